"""`reproducible_`: the hidden states of a token have the same bits on a CPU and on a GPU, in any batch, with and without a cache."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch
from operands.tiny_models import distance, logits, tiny, tokens

import scaled_mm as sm
from scaled_mm.models.source import load_model, load_tokenizer


def reproducible(name, dtype=torch.float32, **fields):
    model = tiny(name, dtype)
    sm.quantize_(model, sm.Int8Config(**fields), tokens(), progress=False)
    sm.fuse_(model)
    sm.reproducible_(model)
    return model


@torch.no_grad()
def states(model, ids, **options):
    """[B, T, H], after the last norm."""
    return model.model(ids, **options).last_hidden_state


@pytest.mark.parametrize("name", ["llama", "llama with biases", "qwen3", "phi3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_computes_nearly_what_the_fused_model_computes(name, dtype):
    model, ids = tiny(name, dtype), tokens()[0]
    sm.quantize_(model, sm.Int8Config(), tokens(), progress=False)
    sm.fuse_(model)
    before = logits(model, ids)
    sm.reproducible_(model)
    assert distance(logits(model, ids), before) < (1e-3 if dtype is torch.float32 else 0.05)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("activation", ["auto", "dynamic"])
def test_a_token_has_the_same_bits_in_a_batch_and_with_a_cache(name, activation):
    model, (first, second, *_) = reproducible(name, activation=activation), tokens()
    whole = states(model, first)
    assert torch.equal(states(model, torch.cat([second, first]))[1:], whole)
    assert torch.equal(states(model, first[:, :7]), whole[:, :7])
    cache = model.model(first[:, :5], use_cache=True)
    for t in range(5, first.shape[1]):
        with torch.no_grad():
            cache = model.model(first[:, t : t + 1], cache=cache.cache, use_cache=True)
        assert torch.equal(cache.last_hidden_state[:, 0], whole[:, t])


def test_padding_at_the_left_changes_the_order_of_sums_only():
    model, ids = reproducible("llama"), tokens()[0]
    padded, mask = torch.cat([torch.zeros(1, 3, dtype=ids.dtype), ids], 1), torch.ones(1, ids.shape[1] + 3, dtype=torch.int64)
    mask[:, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found = states(model, padded, attention_mask=mask, position_ids=positions)[:, 3:]
    assert torch.allclose(found, states(model, ids), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "name, fused, message",
    [
        ("llama", False, r"fused feed-forward network model.layers.0.mlp \(fuse_\), got a LlamaMLP"),
        ("gemma2", True, "layers with full attention, got sliding_attention"),
        ("qwen3_moe", True, r"fused feed-forward network model.layers.0.mlp \(fuse_\), got a Qwen3MoeSparseMoeBlock"),
        ("opt", False, "expected one rotary embedding, got a OPTForCausalLM with 0"),
    ],
)
def test_what_would_differ_between_devices_is_refused_and_nothing_changes(name, fused, message):
    model = tiny(name)
    sm.quantize_(model, progress=False)
    if fused:
        sm.fuse_(model)
    before, attention = dict(model.named_modules()), model.config._attn_implementation
    with pytest.raises(sm.ScaledMMError, match=message):
        sm.reproducible_(model)
    assert dict(model.named_modules()) == before and model.config._attn_implementation == attention


@pytest.mark.parametrize("kind", ["sliding_attention", "chunked_attention"])
def test_a_window_is_refused(kind):
    """Its cache drops keys, which shifts the pairs of the sums."""
    model = tiny("llama")
    sm.quantize_(model, progress=False)
    sm.fuse_(model)
    model.config.layer_types = ["full_attention", kind]
    with pytest.raises(sm.ScaledMMError, match=f"model: expected layers with full attention, got {kind}"):
        sm.reproducible_(model)


class Squashed(torch.nn.Module):
    """Attention with an inexact operator around it."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, *arguments, **options):
        out, *rest = self.attention(*arguments, **options)
        return out.tanh(), *rest


