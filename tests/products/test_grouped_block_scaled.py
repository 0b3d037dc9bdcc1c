"""`grouped_block_scaled_mm`: the bits of a loop of `block_scaled_mm` over the experts, whatever the offsets; and what it refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from operands.grouped_block_scaled_cases import LAYOUTS, OUT_DTYPES, ExpertsCase, loop
from operands.pairs import pairwise
from torch._subclasses.fake_tensor import FakeTensorMode

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.errors import (
    BadParamError,
    BadTensorDeviceError,
    BadTensorDtypeError,
    BadTensorShapeError,
    BadTensorStridesError,
    NullPointerError,
    ScaledMMError,
)

# tokens, E, K, N: one expert, none with rows, more experts than tokens, sizes that end inside a block.
SHAPES = [(7, 1, 128, 16), (40, 5, 384, 264), (3, 17, 16, 8), (300, 4, 400, 72), (64, 200, 16, 8), (33, 6, 131, 13), (1, 3, 1, 1)]


def check(case: ExpertsCase, device: str) -> None:
    """Into a poisoned output and into a new one."""
    inputs, out = case.make(device), case.poisoned(device)
    assert sm.grouped_block_scaled_mm(**inputs, out=out) is out
    case.check(out, inputs, device)
    made = sm.grouped_block_scaled_mm(**inputs, out_dtype=case.out_dtype)
    assert made.is_contiguous() and reference.same_bits(made, out.contiguous()) and reference.same_bits(made, loop(case, inputs))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_has_the_bits_of_a_loop_over_the_experts(device, shape):
    for out_dtype in OUT_DTYPES:
        for pad in (0, 16):
            check(ExpertsCase(*shape, out_dtype, pad=pad, bias="out", seed=sum(shape)), device)


@pairwise(
    offsets=["random", "one", "short", "wild"],
    b_layout=LAYOUTS,
    scales=["rows", "columns", "spread"],
    scale_values=["positive", "signed", "wide", "special"],
    bias=[None, "out", "float32"],
    out_dtype=OUT_DTYPES,
    pad=[0, 16],
    k=[0, 272, 400],
    block_size=[128, 64],
)
def test_every_pair_of_options_equals_the_loop(device, k, **options):
    check(ExpertsCase(50, 6, k, 136, **options), device)


def test_rows_past_the_last_expert_are_zero(device):
    case = ExpertsCase(20, 3, 256, 16)
    inputs, out = case.make(device), case.poisoned(device)
    for ends in ([0, 0, 0], [5, 5, 7], [-1, 3, 2]):
        inputs["expert_offsets"].copy_(torch.tensor(ends))
        out.fill_(float("nan"))
        sm.grouped_block_scaled_mm(**inputs, out=out)
        assert not out[max(0, *ends) :].any() and not out.isnan().any()


@pytest.mark.parametrize("values", ["minimum", "extremes"])
def test_the_largest_sums_of_a_block_are_exact(device, values):
    check(ExpertsCase(18, 2, 1024, 140, torch.float32, values=values), device)


@pytest.mark.parametrize("shape", [(0, 4, 128, 8), (5, 0, 128, 8), (5, 2, 128, 0), (5, 2, 0, 8), (0, 0, 0, 0)], ids=str)
def test_sizes_of_zero(device, shape):
    case = ExpertsCase(*shape, bias="float32")
    inputs, out = case.make(device), case.poisoned(device)
    sm.grouped_block_scaled_mm(**inputs, out=out)
    case.check(out, inputs)


def test_scales_of_quantize_int8_block_are_taken(device):
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(30, 300, generator=generator).to(device), torch.randn(3, 200, 300, generator=generator).to(device)
    (a, a_scale), (q, scale) = sm.quantize_int8_block(x), sm.quantize_int8_block(w, "weight")
    ends = torch.tensor([10, 10, 30], dtype=torch.int32, device=device)
    out = sm.grouped_block_scaled_mm(a, q.transpose(1, 2), a_scale, scale.transpose(1, 2), ends, out_dtype=torch.float32)
    exact = torch.cat((x[:10].double() @ w[0].double().t(), x[10:].double() @ w[2].double().t()))
    assert (out.double() - exact).norm() / exact.norm() < 0.02


def test_a_descriptor_runs_often_and_checks_what_it_is_handed(device):
    case = ExpertsCase(50, 6, 256, 40, bias="float32")
    inputs, out = case.make(device), case.poisoned(device)
    with sm.create_grouped_block_scaled_descriptor(sm.Handle(device), out=out, **inputs) as desc:
        assert desc.workspace_size == 0
        for seed in range(3):
            inputs["expert_offsets"].copy_(dataclasses.replace(case, seed=seed).make()["expert_offsets"])
            out.fill_(float("nan"))
            desc.calculate(out, **inputs)
            case.check(out, inputs)
        with pytest.raises(BadTensorShapeError, match=r"^a_scale: expected \[50, 2\] as the descriptor was created"):
            desc.calculate(out, **{**inputs, "a_scale": inputs["a_scale"][:, :1]})
        with pytest.raises(BadParamError, match="^bias: expected a tensor as the descriptor was created, got none"):
            desc.calculate(out, **{**inputs, "bias": None})
    with pytest.raises(BadParamError, match="destroyed"):
        desc.calculate(out, **inputs)


REFUSALS = [
    (dict(a=lambda t: t["a"].float()), BadTensorDtypeError, "a: expected int8, got float32"),
    (dict(b=lambda t: t["b"].float()), BadTensorDtypeError, "b: expected int8, got float32"),
    (dict(b=lambda t: t["b"][0]), BadTensorShapeError, "b"),
    (dict(b=lambda t: t["b"][:, :5]), BadTensorShapeError, r"b: expected \[E, K, N\] with K = 256 as in a \[tokens, K\], got \[6, 5, 40\]"),
    (dict(expert_offsets=lambda t: t["expert_offsets"].long()), BadTensorDtypeError, "expert_offsets: expected int32"),
    (dict(expert_offsets=lambda t: t["expert_offsets"][:5]), BadTensorShapeError, r"expert_offsets: expected \[E\] = \[6\]"),
    (dict(expert_offsets=lambda t: t["expert_offsets"].repeat_interleave(2)[::2]), BadTensorStridesError, "expert_offsets: expected a contiguous"),
    (dict(a_scale=lambda t: None), NullPointerError, "a_scale: expected"),
    (dict(b_scale=lambda t: None), NullPointerError, "b_scale: expected"),
    (
        dict(a_scale=lambda t: t["a_scale"][:, :1]),
        BadTensorShapeError,
        r"a_scale: expected \[tokens, ceil\(K / 128\)\] = \[50, 2\] \(tokens = 50, K = 256\), got \[50, 1\]",
    ),
    (
        dict(b_scale=lambda t: t["b_scale"][:5]),
        BadTensorShapeError,
        r"b_scale: expected \[E, ceil\(K / 128\), ceil\(N / 128\)\] = \[6, 2, 1\] \(E = 6, K = 256, N = 40\), got \[5, 2, 1\]",
    ),
    (dict(b_scale=lambda t: t["b_scale"][0]), BadTensorShapeError, "b_scale: expected 3 dimensions"),
    (dict(b_scale=lambda t: t["b_scale"].half()), BadTensorDtypeError, "b_scale: expected float32, got float16"),
    (dict(bias=lambda t: t["bias"][:, :7]), BadTensorShapeError, r"bias: expected \[E, N\] = \[6, 40\], got \[6, 7\]"),
    (dict(bias=lambda t: t["bias"].half()), BadTensorDtypeError, "bias: expected bfloat16 or float32, got float16"),
    (dict(out=lambda t: torch.empty(49, 40, dtype=torch.bfloat16, device=t["a"].device)), BadTensorShapeError, "out: expected"),
    (dict(out=lambda t: torch.empty(50, 40, dtype=torch.int32, device=t["a"].device)), BadTensorDtypeError, "out: expected"),
]


@pytest.mark.parametrize("changed, error, message", REFUSALS, ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
def test_what_is_wrong_is_refused_and_named(device, changed, error, message):
    inputs = ExpertsCase(50, 6, 256, 40, bias="float32").make(device)
    arguments = {**inputs, **{name: make(inputs) for name, make in changed.items()}}
    with pytest.raises(error, match=f"^{message}") as caught:
        sm.grouped_block_scaled_mm(**arguments)
    assert isinstance(caught.value, ScaledMMError)


def test_the_expected_number_of_rows_changes_no_bit_and_is_checked(device):
    inputs = ExpertsCase(50, 6, 256, 40, bias="float32", offsets="short").make(device)
    whole = sm.grouped_block_scaled_mm(**inputs)
    assert torch.equal(sm.grouped_block_scaled_mm(**inputs, expected_rows=9), whole)
    with sm.create_grouped_block_scaled_descriptor(sm.Handle(device), out=whole, **inputs, expected_rows=9):
        pass
    with pytest.raises(ScaledMMError, match="^expected_rows: expected None or a number from 1 to 2147483647, got 0"):
        sm.grouped_block_scaled_mm(**inputs, expected_rows=0)


def test_rows_that_belong_to_no_expert_may_have_any_values_on_request(device):
    inputs = ExpertsCase(50, 6, 256, 40, bias="float32", offsets="short").make(device)
    whole, end = sm.grouped_block_scaled_mm(**inputs), int(inputs["expert_offsets"].max())
    assert 0 < end < 50 and not whole[end:].any()
    assert torch.equal(sm.grouped_block_scaled_mm(**inputs, zero_unassigned=False)[:end], whole[:end])
    with pytest.raises(ScaledMMError, match="^zero_unassigned: expected True or False, got None"):
        sm.grouped_block_scaled_mm(**inputs, zero_unassigned=None)


def test_an_out_dtype_that_does_not_exist_is_refused(device):
    with pytest.raises(BadTensorDtypeError, match="^out_dtype: expected"):
        sm.grouped_block_scaled_mm(**ExpertsCase(5, 2, 128, 8).make(device), out_dtype=torch.int32)


def test_fake_tensors_have_the_shape_and_dtype_of_the_result():
    inputs = ExpertsCase(9, 3, 256, 40, bias="float32").make()
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(t) for name, t in inputs.items()}
        out = sm.grouped_block_scaled_mm(**fake, out_dtype=torch.float16)
    assert out.shape == (9, 40) and out.dtype is torch.float16
    meta = {name: t.to("meta") for name, t in inputs.items()}
    assert sm.grouped_block_scaled_mm(**meta).shape == (9, 40)
    with pytest.raises(BadTensorShapeError, match="^a_scale: expected"):
        sm.grouped_block_scaled_mm(**{**meta, "a_scale": meta["a_scale"][:, :1]})
    with pytest.raises(BadTensorDeviceError, match="^b_scale: expected"):
        sm.grouped_block_scaled_mm(**{**inputs, "b_scale": meta["b_scale"]})


def test_a_compiled_graph_has_the_bits_of_the_eager_call(device):
    inputs = ExpertsCase(9, 3, 256, 40, bias="float32").make(device)
    torch.compiler.reset()
    compiled = torch.compile(lambda **t: sm.grouped_block_scaled_mm(**t) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**inputs), sm.grouped_block_scaled_mm(**inputs) + 1)
