"""`parallelize_`: the decoder layers of a quantized model over the ranks of a group."""

from __future__ import annotations

import hashlib

import torch

from scaled_mm.errors import BadParamError
from scaled_mm.models.blocks import blocks_of, experts_of
from scaled_mm.models.fuse import trial
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
    stay whole on every rank. Every rank computes all logits, so `generate` gives the text of one process on each, if all ranks have the same ids
    and, when sampling, the same seed.

    model: from `quantize_`, `from_pretrained` or `convert_`, with Llama's names of modules (Llama, Mistral, Qwen2, Qwen3, Granite and similar),
    the same on every rank. group: a process group, a `DeviceMesh` with one dimension, or None: all processes. The number of ranks must divide the
    heads of query, of key and value, and the sizes of the feed-forward networks. A collective: all ranks must call it.

    Raises BadParamError on all ranks, with the model unchanged, if a decoder layer has fused modules, experts, layers that are not int8, or dynamic
    asymmetric inputs of o or down; if attention is transformers' eager one, whose bits depend on the number of heads; if the models of the ranks
    differ; or if the logits of a few tokens change, as where attention mixes heads.
    """
    ranks = Ranks.of(group)
    facts = ranks.agreed(lambda: {"model": _checksum(model), "layers": _plan(model, ranks.size)})
    ranks.same(facts, layers="model", model="model")
    blocks = blocks_of(model)[1]
    before = trial(model)
    parts = [(getattr(block, parent), _split(getattr(block, parent), parent, ranks)) for block in blocks for parent in COLUMNS]
    whole = [(module, dict(module._modules)) for module, _ in parts]
    for module, shards in parts:
        module._modules.update(shards)

    def unchanged() -> dict[str, object]:
        try:
            same = torch.equal(trial(model), before)
        except (RuntimeError, TypeError) as error:
            raise BadParamError(f"model: expected attention that computes each head by itself, got {type(error).__name__}: {error}") from error
        if not same:
            raise BadParamError("model: expected attention that computes each head by itself, got other logits than those of the whole model")
        return {}

    try:
        ranks.agreed(unchanged)
    except BaseException:  # whatever stopped it, on this rank or another: the model is whole again
        for module, children in whole:
            module._modules.update(children)
        raise
    return model


def _checksum(model: torch.nn.Module) -> str:
    """Of all tensors: names, dtypes, shapes, and sums of their bytes, which a GPU computes too."""
    if not isinstance(model, torch.nn.Module):
        raise BadParamError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        total = int(tensor.detach().flatten().clone().view(torch.int8).sum(dtype=torch.int64)) if tensor.numel() else 0
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} {total}\n".encode())
    return digest.hexdigest()[:16]


def _plan(model: torch.nn.Module, size: int) -> list[dict[str, int]]:
    """The sizes that are split, of each decoder layer by name. Raises BadParamError if they cannot be."""
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if implementation == "eager":
        raise BadParamError("model: expected attn_implementation='sdpa' or a flash attention, got 'eager'")
    prefix, blocks = blocks_of(model)
    return [_plan_of_block(f"{prefix}.{index}", block, size) for index, block in enumerate(blocks)]


def _plan_of_block(name: str, block: torch.nn.Module, size: int) -> dict[str, int]:
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


def _split(module: torch.nn.Module, parent: str, ranks: Ranks) -> dict[str, Int8Linear]:
    """This rank's layers of self_attn or mlp, by name."""
    made: dict[str, Int8Linear] = {}
    for child in COLUMNS[parent]:
        layer = getattr(module, child)
        rows = _part(layer.out_features, ranks)
        bias = None if layer.bias is None else layer.bias[rows].clone()
        static = dict(input_scale=layer.input_scale, input_zero_point=layer.input_zero_point, symmetric=layer.symmetric)
        tensors = layer.weight[rows].clone(), layer.weight_scale[rows].clone()
        made[child] = ColumnParallelInt8Linear.from_shard(*tensors, bias, group=ranks, **static)
    layer = getattr(module, ROWS[parent])
    static = dict(input_scale=layer.input_scale, input_zero_point=layer.input_zero_point)
    shard = layer.weight[:, _part(layer.in_features, ranks)].contiguous()
    made[ROWS[parent]] = RowParallelInt8Linear.from_shard(shard, layer.weight_scale, layer.bias, group=ranks, reduce="all_reduce", **static)
    return made


def _part(count: int, ranks: Ranks) -> slice:
    each = count // ranks.size
    return slice(ranks.rank * each, (ranks.rank + 1) * each)
