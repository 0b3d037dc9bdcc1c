"""`fuse_`, `convert_`, `evaluate`, compiling and generating."""

from __future__ import annotations

import copy
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from operands.tiny_models import bert, distance, logits, tiny, tokens, transformers

import scaled_mm as sm
from scaled_mm import nn
from scaled_mm.models.convert import HOOK


def quantized(name, **fields):
    model = tiny(name)
    sm.quantize_(model, sm.Int8Config(**fields), tokens(), progress=False)
    return model


@pytest.mark.parametrize(
    "name, norms, mlps, routers",
    [
        *[("llama", 4, 2, 0), ("llama with biases", 4, 2, 0), ("qwen3", 4, 2, 0), ("phi3", 4, 2, 0), ("gemma2", 0, 2, 0), ("olmo2", 0, 2, 0)],
        *[("qwen3_moe", 2, 0, 2), ("qwen2_moe", 2, 0, 2), ("mixtral", 2, 0, 2)],
    ],
)
@pytest.mark.parametrize("activation", ["auto", "dynamic"])
def test_fused_models_compute_nearly_the_same(name, norms, mlps, routers, activation):
    """A norm that a router reads too, and gemma's, which multiplies by 1 + weight, stay."""
    model, ids = quantized(name, activation=activation), tokens()[0]
    before = logits(model, ids)
    done = sm.fuse_(model)
    assert (len(done.norms), len(done.mlps), len(done.routers)) == (norms, mlps, routers)
    assert distance(logits(model, ids), before) < 1e-5
    assert sum(isinstance(module, nn.RMSNorm) for module in model.modules()) == norms


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("renormalized", [False, True])
def test_a_fused_router_selects_and_weighs_as_before(dtype, renormalized):
    """Experts of equal logits may change places."""
    model = tiny("qwen3_moe", dtype)
    x = torch.randn(300, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    for layer in model.model.layers:
        layer.mlp.gate.norm_topk_prob = renormalized
    sm.quantize_(model, sm.Int8Config(activation="dynamic"), progress=False)
    before = [layer.mlp.gate(x) for layer in model.model.layers]
    assert sm.fuse_(model).routers == ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    for layer, (logits_before, weights, ids) in zip(model.model.layers, before):
        assert isinstance(layer.mlp.gate, nn.SoftmaxRouter) and layer.mlp.gate.renormalize is renormalized
        found = layer.mlp.gate(x)
        assert torch.equal(found[0], logits_before) and found[1].dtype is torch.float32 and found[2].dtype is torch.int32
        assert torch.equal(logits_before.gather(-1, found[2].long()), logits_before.gather(-1, ids))
        assert torch.allclose(found[1], weights.float(), rtol=torch.finfo(dtype).eps + 2**-14)


def _sigmoid(router, x):
    scores = torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), router.weight)
    weights, ids = scores.sigmoid().topk(2)
    return scores, weights / weights.sum(-1, keepdim=True), ids


ROUTERS = {
    "sigmoid": _sigmoid,
    "scaled weights": lambda router, x: (lambda logits, weights, ids: (logits, 1.1 * weights, ids))(*type(router).forward(router, x)),
    "a group of experts": lambda router, x: (lambda logits, weights, ids: (logits, weights, ids % 2))(*type(router).forward(router, x)),
    "other logits": lambda router, x: (lambda logits, weights, ids: (logits.tanh(), weights, ids))(*type(router).forward(router, x)),
    "two results": lambda router, x: type(router).forward(router, x)[1:],
}


@pytest.mark.parametrize("kind", [*ROUTERS, "a bias", "float experts"])
def test_a_router_that_computes_something_else_stays(kind):
    model = quantized("qwen3_moe", **({"ignore": ["re:.*experts"]} if kind == "float experts" else {}))
    for layer in model.model.layers:
        gate = layer.mlp.gate
        if kind == "a bias":
            gate.register_buffer("bias", torch.zeros(4))
        elif kind in ROUTERS:
            gate.forward = lambda x, gate=gate: ROUTERS[kind](gate, x)
        if kind == "two results":
            layer.mlp.forward = lambda x: x
    assert sm.fuse_(model).routers == [] and not any(isinstance(module, nn.SoftmaxRouter) for module in model.modules())


