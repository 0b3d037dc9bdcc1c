"""`parallelize_`: the decoder layers of a quantized model over the ranks of a group."""

from __future__ import annotations

import torch

from scaled_mm.errors import BadParamError
from scaled_mm.models.blocks import blocks_of, experts_of
from scaled_mm.nn.experts import Int8Experts
from scaled_mm.nn.linear import Int8Linear
from scaled_mm.parallel.linear import ColumnParallelInt8Linear, RowParallelInt8Linear
from scaled_mm.parallel.ranks import Ranks

#: In a decoder layer, by the names that transformers uses: linear layers that read the hidden states, and those that write to them.
COLUMNS = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}
ROWS = {"self_attn": "o_proj", "mlp": "down_proj"}


@torch.no_grad()
def parallelize_(model: torch.nn.Module, group=None) -> torch.nn.Module:
    """Keeps this rank's part of each decoder layer, in place, and returns the model, which computes the bits of the whole one on every rank.

    q, k, v, gate and up are split along N, by heads; o and down along K, and their int32 sums are all-reduced. Norms, embeddings and the output head
    stay whole on every rank, and so does the text: `generate` runs as on one process.

    model: from `quantize_`, `from_pretrained` or `convert_`, with Llama's names of modules (Llama, Mistral, Qwen2, Qwen3, Granite and similar),
    the same on every rank. group: a process group, a `DeviceMesh` with one dimension, or None: all processes. The number of ranks must divide the
    heads of query, of key and value, and the sizes of the feed-forward networks. A collective: all ranks must call it.

    Raises BadParamError on all ranks, before the model is changed, if a decoder layer cannot be split so: fused modules, experts, asymmetric dynamic
    inputs of o or down, layers that are not int8.
    """
    ranks = Ranks.of(group)
    prefix, blocks = blocks_of(model)
    names = [f"{prefix}.{index}" for index in range(len(blocks))]
    facts = ranks.agreed(lambda: {"decoder layers": [_plan(name, block, ranks.size) for name, block in zip(names, blocks)]})
    ranks.same(facts, "decoder layers")
    for block in blocks:
        for parent in COLUMNS:
            _split(getattr(block, parent), parent, ranks)
    return model


def _plan(name: str, block: torch.nn.Module, size: int) -> dict[str, int]:
    """The sizes that are split, by name. Raises BadParamError if they cannot be."""
    if experts_of(block) or any(isinstance(module, Int8Experts) for module in block.modules()):
        raise BadParamError(f"model: expected dense decoder layers, got experts in {name}")
    found = {}
    for parent, columns in COLUMNS.items():
        module = getattr(block, parent, None)
        layers = {child: getattr(module, child, None) for child in (*columns, ROWS[parent])}
        for child, layer in layers.items():
            if type(layer) is not Int8Linear:
                raise BadParamError(f"model: expected an Int8Linear {name}.{parent}.{child}, got {type(layer).__name__}")
        others = [child for child, inner in module.named_children() if isinstance(inner, (torch.nn.Linear, Int8Linear)) and child not in layers]
        if others:
            raise BadParamError(f"model: expected {name}.{parent} with the linear layers {', '.join(layers)} alone, got also {', '.join(others)}")
        last = layers[ROWS[parent]]
        if not last.symmetric and last.input_scale is None:
            raise BadParamError(f"model: expected symmetric or static inputs of {name}.{parent}.{ROWS[parent]}, got dynamic asymmetric ones")
        unit = getattr(module, "head_dim", None) if parent == "self_attn" else 1
        for child in columns:
            rows = layers[child].out_features
            if unit is None or rows % unit or rows // unit % size:
                what = f"{rows // unit} heads" if unit and parent == "self_attn" else f"{rows} rows"
                raise BadParamError(f"group: expected a number of ranks that divides the {what} of {name}.{parent}.{child}, got {size}")
            found[f"{parent}.{child}"] = rows
    return found


def _split(module: torch.nn.Module, parent: str, ranks: Ranks) -> None:
    for child in COLUMNS[parent]:
        layer = getattr(module, child)
        rows = _part(layer.out_features, ranks)
        bias = None if layer.bias is None else layer.bias[rows].clone()
        static = dict(input_scale=layer.input_scale, input_zero_point=layer.input_zero_point, symmetric=layer.symmetric)
        tensors = layer.weight[rows].clone(), layer.weight_scale[rows].clone()
        setattr(module, child, ColumnParallelInt8Linear.from_shard(*tensors, bias, group=ranks, **static))
    layer = getattr(module, ROWS[parent])
    static = dict(input_scale=layer.input_scale, input_zero_point=layer.input_zero_point)
    shard = layer.weight[:, _part(layer.in_features, ranks)].contiguous()
    made = RowParallelInt8Linear.from_shard(shard, layer.weight_scale, layer.bias, group=ranks, reduce="all_reduce", **static)
    setattr(module, ROWS[parent], made)


def _part(count: int, ranks: Ranks) -> slice:
    each = count // ranks.size
    return slice(ranks.rank * each, (ranks.rank + 1) * each)