def test_an_inexact_operator_of_a_layer_is_refused_and_nothing_changes():
    model = tiny("llama")
    sm.quantize_(model, progress=False)
    sm.fuse_(model)
    model.model.layers[1].self_attn = Squashed(model.model.layers[1].self_attn)
    before, attention = dict(model.named_modules()), model.config._attn_implementation
    with pytest.raises(sm.ScaledMMError, match="model: expected layers that round in the same way on every device, got the operators tanh"):
        sm.reproducible_(model)
    assert dict(model.named_modules()) == before and model.config._attn_implementation == attention


def test_attention_that_transformers_does_not_replace_is_an_error(monkeypatch):
    model = tiny("llama")
    sm.quantize_(model, progress=False)
    sm.fuse_(model)
    monkeypatch.setattr(type(model), "set_attn_implementation", lambda *_: None)
    with pytest.raises(sm.ScaledMMError, match="got attention that cannot be replaced, sdpa"):
        sm.reproducible_(model)


def test_a_second_call_changes_nothing_and_a_cast_keeps_the_frequencies():
    model, ids = reproducible("llama"), tokens()[0]
    before = dict(model.named_modules())
    sm.reproducible_(model)
    assert dict(model.named_modules()) == before
    wanted = model.model.rotary_emb(torch.zeros(1), torch.arange(2000)[None])
    model.to(torch.bfloat16)
    assert all(torch.equal(*pair) for pair in zip(model.model.rotary_emb(torch.zeros(1), torch.arange(2000)[None]), wanted))
    assert states(model, ids).dtype is torch.bfloat16


def test_a_pickled_model_works_in_a_new_process(tmp_path):
    model, ids = reproducible("llama"), tokens()[0]
    torch.save((model, ids), tmp_path / "model.pt")
    program = (
        f"import torch; model, ids = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        f"torch.save(model.model(ids).last_hidden_state, {str(tmp_path / 'out.pt')!r})"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert torch.equal(torch.load(tmp_path / "out.pt"), states(model, ids))


def test_another_norm_is_refused():
    model = tiny("llama")
    model.model.norm = torch.nn.LayerNorm(64)
    sm.quantize_(model, progress=False)
    sm.fuse_(model)
    with pytest.raises(sm.ScaledMMError, match="model: expected norms that compute rms_norm, got model.norm, a LayerNorm"):
        sm.reproducible_(model)


def test_a_float_layer_is_refused():
    model = tiny("llama")
    sm.quantize_(model, sm.Int8Config(ignore=("lm_head", r"re:.*1\.self_attn\.o_proj")), progress=False)
    sm.fuse_(model)
    with pytest.raises(sm.ScaledMMError, match="model.layers.1, got the float layer self_attn.o_proj"):
        sm.reproducible_(model)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "llama with biases", "qwen3", "phi3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_have_the_bits_of_the_cpu(name, dtype):
    model, ids = reproducible(name, dtype), torch.cat(tokens())
    assert torch.equal(states(copy.deepcopy(model).cuda(), ids.cuda()).cpu(), states(model, ids))


@pytest.mark.gpu
@pytest.mark.skipif("SCALED_MM_SMOLLM2" not in os.environ, reason="SCALED_MM_SMOLLM2 does not name the GGUF file of SmolLM2")
def test_smollm2_writes_the_text_of_the_cpu():
    model, tokenizer = load_model(os.environ["SCALED_MM_SMOLLM2"]), load_tokenizer(os.environ["SCALED_MM_SMOLLM2"])
    sm.quantize_(model, progress=False)
    sm.fuse_(model)
    sm.reproducible_(model)
    on_gpu = copy.deepcopy(model).cuda()
    for prompt in ("What is the capital of France?", "Write a short poem about the sea.", "Explain what a prime number is."):
        message = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
        text = model.generate(ids, max_new_tokens=40, do_sample=False)
        assert torch.equal(on_gpu.generate(ids.cuda(), max_new_tokens=40, do_sample=False).cpu(), text), prompt
        assert torch.equal(states(on_gpu, text.cuda()).cpu(), states(model, text))