def test_a_fused_router_is_found_by_its_former_class():
    model = quantized("qwen3_moe")
    wanted = copy.deepcopy(model)(tokens()[0], output_router_logits=True)
    former = type(model.model.layers[0].mlp.gate)
    sm.fuse_(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        router = copied.model.layers[0].mlp.gate
        assert isinstance(router, nn.SoftmaxRouter) and isinstance(router, former)
        found = copied(tokens()[0], output_router_logits=True)
        assert len(found.router_logits) == len(wanted.router_logits) == 2
        assert all(distance(logits, before) < 0.1 for logits, before in zip(found.router_logits, wanted.router_logits))


def test_a_module_that_raises_anything_is_no_router():
    class Extra(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8, 64))

        def forward(self, x):
            raise KeyError("for training")

    model = quantized("qwen3_moe")
    model.model.layers[1].mlp.extra = Extra()
    assert sm.fuse_(model).routers == ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]


def test_a_refusal_puts_the_routers_back():
    model, ids = quantized("mixtral"), tokens()[0]
    attention = model.model.layers[1].self_attn.forward
    model.model.layers[1].self_attn.forward = lambda hidden_states, **rest: attention(hidden_states=hidden_states * 2.0, **rest)
    before = logits(model, ids)
    with pytest.raises(sm.ScaledMMError, match="model: expected decoder layers"):
        sm.fuse_(model)
    assert torch.equal(logits(model, ids), before) and not any(isinstance(module, nn.SoftmaxRouter) for module in model.modules())


def test_what_cannot_be_fused_is_refused():
    model = bert()
    sm.quantize_(model, progress=False)
    with pytest.raises(sm.ScaledMMError, match="model: expected int8 decoder layers with input_layernorm, post_attention_layernorm"):
        sm.fuse_(model)
    asymmetric = quantized("llama", activation="dynamic", symmetric=False)
    with pytest.raises(sm.ScaledMMError, match="model: expected int8 decoder layers"):
        sm.fuse_(asymmetric)


@pytest.mark.parametrize("damage", ["an operation on the norm's result", "a norm inside of the MLP"])
def test_a_layer_that_does_more_is_refused_and_stays(damage):
    model, ids = quantized("llama"), tokens()[0]
    layer = model.model.layers[1]
    if damage == "an operation on the norm's result":
        attention = layer.self_attn.forward
        layer.self_attn.forward = lambda hidden_states, **rest: attention(hidden_states=hidden_states * 2.0, **rest)
    else:
        layer.mlp.forward = lambda x, mlp=layer.mlp: mlp.down_proj(-(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)))
    before = logits(model, ids)
    with pytest.raises(sm.ScaledMMError, match="model: expected decoder layers whose norms and MLPs do only what those of Llama do, got "):
        sm.fuse_(model)
    assert torch.equal(logits(model, ids), before) and not any(isinstance(module, (nn.RMSNorm, nn.GatedMLP)) for module in model.modules())


