"""What vLLM, SGLang and transformers see."""

from __future__ import annotations

import os
import sys
import types

import pytest
import torch
from safetensors.torch import load_file, save_file

import scaled_mm as sm
from scaled_mm.integrations import sglang, vllm


def operands(m=7, n=48, k=64):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator) for shape in ((m, k), (n, k)))
    scales = torch.rand(m, 1, generator=generator) + 0.5, torch.rand(n, 1, generator=generator) + 0.5
    return a, b.t(), *scales, torch.randn(n, generator=generator).bfloat16()


def product(a, b, scale_a, scale_b, bias, azp=0):
    exact = (a.double() - azp) @ b.double()
    return (exact * scale_b.double().reshape(1, -1) * scale_a.double() + bias.double()).bfloat16()


def test_the_products_have_vllms_signatures_and_formula():
    a, b, scale_a, scale_b, bias = operands()
    assert torch.allclose(vllm.cutlass_scaled_mm(a, b, scale_a, scale_b, torch.bfloat16, bias), product(a, b, scale_a, scale_b, bias), rtol=1e-2)
    one = vllm.cutlass_scaled_mm(a, b, scale_a[:1], scale_b[:1], torch.float16)
    assert one.dtype is torch.float16 and one.shape == (7, 48)
    sums = b.sum(0, keepdim=True, dtype=torch.int32)
    azp = torch.arange(-3, 4, dtype=torch.int32).reshape(7, 1)
    of_tokens = vllm.cutlass_scaled_mm_azp(a, b, scale_a, scale_b, torch.bfloat16, sums, azp, bias)
    assert torch.allclose(of_tokens, product(a, b, scale_a, scale_b, bias, azp.double()), rtol=1e-2, atol=1.0)
    of_tensor = vllm.cutlass_scaled_mm_azp(a, b, scale_a, scale_b, torch.bfloat16, 5 * sums, None, bias)
    assert torch.allclose(of_tensor, product(a, b, scale_a, scale_b, bias, 5.0), rtol=1e-2, atol=1.0)


def test_the_quantizers_have_vllms_and_sglangs_signatures():
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    q, scale, azp = vllm.scaled_int8_quant(x)
    assert torch.equal(q, sm.quantize_int8(x)[0]) and scale.shape == (7, 1) and azp is None
    q, scale, azp = vllm.scaled_int8_quant(x, symmetric=False)
    assert azp.shape == (7, 1) and azp.dtype is torch.int32 and float(((q.int() - azp) * scale - x.float()).abs().max() / scale.max()) <= 0.51
    static, zero = torch.tensor([0.05]), torch.tensor([3], dtype=torch.int32)
    q, scale, azp = vllm.scaled_int8_quant(x, static, zero, symmetric=False)
    assert scale is static and azp is zero and torch.equal(q, (x.float() / 0.05).round().add(3).clamp(-128, 127).to(torch.int8))
    with pytest.raises(sm.ScaledMMError, match="azp: expected None with symmetric=True"):
        vllm.scaled_int8_quant(x, static, zero)
    with pytest.raises(sm.ScaledMMError, match="azp: expected None without a static scale"):
        vllm.scaled_int8_quant(x, azp=zero)
    q, scale, sums = sglang.per_token_quant_int8(x, torch.bfloat16, cal_sum=True)
    assert torch.equal(q, sm.quantize_int8(x)[0]) and scale.dtype is torch.bfloat16 and torch.equal(sums, x.float().sum(-1))
    a, b, scale_a, scale_b, bias = operands()
    out = sglang.int8_scaled_mm(a, b, scale_a.reshape(-1), scale_b, torch.bfloat16, bias)
    assert torch.equal(out, vllm.cutlass_scaled_mm(a, b, scale_a, scale_b, torch.bfloat16, bias))


