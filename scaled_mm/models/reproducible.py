"""`reproducible_`: a fused W8A8 model whose hidden states have the same bits on a CPU and on every GPU."""

from __future__ import annotations

import torch

from scaled_mm.errors import BadParamError
from scaled_mm.models.blocks import blocks_of, replace
from scaled_mm.models.fuse import is_rms_norm
from scaled_mm.nn import GatedMLP, Int8Linear, RMSNorm
from scaled_mm.nn.reproducible import reproducible_attention, rotary_angles

ATTENTION = "scaled_mm_reproducible"  # its name among the attention functions of transformers
MOVING = ("dynamic", "longrope")  # kinds of rotary embedding whose frequencies depend on the length


@torch.no_grad()
def reproducible_(model: torch.nn.Module) -> None:
    """Replaces the remaining inexact operators of torch in a fused model, in place: attention, rotary embedding, and norms that do not quantize.

    model: of transformers, dense, after `fuse_`. The hidden states of a token then have the same bits on a CPU and on every GPU, in any batch
    without padding at the left, and with or without a KV cache. Logits are products of the float output head and may differ in the last digits, so
    greedy text is the same on all devices unless the two largest logits differ by less than that. Attention is slow
    (`nn.functional.reproducible_attention`). Not for torch.compile. A model must be moved to another device as a whole (`model.cuda()`), or made
    there from the same checkpoint.

    Raises BadParamError, with the model unchanged, for what would still differ: linear layers of decoder layers that are not int8, feed-forward
    networks that `fuse_` did not replace, other kinds of norms or rotary embedding, sliding windows (their cache drops keys).
    """
    prefix, blocks = blocks_of(model)
    rotary = [(name, module) for name, module in model.named_modules() if hasattr(module, "inv_freq")]
    if len(rotary) != 1 or not hasattr(model, "set_attn_implementation"):
        raise BadParamError(f"model: expected a model of transformers with one rotary embedding, got a {type(model).__name__} with {len(rotary)}")
    if any("sliding" in str(kind) for kind in getattr(model.config, "layer_types", None) or ()) or getattr(model.config, "sliding_window", None):
        raise BadParamError(f"model: expected attention without a sliding window, got one of {model.config.sliding_window} tokens")
    for index, block in enumerate(blocks):
        _check_block(f"{prefix}.{index}", block)
    new = {name: _norm(name, module) for name, module in model.named_modules() if _is_plain_norm(module)}
    new[rotary[0][0]] = Rotary(*rotary)
    _register()
    model.set_attn_implementation(ATTENTION)
    for name, module in new.items():
        replace(model, name, module)


class Rotary(torch.nn.Module):
    """forward(x, position_ids) returns (cos, sin), x's dtype, [B, T, D]: halves of a head are rotated, as in Llama."""

    def __init__(self, named: tuple[str, torch.nn.Module]):
        super().__init__()
        name, module = named
        kind, device = getattr(module, "rope_type", None), module.inv_freq.device
        if kind is None or kind in MOVING:
            raise BadParamError(f"model: expected a rotary embedding {name} of a kind other than {', '.join(MOVING)}, got {kind}")
        # Made on a CPU: powers differ between devices.
        with torch.device("cpu"):
            frequencies = type(module)(module.config).inv_freq.float()
        self.register_buffer("inv_freq", frequencies.to(device), persistent=False)
        self.attention_scaling = float(module.attention_scaling)
        x, positions = torch.zeros(1, device=device), torch.arange(64, device=device)[None]
        for ours, theirs in zip(self(x, positions), module(x, positions)):
            if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=0, atol=1e-4):
                raise BadParamError(f"model: expected a rotary embedding {name} like Llama's, got a {type(module).__name__}")

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.cat((one, one), -1).mul(self.attention_scaling).to(x.dtype) for one in rotary_angles(position_ids, self.inv_freq))


def _check_block(name: str, block: torch.nn.Module) -> None:
    for inner, module in block.named_modules():
        if isinstance(module, torch.nn.Linear):
            raise BadParamError(f"model: expected only int8 linear layers in {name}, got the float layer {inner}")
    if not isinstance(getattr(block, "mlp", None), GatedMLP):
        raise BadParamError(f"model: expected a fused feed-forward network {name}.mlp (fuse_), got a {type(getattr(block, 'mlp', None)).__name__}")


def _is_plain_norm(module: torch.nn.Module) -> bool:
    known = isinstance(module, (RMSNorm, Int8Linear, torch.nn.Embedding))
    return not known and getattr(module, "weight", None) is not None and module.weight.dim() == 1


def _norm(name: str, module: torch.nn.Module) -> RMSNorm:
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(epsilon, float) or not is_rms_norm(module, epsilon):
        raise BadParamError(f"model: expected norms that compute rms_norm, got {name}, a {type(module).__name__}")
    made = RMSNorm(module.weight.shape[0], epsilon, dtype=module.weight.dtype, device="meta")
    made.weight = module.weight
    return made


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, eager_mask)


def _attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **options):
    """As transformers calls it: query [B, heads, T, D] to [B, T, heads, D]. attention_mask: float [B, 1, T, L], added."""
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise BadParamError(f"{name}: expected attention without it, got {type(options[name]).__name__}")
    mask = None if attention_mask is None else attention_mask[..., : key.shape[2]]
    out = reproducible_attention(query, key, value, mask, scale=query.shape[-1] ** -0.5 if scaling is None else scaling)
    return out.transpose(1, 2).contiguous(), None
