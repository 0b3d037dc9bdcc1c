"""Batched products: the bits of a loop over products, whatever the strides and whatever they share."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operands import cases
from operands.batched import B_SCALES, BATCHES, BIASES, OUT_BATCHES, SHARED, VECTORS, ZERO_POINTS, BatchCase
from operands.pairs import pairwise

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.errors import (
    AccumulatorOverflowError,
    BadParamError,
    BadTensorShapeError,
    BadTensorStridesError,
    ScaledMMError,
)

OUT_DTYPES = cases.OUT_DTYPES


def check(case: BatchCase, device: str) -> None:
    """`sm.scaled_mm` into a poisoned out and into a fresh one, and a descriptor."""
    operands = case.make(device)
    expected = operands.expected()
    out, memory = operands.poisoned_out()
    assert sm.scaled_mm(**operands.inputs, out=out) is out
    operands.check(out, expected)
    operands.check_poison_around(out, memory)
    fresh = sm.scaled_mm(**operands.inputs, out_dtype=case.out_dtype)
    assert fresh.is_contiguous()
    operands.check(fresh, expected)
    memory.fill_(7)
    with sm.create_descriptor(sm.Handle(device), out=out, **operands.inputs) as descriptor:
        workspace = torch.empty(descriptor.workspace_size, dtype=torch.uint8, device=device)
        descriptor.calculate(out, **operands.inputs, workspace=workspace)
    operands.check(out, expected)


@pytest.mark.parametrize("batch", [1, 2, 3, 17])
def test_every_batch_equals_a_loop_over_its_products(device, batch):
    for out_dtype, (m, n, k) in itertools.product(OUT_DTYPES, [(1, 1, 1), (5, 32, 48), (33, 48, 64), (16, 33, 37)]):
        check(BatchCase(batch, m, n, k, out_dtype, bias="each", a_zero_point="each", b_zero_point="each"), device)


def test_a_batch_equals_the_two_dimensional_products(device):
    operands = BatchCase(4, 6, 32, 48, bias="each", a_zero_point="each", b_zero_point="each").make(device)
    out = sm.scaled_mm(**operands.inputs)
    for i in range(4):
        assert reference.same_bits(out[i], sm.scaled_mm(**{name: t[i] if t is not None else t for name, t in operands.inputs.items()}))


@pairwise(
    a_batch=BATCHES,
    b_batch=BATCHES,
    out_batch=OUT_BATCHES,
    out_layout=cases.LAYOUTS,
    shape=[(1, 32, 48), (9, 32, 48), (4, 17, 13)],
    out_dtype=cases.FLOAT_DTYPES,
)
def test_every_pair_of_strides_equals_the_reference(device, shape, out_dtype, **strides):
    """Batch strides, shared operands and strides of the output: scaled, and as raw sums with zero points."""
    check(BatchCase(3, *shape, out_dtype, b_scale="vector", bias="vector", **strides), device)
    check(BatchCase(3, *shape, torch.int32, a_zero_point="one", b_zero_point="vector", **strides), device)


@pairwise(
    a_scale=VECTORS,
    b_scale=B_SCALES,
    bias=BIASES,
    a_zero_point=ZERO_POINTS,
    b_zero_point=ZERO_POINTS,
    zero_point_dtype=[torch.int32, torch.int8],
    bias_dtype=["out", "float32"],
    sums=[False, True],
    sharing=[("each", "each"), ("each", "matrix"), ("matrix", "each")],
    shape=[(1, 16, 32), (18, 1, 32), (18, 32, 32), (7, 16, 48)],
    out_dtype=cases.FLOAT_DTYPES,
)
def test_every_pair_of_vectors_equals_the_reference(device, sharing, shape, out_dtype, **vectors):
    """Scales, bias and zero points of each product and shared ones: in a batch of three, in one of one, and where b is a batch of one."""
    for batch, (a_batch, b_batch) in ((3, sharing), (1, ("each", "each")), (3, ("one", "one"))):
        check(BatchCase(batch, *shape, out_dtype, a_batch=a_batch, b_batch=b_batch, **vectors), device)


@pytest.mark.parametrize("sizes", [(0, 4, 8, 16), (3, 0, 8, 16), (3, 4, 0, 16), (3, 4, 8, 0), (0, 0, 0, 0), (0, 4, 8, 0), (1, 0, 8, 16)], ids=str)
def test_batches_of_nothing_are_empty_and_a_k_of_zero_is_the_epilogue_of_zero(device, sizes):
    for out_dtype, zero_point, b_batch in itertools.product(OUT_DTYPES, (None, "each"), ("each", "matrix", "expanded")):
        case = BatchCase(*sizes, out_dtype, b_batch=b_batch, bias="each", a_zero_point=zero_point, b_zero_point=zero_point)
        check(case, device)


@settings(max_examples=800, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    case=st.builds(
        BatchCase,
        batch=st.sampled_from([0, 1, 2, 3, 5, 17]),
        m=st.integers(0, 20),
        n=st.one_of(st.integers(0, 40), st.sampled_from([16, 32, 48])),
        k=st.one_of(st.integers(0, 70), st.sampled_from([16, 32, 64, 256])),
        out_dtype=st.sampled_from(OUT_DTYPES),
        a_batch=st.sampled_from(BATCHES),
        b_batch=st.sampled_from(BATCHES),
        out_batch=st.sampled_from(OUT_BATCHES),
        a_layout=st.sampled_from(cases.LAYOUTS),
        b_layout=st.sampled_from(cases.LAYOUTS),
        out_layout=st.sampled_from(cases.LAYOUTS),
        a_scale=st.sampled_from(VECTORS),
        b_scale=st.sampled_from(B_SCALES),
        bias=st.sampled_from(BIASES),
        bias_dtype=st.sampled_from(["out", "float32"]),
        a_zero_point=st.sampled_from(ZERO_POINTS),
        b_zero_point=st.sampled_from(ZERO_POINTS),
        zero_point_dtype=st.sampled_from([torch.int32, torch.int8]),
        sums=st.booleans(),
        seed=st.integers(0, 2**20),
    )
)
def test_every_valid_batch_equals_the_reference(device, case):
    operands = case.make(device)
    out, memory = operands.poisoned_out()
    sm.scaled_mm(**operands.inputs, out=out)
    operands.check(out)
    operands.check_poison_around(out, memory)


def test_the_bound_on_k_is_the_same_for_every_product(device):
    a, b = torch.zeros(1, 1, 1, dtype=torch.int8, device=device).expand(2, 2, 33026), torch.zeros(2, 1, 1, dtype=torch.int8, device=device)
    point = torch.zeros(1, dtype=torch.int8, device=device)
    with pytest.raises(AccumulatorOverflowError, match="K <= 33025"):
        sm.scaled_mm(a, b.expand(2, 33026, 3), out_dtype=torch.int32, a_zero_point=point, b_zero_point=point)


# ---- refusals ---------------------------------------------------------------------------------------------------------------

B, M, N, K = 3, 5, 16, 32


def inputs_of(device: str, **replaced) -> dict:
    case = BatchCase(B, M, N, K, bias="each", a_zero_point="each", b_zero_point="each", sums=True)
    return {**case.make(device).inputs, **replaced}


@pytest.mark.parametrize(
    "name, shapes",
    [
        ("a", [(2, M, K), (0, M, K), (B, M, K + 1), (B, K, M), (1, 1, M, K), (K,)]),
        ("b", [(2, K, N), (0, K, N), (B, N, K), (1, 1, K, N), (N,)]),
        ("a_scale", [(B,), (B, M), (M, B, 1), (B, 1, M), (B, M, N), (2, M, 1), (2, 1, 1), (0, M, 1), (B, M + 1, 1)]),
        ("b_scale", [(B,), (B, N), (B, N, 2), (2, N, 1), (B, M, N), (2, 1, N), (0, 1, N), (B, 1, N + 1)]),
        ("bias", [(B,), (B, N), (B, N, 1), (B, 1, 1), (1, 1, 1), (2, 1, N), ()]),
        ("a_zero_point", [(B,), (B, M), (B, 1, M), (2, M, 1), (B, M, 2)]),
        ("b_zero_point", [(B,), (B, N), (B, N, 1), (2, 1, N)]),
        ("a_row_sums", [(B,), (B, M), (B, 1, M), (B, 1, 1), (2, M, 1), ()]),
        ("b_column_sums", [(B,), (B, N), (B, N, 1), (B, 1, 1), (2, 1, N), ()]),
        ("out", [(M, N), (1, M, N), (2, M, N), (B, N, M), (B, M, N + 1)]),
    ],
)
def test_batched_arguments_of_the_wrong_shape_are_refused_by_name(device, name, shapes):
    inputs = inputs_of(device, out=torch.empty(B, M, N, dtype=torch.bfloat16, device=device))
    for shape in shapes:
        wrong = torch.zeros(shape, dtype=inputs[name].dtype, device=device)
        # A batch of 2 or 0 in a contradicts b, and the other way round: either may be named.
        named = "[ab]: expected" if name in ("a", "b") and len(shape) == 3 else f"{name}: expected"
        with pytest.raises(BadTensorShapeError, match=named if name != "a" or len(shape) != 3 else "(a|b|out): expected"):
            sm.scaled_mm(**{**inputs, name: wrong})
        with pytest.raises(BadTensorShapeError, match="expected"):
            sm.create_descriptor(sm.Handle(device), **{**inputs, name: wrong})


def test_an_out_whose_batches_overlap_is_refused(device):
    memory = torch.zeros(B * M * N, dtype=torch.bfloat16, device=device)
    for strides in [(0, N, 1), (1, N, 1), (M * N - 1, N, 1), (N, N, 1), (M, 1, B * M - 1)]:
        with pytest.raises(BadTensorStridesError, match="out: expected strides under which no two elements overlap"):
            sm.scaled_mm(**inputs_of(device), out=memory.as_strided((B, M, N), strides))
    case = BatchCase(B, M, N, K)
    operands = case.make(device)
    beside = memory.as_strided((B, M, N), (N, B * N, 1))  # rows of all products in turn: nothing overlaps
    operands.check(sm.scaled_mm(**operands.inputs, out=beside))


def test_an_out_that_shares_memory_with_a_batched_input_is_refused(device):
    inputs = inputs_of(device)
    for name in ("a", "b"):
        memory = torch.zeros(2 * B * M * N + inputs[name].numel(), dtype=torch.int8, device=device)
        out = memory[: 2 * B * M * N].view(torch.bfloat16).view(B, M, N)
        overlapping = memory[2 * B * M * N - 16 :][: inputs[name].numel()].view(inputs[name].shape)
        with pytest.raises(BadParamError, match=f"overlap with {name}"):
            sm.scaled_mm(**{**inputs, name: overlapping}, out=out)


def test_calculate_refuses_another_batch_than_the_descriptors(device):
    inputs = inputs_of(device, out=torch.empty(B, M, N, dtype=torch.bfloat16, device=device))
    with sm.create_descriptor(sm.Handle(device), **inputs) as descriptor:
        assert repr(descriptor).startswith(f"Descriptor({B}x{M}x{N}x{K}, bfloat16")
        workspace = torch.empty(descriptor.workspace_size, dtype=torch.uint8, device=device)
        for name, t in inputs.items():
            wrong = t[:2]
            with pytest.raises(ScaledMMError, match=f"{name}: expected"):
                descriptor.calculate(**{**inputs, name: wrong}, workspace=workspace)
        strided = inputs["a"].repeat(2, 1, 1)[::2]
        with pytest.raises(BadTensorStridesError, match="a: expected strides"):
            descriptor.calculate(**{**inputs, "a": strided}, workspace=workspace)


@pytest.mark.parametrize("how", SHARED)
def test_a_shared_weight_gives_the_rows_of_one_tall_product(device, how):
    operands = BatchCase(4, 3, 32, 48, b_batch=how, b_scale="vector", bias="vector", b_zero_point="one").make(device)
    out = sm.scaled_mm(**operands.inputs)
    b = operands.inputs["b"]
    flat = {
        **operands.inputs,
        "a": operands.inputs["a"].reshape(12, 48),
        "a_scale": operands.inputs["a_scale"].reshape(12, 1),
        "b": b if b.dim() == 2 else b[0],
    }
    assert reference.same_bits(out.reshape(12, 32), sm.scaled_mm(**flat))


def test_a_large_batch_of_empty_products_does_not_loop_over_them():
    a, b = torch.empty(10**6, 0, 8, dtype=torch.int8), torch.ones(1, 8, 3, dtype=torch.int8).expand(10**6, 8, 3)
    begin = time.monotonic()
    assert sm.scaled_mm(a, b, torch.ones(1), torch.ones(1)).shape == (10**6, 0, 3)
    assert time.monotonic() - begin < 1