def test_the_products_take_what_the_quantizers_return_for_three_dimensions():
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    _, b, _, scale_b, bias = operands()
    q, scale, _ = vllm.scaled_int8_quant(x)
    out = vllm.cutlass_scaled_mm(q, b, scale, scale_b, torch.bfloat16, bias)
    assert torch.equal(out, sm.int8_linear(x, b.t(), scale_b, bias))
    assert torch.equal(vllm.cutlass_scaled_mm(q, b, scale.view(2, 3, 1), scale_b, torch.bfloat16, bias), out)
    q, scale, azp = vllm.scaled_int8_quant(x, symmetric=False)
    sums = b.sum(0, dtype=torch.int32)
    rows = vllm.cutlass_scaled_mm_azp(q.view(6, 64), b, scale, scale_b, torch.bfloat16, sums, azp, bias)
    assert torch.equal(vllm.cutlass_scaled_mm_azp(q, b, scale, scale_b, torch.bfloat16, sums, azp, bias), rows.view(2, 3, 48))


def test_what_is_no_tensor_is_refused_by_name():
    a, b, scale_a, scale_b, _ = operands()
    for call, message in (
        (lambda: vllm.cutlass_scaled_mm(a, b, 0.5, scale_b, torch.bfloat16), "scale_a: expected a tensor, got float"),
        (lambda: vllm.cutlass_scaled_mm(a, b, scale_a, None, torch.bfloat16), "scale_b: expected a tensor, got NoneType"),
        (lambda: vllm.cutlass_scaled_mm_azp(a, b, scale_a, scale_b, torch.bfloat16, None), "azp_adj: expected a tensor, got NoneType"),
        (lambda: sglang.int8_scaled_mm(a, b, None, scale_b, torch.bfloat16), "scales_a: expected a tensor, got NoneType"),
        (lambda: sglang.per_token_quant_int8(torch.randn(2, 64), torch.int32), "scale_dtype: expected a float dtype, got torch.int32"),
    ):
        with pytest.raises(sm.BadParamError, match=f"^{message}"):
            call()
    assert not sglang.per_token_quant_int8(torch.randn(2, 64, requires_grad=True), cal_sum=True)[2].requires_grad


@pytest.fixture
def a_vllm(monkeypatch):
    """The part of vLLM 0.24 that the plugin uses. Its registration appends; its CUTLASS kernel takes every layer."""

    class CutlassInt8ScaledMMLinearKernel:
        def _get_layer_params(self, layer):
            return layer

    cuda, linear = object(), types.ModuleType("vllm.model_executor.kernels.linear")
    linear.CutlassInt8ScaledMMLinearKernel = CutlassInt8ScaledMMLinearKernel
    linear._POSSIBLE_INT8_KERNELS = {cuda: [CutlassInt8ScaledMMLinearKernel]}
    linear.register_linear_kernel = lambda kernel, platform, kind: linear._POSSIBLE_INT8_KERNELS[platform].append(kernel) if kind == "int8" else None
    kernels, executor, root, platforms = (types.ModuleType(name) for name in ("kernels", "model_executor", "vllm", "platforms"))
    kernels.linear, executor.kernels, root.model_executor, root.platforms = linear, kernels, executor, platforms
    platforms.PlatformEnum = types.SimpleNamespace(CUDA=cuda)
    names = {
        "vllm": root,
        "vllm.model_executor": executor,
        "vllm.model_executor.kernels": kernels,
        linear.__name__: linear,
        "vllm.platforms": platforms,
    }
    for name, module in names.items():
        monkeypatch.setitem(sys.modules, name, module)
    return linear._POSSIBLE_INT8_KERNELS[cuda]


def test_the_plugin_puts_its_linear_kernel_before_vllms(a_vllm):
    vllm.register()
    assert [kernel.__name__ for kernel in a_vllm] == ["ScaledMMInt8LinearKernel", "CutlassInt8ScaledMMLinearKernel"]
    _, b, _, scale_b, bias = operands()
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    sums = b.sum(0, keepdim=True, dtype=torch.int32)
    static, zero = torch.tensor([0.03]), torch.tensor([4], dtype=torch.int32)
    real = x.double() @ (b.double() * scale_b.double().reshape(1, -1)) + bias.double()
    for layer in (
        (b, scale_b, None, None, None),
        (b, scale_b, static, None, None),
        (b, scale_b, None, None, sums),
        (b, scale_b, static, zero, 4 * sums),
    ):
        out = a_vllm[0]().apply_weights(layer, x, bias)
        assert out.shape == (2, 3, 48) and float((out.double() - real).norm() / real.norm()) < 0.02
        assert torch.equal(a_vllm[0]().apply_weights(layer, x[0, 0], bias), out[0, 0])
        for none in ((0, 64), (2, 0, 64)):
            assert a_vllm[0]().apply_weights(layer, torch.zeros(none).bfloat16(), bias).shape == (*none[:-1], 48)
    assert torch.equal(a_vllm[0]().apply_weights((b, scale_b, None, None, None), x, bias), sm.int8_linear(x, b.t(), scale_b, bias))


