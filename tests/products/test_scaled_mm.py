"""sm.scaled_mm against the reference: the same tests on the CPU and on a GPU."""

import itertools

import pytest
import torch
from operands.cases import (
    B_SCALES,
    BIASES,
    FLOAT_DTYPES,
    INPUT_LAYOUTS,
    LAYOUTS,
    MAX_K_BOTH_ZERO_POINTS,
    MAX_K_ONE_ZERO_POINT,
    MAX_K_SYMMETRIC,
    OUT_DTYPES,
    SCALE_VALUES,
    SCALES,
    SMALL_SHAPES,
    ZERO_POINTS,
    ZERO_SHAPES,
    Case,
    random_case,
)
from operands.pairs import pairwise

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.errors import AccumulatorOverflowError


def check(case: Case, device: str) -> None:
    """`sm.scaled_mm` into a poisoned out and into a fresh one."""
    operands = case.make(device)
    out = operands.poisoned_out()
    returned = sm.scaled_mm(**operands.inputs, out_dtype=case.out_dtype, out=out)
    assert returned is out
    operands.check(out)
    fresh = sm.scaled_mm(**operands.inputs, out_dtype=case.out_dtype)
    assert fresh.is_contiguous()
    operands.check(fresh)


@pytest.mark.parametrize("shape", SMALL_SHAPES, ids=str)
def test_every_shape_equals_the_reference(device, shape):
    for out_dtype in OUT_DTYPES:
        check(Case(*shape, out_dtype=out_dtype, bias="out"), device)


@pytest.mark.parametrize("shape", ZERO_SHAPES, ids=str)
def test_sizes_of_zero_give_empty_results_or_the_epilogue_of_zero(device, shape):
    for out_dtype, bias, zero_point in itertools.product(OUT_DTYPES, (None, "out"), (None, "vector_int8")):
        check(Case(*shape, out_dtype=out_dtype, bias=bias, a_zero_point=zero_point, b_zero_point=zero_point), device)


def test_every_m_up_to_two_tiles_equals_the_reference(device):
    for m in range(1, 130):
        check(Case(m, 64, 128, seed=m), device)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 63, 65, 127, 129, 1031])
def test_unaligned_k_and_n_equal_the_reference(device, k):
    for n in (1, 2, 7, 8, 9, 24, 33, 127):
        check(Case(5, n, k, bias="out", values="extremes"), device)


@pairwise(
    a_layout=INPUT_LAYOUTS,
    b_layout=INPUT_LAYOUTS,
    out_layout=LAYOUTS,
    a_scale=SCALES,
    b_scale=B_SCALES,
    a_zero_point=ZERO_POINTS,
    b_zero_point=ZERO_POINTS,
    bias=BIASES,
    shape=[(1, 32, 48), (19, 32, 48), (16, 33, 37), (18, 1, 64), (64, 64, 64)],
    out_dtype=FLOAT_DTYPES,
    values=["full", "extremes"],
)
def test_every_pair_of_options_equals_the_reference(device, shape, out_dtype, **options):
    """Strides, shapes of scales, bias and zero points, dtypes and values: scaled, and as raw sums."""
    for dtype in (out_dtype, torch.int32):
        check(Case(*shape, out_dtype=dtype, **options), device)


def test_nothing_outside_a_padded_output_is_written(device):
    operands = Case(20, 32, 48, bias="out").make(device)
    whole = torch.full((24, 64), float("nan"), dtype=torch.bfloat16, device=device)
    sm.scaled_mm(**operands.inputs, out=whole[2:22, 16:48])
    operands.check(whole[2:22, 16:48])
    frame = torch.ones(24, 64, dtype=torch.bool, device=device)
    frame[2:22, 16:48] = False
    assert whole[frame].isnan().all()


def test_scales_of_a_checkpoint_are_taken_as_they_are(device):
    """[N, 1], as compressed-tensors, vLLM, SGLang and InfiniCore hold them, for plain, batched and planned products, and in a compiled graph."""
    operands = Case(18, 32, 64, a_scale="vector", b_scale="vector").make(device)
    inputs = dict(operands.inputs)
    column = inputs["b_scale"].reshape(32, 1)
    expected = sm.scaled_mm(**inputs)
    inputs["b_scale"] = column
    assert torch.equal(sm.scaled_mm(**inputs), expected)
    assert torch.equal(torch.compile(sm.scaled_mm, backend="eager", fullgraph=True)(**inputs), expected)
    out = operands.poisoned_out()
    with sm.create_descriptor(sm.Handle(device), out=out, **inputs) as desc:
        desc.calculate(out, **inputs, workspace=torch.empty(max(desc.workspace_size, 1), dtype=torch.uint8, device=device))
    assert torch.equal(out, expected)
    batch = {**inputs, "a": inputs["a"].expand(3, -1, -1), "b_scale": column.expand(3, -1, -1), "a_scale": inputs["a_scale"].reshape(1, -1, 1)}
    assert torch.equal(sm.scaled_mm(**batch), expected.expand(3, -1, -1))
    each = {**batch, "b_scale": column * torch.tensor([1, 2, 4], device=device).reshape(3, 1, 1)}
    rows = {**each, "b_scale": each["b_scale"].mT.contiguous()}
    assert torch.equal(sm.scaled_mm(**each), sm.scaled_mm(**rows))


