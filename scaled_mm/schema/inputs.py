"""The tensors of a workload: read from its files, or drawn, the same numbers on every machine.

A tensor of blocks is drawn as normal values and quantized; a file that is not there is drawn as `scaled-mm schema draw` would write
it, because 132 MB of weights are not kept in a repository. Every draw has a seed of its own, from its definition, workload and name.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import torch

from scaled_mm.schema.model import Definition, SchemaError, Tensor, Workload

_PERIOD = 4194301
"""Normal values are drawn up to this number of them, a prime, and repeated: rows still differ, and 235 million take no seconds."""


def draw(definition: Definition, workload: Workload, device: torch.device | str = "cpu", root: Path | None = None) -> list:
    """The inputs in the definition's order, on `device`. root: where the workload's files are looked for; None: all are drawn.

    SchemaError for sizes that do not fit, and for a file whose tensor is not what the definition says.
    """
    workload.check(definition)
    sizes = definition.sizes(workload.axes)
    values = []
    for name, tensor in definition.inputs.items():
        given = workload.inputs[name]
        if given.type == "scalar":
            values.append(given.value)
            continue
        shape = definition.shape(name, sizes)
        if given.type == "safetensors" and root is not None and (root / given.path).is_file():
            values.append(_read(root / given.path, given.tensor_key, name, tensor, shape).to(device))
        else:
            values.append(_drawn(definition, workload, name, shape, torch.device(device)))
    return values


def blob_tensors(definition: Definition, workload: Workload) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors by key, by path: the files that a workload wants, as they are drawn. Empty if it wants none."""
    sizes, files = definition.sizes(workload.axes), {}
    for name, given in workload.inputs.items():
        if given.type == "safetensors":
            drawn = _drawn(definition, workload, name, definition.shape(name, sizes), torch.device("cpu"))
            files.setdefault(given.path, {})[given.tensor_key] = drawn.contiguous()
    return files


def elements(definition: Definition, workload: Workload) -> int:
    """How many numbers a workload's inputs have, blocks counted by their bytes."""
    sizes = definition.sizes(workload.axes)
    return sum(math.prod(definition.shape(name, sizes)) for name, tensor in definition.inputs.items() if tensor.shape is not None)


def _read(path: Path, key: str, name: str, tensor: Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    import safetensors

    try:
        with safetensors.safe_open(path, framework="pt") as file:
            if key not in file.keys():
                raise SchemaError(f"{path}: expected the tensor {key!r} of input {name}, got {', '.join(file.keys())}")
            found = file.get_tensor(key)
    except safetensors.SafetensorError as error:
        raise SchemaError(f"{path}: expected a safetensors file, got one that cannot be read ({error})") from error
    dtype = getattr(torch, tensor.dtype)
    if tuple(found.shape) != shape or found.dtype != dtype:
        raise SchemaError(f"{path}: {name}: expected {dtype} {list(shape)}, got {found.dtype} {list(found.shape)}")
    return found


def _drawn(definition: Definition, workload: Workload, name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    digest = hashlib.sha256(f"{definition.name}/{workload.uuid}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "little"))
    if name in definition.logical:
        from scaled_mm.block import quantize_block

        values = _normal((*shape[:-2], shape[-2] * 32), generator, device)
        return quantize_block(values, definition.logical[name], rule="ggml").view(torch.int8)
    if definition.op_type == "paged_decode_attention" and name in ("context_lens", "block_tables"):
        return _pages(definition, workload, name, shape, generator).to(device)
    dtype = getattr(torch, definition.inputs[name].dtype)
    if dtype.is_floating_point:
        return _normal(shape, generator, device).to(dtype)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool().to(device)
    low, high = (-128, 128) if dtype is torch.int8 else (-1024, 1024)
    return _repeated(torch.randint(low, high, (_drawn_of(shape),), generator=generator, dtype=dtype), shape, device)


def _normal(shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> torch.Tensor:
    return _repeated(torch.randn(_drawn_of(shape), generator=generator), shape, device)


def _drawn_of(shape: tuple[int, ...]) -> int:
    return min(math.prod(shape), _PERIOD)


def _repeated(values: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    wanted = math.prod(shape)
    values = values.to(device)
    if wanted > values.numel():
        values = values.repeat(-(-wanted // values.numel()))[:wanted]
    return values.view(shape)


def _pages(definition: Definition, workload: Workload, name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """context_lens: from 1 to what the sequence's pages hold. block_tables: pages in random order, none used twice."""
    sizes = definition.sizes(workload.axes)
    if name == "context_lens":
        return torch.randint(1, sizes["max_blocks"] * sizes["block_size"] + 1, shape, generator=generator, dtype=torch.int32)
    if math.prod(shape) > sizes["num_blocks"]:
        raise SchemaError(f"workload.axes: expected at least {math.prod(shape)} num_blocks, a page for each entry of block_tables, got {sizes['num_blocks']}")
    return torch.randperm(sizes["num_blocks"], generator=generator)[: math.prod(shape)].to(torch.int32).view(shape)
