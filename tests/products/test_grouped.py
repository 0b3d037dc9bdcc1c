"""`grouped_scaled_mm`: the bits of a loop of `scaled_mm` over the experts, whatever the offsets; and what it refuses."""

from __future__ import annotations

import itertools

import pytest
import torch
from operands.cases import FLOAT_DTYPES
from operands.grouped_cases import OUT_DTYPES, Grouped, grouped
from operands.pairs import pairwise
from torch._subclasses.fake_tensor import FakeTensorMode

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.errors import (
    AccumulatorOverflowError,
    BadParamError,
    BadTensorDeviceError,
    BadTensorDtypeError,
    BadTensorShapeError,
    BadTensorStridesError,
    NullPointerError,
    ScaledMMError,
)
from scaled_mm.products.grouped import GROUPED

# tokens, E, K, N: one expert, none with rows, more experts than tokens, thousands of them; sizes that no tile divides.
SHAPES = [(7, 1, 32, 16), (40, 5, 48, 24), (3, 17, 16, 8), (300, 4, 100, 72), (64, 2000, 16, 8), (33, 6, 31, 13), (1, 3, 1, 1)]


def check(case: Grouped, out: torch.Tensor) -> None:
    for expected in (reference.grouped_scaled_mm(**case.defined_by, out_dtype=case.out_dtype), case.loop()):
        assert reference.same_bits(out, expected), reference.describe_difference(out, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_has_the_bits_of_a_loop_over_the_experts(device, shape):
    for out_dtype in OUT_DTYPES:
        case = grouped(*shape, out_dtype=out_dtype, bias="out", device=device)
        check(case, sm.grouped_scaled_mm(**case.inputs, out_dtype=out_dtype))
        out = case.poisoned()
        assert sm.grouped_scaled_mm(**case.inputs, out=out) is out
        check(case, out)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_offsets_are_clamped_and_rows_past_the_last_are_zero(device, shape):
    for offsets, seed in itertools.product(("one", "short", "wild"), range(3)):
        case = grouped(*shape, offsets=offsets, seed=seed, bias="float32", device=device)
        out = case.poisoned()
        sm.grouped_scaled_mm(**case.inputs, out=out)
        check(case, out)
        last = max(0, min(case.expert_offsets.max().item(), shape[0]))
        assert not out[last:].any()


@pairwise(
    b_scale=["one", "expert", "expert3", "matrix", "matrix3", "column3", "strided"],
    a_scale=["one", "vector", "matrix"],
    bias=[None, "out", "float32"],
    out_dtype=FLOAT_DTYPES,
    offsets=["random", "one", "short", "wild"],
    strides=[("columns", 0), ("rows", 0), ("columns", 16), ("columns", 3)],
    padding=[0, 8, 3],
    a_zero_point=[None, "one", "vector", "matrix"],
    b_zero_point=[None, "one", "expert", "matrix", "matrix3", "column3", "strided"],
    sums=[False, True],
)
def test_every_pair_of_options_equals_the_loop(device, strides, padding, **options):
    """Shapes of scales, zero points and bias, offsets, dtypes, strides of b and of the output (padding elements after each row)."""
    b_layout, pad = strides
    case = grouped(50, 6, 64, 40, b_layout=b_layout, pad=pad, device=device, **options)
    check(case, sm.grouped_scaled_mm(**case.inputs, out_dtype=case.out_dtype))
    out = case.poisoned(padding)
    sm.grouped_scaled_mm(**case.inputs, out=out)
    check(case, out)


def test_an_output_of_columns_is_written_in_place(device):
    for b_layout, pad in (("rows", 0), ("columns", 16), ("columns", 3)):
        case = grouped(50, 6, 64, 40, b_layout=b_layout, pad=pad, device=device)
        transposed = case.poisoned().t().contiguous().t()
        sm.grouped_scaled_mm(**case.inputs, out=transposed)
        check(case, transposed)


def test_an_expert_may_serve_several_groups_by_a_stride_of_zero(device):
    case = grouped(50, 1, 64, 40, device=device, b_scale="one")
    case.b, case.expert_offsets = case.b.expand(3, 64, 40), torch.tensor([10, 30, 50], dtype=torch.int32, device=device)
    check(case, sm.grouped_scaled_mm(**case.inputs))


@pytest.mark.parametrize("shape", [(0, 4, 16, 8), (5, 0, 16, 8), (5, 2, 16, 0), (5, 2, 0, 8), (0, 0, 0, 0)], ids=str)
def test_sizes_of_zero(device, shape):
    for zero_points in ({}, dict(a_zero_point="vector", b_zero_point="matrix"), dict(a_zero_point="one", sums=True)):
        case = grouped(*shape, bias="float32", device=device, **zero_points)
        out = case.poisoned()
        sm.grouped_scaled_mm(**case.inputs, out=out)
        check(case, out)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_raw_sums_have_zero_points_too(device, shape):
    for zero_points in (dict(a_zero_point="vector", sums=True), dict(b_zero_point="matrix"), dict(a_zero_point="one", b_zero_point="expert3")):
        case = grouped(*shape, out_dtype=torch.int32, offsets="short", device=device, **zero_points)
        check(case, sm.grouped_scaled_mm(**case.inputs, out_dtype=torch.int32))


def test_sums_of_columns_that_are_given_are_not_computed(device):
    """Wrong ones give a wrong product, where zero points need them, and none other."""
    case = grouped(50, 6, 64, 40, a_zero_point="vector", sums=True, out_dtype=torch.int32, device=device)
    case.b_column_sums += 1
    out, right = sm.grouped_scaled_mm(**case.inputs, out_dtype=torch.int32), case.loop()
    last = int(case.expert_offsets.max())
    assert torch.equal(out[:last], right[:last] - case.a_zero_point[:last, None]) and not out[last:].any()
    case.a_zero_point = None
    assert torch.equal(sm.grouped_scaled_mm(**case.inputs, out_dtype=torch.int32), case.loop())


def test_no_tokens_for_any_expert_gives_zeros(device):
    case = grouped(20, 3, 32, 16, device=device)
    case.expert_offsets.zero_()
    out = case.poisoned()
    sm.grouped_scaled_mm(**case.inputs, out=out)
    assert not out.any() and not out.isnan().any()


def test_sums_at_the_end_of_int32_do_not_saturate(device):
    K = 131071
    a, weight = torch.full((4, K), -128, dtype=torch.int8, device=device), torch.full((2, 3, K), -128, dtype=torch.int8, device=device)
    offsets = torch.tensor([1, 4], dtype=torch.int32, device=device)
    out = sm.grouped_scaled_mm(a, weight.transpose(1, 2), None, None, offsets, out_dtype=torch.int32)
    assert (out == 128 * 128 * K).all()


def test_a_descriptor_runs_often_and_checks_what_it_is_handed(device):
    case = grouped(50, 6, 64, 40, bias="float32", device=device)
    out = case.poisoned()
    handle = sm.Handle(device)
    with sm.create_grouped_descriptor(handle, out=out, **case.inputs) as desc:
        workspace = torch.empty(desc.workspace_size, dtype=torch.uint8, device=device) if desc.workspace_size else None
        for seed in range(3):
            case.expert_offsets.copy_(grouped(50, 6, 64, 40, seed=seed).expert_offsets)
            out.fill_(float("nan"))
            desc.calculate(out, **case.inputs, workspace=workspace)
            check(case, out)
        with pytest.raises(BadTensorShapeError, match=r"^expert_offsets: expected \[6\] as the descriptor was created"):
            desc.calculate(out, **{**case.inputs, "expert_offsets": case.expert_offsets[:5]}, workspace=workspace)
        with pytest.raises(BadParamError, match="^bias: expected a tensor as the descriptor was created, got none"):
            desc.calculate(out, **{**case.inputs, "bias": None}, workspace=workspace)
    with pytest.raises(BadParamError, match="destroyed"):
        desc.calculate(out, **case.inputs)


# ---- refusals -------------------------------------------------------------------------------------------------------------

REFUSALS = [
    (dict(a=lambda c: c.a.float()), BadTensorDtypeError, "a: expected int8, got float32"),
    (dict(b=lambda c: c.b.float()), BadTensorDtypeError, "b: expected int8, got float32"),
    (dict(a=lambda c: c.a[0]), BadTensorShapeError, "a"),
    (dict(b=lambda c: c.b[0]), BadTensorShapeError, "b"),
    (dict(b=lambda c: c.b[:, :5]), BadTensorShapeError, r"b: expected \[E, K, N\] with K = 64 as in a \[tokens, K\], got \[6, 5, 40\]"),
    (dict(expert_offsets=lambda c: c.expert_offsets.long()), BadTensorDtypeError, "expert_offsets: expected int32"),
    (dict(expert_offsets=lambda c: c.expert_offsets[:5]), BadTensorShapeError, r"expert_offsets: expected \[E\] = \[6\]"),
    (dict(expert_offsets=lambda c: c.expert_offsets.reshape(6, 1)), BadTensorShapeError, r"expert_offsets: expected 1 dimension \[E\]"),
    (dict(expert_offsets=lambda c: c.expert_offsets.repeat_interleave(2)[::2]), BadTensorStridesError, "expert_offsets: expected a contiguous"),
    (dict(a_scale=lambda c: None), NullPointerError, "a_scale: expected float32 scales"),
    (dict(b_scale=lambda c: None), NullPointerError, "b_scale: expected float32 scales"),
    (dict(a_scale=lambda c: c.a_scale[:7]), BadTensorShapeError, "a_scale: expected one value"),
    (dict(b_scale=lambda c: c.b_scale[:, :7]), BadTensorShapeError, r"b_scale: expected one value, \[6\], \[6, 1, 1\], \[6, 40\]"),
    (dict(b_scale=lambda c: c.b_scale[:5]), BadTensorShapeError, "b_scale: expected one value"),
    (dict(b_scale=lambda c: c.b_scale[0]), BadTensorShapeError, "b_scale: expected one value"),
    (dict(b_scale=lambda c: c.b_scale.half()), BadTensorDtypeError, "b_scale: expected float32, got float16"),
    (dict(bias=lambda c: c.bias[0]), BadTensorShapeError, r"bias: expected 2 dimensions \[E, N\]"),
    (dict(bias=lambda c: c.bias[:, :7]), BadTensorShapeError, r"bias: expected \[E, N\] = \[6, 40\], got \[6, 7\]"),
    (dict(bias=lambda c: c.bias.half()), BadTensorDtypeError, "bias: expected bfloat16 or float32, got float16"),
    (dict(out=lambda c: c.poisoned()[:-1]), BadTensorShapeError, "out: expected"),
    (dict(out=lambda c: c.poisoned()[0].expand(50, 40)), BadTensorStridesError, "out: expected strides"),
    (dict(out=lambda c: c.poisoned().double()), BadTensorDtypeError, "out: expected"),
    (dict(out=lambda c: c.poisoned().int()), BadParamError, "a_scale: expected none with an int32 out"),
]


@pytest.mark.parametrize("changed, error, message", REFUSALS, ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
def test_what_is_wrong_is_refused_and_named(device, changed, error, message):
    case = grouped(50, 6, 64, 40, bias="float32", device=device)
    arguments = {**case.inputs, **{name: make(case) for name, make in changed.items()}}
    with pytest.raises(error, match=f"^{message}") as caught:
        sm.grouped_scaled_mm(**arguments)
    assert isinstance(caught.value, ScaledMMError)


def test_the_expected_number_of_rows_changes_no_bit_and_is_checked(device):
    case = grouped(40, 5, 48, 24, offsets="short", bias="out", device=device)
    given = {**case.inputs, "out": case.poisoned()}
    for rows in (1, 7, 40, 5000, 2**31 - 1, None):
        check(case, sm.grouped_scaled_mm(**case.inputs, expected_rows=rows))
        with sm.create_grouped_descriptor(sm.Handle(device), **given, expected_rows=rows) as descriptor:
            assert descriptor.workspace_size >= 0
    for rows in (0, -1, 2**31, 1.5, True, "7"):
        for call in (sm.grouped_scaled_mm, lambda **more: sm.create_grouped_descriptor(sm.Handle(device), **more)):
            with pytest.raises(BadParamError, match="^expected_rows: expected None or a number from 1 to 2147483647, got "):
                call(**given, expected_rows=rows)


def test_rows_that_belong_to_no_expert_may_have_any_values_on_request(device):
    case = grouped(40, 5, 48, 24, offsets="short", bias="out", device=device)
    whole, end = sm.grouped_scaled_mm(**case.inputs), int(case.inputs["expert_offsets"].max())
    assert 0 < end < 40 and not whole[end:].any()
    for rows in (None, 7):
        assert torch.equal(sm.grouped_scaled_mm(**case.inputs, zero_unassigned=False, expected_rows=rows)[:end], whole[:end])
    given = {**case.inputs, "out": case.poisoned()}
    with sm.create_grouped_descriptor(sm.Handle(device), **given, zero_unassigned=False) as descriptor:
        descriptor.calculate(**given, workspace=torch.empty(descriptor.workspace_size, dtype=torch.int8, device=device))
    assert torch.equal(given["out"][:end], whole[:end])
    with pytest.raises(BadParamError, match="^zero_unassigned: expected True or False, got 0"):
        sm.grouped_scaled_mm(**case.inputs, zero_unassigned=0)


def test_k_is_bounded_as_in_the_plain_product(device):
    a, weight = torch.zeros(1, 131072, dtype=torch.int8, device=device), torch.zeros(1, 1, 131072, dtype=torch.int8, device=device)
    with pytest.raises(AccumulatorOverflowError, match="a: expected K <= 131071"):
        sm.grouped_scaled_mm(a, weight.transpose(1, 2), None, None, torch.ones(1, dtype=torch.int32, device=device), out_dtype=torch.int32)


def test_an_out_dtype_that_does_not_exist_is_refused(device):
    case = grouped(5, 2, 16, 8, device=device)
    with pytest.raises(BadTensorDtypeError, match="^out_dtype: expected"):
        sm.grouped_scaled_mm(**case.inputs, out_dtype=torch.float64)


def test_an_output_in_the_memory_of_an_input_is_refused(device):
    case = grouped(50, 6, 64, 40, device=device)
    for name in ("a", "expert_offsets"):
        memory = torch.zeros(50 * 40 * 2, dtype=torch.uint8, device=device)
        out, size = memory.view(torch.bfloat16).view(50, 40), getattr(case, name).numel() * getattr(case, name).element_size()
        inside = memory[:size].view(getattr(case, name).dtype).view(getattr(case, name).shape)
        with pytest.raises(BadParamError, match=f"out: expected memory apart from every input, got an overlap with {name}"):
            sm.grouped_scaled_mm(**{**case.inputs, name: inside}, out=out)


def test_an_output_that_wants_a_gradient_is_refused_and_any_other_counts_the_change(device):
    case = grouped(20, 3, 16, 8, device=device)
    out = torch.zeros(20, 8, dtype=torch.bfloat16, device=device)
    before = out._version
    sm.grouped_scaled_mm(**case.inputs, out=out)
    with sm.create_grouped_descriptor(sm.Handle(device), out=out, **case.inputs) as desc:
        workspace = torch.empty(desc.workspace_size, dtype=torch.uint8, device=device) if desc.workspace_size else None
        desc.calculate(out, **case.inputs, workspace=workspace)
        assert out._version >= before + 2
        out.requires_grad_()
        with pytest.raises(BadParamError, match="^out: expected a tensor that requires no gradient"):
            desc.calculate(out, **case.inputs, workspace=workspace)
    with pytest.raises(BadParamError, match="^out: expected a tensor that requires no gradient"):
        sm.grouped_scaled_mm(**case.inputs, out=out)


@pytest.mark.gpu
def test_tensors_on_two_devices_are_refused():
    case = grouped(5, 2, 16, 8, device="cuda:0")
    with pytest.raises(BadTensorDeviceError, match="^expert_offsets: expected a tensor on cuda:0"):
        sm.grouped_scaled_mm(**{**case.inputs, "expert_offsets": case.expert_offsets.cpu()})


# ---- torch ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
def test_opcheck_finds_nothing_wrong(device, out_dtype):
    case = grouped(50, 6, 64, 40, out_dtype=out_dtype, bias="float32", a_zero_point="vector", b_zero_point="expert", sums=True, device=device)
    inputs = [case.inputs[name] for name in GROUPED.spec.input_names]
    torch.library.opcheck(GROUPED.functional, (*inputs, out_dtype, False))
    torch.library.opcheck(GROUPED.out, (case.poisoned(), *inputs, False))


def test_a_compiled_function_gives_the_same_bits_and_the_fake_output_the_same_shape(device):
    case = grouped(50, 6, 64, 40, bias="float32", a_zero_point="vector", sums=True, device=device)
    compiled = torch.compile(lambda **inputs: sm.grouped_scaled_mm(**inputs) * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**case.inputs), case.loop() * 2)
    with FakeTensorMode() as mode:
        fake = sm.grouped_scaled_mm(**{name: None if t is None else mode.from_tensor(t) for name, t in case.inputs.items()})
    real = sm.grouped_scaled_mm(**case.inputs)
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())
