"""`from_pretrained` with tp=: each rank reads its part of a checkpoint's split tensors."""

from __future__ import annotations

import copy
import os

import torch

from scaled_mm.errors import BadParamError, ScaledMMError
from scaled_mm.models.blocks import replace
from scaled_mm.models.load import Checkpoint, opened
from scaled_mm.models.quantize import quantize_
from scaled_mm.nn.experts import Int8Experts
from scaled_mm.nn.linear import Int8Linear
from scaled_mm.parallel.division import Part, parts_of
from scaled_mm.parallel.model import VECTOR, checksum, parallelize_, shard_of
from scaled_mm.parallel.ranks import Ranks


def load_split(
    path: str | os.PathLike, dtype: torch.dtype | None, device: torch.device | str | None, group: object, attention: bool = True
) -> torch.nn.Module:
    """`from_pretrained` with tp=group: the model has parallel modules, as after `parallelize_`. Raises as `from_pretrained`, on all ranks."""
    ranks = Ranks.of(group)
    checkpoints: list[Checkpoint] = []
    parts: list[Part] = []
    devices: list[torch.device] = []

    def described() -> dict[str, object]:
        devices.append(torch.device("cpu" if device is None else device))
        checkpoints.append(opened(path, dtype))
        model = checkpoints[0].model
        parts.extend(parts_of(model, ranks, attention))
        tensors = {name: f"{dtype} {shape}" for name, dtype, shape in checkpoints[0].tensors()}
        return {
            "config": {key: repr(value) for key, value in model.config.to_dict().items() if key != "_name_or_path"},
            "tensor": tensors,
            "attention": attention,
        }

    ranks.require_same(ranks.gather_facts(described), attention="tp_attention", config="path", tensor="path")
    checkpoint = checkpoints[0]
    model = checkpoint.model
    _refuse_mixed_heads(model, ranks, devices[0], attention)

    def read() -> dict[str, object]:
        cuts = {}
        for part in parts:
            whole = model.get_submodule(part.name)
            replace(model, part.name, _empty(whole, part))
            for name, tensor in whole.named_parameters():
                if (cut := part.of_tensor(name)) is not None and tensor.numel() != 1:
                    cuts[f"{part.name}.{name}"] = cut
        checkpoint.fill(devices[0], cuts)
        checkpoint.finished(device)
        of_parts = tuple(f"{part.name}." for part in parts)
        return {"content": checksum((name, tensor) for name, tensor in model.state_dict().items() if not name.startswith(of_parts))}

    ranks.require_same(ranks.gather_facts(read), content="path")
    for part in parts:
        replace(model, part.name, shard_of(lambda part=part: model.get_submodule(part.name), part, ranks))
    return model


def _empty(module: Int8Linear | Int8Experts, part: Part) -> Int8Linear | Int8Experts:
    """A module of the size of this rank's part, on the meta device."""
    count = part.mine.stop - part.mine.start
    if isinstance(module, Int8Experts):
        return Int8Experts(count, module.hidden_dim, module.intermediate_dim, activation=module.activation, device="meta")
    k, n = (count, module.out_features) if part.way == "rows" else (module.in_features, count)
    bias = module.bias
    options = dict(static=module.input_scale is not None, symmetric=module.symmetric, device="meta")
    return Int8Linear(k, n, bias is not None, **options, **({} if bias is None else {"dtype": bias.dtype}))


def _refuse_mixed_heads(model: torch.nn.Module, ranks: Ranks, device: torch.device, attention: bool) -> None:
    """Splits a small model of the same class with random weights, because no rank has the whole one. It is on the same device, for which the group
    has a backend. BadParamError on all ranks where attention mixes heads."""
    made: list[torch.nn.Module] = []

    def small() -> dict[str, object]:
        config = _small(model.config, ranks.size)
        try:
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(0)
                one = type(model)._from_config(config, dtype=model.dtype).to(device).eval()
            quantize_(one, progress=False)
        except (RuntimeError, TypeError, ValueError, AttributeError, ScaledMMError) as error:
            raise BadParamError(f"path: expected a model whose class can be made in a small size, got {type(error).__name__}: {error}") from error
        made.append(one)
        return {}

    ranks.gather_facts(small)
    parallelize_(made[0], ranks, attention=attention)


def _small(config, size: int):
    """A config of the same heads, experts and kinds of layers, with short vectors between the layers."""
    config = copy.deepcopy(config)
    sizes = {"hidden_size": 8 * config.num_attention_heads, "vocab_size": 64, "moe_intermediate_size": 8}
    sizes |= {name: VECTOR * size for name in ("intermediate_size", "shared_expert_intermediate_size")}
    for name, value in sizes.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, None)
    layers = min(config.num_hidden_layers, 4)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        config.layer_types = kinds[:layers]
    config.num_hidden_layers = layers
    return config
