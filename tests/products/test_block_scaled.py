"""`block_scaled_mm` against its reference on every backend, the reference against integers and float64, and every refusal."""

from __future__ import annotations

import pytest
import torch
from operands.block_scaled_cases import BIASES, OUT_DTYPES, SCALE_LAYOUTS, SCALE_VALUES, SHAPES, ZERO_SHAPES, BlockCase
from operands.cases import INPUT_LAYOUTS, LAYOUTS
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
from scaled_mm.products.block_scaled import BLOCK_SCALED


def check(case: BlockCase, device: str) -> None:
    """Into a poisoned output, into a new one, and again: the same bits each time."""
    operands = case.make(device)
    out = operands.poisoned()
    assert sm.block_scaled_mm(**operands.inputs, out=out) is out
    operands.check(out, device)
    made = sm.block_scaled_mm(**operands.inputs, out_dtype=case.out_dtype)
    assert made.is_contiguous() and reference.same_bits(made, out.contiguous())


@pytest.mark.parametrize("m, n, k", SHAPES + ZERO_SHAPES)
def test_every_shape_has_the_bits_of_the_reference(device, m, n, k):
    for out_dtype in OUT_DTYPES:
        check(BlockCase(m, n, k, out_dtype, bias="out", seed=m + n + k), device)
        check(BlockCase(m, n, k, out_dtype, pad=16, bias="float32", seed=m + n + k), device)


@pytest.mark.parametrize("m, n, k", SHAPES + ZERO_SHAPES)
def test_every_shape_has_the_bits_of_the_reference_with_blocks_of_64(device, m, n, k):
    for out_dtype in OUT_DTYPES:
        check(BlockCase(m, n, k, out_dtype, bias="out", seed=m + n + k, block_size=64), device)
        check(BlockCase(m, n, k, out_dtype, pad=16, scale_layout="columns", seed=m + n + k, block_size=64), device)


