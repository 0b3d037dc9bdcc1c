"""Modules over the operators: the bits of the operators, scales that stay float32, inputs that are quantized once."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import scaled_mm as sm
from scaled_mm import nn
from scaled_mm.models.weights import quantize_weight

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def layer(
    n: int = 48, k: int = 64, dtype: torch.dtype = torch.bfloat16, static: bool = False, symmetric: bool = True, bias: bool = True
) -> nn.Int8Linear:
    torch.manual_seed(n + k)
    weight, scale = quantize_weight(torch.randn(n, k).to(dtype), dtype)
    input_scale = torch.tensor([0.03]) if static else None
    zero = torch.tensor([5], dtype=torch.int8) if static and not symmetric else None
    return nn.Int8Linear.from_tensors(weight, scale, torch.randn(n).to(dtype) if bias else None, input_scale, zero, symmetric=symmetric)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("static", [False, True])
def test_a_linear_layer_has_the_bits_of_int8_linear(dtype, static):
    made, x = layer(dtype=dtype, static=static), torch.randn(2, 5, 64).to(dtype)
    expected = sm.int8_linear(x, made.weight, made.weight_scale, made.bias, input_scale=made.input_scale)
    assert torch.equal(made(x), expected) and made(x).dtype is dtype
    assert torch.equal(copy.deepcopy(made)(x), expected) and torch.equal(pickle.loads(pickle.dumps(made))(x), expected)


@pytest.mark.parametrize("static", [False, True])
def test_an_asymmetric_layer_subtracts_the_zero_point(static):
    made, x = layer(dtype=torch.float32, static=static, symmetric=False), torch.randn(7, 64)
    q = sm.quantize_int8(x, scale=made.input_scale, zero_point=made.input_zero_point) if static else sm.quantize_int8(x, symmetric=False)
    values = (q.q.double() - q.zero_point.double()) * q.scale.double()
    exact = values @ (made.weight.double() * made.weight_scale.double()).t() + made.bias.double()
    assert torch.allclose(made(x).double(), exact, rtol=1e-5, atol=1e-5)


def test_scales_stay_float32_and_keep_their_bits():
    made = layer(dtype=torch.float32, static=True)
    before = made.weight_scale.clone(), made.input_scale.clone()
    x = torch.randn(3, 64)
    made.to(torch.float16).bfloat16().half()
    assert torch.equal(made.weight_scale, before[0]) and torch.equal(made.input_scale, before[1])
    assert made.bias.dtype is torch.float16 and made.weight.dtype is torch.int8
    assert made(x.half()).dtype is torch.float16 and made(x).dtype is torch.float32


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_of_floats_is_refused_and_scales_become_float32(assign):
    made = layer(dtype=torch.bfloat16, static=True)
    state = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    with pytest.raises(RuntimeError, match="weight: expected int8, got torch.float32"):
        made.load_state_dict({**state, "weight": state["weight"].float()}, assign=assign)
    made.load_state_dict({**state, "weight_scale": state["weight_scale"].bfloat16()}, assign=assign)
    assert made.weight_scale.dtype is torch.float32 and torch.equal(made.weight, state["weight"])
    assert made(torch.randn(3, 64).bfloat16()).shape == (3, 48)


def test_the_state_has_the_names_of_checkpoints():
    assert set(layer().state_dict()) == {"weight", "weight_scale", "bias"}
    assert set(layer(static=True, symmetric=False, bias=False).state_dict()) == {"weight", "weight_scale", "input_scale", "input_zero_point"}
    empty = nn.Int8Linear(64, 48, static=True, symmetric=False, device="meta")
    assert {name: tuple(value.shape) for name, value in empty.state_dict().items()} == {
        "weight": (48, 64),
        "weight_scale": (48, 1),
        "input_scale": (1,),
        "input_zero_point": (1,),
        "bias": (48,),
    }


@pytest.mark.parametrize("quantize", ["token", "static"])
@pytest.mark.parametrize("add", [False, True])
def test_a_norm_quantizes_once_for_all_layers_that_read_it(quantize, add):
    torch.manual_seed(0)
    first, second = layer(48, static=quantize == "static"), layer(32, static=quantize == "static")
    norm = (nn.AddRMSNorm if add else nn.RMSNorm)(64, 1e-5, quantize=quantize)
    if quantize == "static":
        norm.input_scale = first.input_scale
    x, residual = torch.randn(2, 3, 64).bfloat16(), torch.randn(2, 3, 64).bfloat16()
    out = norm(x, residual) if add else norm(x)
    quantized, total = out if add else (out, None)
    how = first.input_scale if quantize == "static" else "token"
    if add:
        (q, scale), expected_total = sm.add_rms_norm(x, residual, norm.weight, 1e-5, quantize=how)
        assert torch.equal(total, expected_total)
    else:
        q, scale = sm.rms_norm(x, norm.weight, 1e-5, quantize=how)
    assert quantized.shape == (2, 3, 64) and quantized.dtype is torch.bfloat16 and torch.equal(quantized.q, q)
    for made in (first, second):
        rows = q.reshape(-1, 64)
        expected = sm.scaled_mm(rows, made.weight.t(), scale.reshape(-1, 1), made.weight_scale.reshape(1, -1), made.bias, out_dtype=torch.bfloat16)
        assert torch.equal(made(quantized).reshape(-1, made.out_features), expected)
    assert torch.equal(nn.RMSNorm(64, 1e-5)(x), sm.rms_norm(x, torch.ones(64).bfloat16(), 1e-5))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("static", [False, True])
def test_a_gated_mlp_quantizes_inside_of_the_activation(activation, static):
    torch.manual_seed(0)
    both, down, x = layer(96, 64), layer(64, 48, static=static), torch.randn(5, 64).bfloat16()
    h = both(x)
    how = down.input_scale if static else "token"
    options = {} if activation == "silu" else dict(approximate="tanh" if activation == "gelu_tanh" else "none")
    q, scale = (sm.silu_and_mul if activation == "silu" else sm.gelu_and_mul)(h, quantize=how, **options)
    expected = sm.scaled_mm(q, down.weight.t(), scale.reshape(-1, 1), down.weight_scale.reshape(1, -1), down.bias, out_dtype=torch.bfloat16)
    assert torch.equal(nn.GatedMLP(both, down, activation)(x), expected)


def test_experts_have_the_bits_of_fused_experts():
    torch.manual_seed(0)
    experts = nn.Int8Experts(4, 64, 32)
    for name, shape in (("gate_up_proj", (4, 64, 64)), ("down_proj", (4, 64, 32))):
        q, scale = quantize_weight(torch.randn(shape), torch.bfloat16)
        setattr(experts, name, torch.nn.Parameter(q, requires_grad=False))
        setattr(experts, f"{name}_scale", torch.nn.Parameter(scale, requires_grad=False))
    x, ids, weights = torch.randn(6, 64).bfloat16(), torch.randint(0, 4, (6, 2)), torch.rand(6, 2)
    expected = sm.fused_experts(
        x, experts.gate_up_proj, experts.gate_up_proj_scale, experts.down_proj, experts.down_proj_scale, weights, ids, activation="silu"
    )
    assert torch.equal(experts(x, ids, weights), expected)
    assert experts.half().down_proj_scale.dtype is torch.float32


def test_wrong_tensors_are_refused_by_name():
    weight, scale = torch.zeros(4, 8, dtype=torch.int8), torch.ones(4, 1)
    for call, message in (
        (lambda: nn.Int8Linear.from_tensors(weight.float(), scale), r"weight: expected int8 \[N, K\], got torch.float32"),
        (lambda: nn.Int8Linear.from_tensors(weight, torch.ones(3)), r"weight_scale: expected \[4, 1\], got \[3\]"),
        (lambda: nn.Int8Linear.from_tensors(weight, scale, None, None, torch.zeros(1, dtype=torch.int8)), "input_zero_point: expected None"),
        (
            lambda: nn.Int8Linear.from_tensors(weight, scale, None, torch.ones(1), torch.tensor([128])),
            "input_zero_point: expected a value from -128 to",
        ),
        (lambda: nn.Int8Linear.from_tensors(weight, scale, None, torch.ones(2)), r"input_scale: expected one value, got \[2\]"),
        (lambda: nn.RMSNorm(8, quantize="channel"), "quantize: expected None, 'token' or 'static', got 'channel'"),
        (lambda: nn.GatedMLP(layer(48, 64), layer(64, 48)), "gate_up: expected 96 rows"),
        (lambda: nn.GatedMLP(layer(96, 64), layer(64, 48), "relu"), "activation: expected 'silu'"),
        (lambda: nn.GatedMLP(layer(96, 64), layer(64, 48, symmetric=False)), "down: expected a layer with symmetric inputs"),
    ):
        with pytest.raises(sm.ScaledMMError, match=message):
            call()


def test_a_router_is_a_product_and_the_best_of_its_softmax(device):
    router = nn.SoftmaxRouter(64, 16, 4, renormalize=False, device=device)
    router.weight.copy_(torch.randn(16, 64, generator=torch.Generator().manual_seed(0)))
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    logits, weights, ids = router(x)
    assert torch.equal(logits, torch.nn.functional.linear(x.view(6, 64), router.weight))
    assert all(map(torch.equal, (weights, ids), sm.topk_softmax(logits, 4, renormalize=False)))
    assert str(router) == "SoftmaxRouter(64, num_experts=16, top_k=4, renormalize=False)"


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("value", [200.0, 3.5, float("nan"), 128])
def test_a_zero_point_that_is_no_int8_is_refused(value, assign):
    made = layer(static=True, symmetric=False)
    given = torch.tensor([value])
    with pytest.raises(RuntimeError, match="input_zero_point: expected a value from -128 to 127, an integer, got "):
        made.load_state_dict({**made.state_dict(), "input_zero_point": given}, assign=assign)
    assert int(made.input_zero_point) == 5 and made.input_zero_point.dtype is torch.int8
    with pytest.raises(sm.BadParamError, match="input_zero_point: expected a value from -128 to 127, an integer, got "):
        nn.Int8Linear.from_tensors(made.weight, made.weight_scale, None, made.input_scale, given)
    made.load_state_dict({**made.state_dict(), "input_zero_point": torch.tensor([-7], dtype=torch.int32)}, assign=assign)
    assert int(made.input_zero_point) == -7 and made.input_zero_point.dtype is torch.int8


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shape", [(6, 63), (0, 63), (63,)])
def test_another_k_is_refused_by_name(symmetric, shape):
    with pytest.raises(sm.BadTensorShapeError, match="x: expected "):
        layer(symmetric=symmetric)(torch.randn(shape).bfloat16())


def test_layers_are_exported_with_any_batch():
    made = layer(symmetric=False)
    x = torch.randn(6, 64).bfloat16()
    exported = torch.export.export(made, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)).module()
    for rows in (x, x[:3], torch.cat([x, x])):
        assert torch.equal(exported(rows), made(rows))


def test_a_router_names_what_is_wrong_and_runs_under_autocast():
    router = nn.SoftmaxRouter(16, 4, 2, dtype=torch.float32)
    router.weight.data.normal_()
    with pytest.raises(sm.BadTensorDtypeError, match="hidden_states: expected torch.float32 as the weight, got torch.bfloat16"):
        router(torch.randn(3, 16).bfloat16())
    with pytest.raises(sm.BadParamError, match="hidden_states: expected a tensor, got NoneType"):
        router(None)
    with torch.autocast("cpu", torch.bfloat16):
        assert router(torch.randn(3, 16).bfloat16())[2].shape == (3, 2)


def test_experts_of_float16_run_under_autocast():
    x, weights, ids = torch.randn(5, 16).half(), torch.rand(5, 2), torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0], [0, 1]])
    w13, w2 = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((2, 16, 16), (2, 16, 8)))
    operands = x, w13, torch.rand(2, 16) / 1e3, w2, torch.rand(2, 16) / 1e3, weights, ids
    with torch.autocast("cpu", torch.bfloat16):
        out = sm.fused_experts(*operands)
    assert torch.equal(out, sm.fused_experts(*operands)) and out.dtype is torch.float16
