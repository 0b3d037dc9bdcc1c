"""The reference against arithmetic that shares nothing with it: Python integers, and IEEE rounding spelt out."""

import itertools
import struct

import pytest
import torch
from operands.cases import MAX_K_BOTH_ZERO_POINTS, MAX_K_ONE_ZERO_POINT, MAX_K_SYMMETRIC, OUT_DTYPES, Case

from scaled_mm import reference


def to_float32(value: float) -> float:
    """Rounds a double to float32, to nearest even. One float32 operation on float32 values, done in double, rounds the
    same way as done in float32: double has more than 2 * 24 + 2 bits, so rounding twice changes nothing."""
    return struct.unpack("f", struct.pack("f", value))[0]


def to_float16(value: float) -> float:
    return struct.unpack("e", struct.pack("e", value))[0]


def to_bfloat16(value: float) -> float:
    bits = struct.unpack("I", struct.pack("f", value))[0]
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return struct.unpack("f", struct.pack("I", bits))[0]


CAST = {torch.float32: to_float32, torch.float16: to_float16, torch.bfloat16: to_bfloat16}


def by_hand(operands) -> list[list[float]]:
    """The two formulas of docs/design/numerics.md, read off the page."""
    case = operands.case

    def values(t, count):
        return [None] * count if t is None else t.reshape(-1).expand(count).tolist()

    a, b = operands.a.tolist(), operands.b.tolist()
    a_scale, b_scale = values(operands.a_scale, case.m), values(operands.b_scale, case.n)
    bias = values(operands.bias, case.n)
    za, zb = values(operands.a_zero_point, case.m), values(operands.b_zero_point, case.n)
    rows = []
    for m in range(case.m):
        row = []
        for n in range(case.n):
            acc = sum((a[m][k] - (za[m] or 0)) * (b[k][n] - (zb[n] or 0)) for k in range(case.k))
            if case.out_dtype is torch.int32:
                row.append(acc)
                continue
            value = to_float32(to_float32(to_float32(acc) * b_scale[n]) * a_scale[m])
            if bias[n] is not None:
                value = to_float32(value + bias[n])
            row.append(CAST[case.out_dtype](value))
        rows.append(row)
    return rows


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
@pytest.mark.parametrize("zero_points", list(itertools.product((None, "one_0d_int32", "vector_int8"), (None, "one_1d_int8", "vector_int32"))))
def test_the_reference_equals_python_integers_and_ieee_rounding(out_dtype, zero_points):
    for seed, (m, n, k) in enumerate([(1, 1, 1), (3, 4, 5), (2, 7, 64), (5, 3, 0), (4, 4, 700)]):
        for bias, scales in (("out", "vector"), (None, "one_0d"), ("float32", "matrix")):
            case = Case(
                m,
                n,
                k,
                out_dtype=out_dtype,
                a_scale=scales,
                b_scale=scales,
                scale_values="signed",
                bias=bias,
                a_zero_point=zero_points[0],
                b_zero_point=zero_points[1],
                seed=seed,
            )
            operands = case.make()
            want = torch.tensor(by_hand(operands), dtype=torch.float64).to(out_dtype).reshape(m, n)
            assert reference.same_bits(operands.expected(), want), case


def test_scales_are_applied_to_the_columns_first():
    a, b = torch.full((1, 64), 127, dtype=torch.int8), torch.full((64, 1), 127, dtype=torch.int8)
    small, large = torch.tensor([1e-38]), torch.tensor([1e38])
    # acc * 1e38 overflows to infinity, and infinity * 1e-38 stays there; the other order would give about 1e6.
    out = reference.scaled_mm(a, b, a_scale=small, b_scale=large, out_dtype=torch.float32)
    assert out.item() == float("inf")
    out = reference.scaled_mm(a, b, a_scale=large, b_scale=small, out_dtype=torch.float32)
    assert out.item() == pytest.approx(64 * 127 * 127, rel=1e-6)


