"""quantize_int8 against Python numbers, and its promises on rows that have no sensible scale."""

import math
import struct

import pytest
import torch

from scaled_mm import reference
from scaled_mm.errors import BadParamError, BadTensorDtypeError, BadTensorShapeError
from scaled_mm.rowwise import quantize_int8

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SMALLEST_SCALE = 2.0**-126


def by_hand(row: list[float]) -> tuple[list[int], float]:
    """One finite row. A float32 division done in double and rounded to float32 is the float32 division."""

    def to_float32(value):
        return struct.unpack("f", struct.pack("f", value))[0]

    scale = max(to_float32(max(map(abs, row)) / 127.0), SMALLEST_SCALE)
    return [max(-127, min(127, round(to_float32(x / scale)))) for x in row], scale  # round() is half to even


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_row_equals_the_definition(device, dtype):
    generator = torch.Generator().manual_seed(1)
    for magnitude in (1.0, 1e-3, 300.0) + ((1e-44, 1e-37, 1e36) if dtype is torch.float32 else ()):
        x = (torch.randn(37, 65, generator=generator) * magnitude).to(dtype)
        q, scale = quantize_int8(x.to(device))
        assert q.dtype is torch.int8 and scale.dtype is torch.float32
        assert q.shape == x.shape and scale.shape == (37, 1)
        want = [by_hand(row) for row in x.tolist()]
        assert q.tolist() == [values for values, _ in want]
        assert scale.flatten().tolist() == [value for _, value in want]


def test_ties_round_to_even(device):
    # scale is exactly 1, so the elements are the quotients.
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 125.5, -126.5]], device=device)
    q, scale = quantize_int8(x)
    assert scale.item() == 1.0
    assert q.tolist() == [[127, 0, 2, 2, 0, -2, -2, 126, -126]]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_scale_is_the_ieee_quotient_and_not_a_product_with_the_reciprocal(device, dtype):
    largest = torch.arange(1, 2048, dtype=torch.float32).to(dtype)
    _, scale = quantize_int8(largest.reshape(-1, 1).to(device))
    want = torch.tensor([struct.unpack("f", struct.pack("f", v / 127.0))[0] for v in largest.tolist()])
    assert reference.same_bits(scale.cpu().flatten(), want)
    assert not torch.equal(largest.float() * torch.tensor(1 / 127.0), want)  # the values do tell the two apart


def test_minus_128_never_appears(device):
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(3)).to(device)
    for dim in ("token", "channel", "tensor"):
        assert int(quantize_int8(-x.abs(), dim)[0].min()) == -127


def test_a_row_of_zeros_has_the_smallest_normal_scale_and_dequantizes_to_zero(device):
    x = torch.ones(3, 8, device=device)
    x[1] = 0
    q, scale = quantize_int8(x)
    assert scale[1].item() == SMALLEST_SCALE
    assert q[1].tolist() == [0] * 8
    assert (q[1] * scale[1]).tolist() == [0.0] * 8
    assert math.isfinite(1 / scale[1].item())


def test_subnormal_rows_keep_the_error_within_half_a_scale(device):
    x = torch.tensor([[1e-45, -3e-40, 1e-39, 0.0], [1e-45, 0.0, 0.0, -1e-45]], device=device)
    q, scale = quantize_int8(x)
    assert (scale >= SMALLEST_SCALE).all()
    assert ((q.double() * scale.double() - x.double()).abs() <= scale.double() / 2).all()


def test_nan_and_infinity_spoil_their_own_row_only(device):
    x = torch.ones(4, 8, device=device)
    x[0, 3], x[1, 3], x[2, 3], x[2, 4] = float("nan"), float("-inf"), float("inf"), float("nan")
    q, scale = quantize_int8(x)
    assert scale[0].isnan().item() and scale[1].item() == float("inf") and scale[2].isnan().item()
    assert q[:3].tolist() == [[0] * 8] * 3
    assert q[3].tolist() == [127] * 8 and scale[3].item() == pytest.approx(1 / 127)
    assert (q[:3].float() * scale[:3]).isnan().all()


