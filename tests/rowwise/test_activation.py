"""`silu_and_mul` and `gelu_and_mul`: the bits of the numpy reference, and the distance from a float64 result."""

from __future__ import annotations

import math

import pytest
import torch
from operands.pairs import pairwise
from rowwise_data import FLOATS, KINDS, LAYOUTS, LEADING, SPECIAL, WIDTHS, beyond_one_unit, laid_out, values

import scaled_mm as sm
from scaled_mm.errors import BadParamError, BadTensorDeviceError, BadTensorDtypeError, BadTensorShapeError
from scaled_mm.reference import same_bits
from scaled_mm.rowwise import reference

ACTIVATIONS = {
    "silu": (sm.silu_and_mul, reference.silu_and_mul),
    "none": (sm.gelu_and_mul, reference.gelu_and_mul),
    "tanh": (lambda x, **options: sm.gelu_and_mul(x, approximate="tanh", **options), lambda x: reference.gelu_and_mul(x, "tanh")),
}
EXACT = {
    "silu": lambda g: g / (1 + torch.exp(-g)),
    "none": lambda g: 0.5 * g * torch.special.erfc(-g * math.sqrt(0.5)),
    "tanh": lambda g: g / (1 + torch.exp(-2 * math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))),
}
each = pytest.mark.parametrize("name", ACTIVATIONS)


def every_finite(dtype: torch.dtype) -> torch.Tensor:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    return bits[bits.isfinite()]


def gates(dtype: torch.dtype) -> torch.Tensor:
    """Every finite number of 16 bits; float32: numbers of every exponent, and a fine grid of where the functions bend and vanish."""
    if dtype is not torch.float32:
        return every_finite(dtype)
    generator = torch.Generator().manual_seed(1)
    wide = torch.exp2(torch.empty(50_000, dtype=torch.float64).uniform_(-149, 100, generator=generator))
    return torch.cat((wide, -wide, torch.empty(100_000, dtype=torch.float64).uniform_(-130, 30, generator=generator))).float()


@pairwise(name=list(ACTIVATIONS), dtype=FLOATS, h=WIDTHS, leading=LEADING, layout=LAYOUTS, kind=KINDS)
def test_every_pair_of_operands_has_the_bits_of_the_reference(device, name, dtype, h, leading, layout, kind):
    operator, by_hand = ACTIVATIONS[name]
    x = laid_out(values((*leading, 2 * h), dtype, kind, seed=h), layout)
    y = operator(x.to(device))
    assert y.is_contiguous() and same_bits(y.cpu(), by_hand(x).to(dtype))


@each
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_gate_has_the_bits_of_the_reference(device, name, dtype):
    operator, by_hand = ACTIVATIONS[name]
    g = gates(dtype)
    x = torch.stack((g, values(g.shape, dtype)), -1)
    assert same_bits(operator(x.to(device)).cpu(), by_hand(x).to(dtype))
    x = torch.cartesian_prod(torch.tensor(SPECIAL), torch.tensor(SPECIAL)).to(dtype)
    assert same_bits(operator(x.to(device)).cpu(), by_hand(x).to(dtype))


@each
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("half", [4096, 14336])
def test_layers_of_language_models_have_the_bits_of_the_reference(device, name, half, dtype):
    operator, by_hand = ACTIVATIONS[name]
    x = values((2, 2 * half), dtype, seed=half) * 4
    assert same_bits(operator(x.to(device)).cpu(), by_hand(x).to(dtype))


@each
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_results_are_within_one_unit_in_the_last_place_of_float64(device, name, dtype):
    # bfloat16 has the exponents of float32, in which the gate is computed: there exp is a multiple of 2^-149.
    g = gates(dtype)
    slack = 2.0**-142 if dtype is torch.bfloat16 else 0.0
    for u in (1.0, -0.37, 2.0**-9, 3e4, *((1e-30, 1e30) if dtype is not torch.float16 else ())):
        u = torch.tensor(u).to(dtype)
        exact = EXACT[name](g.double()) * u.double()
        y = ACTIVATIONS[name][0](torch.stack((g, u.expand(g.shape)), -1).to(device)).flatten()
        wrong = beyond_one_unit(y, exact, slack * u.double().abs())
        assert wrong.numel() == 0, wrong


def test_gelus_negative_tail_keeps_its_relative_accuracy(device):
    g = torch.linspace(-13, -6, 3001, dtype=torch.float32)
    exact = EXACT["none"](g.double())
    y = sm.gelu_and_mul(torch.stack((g, torch.ones_like(g)), -1).to(device)).flatten()
    assert ((y.cpu().double() / exact - 1).abs() < 2.0**-22).all() and exact.abs().min() < 1e-36


@each
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_row_alone_has_the_bits_of_the_row_in_a_batch(device, name, dtype):
    x = values((67, 2 * 129), dtype, "wide").to(device)
    batch = ACTIVATIONS[name][0](x)
    for row in (0, 1, 31, 66):
        assert same_bits(ACTIVATIONS[name][0](x[row]), batch[row])


