"""Small models of transformers with random weights, and token batches. Importing this module skips the test file without transformers, unless
SCALED_MM_REQUIRE_MODELS is set."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("SCALED_MM_REQUIRE_MODELS"):
    import accelerate  # noqa: F401
    import transformers
else:
    transformers = pytest.importorskip("transformers", minversion="5")
    pytest.importorskip("accelerate")

SIZES = dict(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
MLA = dict(q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, num_key_value_heads=4)
EXPERTS = dict(moe_intermediate_size=32, num_experts_per_tok=2)
# name: (class, fields of its config)
MODELS = {
    "llama": ("Llama", dict(tie_word_embeddings=True)),
    "llama with biases": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "qwen3": ("Qwen3", dict(head_dim=16)),
    "gemma2": ("Gemma2", dict(head_dim=16)),
    "phi3": ("Phi3", dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)),
    "opt": ("OPT", dict(ffn_dim=96, word_embed_proj_dim=64)),
    "mixtral": ("Mixtral", dict(num_local_experts=4)),
    "qwen3_moe": ("Qwen3Moe", dict(num_experts=4, head_dim=16, **EXPERTS)),
    "qwen2_moe": ("Qwen2Moe", dict(num_experts=4, shared_expert_intermediate_size=32, **EXPERTS)),
    "olmo2": ("Olmo2", dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)),
    "deepseek": ("DeepseekV3", dict(n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1, **MLA, **EXPERTS)),
}


def tiny(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    """A causal language model of `MODELS` with random weights, in evaluation mode."""
    kind, fields = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **fields}, dtype=dtype)
    torch.manual_seed(seed)
    return getattr(transformers, f"{kind}ForCausalLM")._from_config(config, dtype=dtype).eval()


def bert(seed: int = 0) -> torch.nn.Module:
    """An encoder with LayerNorm and biases."""
    torch.manual_seed(seed)
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    return transformers.BertModel._from_config(transformers.BertConfig(**sizes), dtype=torch.float32).eval()


def tokens(count: int = 4, length: int = 24, seed: int = 1) -> list[torch.Tensor]:
    """Token ids [1, length]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 64, (1, length), generator=generator) for _ in range(count)]


@torch.no_grad()
def logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    result = model(ids)
    return result.logits if hasattr(result, "logits") else result.last_hidden_state


def distance(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """|ours - reference| / |reference|."""
    return float((ours.float() - reference.float()).norm() / reference.float().norm())