def test_channel_scales_are_laid_out_for_the_transposed_weight(device):
    weight = torch.randn(24, 40, generator=torch.Generator().manual_seed(5)).to(device)
    q, scale = quantize_int8(weight, "channel")
    by_row, row_scale = quantize_int8(weight, "token")
    assert torch.equal(q, by_row)
    assert scale.shape == (1, 24) and scale.is_contiguous() and torch.equal(scale, row_scale.t())
    assert ((q.t() * scale).t() - weight).abs().max() <= scale.max() / 2 * 1.001


def test_expert_weights_have_their_channel_scales_per_expert(device):
    weight = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(6)).to(device)
    q, scale = quantize_int8(weight, "channel")
    assert q.shape == (3, 8, 16) and scale.shape == (3, 1, 8)
    for expert in range(3):
        alone_q, alone_scale = quantize_int8(weight[expert], "channel")
        assert torch.equal(q[expert], alone_q) and torch.equal(scale[expert], alone_scale)


def test_one_scale_for_the_whole_tensor(device):
    x = torch.randn(5, 6, 7, generator=torch.Generator().manual_seed(7)).to(device)
    q, scale = quantize_int8(x, "tensor")
    flat, flat_scale = quantize_int8(x.reshape(-1))
    assert q.shape == x.shape and scale.shape == (1,)
    assert torch.equal(q.reshape(-1), flat) and torch.equal(scale, flat_scale)
    scalar, scalar_scale = quantize_int8(torch.tensor(-2.0, device=device), "tensor")
    assert scalar.shape == () and scalar.item() == -127 and scalar_scale.shape == (1,)


def test_strides_do_not_change_the_result_and_the_input_is_left_alone(device):
    x = torch.randn(40, 60, generator=torch.Generator().manual_seed(8)).to(device)
    kept = x.clone()
    for view in (x[:, 3:50:2], x.t(), x[::3], x.expand(2, 40, 60)):
        q, scale = quantize_int8(view)
        want_q, want_scale = quantize_int8(view.contiguous())
        assert q.is_contiguous() and torch.equal(q, want_q) and torch.equal(scale, want_scale)
    assert torch.equal(x, kept)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,), (0, 0), (2, 0, 3)])
def test_tensors_without_elements_give_empty_results(device, shape):
    for dim in ("token", "channel", "tensor") if len(shape) > 1 else ("token", "tensor"):
        q, scale = quantize_int8(torch.empty(shape, device=device), dim)
        assert q.shape == shape
        assert (scale == SMALLEST_SCALE).all()


def test_a_gradient_does_not_follow_the_quantized_values():
    q, scale = quantize_int8(torch.ones(2, 2, requires_grad=True))
    assert not q.requires_grad and not scale.requires_grad


def test_what_is_no_tensor_is_refused_by_name():
    for thing, name in (([1.0], "list"), (None, "None"), (1.0, "float")):
        with pytest.raises(BadParamError, match=f"x: expected a tensor, got {name}"):
            quantize_int8(thing)


def test_wrong_arguments_are_refused_with_what_was_expected():
    with pytest.raises(BadParamError, match="'token', 'channel', 'tensor', got 'row'"):
        quantize_int8(torch.ones(2, 2), "row")
    with pytest.raises(BadTensorDtypeError, match="got torch.int8"):
        quantize_int8(torch.ones(2, 2, dtype=torch.int8))
    with pytest.raises(BadTensorDtypeError, match="got torch.float64"):
        quantize_int8(torch.ones(2, 2, dtype=torch.float64))
    with pytest.raises(BadTensorShapeError, match=r"at least 1 dimensions, got shape \(\)"):
        quantize_int8(torch.tensor(1.0))
    with pytest.raises(BadTensorShapeError, match=r"at least 2 dimensions, got shape \(4,\)"):
        quantize_int8(torch.ones(4), "channel")