@each
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_fused_quantizer_has_the_bits_of_the_chain_in_float32(device, name, dtype, kind):
    operator, by_hand = ACTIVATIONS[name]
    x = values((5, 2 * 255), dtype, kind)
    y32 = by_hand(x)
    made = operator(x.to(device), quantize="token")
    for chain in (sm.quantize_int8(y32), reference.token(y32)):
        assert same_bits(made.q.cpu(), chain[0]) and same_bits(made.scale.cpu(), chain[1])
    scale = torch.tensor([0.01], device=device)
    for zero_point in (None, torch.tensor([11], dtype=torch.int8), torch.tensor([-1000], dtype=torch.int32)):
        made = operator(x.to(device), quantize=scale, zero_point=None if zero_point is None else zero_point.to(device))
        assert same_bits(made.q.cpu(), reference.static(y32, scale.cpu(), zero_point)) and made.scale is scale


@each
def test_tensors_without_elements_give_empty_results(device, name):
    for shape in ((0,), (3, 0), (0, 4), (2, 0, 6)):
        x = torch.empty(shape, dtype=torch.bfloat16, device=device)
        want = (*shape[:-1], shape[-1] // 2)
        q, scale = ACTIVATIONS[name][0](x, quantize="token")
        assert ACTIVATIONS[name][0](x).shape == q.shape == want and scale.shape == (*want[:-1], 1)


X = torch.ones(2, 4)


@each
@pytest.mark.parametrize(
    "error, message, x, options",
    [
        (BadParamError, "x: expected a tensor, got None", None, {}),
        (BadParamError, "x: expected a strided tensor", X.to_sparse(), {}),
        (BadTensorDtypeError, "x: expected float16, bfloat16 or float32, got torch.int8", X.to(torch.int8), {}),
        (BadTensorShapeError, r"x: expected \[..., 2 H\], got \[2, 3\]", X[:, :3], {}),
        (BadTensorShapeError, "x: expected 1 to 8 dimensions, got 0", X[0, 0], {}),
        (BadTensorShapeError, "x: expected 1 to 8 dimensions, got 9", torch.ones([2] * 9), {}),
        (BadParamError, "quantize: expected None, ", X, {"quantize": "channel"}),
        (BadTensorDtypeError, "quantize: expected float32, got", X, {"quantize": X[0, 0].half()}),
        (BadTensorShapeError, "quantize: expected one value", X, {"quantize": X}),
        (BadTensorDeviceError, "quantize: expected a tensor on cpu", X, {"quantize": X[0, 0].to("meta")}),
        (BadParamError, "zero_point: expected None without", X, {"zero_point": torch.zeros(1, dtype=torch.int8)}),
    ],
)
def test_what_is_wrong_is_refused_and_named(name, error, message, x, options):
    with pytest.raises(error, match="^" + message):
        ACTIVATIONS[name][0](x, **options)


@pytest.mark.parametrize("approximate", ["tan", "Tanh", None, True, torch.ones(2).numpy(), ["none"]])
def test_a_wrong_approximation_is_refused_and_named(approximate):
    with pytest.raises(BadParamError, match="^approximate: expected 'none' or 'tanh', got"):
        sm.gelu_and_mul(X, approximate=approximate)


@each
def test_a_compiled_graph_gives_the_same_bits(device, name):
    def layer(x, scale):
        activation = ACTIVATIONS[name][0]
        return activation(x), activation(x.t().contiguous().t()), activation(x, quantize="token"), activation(x, quantize=scale)

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for rows in (3, 7):
        made = values((rows, 34), torch.bfloat16).to(device), torch.tensor(0.1, device=device)
        for one, other in zip(*(torch.utils._pytree.tree_leaves(result) for result in (layer(*made), compiled(*made)))):
            assert same_bits(one, other) and one.stride() == other.stride()


def test_opcheck_finds_nothing_wrong(device):
    for layout in ("contiguous", "transposed"):
        for dtype in (torch.float32, torch.bfloat16):
            x = laid_out(values((5, 12), dtype), layout).to(device)
            torch.library.opcheck(torch.ops.scaled_mm.silu_and_mul.default, (x,))
            torch.library.opcheck(torch.ops.scaled_mm.gelu_and_mul.default, (x, "tanh"))


@pytest.mark.parametrize("function", ["SILU_AND_MUL", "GELU_AND_MUL", "GELU_TANH_AND_MUL"])
def test_opcheck_finds_nothing_wrong_with_what_a_compiler_calls(device, function):
    x = laid_out(values((5, 12), torch.bfloat16), "contiguous").to(device)
    for token, scale in ((False, None), (True, None), (False, torch.tensor(0.1, device=device))):
        torch.library.opcheck(torch.ops.scaled_mm.rowwise_gated.default, (x, function, token, scale, None))
