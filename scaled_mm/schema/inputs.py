"""The tensors of a workload, read from files or drawn at random, with the same bits on every machine.

A tensor in a GGUF format is drawn as values and quantized. If the file named by `blob_path` is missing, its tensors are drawn, because a
repository should not contain 132 MB of weights. Each tensor has its own seed, from definition, workload and name.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import torch

from scaled_mm.schema.model import Definition, SchemaError, Tensor, Workload
from scaled_mm.schema.vocabulary import torch_dtype

_PERIOD = 2**20 - 3
"""Maximum number of drawn values, for speed. Larger tensors (up to 235 million values) repeat them; it is prime, so that rows still differ."""
_TERMS, _TOP = 4, 2**16
_DEVIATION = (_TERMS * (_TOP**2 - 1) / 12) ** 0.5


def blob_path(op_type: str, definition: str, uuid: str) -> str:
    """The path of the file of a workload's drawn inputs, relative to the folder that contains definitions/."""
    return f"blob/workloads/{op_type}/{definition}/{uuid}.safetensors"


def draw(definition: Definition, workload: Workload, device: torch.device | str = "cpu", root: Path | None = None, salt: str = "") -> list:
    """The inputs in the definition's order, on `device`.

    root: the folder with the workload's files; None: all inputs are drawn. salt: changes the drawn numbers, but not those read from files.
    Raises SchemaError if sizes do not match, if a file's tensor does not match the definition, or if a file is missing that is not
    `blob_path`'s and thus cannot be drawn.
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
        if given.type == "safetensors" and not (salt and _is_drawn(definition, workload, given.path)):
            if root is not None and (root / given.path).is_file():
                values.append(_read(root / given.path, given.tensor_key, name, tensor, shape).to(device))
                continue
            if not _is_drawn(definition, workload, given.path):
                raise SchemaError(f"workload.inputs.{name}.path: expected the file {given.path}, there is none{'' if root else ' without a folder'}")
        values.append(_drawn(definition, workload, name, shape, torch.device(device), salt))
    return values


def blob_tensors(definition: Definition, workload: Workload) -> dict[str, dict[str, torch.Tensor]]:
    """{path: {key: tensor}}: the drawn contents of the file that a workload refers to. Empty if it refers to no such file."""
    sizes, files = definition.sizes(workload.axes), {}
    for name, given in workload.inputs.items():
        if given.type == "safetensors" and _is_drawn(definition, workload, given.path):
            drawn = _drawn(definition, workload, name, definition.shape(name, sizes), torch.device("cpu"))
            files.setdefault(given.path, {})[given.tensor_key] = drawn.contiguous()
    return files


def elements(definition: Definition, workload: Workload) -> int:
    """The number of elements of a workload's inputs; a GGUF tensor counts its bytes."""
    sizes = definition.sizes(workload.axes)
    return sum(math.prod(definition.shape(name, sizes)) for name, tensor in definition.inputs.items() if tensor.shape is not None)


def _is_drawn(definition: Definition, workload: Workload, path: str) -> bool:
    return path == blob_path(definition.op_type, definition.name, workload.uuid)


def _read(path: Path, key: str, name: str, tensor: Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    import safetensors

    try:
        with safetensors.safe_open(path, framework="pt") as file:
            if key not in file.keys():
                raise SchemaError(f"{path}: expected the tensor {key!r} of input {name}, got {', '.join(file.keys())}")
            found = file.get_tensor(key)
    except (safetensors.SafetensorError, OSError) as error:
        raise SchemaError(f"{path}: expected a safetensors file that can be read, got {type(error).__name__}: {error}") from error
    dtype = torch_dtype(tensor.dtype)
    if tuple(found.shape) != shape or found.dtype != dtype:
        raise SchemaError(f"{path}: {name}: expected {dtype} {list(shape)}, got {found.dtype} {list(found.shape)}")
    return found


def _drawn(definition: Definition, workload: Workload, name: str, shape: tuple[int, ...], device: torch.device, salt: str = "") -> torch.Tensor:
    digest = hashlib.sha256(f"{definition.name}/{workload.uuid}/{name}{salt}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "little"))
    if name in definition.logical:
        from scaled_mm.gguf import quantize_block

        values = _normal((*shape[:-2], shape[-2] * 32), generator, device)
        return quantize_block(values, definition.logical[name], rule="ggml").view(torch.int8)
    dtype = torch_dtype(definition.inputs[name].dtype)
    if definition.op_type == "paged_decode_attention" and name in ("context_lens", "block_tables"):
        return _pages(definition, workload, name, shape, generator).to(device, dtype)
    if definition.op_type == "moe" and name == "topk_ids":
        return _routing(definition, workload, shape, generator).to(device, dtype)
    if dtype is torch.float4_e2m1fn_x2:
        raise SchemaError(f"inputs.{name}.dtype: expected a dtype that this reader draws, got float4_e2m1; give a file")
    if dtype.is_floating_point:
        values = _normal(shape, generator, device)
        return (values.clamp(-2, 2) if dtype.itemsize == 1 else values).to(dtype)
    if dtype is torch.bool:
        return _repeated(torch.randint(0, 2, (_drawn_of(shape),), generator=generator).bool(), shape, device)
    low, high = (-128, 128) if dtype is torch.int8 else (-1024, 1024)
    return _repeated(torch.randint(low, high, (_drawn_of(shape),), generator=generator, dtype=dtype), shape, device)


def _normal(shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """float32 with mean 0 and standard deviation 1, approximately normal: sums of integers, scaled by one multiplication. The last bits of
    torch.randn depend on the CPU's instruction set."""
    terms = torch.randint(0, _TOP, (_TERMS, _drawn_of(shape)), generator=generator, dtype=torch.int32)
    centred = terms.sum(0).sub_(_TERMS * (_TOP - 1) // 2).to(torch.float32)
    return _repeated(centred.mul_(1 / _DEVIATION), shape, device)


def _drawn_of(shape: tuple[int, ...]) -> int:
    return min(math.prod(shape), _PERIOD)


def _repeated(values: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    wanted = math.prod(shape)
    values = values.to(device)
    if wanted > values.numel():
        values = values.repeat(-(-wanted // values.numel()))[:wanted]
    return values.view(shape)


def _routing(definition: Definition, workload: Workload, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Different experts of each token, in random order."""
    sizes = definition.sizes(workload.axes)
    if "E" not in sizes:
        raise SchemaError("axes: expected E, the experts of a moe, by which topk_ids is drawn; give a file")
    return torch.randint(0, 2**40, (shape[0], sizes["E"]), generator=generator).argsort(dim=1, stable=True)[:, : shape[1]]


def _pages(definition: Definition, workload: Workload, name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """context_lens: from 1 to the capacity of the sequence's pages. block_tables: pages in random order, each used once."""
    sizes = definition.sizes(workload.axes)
    if missing := [axis for axis in ("num_blocks", "max_blocks", "block_size") if axis not in sizes]:
        raise SchemaError(f"axes: expected {', '.join(missing)} of a paged_decode_attention, by which {name} is drawn; give a file")
    if name == "context_lens":
        return torch.randint(1, sizes["max_blocks"] * sizes["block_size"] + 1, shape, generator=generator)
    if math.prod(shape) > sizes["num_blocks"]:
        raise SchemaError(
            f"workload.axes: expected at least {math.prod(shape)} num_blocks, a page for each entry of block_tables, got {sizes['num_blocks']}"
        )
    return torch.randperm(sizes["num_blocks"], generator=generator)[: math.prod(shape)].view(shape)