@pytest.mark.parametrize("fused", [False, True])
def test_a_quantized_model_compiles_as_one_graph(fused):
    model, ids = quantized("llama"), tokens()[0]
    if fused:
        sm.fuse_(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(logits(compiled, ids), logits(model, ids))


def test_generation_with_a_cache_is_that_without():
    model, ids = quantized("llama", activation="dynamic"), tokens()[0]
    options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    cached, whole = (model.generate(ids, use_cache=use_cache, **options) for use_cache in (True, False))
    assert cached.shape == (1, 32) and torch.equal(cached, whole)


class Compressed:
    """What transformers makes of a compressed-tensors checkpoint, without that package: linear layers with int8 weights and scales, and a hook."""

    def __init__(self, model):
        self.called = []
        for name, layer in [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Int8Linear)]:
            linear = torch.nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
            for key, value in layer.state_dict().items():
                setattr(linear, key, torch.nn.Parameter(value, requires_grad=False))
            dynamic = layer.input_scale is None
            inputs = dict(num_bits=8, type="int", strategy="token" if dynamic else "tensor", symmetric=layer.symmetric, dynamic=dynamic)
            weights = dict(num_bits=8, type="int", strategy="channel", symmetric=True, dynamic=False)
            linear.quantization_scheme = SimpleNamespace(input_activations=SimpleNamespace(**inputs), weights=SimpleNamespace(**weights))
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, linear)
        setattr(model, HOOK, model.register_forward_pre_hook(lambda *_: self.called.append(True)))


@pytest.mark.filterwarnings("ignore:static scales")
@pytest.mark.parametrize("fields", [dict(), dict(activation="dynamic", symmetric=False), dict(activation="static", symmetric=False)])
def test_a_compressed_model_is_converted_and_its_hook_removed(fields):
    model, ids = quantized("llama with biases", **fields), tokens()[0]
    before = logits(model, ids)
    compressed = Compressed(model)
    assert sm.convert_(model) is model
    assert torch.equal(logits(model, ids), before) and not compressed.called and not hasattr(model, HOOK)


def test_what_cannot_be_converted_is_refused_unchanged():
    with pytest.raises(sm.ScaledMMError, match="model: expected linear layers with int8 weights and weight_scale, got none"):
        sm.convert_(tiny("llama"))
    model = quantized("llama")
    Compressed(model)
    layer = model.model.layers[1].mlp.down_proj
    layer.weight = torch.nn.Parameter(layer.weight.float())
    with pytest.raises(
        sm.ScaledMMError, match="expected int8 weights, as before the first forward, got model.layers.1.mlp.down_proj.weight of torch.float32"
    ):
        sm.convert_(model)
    assert type(model.model.layers[0].mlp.down_proj) is torch.nn.Linear


def test_evaluation_follows_its_definitions():
    model, reference, batches = quantized("llama"), tiny("llama"), tokens(3)
    result = sm.evaluate(model, batches, reference)
    nll = kl = same = 0.0
    for ids in batches:
        ours, theirs = (logits(one, ids)[0].double().log_softmax(-1) for one in (model, reference))
        nll -= sum(float(ours[place, ids[0, place + 1]]) for place in range(23))
        kl += sum(float((theirs[place].exp() * (theirs[place] - ours[place])).sum()) for place in range(23))
        same += sum(int(ours[place].argmax() == theirs[place].argmax()) for place in range(23))
    assert result.tokens == 69 and result.perplexity == pytest.approx(math.exp(nll / 69)) and result.kl == pytest.approx(kl / 69)
    assert result.top1 == pytest.approx(same / 69) and list(result.layers) == ["model.layers.0", "model.layers.1"]
    assert 0 < result.layers["model.layers.0"] < result.layers["model.layers.1"] < 0.1
    alone = sm.evaluate(model, batches)
    assert alone.perplexity == pytest.approx(result.perplexity) and set(alone.to_dict()) == {"tokens", "perplexity"}
    encoder = bert()
    assert sm.evaluate(encoder, batches, bert()).cosine == pytest.approx(1.0)
    with pytest.raises(sm.ScaledMMError, match="batches: expected at least one"):
        sm.evaluate(model, [])
    masked = transformers.BertForMaskedLM(encoder.config)
    with pytest.raises(sm.BadParamError, match="model: expected a causal language model, or an encoder without a head, got a BertForMaskedLM"):
        sm.evaluate(masked, batches)
    with pytest.raises(sm.ScaledMMError, match=r"batches\[0\]: expected \[batch, tokens\] with at least 2 tokens, got \[1, 1\]"):
        sm.evaluate(model, [torch.zeros(1, 1, dtype=torch.long)])