def test_blocks_of_64_are_blocks_of_128_whose_second_half_is_zeros(device):
    m, n, k = 9, 192, 448
    t = BlockCase(m, n, k, torch.float32, block_size=64).make(device).inputs

    def spread(operand: torch.Tensor) -> torch.Tensor:
        """[K, any] with 64 zeros after every 64 k."""
        parts = operand.reshape(k // 64, 64, -1)
        return torch.cat((parts, torch.zeros_like(parts)), 1).flatten(0, 1)

    a, b = spread(t["a"].t()).t(), spread(t["b"])
    for j in range(n // 64):  # the columns of one scale
        columns = slice(64 * j, 64 * j + 64)
        expected = sm.block_scaled_mm(a, b[:, columns], t["a_scale"], t["b_scale"][:, j : j + 1], out_dtype=torch.float32)
        found = sm.block_scaled_mm(t["a"], t["b"][:, columns], t["a_scale"], t["b_scale"][:, j : j + 1], out_dtype=torch.float32)
        whole = sm.block_scaled_mm(t["a"], t["b"], t["a_scale"], t["b_scale"], out_dtype=torch.float32)[:, columns]
        assert reference.same_bits(found, expected) and reference.same_bits(whole, expected)


@pairwise(
    a_layout=LAYOUTS,
    b_layout=LAYOUTS,
    out_layout=LAYOUTS,
    scale_layout=SCALE_LAYOUTS,
    block_size=[128, 64],
    bias=BIASES,
    out_dtype=OUT_DTYPES,
    shape=[(1, 33, 130), (17, 130, 144), (5, 16, 256), (21, 260, 400)],
)
def test_every_pair_of_layouts_has_the_bits_of_the_reference(device, shape, **options):
    check(BlockCase(*shape, **options), device)


def test_operands_of_stride_zero_are_taken(device):
    assert {"broadcast_row", "broadcast_column"} <= set(INPUT_LAYOUTS)
    operands = BlockCase(9, 140, 200).make(device)
    operands.inputs["a"] = operands.inputs["a"][:1].expand(9, 200)
    operands.inputs["b"] = operands.inputs["b"][:, :1].expand(200, 140)
    operands.check(sm.block_scaled_mm(**operands.inputs))


@pairwise(bias=BIASES, scale_values=SCALE_VALUES, scale_layout=SCALE_LAYOUTS, out_dtype=OUT_DTYPES, k=[0, 400])
def test_nan_infinity_and_subnormals_propagate_as_the_formula_says(device, k, **options):
    check(BlockCase(21, 260, k, **options), device)


@pytest.mark.parametrize("values", ["minimum", "extremes"])
def test_the_largest_sums_of_a_block_are_exact(device, values):
    for k in (128, 131, 1024):
        check(BlockCase(18, 140, k, torch.float32, values=values), device)


def test_k_is_not_bounded_by_the_accumulator(device):
    k = 131072 + 128
    a, b = torch.full((2, k), -128, dtype=torch.int8, device=device), torch.full((16, k), -128, dtype=torch.int8, device=device).t()
    ones_a, ones_b = torch.ones(2, k // 128, device=device), torch.ones(k // 128, 1, device=device)
    assert torch.equal(sm.block_scaled_mm(a, b, ones_a, ones_b, out_dtype=torch.float32), torch.full((2, 16), 16384.0 * k, device=device))


def test_blocks_are_added_in_the_order_of_k(device):
    """2^24 + 1 + 1 is 2^24 from left to right, and 2^24 + 2 the other way."""
    a = torch.zeros(1, 384, dtype=torch.int8, device=device)
    a[0, ::128] = 1
    b = torch.ones(384, 1, dtype=torch.int8, device=device)
    big_first, big_last = (torch.tensor([row], device=device) for row in ([2.0**24, 1.0, 1.0], [1.0, 1.0, 2.0**24]))
    ones = torch.ones(3, 1, device=device)
    assert sm.block_scaled_mm(a, b, big_first, ones, out_dtype=torch.float32).item() == 2.0**24
    assert sm.block_scaled_mm(a, b, big_last, ones, out_dtype=torch.float32).item() == 2.0**24 + 2


def test_the_scales_are_multiplied_with_each_other_first(device):
    a, b = torch.full((1, 128), 100, dtype=torch.int8, device=device), torch.full((128, 1), 100, dtype=torch.int8, device=device)
    huge, tiny = torch.full((1, 1), 3e38, device=device), torch.full((1, 1), 1e-38, device=device)
    assert sm.block_scaled_mm(a, b, huge, tiny, out_dtype=torch.float32).isfinite().all()  # 1.28e6 * 3e38 would be infinity


def test_a_row_alone_has_the_bits_that_it_has_in_a_batch(device):
    operands = BlockCase(70, 200, 640, bias="float32").make(device)
    whole, t = operands.expected(), operands.inputs
    for row in (0, 33, 69):
        alone = sm.block_scaled_mm(t["a"][row : row + 1], t["b"], t["a_scale"][row : row + 1], t["b_scale"], t["bias"])
        assert reference.same_bits(alone, whole[row : row + 1])


# ---- the reference ----------------------------------------------------------------------------------------------------


def test_the_reference_is_the_sum_that_python_computes():
    operands = BlockCase(3, 131, 260, torch.float32, scale_values="signed", bias="float32").make()
    t, out = operands.inputs, operands.expected()

    def f32(x: float) -> float:
        return torch.tensor(x, dtype=torch.float64).float().double().item()  # one rounding: a double holds products and sums that need it

    for m, n in ((0, 0), (1, 127), (2, 128), (2, 130)):
        total = 0.0
        for block in range(3):
            ks = range(128 * block, min(128 * block + 128, 260))
            acc = sum(int(t["a"][m, k]) * int(t["b"][k, n]) for k in ks)
            scale = f32(t["a_scale"][m, block].item() * t["b_scale"][block, n // 128].item())
            total = f32(total + f32(acc * scale))
        assert out[m, n].item() == f32(total + t["bias"][n].item())


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
@pytest.mark.parametrize("m, n, k", [(5, 130, 128), (17, 64, 1000), (64, 256, 4096), (3, 20, 40000)])
def test_the_error_against_float64_is_within_the_bound(device, m, n, k, out_dtype):
    """docs/design/numerics.md: |out - exact| <= g * (sum |terms| + |bias|) + cast, g = (blocks + 2) u / (1 - (blocks + 2) u), u = 2^-24."""
    operands = BlockCase(m, n, k, out_dtype, scale_values="signed", bias="float32", seed=k).make(device)
    t = operands.inputs
    out = sm.block_scaled_mm(**t, out_dtype=out_dtype).double()
    blocks = -(-k // 128)
    exact = t["bias"].double().expand(m, n).clone()
    magnitude = exact.abs()
    for block in range(blocks):
        ks = slice(128 * block, 128 * block + 128)
        scale = t["a_scale"][:, block, None].double() * t["b_scale"][block].double().repeat_interleave(128)[:n]
        term = (t["a"][:, ks].double() @ t["b"][ks].double()) * scale
        exact += term
        magnitude += term.abs()
    u = 2.0**-24
    bound = (blocks + 2) * u / (1 - (blocks + 2) * u) * magnitude
    unit, least = {torch.float32: (0.0, 0.0), torch.float16: (2.0**-11, 2.0**-25), torch.bfloat16: (2.0**-8, 0.0)}[out_dtype]
    bound = bound + unit * (exact.abs() + bound) + least + 1e-15 * magnitude  # the last: what float64 rounds itself
    finite = out.isfinite()
    assert ((out - exact).abs() <= bound)[finite].all() and (finite.all() or out_dtype is torch.float16)


# ---- refusals -----------------------------------------------------------------------------------------------------------


def made(device: str, **changed):
    return {**BlockCase(20, 300, 260, bias="float32").make(device).inputs, **changed}


REFUSED = [
    (dict(a_scale=(20, 2)), BadTensorShapeError, "a_scale: expected [M, ceil(K / 128)] = [20, 3] (M = 20, K = 260), got [20, 2]"),
    (dict(a_scale=(20, 1)), BadTensorShapeError, "a_scale: expected [M, ceil(K / 128)] = [20, 3]"),
    (dict(a_scale=(20,)), BadTensorShapeError, "a_scale: expected 2 dimensions [M, ceil(K / 128)], got 1: [20]"),
    (dict(b_scale=(3, 300)), BadTensorShapeError, "b_scale: expected [ceil(K / 128), ceil(N / 128)] = [3, 3] (K = 260, N = 300), got [3, 300]"),
    (dict(b_scale=()), BadTensorShapeError, "b_scale: expected 2 dimensions"),
    (dict(a_scale=(20, 5)), BadTensorShapeError, "b_scale: expected [ceil(K / 64), ceil(N / 64)] = [5, 5] (K = 260, N = 300), got [3, 3]"),
    (dict(a_scale=(20, 5, 1)), BadTensorShapeError, "a_scale: expected 2 dimensions"),
    (
        dict(a=(20, 60), b=(60, 300), a_scale=(20, 1), b_scale=(1, 4)),
        BadTensorShapeError,
        "b_scale: expected [ceil(K / 128), ceil(N / 128)] = [1, 3]",
    ),
    (dict(a_scale=(19, 5)), BadTensorShapeError, "a_scale: expected [M, ceil(K / 64)] = [20, 5] (M = 20, K = 260), got [19, 5]"),
    (dict(b=(300, 260)), BadTensorShapeError, "b: expected [K, N] with K = 260 as in a [M, K], got [300, 260]"),
    (dict(a=(2, 20, 260)), BadTensorShapeError, "a: expected 2 dimensions [M, K], got 3"),
    (dict(bias=(299,)), BadTensorShapeError, "bias: expected [300] or [1, 300] (N = 300), got [299]"),
]


@pytest.mark.parametrize("changed, error, message", REFUSED, ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
def test_what_has_the_wrong_shape_is_refused_by_name(device, changed, error, message):
    tensors = {name: torch.ones(shape, dtype=torch.int8 if name in "ab" else torch.float32, device=device) for name, shape in changed.items()}
    with pytest.raises(error) as caught:
        sm.block_scaled_mm(**made(device, **tensors))
    assert str(caught.value).startswith(message), caught.value


def test_wrong_dtypes_are_refused_by_name(device):
    inputs = made(device)
    for name, dtype, expected in (
        ("a", torch.uint8, "int8"),
        ("b", torch.float32, "int8"),
        ("a_scale", torch.float16, "float32"),
        ("b_scale", torch.float64, "float32"),
        ("bias", torch.float16, "out's dtype bfloat16 or float32"),
    ):
        with pytest.raises(BadTensorDtypeError, match=f"^{name}: expected {expected}, got {str(dtype).removeprefix('torch.')}"):
            sm.block_scaled_mm(**{**inputs, name: inputs[name].to(dtype)})
    for out_dtype in (torch.int32, torch.float64, "bfloat16", None):
        with pytest.raises(BadTensorDtypeError, match="^out_dtype: expected torch.bfloat16, torch.float16, torch.float32, got "):
            sm.block_scaled_mm(**inputs, out_dtype=out_dtype)
    with pytest.raises(BadTensorDtypeError, match="^out: expected float16, bfloat16 or float32, got int32"):
        sm.block_scaled_mm(**inputs, out=torch.empty(20, 300, dtype=torch.int32, device=device))


def test_outputs_that_cannot_be_written_are_refused(device):
    inputs = made(device)
    with pytest.raises(BadTensorShapeError, match=r"^out: expected \[M, N\] = \[20, 300\], got \[20, 299\]"):
        sm.block_scaled_mm(**inputs, out=torch.empty(20, 299, device=device))
    with pytest.raises(BadTensorStridesError, match="^out: expected strides under which no two elements overlap"):
        sm.block_scaled_mm(**inputs, out=torch.empty(1, 300, device=device).expand(20, 300))
    with pytest.raises(BadParamError, match="^out: expected a tensor that requires no gradient"):
        sm.block_scaled_mm(**inputs, out=torch.empty(20, 300, device=device, requires_grad=True))
    square = torch.ones(3, 3, device=device)
    with pytest.raises(BadParamError, match="^out: expected memory apart from every input, got an overlap with b_scale"):
        ones = torch.ones(3, 3, dtype=torch.int8, device=device)
        sm.block_scaled_mm(ones, ones, torch.ones(3, 1, device=device), square[:1, :1], out=square)


def test_missing_arguments_and_other_devices_are_refused_by_name(device):
    inputs = made(device)
    for name in ("a", "b", "a_scale", "b_scale"):
        with pytest.raises(ScaledMMError) as caught:
            sm.block_scaled_mm(**{**inputs, name: None})
        assert isinstance(caught.value, (NullPointerError, BadParamError)) and name in str(caught.value)
    with pytest.raises((BadTensorDeviceError, ScaledMMError), match="a_scale: expected a tensor on"):
        sm.block_scaled_mm(**{**inputs, "a_scale": inputs["a_scale"].to("meta")})


def test_a_descriptor_refuses_other_tensors_and_a_kernel_on_a_cpu():
    inputs = made("cpu")
    out = torch.empty(20, 300)
    handle = sm.Handle("cpu")
    with sm.create_block_scaled_descriptor(handle, out=out, **inputs) as desc:
        desc.calculate(out, **inputs)
        assert reference.same_bits(out, reference.block_scaled_mm(**inputs, out_dtype=torch.float32)) and "20x300x260, float32" in repr(desc)
        assert desc.kernel.reason.startswith("the device is a CPU: ")
        with pytest.raises(BadTensorStridesError, match="^a_scale: expected strides"):
            desc.calculate(out, **{**inputs, "a_scale": inputs["a_scale"].t().contiguous().t()})
        with pytest.raises(BadParamError, match="^bias: expected a tensor as the descriptor was created, got none"):
            desc.calculate(out, **{**inputs, "bias": None})
    with pytest.raises(BadParamError, match="got one that was destroyed"):
        desc.calculate(out, **inputs)
    with pytest.raises(BadParamError, match="^kernel: expected none on a CPU"):
        sm.create_block_scaled_descriptor(handle, out=out, **inputs, kernel="block_scaled_generic_64x64x128")
    with pytest.raises(BadParamError, match="^b_scale: expected a tensor or a TensorDesc, got None"):
        sm.create_block_scaled_descriptor(handle, out=out, **{**inputs, "b_scale": None})


# ---- torch ----------------------------------------------------------------------------------------------------------------


def test_opcheck_finds_nothing_wrong(device):
    for out_dtype, bias in zip(OUT_DTYPES, (None, "out", "float32")):
        t = BlockCase(5, 136, 200, out_dtype, bias=bias).make(device).inputs
        torch.library.opcheck(BLOCK_SCALED.functional, (*t.values(), out_dtype, False))
        torch.library.opcheck(BLOCK_SCALED.out, (torch.empty(5, 136, dtype=out_dtype, device=device), *t.values(), False))


def test_the_fake_output_is_what_the_real_one_is(device):
    for shape in [(1, 1, 1), (5, 32, 48), (0, 8, 16), (8, 0, 16), (3, 7, 0)]:
        t = BlockCase(*shape).make(device).inputs
        real = sm.block_scaled_mm(**t)
        with FakeTensorMode() as mode:
            fake = sm.block_scaled_mm(**{name: None if x is None else mode.from_tensor(x) for name, x in t.items()})
        assert (fake.shape, fake.dtype, fake.stride(), fake.device) == (real.shape, real.dtype, real.stride(), real.device)


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_takes_the_whole_graph(device, dynamic):
    def layer(x, weight, weight_scale_inv, bias):
        a, a_scale = sm.quantize_int8_block(x)
        return torch.relu(sm.block_scaled_mm(a, weight.t(), a_scale, weight_scale_inv.t(), bias))

    weight, scale = sm.quantize_int8_block(torch.randn(200, 300, device=device), dim="weight")
    bias = torch.randn(200, device=device)
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (3, 17, 64):
        x = torch.randn(tokens, 300, device=device)
        assert reference.same_bits(compiled(x, weight, scale, bias), layer(x, weight, scale, bias))


def test_a_call_announces_that_it_wrote_to_out(device):
    out = torch.empty(20, 300, device=device)
    before = out._version
    sm.block_scaled_mm(**made(device), out=out)
    assert out._version > before
