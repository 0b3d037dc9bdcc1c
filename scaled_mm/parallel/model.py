"""`parallelize_`: the decoder layers of a quantized model over the ranks of a group."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from scaled_mm.errors import BadParamError
from scaled_mm.models.blocks import replace
from scaled_mm.models.fuse import trial
from scaled_mm.nn.experts import Int8Experts
from scaled_mm.nn.linear import Int8Linear
from scaled_mm.parallel.division import Part, parts_of
from scaled_mm.parallel.int8_experts import ExpertParallelInt8Experts
from scaled_mm.parallel.linear import ColumnParallelInt8Linear, RowParallelInt8Linear
from scaled_mm.parallel.ranks import Ranks

VECTOR = 32  # float32 values that torch's SiLU computes at a time on a CPU with AVX-512. The rest of a tensor is computed one by one, to other bits


@torch.no_grad()
def parallelize_(model: torch.nn.Module, group=None, *, attention: bool = True) -> torch.nn.Module:
    """Keeps this rank's part of each decoder layer, in place, and returns the model, which computes the bits of the whole one on every rank.

    q, k, v, gate and up are split along N, by heads. o and down are split along N too, and their inputs gathered, if the ranks divide N and K is at
    most 4 N; otherwise along K, and their int32 sums are all-reduced. Of experts each rank keeps `part_of(experts, rank, size)`. Norms, routers,
    embeddings and the output head stay whole on every rank, and all ranks have all tokens. Every rank computes all logits, so `generate` gives the
    text of one process on each, if all ranks have the same ids and, when sampling, the same seed.

    model: from `quantize_`, `from_pretrained` or `convert_`, with the names of modules of Llama (Mistral, Qwen2, Qwen3, Granite and similar), of its
    mixtures (Mixtral, Qwen2-MoE, Qwen3-MoE and similar) or of DeepSeek; the same on every rank. group: a process group, a `DeviceMesh` with one
    dimension, or None: all processes. The number of ranks must divide the heads of query, of key and value, and the sizes of the feed-forward
    networks; not the number of experts. attention: False: attention stays whole on every rank, and its heads do not matter. A collective: all ranks
    must call it.

    Raises BadParamError on all ranks, with the model unchanged, if a decoder layer has fused modules, layers or experts that are not int8, or dynamic
    asymmetric inputs of o or down; if attention is transformers' eager one, whose bits depend on the number of heads; if the models of the ranks
    differ; or if the logits of a few tokens change: where attention mixes heads, or in float32 on a CPU with AVX-512, if the parts of gate and up are
    no multiples of 32 values, because torch's SiLU rounds the last ones otherwise.
    """
    ranks = Ranks.of(group)
    parts: list[Part] = []
    before: list[torch.Tensor] = []

    def facts() -> dict[str, object]:
        parts.extend(parts_of(model, ranks, attention))
        before.extend(_trials(model))
        return {"model": checksum(model.state_dict().items()), "layers": {part.name: part.of for part in parts}, "attention": attention}

    ranks.require_same(ranks.gather_facts(facts), layers="model", attention="attention", model="model")
    whole = {part.name: model.get_submodule(part.name) for part in parts}
    try:
        for part in parts:
            replace(model, part.name, shard_of(lambda part=part: cut(whole[part.name], part), part, ranks))
        ranks.gather_facts(lambda: _same_logits(model, before))
    except BaseException:  # whatever stopped it, on this rank or another: the model is whole again
        for name, module in whole.items():
            replace(model, name, module)
        raise
    return model


def _trials(model: torch.nn.Module) -> list[torch.Tensor]:
    """The logits of a few tokens and, if the model can generate, of two more with a KV cache, of which attention computes the last in another way."""
    found = [trial(model)]
    if hasattr(model, "generate"):
        ids = torch.arange(1, 9, device=found[0].device)[None]
        options = dict(max_new_tokens=2, do_sample=False, pad_token_id=0, eos_token_id=None, output_logits=True, return_dict_in_generate=True)
        found += [one.float() for one in model.generate(ids, **options).logits]
    return found


def _same_logits(model: torch.nn.Module, before: list[torch.Tensor]) -> dict[str, object]:
    try:
        same = all(torch.equal(ours, wanted) for ours, wanted in zip(_trials(model), before, strict=True))
    except (torch.OutOfMemoryError, dist.DistError):
        raise
    except (RuntimeError, TypeError) as error:
        raise BadParamError(f"model: expected attention that computes each head by itself, got {type(error).__name__}: {error}") from error
    if not same:
        hint = ""
        if any(parameter.device.type == "cpu" and parameter.dtype is torch.float32 for parameter in model.parameters()):
            hint = f"; or, in float32 on a CPU, parts of gate and up that are no multiples of {VECTOR} values, which torch's SiLU rounds otherwise"
        raise BadParamError(f"model: expected attention that computes each head by itself, got other logits than those of the whole model{hint}")
    return {}


def checksum(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A hash of names, dtypes, shapes and weighted sums of the bytes, which are computed on the tensors' device."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        flat = tensor.detach().flatten()
        flat = (flat.clone() if flat.numel() == 1 else flat).view(torch.uint8)  # one element may have any stride
        sums = [(part.to(torch.int64) * torch.arange(1, part.numel() + 1, device=part.device)).sum() for part in flat.split(1 << 22)]
        total = torch.stack(sums).tolist() if sums and flat.numel() else []
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} {total}\n".encode())
    return digest.hexdigest()[:16]


def cut(module: Int8Linear | Int8Experts, part: Part) -> Int8Linear | Int8Experts:
    """The module of this rank's part of a whole module's tensors, which are copied."""

    def mine(name: str) -> torch.Tensor | None:
        tensor, where = getattr(module, name), part.of_tensor(name)
        return tensor if tensor is None or where is None else tensor.narrow(where[0], where[1].start, where[1].stop - where[1].start).clone()

    if isinstance(module, Int8Experts):
        made = Int8Experts(part.mine.stop - part.mine.start, module.hidden_dim, module.intermediate_dim, activation=module.activation, device="meta")
        for name in ("gate_up_proj", "gate_up_proj_scale", "down_proj", "down_proj_scale"):
            setattr(made, name, torch.nn.Parameter(mine(name), requires_grad=False))
        return made
    tensors = (mine(name) for name in ("weight", "weight_scale", "bias", "input_scale", "input_zero_point"))
    return Int8Linear.from_tensors(*tensors, symmetric=module.symmetric)


def shard_of(make: Callable[[], Int8Linear | Int8Experts], part: Part, ranks: Ranks) -> torch.nn.Module:
    """The parallel module of a module that has this rank's part of the tensors. make: that module; an error of it is raised on all ranks. A
    collective."""
    made: list[Int8Linear | Int8Experts] = []

    def facts() -> dict[str, object]:
        made.append(make())
        return {}

    ranks.gather_facts(facts)
    module = made[0]
    if isinstance(module, Int8Experts):
        tensors = module.gate_up_proj, module.gate_up_proj_scale, module.down_proj, module.down_proj_scale
        return ExpertParallelInt8Experts.from_shard(*tensors, global_num_experts=part.of, group=ranks, activation=module.activation)
    tensors = module.weight.contiguous(), module.weight_scale, module.bias
    static = dict(input_scale=module.input_scale, input_zero_point=module.input_zero_point)
    if part.way == "rows":
        return RowParallelInt8Linear.from_shard(*tensors, group=ranks, reduce="all_reduce", **static)
    gathers = dict.fromkeys(("gather_output", "input_is_parallel"), part.way == "gather")
    return ColumnParallelInt8Linear.from_shard(*tensors, group=ranks, symmetric=module.symmetric, **gathers, **static)