@pairwise(bias=BIASES, values=SCALE_VALUES, out_dtype=FLOAT_DTYPES, k=[96, 0])
def test_nan_infinity_and_subnormals_propagate_as_the_formula_says(device, out_dtype, values, bias, k):
    for seed in range(3):
        check(Case(33, 64, k, out_dtype=out_dtype, scale_values=values, bias=bias, seed=seed), device)


@pytest.mark.parametrize(
    "k, za, zb",
    [
        (MAX_K_SYMMETRIC, None, None),
        (MAX_K_ONE_ZERO_POINT, 127, None),
        (MAX_K_ONE_ZERO_POINT, None, 127),
        (MAX_K_BOTH_ZERO_POINTS, 127, 127),
    ],
)
def test_the_largest_k_is_exact_for_the_worst_values_and_the_next_is_refused(device, k, za, zb):
    def product(depth):
        a = torch.full((2, depth), -128, dtype=torch.int8, device=device)
        b = torch.full((3, depth), -128, dtype=torch.int8, device=device).t()
        zero_points = [None if z is None else torch.tensor([z], dtype=torch.int8, device=device) for z in (za, zb)]
        return sm.scaled_mm(a, b, None, None, out_dtype=torch.int32, a_zero_point=zero_points[0], b_zero_point=zero_points[1])

    assert product(k).unique().tolist() == [k * (-128 - (za or 0)) * (-128 - (zb or 0))]
    with pytest.raises(AccumulatorOverflowError, match=f"K <= {k}"):
        product(k + 1)


def test_a_row_does_not_depend_on_the_batch_around_it(device):
    operands = Case(70, 96, 256, bias="out", a_zero_point="vector_int32").make(device)
    whole = sm.scaled_mm(**operands.inputs)
    for start, stop in [(0, 1), (17, 18), (3, 20), (64, 70)]:
        part = sm.scaled_mm(
            operands.a[start:stop],
            operands.b,
            operands.a_scale[start:stop],
            operands.b_scale,
            operands.bias,
            a_zero_point=operands.a_zero_point[start:stop],
        )
        assert reference.same_bits(part, whole[start:stop])


def test_random_mixes_of_everything_equal_the_reference(device):
    generator = torch.Generator().manual_seed(20)
    for _ in range(300):
        check(random_case(generator), device)


def test_inputs_are_left_alone(device):
    operands = Case(20, 32, 48, bias="float32", a_zero_point="vector_int32", b_zero_point="vector_int32", a_layout="offset_rows").make(device)
    kept = {name: t.clone() for name, t in operands.inputs.items()}
    sm.scaled_mm(**operands.inputs)
    for name, t in operands.inputs.items():
        assert torch.equal(t, kept[name]), name


def test_the_default_output_is_bfloat16(device):
    operands = Case(3, 16, 32).make(device)
    out = sm.scaled_mm(operands.a, operands.b, operands.a_scale, operands.b_scale)
    assert out.dtype is torch.bfloat16
    operands.check(out)


def test_a_quantized_linear_layer_is_close_to_the_float_one(device):
    generator = torch.Generator().manual_seed(21)
    x, weight = (
        torch.randn(40, 512, generator=generator).to(device),
        torch.randn(64, 512, generator=generator).to(device),
    )
    q, scale = sm.quantize_int8(x, "token")
    w, w_scale = sm.quantize_int8(weight, "channel")
    out = sm.scaled_mm(q, w.t(), scale, w_scale, out_dtype=torch.float32)
    exact = x.double() @ weight.double().t()
    assert ((out - exact).norm() / exact.norm()).item() < 0.012  # 8 bits on both sides of normal data: about 0.9 %
    one_scale, tensor_scale = sm.quantize_int8(x, "tensor")
    assert reference.same_bits(
        sm.scaled_mm(one_scale, w.t(), tensor_scale, w_scale),
        reference.scaled_mm(one_scale, w.t(), tensor_scale, w_scale),
    )


@pytest.mark.gpu
def test_cpu_and_gpu_give_the_same_bits():
    generator = torch.Generator().manual_seed(22)
    for _ in range(200):
        case = random_case(generator, max_m=200, max_n=300, max_k=600)
        on_cpu, on_gpu = case.make("cpu"), case.make("cuda:0")
        expected = sm.scaled_mm(**on_cpu.inputs, out_dtype=case.out_dtype)
        actual = sm.scaled_mm(**on_gpu.inputs, out_dtype=case.out_dtype).cpu()
        assert reference.same_bits(actual, expected), f"{case}: {reference.describe_difference(actual, expected)}"


def test_a_weight_may_be_prepared_within_vmap():
    a, scale = torch.randint(-5, 5, (3, 6, 8), dtype=torch.int8), torch.ones(1)
    found = torch.vmap(lambda a: sm.scaled_mm(a, sm.prepare_weight(a.t()), scale, scale))(a)
    assert torch.equal(found, torch.stack([sm.scaled_mm(each, each.t(), scale, scale) for each in a]))
