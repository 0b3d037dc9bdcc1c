"""How a quantized model is divided over ranks: which modules are split along which dimension of their tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch

from scaled_mm.errors import BadParamError
from scaled_mm.models.blocks import blocks_of, experts_of
from scaled_mm.nn.experts import Int8Experts
from scaled_mm.nn.linear import Int8Linear
from scaled_mm.parallel.ranks import Ranks, part_of


class Form(NamedTuple):
    """Linear layers of a module by their names in transformers. columns: split along N. last: takes what these give, split along K or along N. whole:
    not split, projections to a latent vector."""

    columns: tuple[str, ...]
    last: str
    whole: tuple[str, ...] = ()


ATTENTION = (
    Form(("q_proj", "k_proj", "v_proj"), "o_proj"),
    Form(("q_b_proj", "kv_b_proj"), "o_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
    Form(("q_proj", "kv_b_proj"), "o_proj", ("kv_a_proj_with_mqa",)),
)
MLP = Form(("gate_proj", "up_proj"), "down_proj")


@dataclasses.dataclass(frozen=True)
class Part:
    """A module of a model that is split. way: "columns" (column-parallel: rows of the weight [N, K]), "gather" (the same, of an input that is split
    along K and gathered), "rows" (row-parallel: columns of the weight) or "experts". mine: this rank's, of `of` in all."""

    name: str
    way: str
    mine: slice
    of: int

    def of_tensor(self, tensor: str) -> tuple[int, slice] | None:
        """(dimension, what of it is this rank's) of the module's parameter; None: all."""
        if self.way == "experts":
            return 0, self.mine
        if self.way == "rows":
            return (1, self.mine) if tensor == "weight" else None
        return (0, self.mine) if tensor in ("weight", "weight_scale", "bias") else None


def parts_of(model: torch.nn.Module, ranks: Ranks, attention: bool = True) -> list[Part]:
    """The modules that are split, in order. model: quantized, its tensors may be on the meta device. attention: False: attention stays whole.

    Raises BadParamError for a model that cannot be split.
    """
    if not isinstance(model, torch.nn.Module):
        raise BadParamError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(attention, bool):
        raise BadParamError(f"attention: expected True or False, got {attention!r}")
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if attention and implementation == "eager":
        raise BadParamError("model: expected attn_implementation='sdpa' or a flash attention, got 'eager'")
    prefix, blocks = blocks_of(model)
    found = [part for index, block in enumerate(blocks) for part in _of_block(f"{prefix}.{index}", block, ranks, attention)]
    if not found:
        raise BadParamError("model: expected feed-forward networks with gate_proj, up_proj and down_proj, or experts, got none")
    return found


def _of_block(name: str, block: torch.nn.Module, ranks: Ranks, attention: bool) -> Iterator[Part]:
    if kept := next(iter(experts_of(block)), None):
        raise BadParamError(f"model: expected int8 experts, got float ones in {name}.{kept}")
    divided = set()
    if attention:
        module = getattr(block, "self_attn", None)
        form = next((form for form in ATTENTION if _has(module, form)), ATTENTION[0])
        divided |= {f"self_attn.{child}" for child in form.whole}
        yield from _of_group(f"{name}.self_attn", module, form, ranks, _units(module))
        divided |= {f"self_attn.{child}" for child in (*form.columns, form.last)}
    for inner, module in block.named_modules():
        if isinstance(module, Int8Experts):
            if module.is_shard:
                raise BadParamError(f"model: expected a whole one, got {name}.{inner} that is split already")
            yield Part(f"{name}.{inner}", "experts", part_of(module.num_experts, ranks.rank, ranks.size), module.num_experts)
        elif _has(module, MLP):
            yield from _of_group(f"{name}.{inner}", module, MLP, ranks, {})
            divided |= {f"{inner}.{child}" for child in (*MLP.columns, MLP.last)}
    for inner, module in block.named_modules():
        if isinstance(module, Int8Linear) and inner not in divided and not (inner.startswith("self_attn.") and not attention):
            where = "self_attn and in modules with gate_proj, up_proj and down_proj"
            raise BadParamError(f"model: expected int8 linear layers in {where} alone, got {name}.{inner}")


def _has(module: torch.nn.Module | None, form: Form) -> bool:
    return all(getattr(module, child, None) is not None for child in (*form.columns, form.last))


def _units(module: torch.nn.Module | None) -> dict[str, int | None]:
    """Rows of a head in each linear layer of attention, by name."""
    head = getattr(module, "head_dim", None)
    of_query = getattr(module, "qk_head_dim", head)
    nope, value = getattr(module, "qk_nope_head_dim", None), getattr(module, "v_head_dim", None)
    both = None if nope is None or value is None else nope + value
    return {"q_proj": of_query, "k_proj": head, "v_proj": head, "q_b_proj": of_query, "kv_b_proj": both}


def _of_group(name: str, module, form: Form, ranks: Ranks, units: dict[str, int | None]) -> Iterator[Part]:
    columns, last, whole = form
    layers = {child: getattr(module, child, None) for child in (*columns, last)}
    for child, layer in layers.items():
        if isinstance(layer, Int8Linear) and layer.is_shard:
            raise BadParamError(f"model: expected a whole one, got {name}.{child} that is split already")
        if type(layer) is not Int8Linear:
            raise BadParamError(f"model: expected an Int8Linear {name}.{child}, got {type(layer).__name__}")
    known = {*layers, *whole}
    others = [child for child, inner in module.named_children() if isinstance(inner, (torch.nn.Linear, Int8Linear)) and child not in known]
    if others:
        raise BadParamError(f"model: expected {name} with the linear layers {', '.join(layers)} alone, got also {', '.join(others)}")
    if not layers[last].symmetric and layers[last].input_scale is None:
        raise BadParamError(f"model: expected symmetric or static inputs of {name}.{last}, got dynamic asymmetric ones")
    for child in columns:
        rows, unit = layers[child].out_features, units.get(child, 1)
        if unit is None or rows % unit or rows // unit % ranks.size:
            what = f"{rows // unit} heads" if unit and units else f"{rows} rows"
            remedy = " (attention=False, or tp_attention=False of from_pretrained, keeps attention whole)" if units else ""
            raise BadParamError(f"group: expected a number of ranks that divides the {what} of {name}.{child}, got {ranks.size}{remedy}")
        yield Part(f"{name}.{child}", "columns", part_of(rows, ranks.rank, ranks.size), rows)
    k, n = layers[last].in_features, layers[last].out_features
    way, of = ("gather", n) if _gathers(k, n, ranks.size) else ("rows", k)
    yield Part(f"{name}.{last}", way, part_of(of, ranks.rank, ranks.size), of)


def _gathers(k: int, n: int, size: int) -> bool:
    """Whether the last layer of a group gathers its input and is split along N; otherwise int32 sums are reduced. Gathering int8 and 16-bit outputs
    sends 2 + K / N bytes an output, reducing and gathering 6 (decision 0026)."""
    return k % size == 0 and n % size == 0 and k <= 4 * n