def test_without_vllm_the_plugin_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.warns(UserWarning, match="scaled_mm: no INT8 linear kernel for this vLLM"):
        vllm.register()


def test_transformers_loads_w8a8_int8_checkpoints(tmp_path):
    from operands.tiny_models import logits, tiny, tokens, transformers

    import scaled_mm.integrations.transformers  # noqa: F401  (registers)

    model = tiny("llama with biases", torch.bfloat16)
    sm.quantize_(model, progress=False)
    sm.save_pretrained(model, tmp_path, "w8a8_int8")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    layer = loaded.model.layers[0].mlp.down_proj
    assert type(layer) is sm.nn.Int8Linear and layer.weight_scale.dtype is torch.float32 and type(loaded.lm_head) is torch.nn.Linear
    assert torch.equal(logits(loaded, tokens()[0]), logits(model, tokens()[0]))
    tensors = load_file(tmp_path / "model.safetensors")

    def refused(changed: dict, message: str) -> None:
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(sm.ScaledMMError, match=message):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path)

    scale = "model.layers.0.mlp.up_proj.weight_scale"
    for name in (scale, "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.bias"):
        rest = {key: tensor for key, tensor in tensors.items() if key != name}
        refused(rest, f"{name}: expected it in the checkpoint, got a checkpoint without it")
    weight = "model.layers.1.mlp.up_proj.weight"
    refused({**tensors, weight: tensors[weight].float()}, f"{weight}: expected int8 in the checkpoint, got F32")
    refused({**tensors, scale: torch.full((96, 1), torch.nan)}, f"{scale}: expected finite positive scales in the checkpoint, got others")
    sm.quantize_(experts := tiny("qwen3_moe"), progress=False)
    sm.save_pretrained(experts, tmp_path / "experts", "w8a8_int8")
    with pytest.raises(sm.ScaledMMError, match="model: expected one without experts; scaled_mm.from_pretrained loads int8 experts"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "experts")


def test_transformers_loads_models_without_head_whose_ignored_layers_are_named(tmp_path):
    from operands.tiny_models import tiny, tokens, transformers

    import scaled_mm.integrations.transformers  # noqa: F401  (registers)

    model = tiny("llama", torch.bfloat16)
    ignored = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")]
    sm.quantize_(model, sm.Int8Config(activation="dynamic", ignore=("lm_head", *ignored)), progress=False)
    sm.save_pretrained(model, tmp_path, "w8a8_int8")
    loaded = transformers.AutoModel.from_pretrained(tmp_path)
    assert type(loaded.layers[0].mlp.up_proj) is torch.nn.Linear and type(loaded.layers[1].mlp.up_proj) is sm.nn.Int8Linear
    with torch.no_grad():
        assert torch.equal(loaded(tokens()[0]).last_hidden_state, model.model(tokens()[0]).last_hidden_state)


@pytest.mark.filterwarnings("ignore:static scales")
@pytest.mark.parametrize(
    "fields", [dict(), dict(activation="static"), dict(activation="dynamic", symmetric=False), dict(activation="static", symmetric=False)]
)
def test_the_real_compressed_tensors_reads_what_is_saved(tmp_path, fields):
    """And `convert_` makes int8 layers of what transformers makes of it."""
    if os.environ.get("SCALED_MM_REQUIRE_MODELS"):
        import compressed_tensors  # noqa: F401
    else:
        pytest.importorskip("compressed_tensors")
    from operands.tiny_models import distance, logits, tiny, tokens, transformers

    model = tiny("llama with biases", torch.bfloat16)
    sm.quantize_(model, sm.Int8Config(**fields), tokens(), progress=False)
    sm.save_pretrained(model, tmp_path)
    ids = tokens()[0]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert distance(logits(theirs, ids), logits(model, ids)) < 0.03  # their scale of a token is max|x| / 127.5
    converted = sm.convert_(transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    assert torch.equal(logits(converted, ids), logits(model, ids))
