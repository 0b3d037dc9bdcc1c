"""`reproducible_`: a fused W8A8 model whose hidden states have the same bits on a CPU and on every GPU."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from scaled_mm.errors import BadParamError
from scaled_mm.models.blocks import blocks_of, replace
from scaled_mm.models.fuse import is_rms_norm, trial_ids
from scaled_mm.nn import GatedMLP, Int8Linear, RMSNorm
from scaled_mm.nn.reproducible import reproducible_attention, rotary_angles

ATTENTION = "scaled_mm_reproducible"  # its name among the attention functions of transformers
MOVING = ("dynamic", "longrope")  # kinds of rotary embedding whose frequencies depend on the length

# torch's operators that IEEE 754 defines to the bit, or that move values. rsqrt is of our own norms on a CPU.
EXACT = frozenset(
    "_reshape_alias _to_copy _unsafe_view abs add alias amax amin as_strided cat clamp clamp_max clamp_min clone constant_pad_nd contiguous copy "
    "detach div embedding empty empty_like empty_strided expand fill flip floor full full_like gather index index_select lift_fresh masked_fill "
    "maximum minimum mul nan_to_num neg new_empty new_empty_strided new_full new_ones new_zeros ones ones_like permute reciprocal repeat reshape "
    "resize round rsqrt scalar_tensor select set slice split split_with_sizes squeeze stack sub t transpose tril triu unbind unsafe_split unsqueeze "
    "view where zero zeros zeros_like".split()
)


@torch.no_grad()
def reproducible_(model: torch.nn.Module) -> None:
    """Replaces the remaining inexact operators of torch in a fused model, in place: attention, rotary embedding, and norms that do not quantize.

    model: of transformers, dense, after `fuse_`. The hidden states of a token then have the same bits on a CPU and on every GPU, in any batch
    without padding at the left, and with or without a KV cache. Logits are products of the float output head and may differ in the last digits, so
    greedy text is the same on all devices unless the two largest logits differ by less than that. Attention is slow
    (`nn.functional.reproducible_attention`). Not for torch.compile. A model must be moved to another device as a whole (`model.cuda()`), or made
    there from the same checkpoint.

    Raises BadParamError, with the model unchanged, for what would still differ: linear layers of decoder layers that are not int8, feed-forward
    networks that `fuse_` did not replace, other kinds of norms or rotary embedding, windows of attention (their cache drops keys), and any inexact
    operator of torch that the layers run for a few tokens. A second call changes nothing. Models that share a config share the attention.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation") or not hasattr(model, "base_model"):
        raise BadParamError(f"model: expected a model of transformers, got a {type(model).__name__}")
    prefix, blocks = blocks_of(model)
    rotary = [(name, module) for name, module in model.named_modules() if hasattr(module, "inv_freq")]
    if len(rotary) != 1:
        raise BadParamError(f"model: expected one rotary embedding, got a {type(model).__name__} with {len(rotary)}")
    if isinstance(rotary[0][1], Rotary):
        return
    kinds = {*(getattr(config, "layer_types", None) or ())} - {"full_attention"}
    if kinds or getattr(config, "sliding_window", None):
        raise BadParamError(f"model: expected layers with full attention, got {', '.join(sorted(kinds)) or 'a sliding window'}")
    for index, block in enumerate(blocks):
        _check_block(f"{prefix}.{index}", block)
    new = {name: _norm(name, module) for name, module in model.named_modules() if _is_plain_norm(module)}
    new[rotary[0][0]] = Rotary(*rotary[0])
    before, attention = {name: model.get_submodule(name) for name in new}, config._attn_implementation
    for name, module in new.items():
        replace(model, name, module)
    if reason := _what_differs(model):
        for name, module in before.items():
            replace(model, name, module)
        model.set_attn_implementation(attention)
        raise BadParamError(f"model: expected layers that round in the same way on every device, got {reason}")


class Rotary(torch.nn.Module):
    """forward(x, position_ids) returns (cos, sin), x's dtype, [B, T, D]: halves of a head are rotated, as in Llama."""

    def __init__(self, name: str, module: torch.nn.Module):
        super().__init__()
        kind = getattr(module, "rope_type", None)
        if kind is None or kind in MOVING:
            raise BadParamError(f"model: expected a rotary embedding {name} of a kind other than {', '.join(MOVING)}, got {kind}")
        # Made on a CPU, because powers differ between devices. No buffer, which a cast of the model would round.
        with torch.device("cpu"):
            made = type(module)(module.config)
        self.inv_freq, self.attention_scaling = made.inv_freq.float(), float(made.attention_scaling)
        self._copies: dict[torch.device, torch.Tensor] = {}
        x, positions = torch.zeros(1), torch.arange(64)[None]
        for ours, theirs in zip(self(x, positions), made(x, positions)):
            if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=0, atol=1e-4):
                raise BadParamError(f"model: expected a rotary embedding {name} like Llama's, got a {type(module).__name__}")

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if x.device not in self._copies:
            self._copies[x.device] = self.inv_freq.to(x.device)
        angles = rotary_angles(position_ids, self._copies[x.device])
        return tuple(torch.cat((one, one), -1).mul(self.attention_scaling).to(x.dtype) for one in angles)


class _Inexact(TorchDispatchMode):
    """Collects the names of torch's operators with float results that are not in EXACT."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [one for one in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(one, torch.Tensor)]
        namespace, _, name = function._schema.name.partition("::")
        if namespace == "aten" and name.rstrip("_") not in EXACT and any(one.is_floating_point() for one in tensors):
            self.names.add(name)
        return result


def _what_differs(model: torch.nn.Module) -> str | None:
    """Replaces attention. Returns why the hidden states of a few tokens might still differ between devices, or None."""
    try:
        model.set_attn_implementation(ATTENTION)
        if model.config._attn_implementation != ATTENTION:
            return f"attention that cannot be replaced, {model.config._attn_implementation}"
        with _Inexact() as found:
            model.base_model(trial_ids(model))
    except Exception as error:  # of any kind: the caller undoes what it changed, and raises with this reason
        return f"{type(error).__name__}: {error}"
    return f"the operators {', '.join(sorted(found.names))}" if found.names else None


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


def _attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **options):
    """As transformers calls it: query [B, heads, T, D] to [B, T, heads, D]. attention_mask: float [B, 1, T, L], added."""
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise BadParamError(f"{name}: expected attention without it, got {type(options[name]).__name__}")
    mask = None if attention_mask is None else attention_mask[..., : key.shape[2]]
    out = reproducible_attention(query, key, value, mask, scale=query.shape[-1] ** -0.5 if scaling is None else scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _attention)  # here, so that an unpickled model finds it
AttentionMaskInterface.register(ATTENTION, eager_mask)
