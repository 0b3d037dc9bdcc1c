"""GGUF files: names to quantized tensors, through the `gguf` package, memory-mapped."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterable

import torch

from scaled_mm.block.dequantize import dequantize_block
from scaled_mm.block.pack import PackedBlockWeight, pack_block_weight
from scaled_mm.block_formats import BLOCK, FORMATS
from scaled_mm.errors import BadParamError, BadTensorDtypeError

# q8_1 is for activations; gguf's own size of it, 40 bytes, is that of an older one.
_WEIGHTS = {name.upper(): name for name, description in FORMATS.items() if description.is_weight}
_PLAIN = ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A quantized tensor of a file: q, uint8 [..., K/32, bytes of a block], in the format `fmt`."""

    fmt: str
    q: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """[..., K]: that of the values."""
        return torch.Size((*self.q.shape[:-2], self.q.shape[-2] * BLOCK))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """`dequantize_block` of it."""
        return dequantize_block(self.q, self.fmt, dtype)

    def pack(self) -> PackedBlockWeight:
        """`pack_block_weight` of it."""
        return pack_block_weight(self.q, self.fmt)


def load_gguf(
    path: str | os.PathLike, names: Iterable[str] | None = None, *, skip_unsupported: bool = False
) -> dict[str, QuantizedTensor | torch.Tensor]:
    """The tensors of a GGUF file by name: quantized ones as QuantizedTensor, others as tensors of the dtype they have there.

    Shapes are in torch's order, the last dimension the contiguous one: a matrix is [out, in]. Nothing is read before it is used: the
    tensors are CPU views of the mapped file. Writing to one changes it in memory, never the file.
    names: only these are returned, and only their types are looked at.
    skip_unsupported: tensors of other types than those below are left out, not refused.

    Raises ImportError without the `gguf` package, OSError (FileNotFoundError ...) for a file that cannot be opened, BadParamError for
    one that is no little-endian GGUF file, is cut off, or lacks one of `names`, and BadTensorDtypeError for a tensor of another type
    than q4_0, q4_1, q5_0, q5_1, q8_0, f32, f16, bf16, f64, i8, i16, i32 or i64, unless they are skipped.
    """
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError as error:
        if error.name != "gguf":
            raise
        raise ImportError("load_gguf: expected the package gguf, which is not installed; pip install gguf", name="gguf") from error
    if not isinstance(path, (str, os.PathLike)):
        raise BadParamError(f"path: expected a path, got a {type(path).__name__}")
    try:
        reader = GGUFReader(path, "c")
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise BadParamError(f"path: expected a GGUF file, got {os.fspath(path)}: {error}{_truncation_hint(path, error)}") from error
    if reader.byte_order != "I":
        raise BadParamError(f"path: expected a little-endian GGUF file, got {os.fspath(path)}, which is of the other byte order")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if names is not None:
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise BadParamError(f"names: expected None or several names of tensors, got {names!r}")
        names = list(names)
        if missing := [name for name in names if not isinstance(name, str) or name not in tensors]:
            there = _like(str(missing[0]), list(tensors))
            got = ", ".join(map(repr, missing))
            raise BadParamError(f"names: expected names of tensors in {os.fspath(path)}, got {got}; there are {there}")
        tensors = {name: tensors[name] for name in names}
    known = (*_WEIGHTS, *_PLAIN)
    unsupported = [name for name, tensor in tensors.items() if tensor.tensor_type.name not in known]
    if unsupported and not skip_unsupported:
        first, more = unsupported[0], len(unsupported) - 1
        got = tensors[first].tensor_type.name + (f", and {more} more that are of no such type" if more else "")
        raise BadTensorDtypeError(f"{first}: expected a tensor of type {', '.join(known)}, got {got}; skip_unsupported=True loads the others")
    return {name: _tensor(tensor) for name, tensor in tensors.items() if name not in unsupported}


def _truncation_hint(path: str | os.PathLike, error: Exception) -> str:
    """A file that begins as a GGUF file does, of a version that the reader knows, most often lacks its end."""
    with open(path, "rb") as file:
        begins_right = file.read(4) == b"GGUF"
    return "; the file may be truncated" if begins_right and "appears to be version" not in str(error) else ""


def _like(name: str, names: list[str], most: int = 5) -> str:
    """The names that are most like one that is not among them."""
    chosen = difflib.get_close_matches(name, names, most, 0.0)
    more = len(names) - len(chosen)
    return (", ".join(map(repr, chosen)) or "none") + (f" and {more} more" if more else "")


def _tensor(tensor) -> QuantizedTensor | torch.Tensor:
    kind = tensor.tensor_type.name
    if kind in _PLAIN:
        data = torch.from_numpy(tensor.data)
        return data.view(torch.bfloat16) if kind == "BF16" else data
    fmt = _WEIGHTS[kind]
    data = torch.from_numpy(tensor.data)
    return QuantizedTensor(fmt, data.unflatten(-1, (-1, FORMATS[fmt].block_bytes)))
