"""Hypothesis strategies of valid products, and the settings that the tests of products share."""

from __future__ import annotations

from hypothesis import HealthCheck
from hypothesis import strategies as st
from operands import cases
from operands.cases import Case

# The device fixture does not change from one example to the next, so it may be shared.
SETTINGS = dict(
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)

SIZES = st.one_of(st.integers(0, 5), st.integers(0, 70), st.sampled_from([1, 16, 32, 64, 128]))

valid_cases = st.builds(
    Case,
    m=SIZES,
    n=SIZES,
    k=st.one_of(SIZES, st.integers(0, 700)),
    out_dtype=st.sampled_from(cases.OUT_DTYPES),
    a_layout=st.sampled_from(cases.INPUT_LAYOUTS),
    b_layout=st.sampled_from(cases.INPUT_LAYOUTS),
    out_layout=st.sampled_from(cases.LAYOUTS),
    values=st.sampled_from(cases.VALUES),
    a_scale=st.sampled_from(cases.SCALES),
    b_scale=st.sampled_from(cases.B_SCALES),
    scale_values=st.sampled_from(cases.SCALE_VALUES),
    bias=st.sampled_from(cases.BIASES),
    a_zero_point=st.sampled_from(cases.ZERO_POINTS),
    b_zero_point=st.sampled_from(cases.ZERO_POINTS),
    seed=st.integers(0, 2**20),
)
