"""Int8 weights in files that are mapped into memory, for models larger than the memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from scaled_mm.errors import BadParamError
from scaled_mm.models.blocks import experts_of, linears_of
from scaled_mm.nn.experts import Int8Experts
from scaled_mm.nn.linear import Int8Linear


def map_int8(block: torch.nn.Module, path: Path) -> None:
    """Writes the tensors of a layer's int8 modules to a safetensors file, and maps them from there."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    modules = {name: module for name, module in block.named_modules() if isinstance(module, (Int8Linear, Int8Experts))}
    tensors = {f"{name}.{key}": value for name, module in modules.items() for key, value in module.state_dict().items()}
    if not tensors:
        return
    devices = {name: tensor.device for name, tensor in tensors.items()}
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path)
    with safe_open(path, "pt") as file:
        for name, device in devices.items():
            module, _, key = name.rpartition(".")
            setattr(modules[module], key, torch.nn.Parameter(file.get_tensor(name).to(device), requires_grad=False))


def map_or_explain(block: torch.nn.Module, path: Path) -> None:
    from safetensors import SafetensorError

    try:
        map_int8(block, path)
    except (OSError, SafetensorError) as error:
        raise BadParamError(f"offload: {path} cannot be written ({error}); the model is partly quantized, load it again") from error


def offload_folder(offload: str | os.PathLike, prefix: str, blocks: Sequence[torch.nn.Module]) -> Path:
    """The folder, with room for the int8 weights of all blocks."""
    folder = Path(offload)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        raise BadParamError(f"offload: expected a folder that can be written to, got {offload} ({error.strerror})") from error
    for index in range(len(blocks)):
        if (file := folder / f"{prefix}.{index}.safetensors").is_dir():
            raise BadParamError(f"offload: expected a file or none, got the folder {file}")
    weights = [linear.weight for block in blocks for linear in linears_of(block).values()]
    weights += [getattr(experts, name) for block in blocks for experts in experts_of(block).values() for name in ("gate_up_proj", "down_proj")]
    needed = sum(weight.numel() + 4 * weight.numel() // max(1, weight.shape[-1]) for weight in weights)
    if free < needed:
        raise BadParamError(f"offload: expected {needed / 1e9:.2f} GB of free space in {offload}, got {free / 1e9:.2f}")
    return folder