@pytest.mark.gpu
def test_cpu_and_gpu_give_the_same_bits():
    generator = torch.Generator().manual_seed(9)
    for dtype in FLOATS:
        x = (torch.randn(257, 1031, generator=generator) * torch.randn(257, 1, generator=generator).exp()).to(dtype)
        for dim in ("token", "channel", "tensor"):
            q, scale = quantize_int8(x, dim)
            gpu_q, gpu_scale = quantize_int8(x.cuda(), dim)
            assert torch.equal(gpu_q.cpu(), q) and reference.same_bits(gpu_scale.cpu(), scale)


@pytest.mark.gpu
def test_quantizing_on_the_gpu_does_not_synchronise():
    x = torch.randn(64, 256, device="cuda")
    quantize_int8(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for dim in ("token", "channel", "tensor"):
            quantize_int8(x, dim)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("dim", ["token", "channel", "tensor"])
def test_torch_compile_with_inductor_quantizes_to_the_same_bits(device, dim, symmetric):
    torch.compiler.reset()  # the cases share one lambda, which may be compiled a few times only
    compiled = torch.compile(lambda x: quantize_int8(x * 1, dim, symmetric), fullgraph=True)
    for rows, columns in ((200, 300), (7, 1), (64, 128)):
        x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)).to(device)
        eager, made = quantize_int8(x, dim, symmetric), compiled(x)
        assert type(made) is type(eager)
        for one, other in zip(eager, made):
            assert torch.equal(one, other) and one.stride() == other.stride()


RAW = {"quantize_int8": (), "quantize_int8_asymmetric": (), "quantize_int8_block": ("nearest",)}
"""The operators, and their arguments after dim."""


def test_opcheck_finds_nothing_wrong(device):
    for name, rest in RAW.items():
        for x in (torch.randn(5, 300, device=device), torch.randn(2, 3, 40, device=device)):
            torch.library.opcheck(getattr(torch.ops.scaled_mm, name).default, (x, "token", *rest))


@pytest.mark.parametrize("name", RAW)
def test_the_raw_operators_refuse_as_the_functions_do(device, name):
    x = torch.ones(2, 4, device=device)

    def raw(x, dim):
        return getattr(torch.ops.scaled_mm, name)(x, dim, *RAW[name])

    for made in (x, x.to("meta")):
        with pytest.raises(BadParamError, match="^dim: expected one of 'token', .*, got 'chanel'"):
            raw(made, "chanel")
        with pytest.raises(BadTensorDtypeError, match="^x: expected float16, bfloat16 or float32, got torch.int8"):
            raw(made.to(torch.int8), "token")
        with pytest.raises(BadTensorShapeError, match="^x: dim='token' needs at least 1 dimensions"):
            raw(made[0, 0], "token")
    with pytest.raises(BadParamError, match="^x: expected a strided tensor, got layout torch.sparse_coo"):
        raw(x.to_sparse(), "token")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", ["normal", "nan", "infinite", "tiny", "zeros", "largest"])
def test_one_scale_of_a_tensor_is_static_quantization_by_that_scale(device, dtype, kind):
    """What the CUDA path does: the scale first, then a static quantizer."""
    x = torch.randn(5, 33, generator=torch.Generator().manual_seed(2)).to(dtype)
    if kind == "largest":
        x[1, 1] = torch.finfo(dtype).max
    elif kind in ("tiny", "zeros"):
        x = x * (torch.finfo(dtype).smallest_normal if kind == "tiny" else 0)
    elif kind != "normal":
        x[2, 3] = float("nan" if kind == "nan" else "-inf")
    q, scale = quantize_int8(x.to(device), "tensor")
    assert torch.equal(q, quantize_int8(x.to(device), "tensor", scale=scale)[0])
    expected, expected_scale = quantize_int8(x, "tensor")
    assert torch.equal(q.cpu(), expected) and reference.same_bits(scale.cpu(), expected_scale)