def test_the_accumulator_is_rounded_to_float32_before_it_is_scaled():
    # acc = 2^24 + 1, which float32 rounds to the even neighbour 2^24.
    a = torch.tensor([[-128] * 1024 + [1]], dtype=torch.int8)
    b = torch.tensor([[-128]] * 1024 + [[1]], dtype=torch.int8)
    one = torch.ones(1)
    assert reference.scaled_mm(a, b, None, None, out_dtype=torch.int32).item() == 2**24 + 1
    assert reference.scaled_mm(a, b, one, one, out_dtype=torch.float32).item() == 2**24


def test_without_a_bias_a_negative_zero_stays_negative():
    zero, one = torch.zeros((1, 4), dtype=torch.int8), torch.ones(1)
    out = reference.scaled_mm(zero, zero.t(), one, -one, out_dtype=torch.float32)
    assert out.item() == 0.0 and torch.signbit(out).item()
    out = reference.scaled_mm(zero, zero.t(), one, -one, torch.zeros(1), out_dtype=torch.float32)
    assert out.item() == 0.0 and not torch.signbit(out).item()


@pytest.mark.parametrize(
    "k, a_value, b_value, za, zb",
    [
        (MAX_K_SYMMETRIC, -128, -128, None, None),
        (MAX_K_ONE_ZERO_POINT, -128, -128, 127, None),
        (MAX_K_ONE_ZERO_POINT, -128, -128, None, 127),
        (MAX_K_BOTH_ZERO_POINTS, -128, -128, 127, 127),
    ],
)
def test_the_k_bounds_are_the_last_k_that_fits_32_bits(k, a_value, b_value, za, zb):
    def accumulate(depth):
        a = torch.full((1, depth), a_value, dtype=torch.int8)
        b = torch.full((depth, 1), b_value, dtype=torch.int8)
        return reference.scaled_mm(
            a,
            b,
            None,
            None,
            out_dtype=torch.int32,
            a_zero_point=None if za is None else torch.tensor([za]),
            b_zero_point=None if zb is None else torch.tensor([zb]),
        ).item()

    assert accumulate(k) == k * (a_value - (za or 0)) * (b_value - (zb or 0)) < 2**31
    with pytest.raises(OverflowError, match="do not fit 32 bits"):
        accumulate(k + 1)


def test_the_reference_refuses_zero_points_that_float64_could_round():
    a = torch.full((1, 64), -128, dtype=torch.int8)
    huge = torch.tensor([2**30], dtype=torch.int32)
    with pytest.raises(OverflowError, match="2\\^53"):
        reference.scaled_mm(a, a.t(), None, None, out_dtype=torch.int32, a_zero_point=huge, b_zero_point=huge)


def test_chunks_do_not_change_the_result(monkeypatch):
    operands = Case(61, 83, 97, bias="out", a_zero_point="vector_int8", b_zero_point="vector_int32").make()
    whole = operands.expected()
    monkeypatch.setattr(reference, "_CHUNK_ELEMENTS", 500)
    assert reference.same_bits(operands.expected(), whole)


def test_same_bits_tells_signed_zeros_apart_and_takes_any_nan_for_a_nan():
    plus, minus = torch.tensor([0.0]), torch.tensor([-0.0])
    assert torch.equal(plus, minus) and not reference.same_bits(plus, minus)
    nans = torch.tensor([0x7FC00000, -0x400000, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert reference.same_bits(nans, torch.full((3,), float("nan")))
    assert not reference.same_bits(nans, torch.tensor([float("nan"), float("nan"), float("inf")]))
    assert not reference.same_bits(torch.ones(2), torch.ones(2, dtype=torch.float16))
    assert not reference.same_bits(torch.ones(2), torch.ones(2, 1))
    assert reference.same_bits(torch.arange(6).reshape(2, 3), torch.arange(6).reshape(2, 3).t().contiguous().t())


def test_a_difference_is_described_by_its_count_and_its_first_place():
    actual = torch.zeros(2, 3)
    actual[1, 2] = 5
    text = reference.describe_difference(actual, torch.zeros(2, 3))
    assert text == "1 of 6 elements differ; the first at [1, 2]: 5.0, expected 0.0"
    assert reference.describe_difference(actual, actual.clone()) == "no difference"
    assert "dtype torch.float32, expected torch.float16" in reference.describe_difference(actual, actual.half())
