"""Loads the tensors of a memory-mapped GGUF file by name, with the `gguf` package."""

from __future__ import annotations

import dataclasses
import difflib
import mmap
import os
import stat
from collections.abc import Iterable, Mapping

import torch

from scaled_mm.errors import BadParamError, BadTensorDtypeError
from scaled_mm.gguf.dequantize import dequantize_block
from scaled_mm.gguf.gguf_header import GgufHeader, check_header
from scaled_mm.gguf.pack import PackedBlockWeight, pack_block_weight
from scaled_mm.gguf_formats import BLOCK, WEIGHT_FORMATS
from scaled_mm.gguf_k_quants import K_QUANTS

# q8_1 and Q8_K are for activations. gguf's size of q8_1, 40 bytes, is that of an older layout.
_WEIGHTS = {name.upper(): description for name, description in (WEIGHT_FORMATS | K_QUANTS).items()}
_PLAIN = ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A quantized tensor of a file: q is uint8 [..., K/32, bytes of a block] in the GGUF format `fmt`.

    With a K-quant, fmt = "q4_k", "q5_k" or "q6_k", q is uint8 [..., K/256, bytes of a super-block].
    """

    fmt: str
    q: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """[..., K], the shape in values."""
        values = K_QUANTS[self.fmt].block_values if self.fmt in K_QUANTS else BLOCK
        return torch.Size((*self.q.shape[:-2], self.q.shape[-2] * values))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The result of `dequantize_block`."""
        return dequantize_block(self.q, self.fmt, dtype)

    def pack(self) -> PackedBlockWeight:
        """The result of `pack_block_weight`, which converts q4_k and q5_k and refuses q6_k."""
        return pack_block_weight(self.q, self.fmt)


def load_gguf(
    path: str | bytes | os.PathLike, names: Iterable[str] | None = None, *, skip_unsupported: bool = False
) -> dict[str, QuantizedTensor | torch.Tensor]:
    """The tensors of a GGUF file by name: quantized ones as QuantizedTensor, others as tensors with the file's dtype.

    Shapes are in torch's order, with the contiguous dimension last: a matrix is [out, in]. Tensors are lazy, copy-on-write CPU views of
    the mapped file. Writing to one never changes the file.
    names: return only these tensors, and ignore unsupported types of others.
    skip_unsupported: omit tensors of types not listed below.

    The header of the whole file is checked first, so that a malformed file cannot consume time or memory. Checks:
    - the file is a regular file, little-endian, of GGUF version 2 or 3;
    - the numbers of tensors and keys, and the lengths of names, strings and arrays, fit the size of the file;
    - keys and tensor names are UTF-8, at most 65535 bytes, and occur once; value types and tensor types are known;
    - tensors have at most 4 dimensions, none of them 0, and K is a multiple of the type's block;
    - general.alignment is a uint32 and a power of two; tensors are aligned to it, lie in the file and do not overlap;
    - at most 2^16 keys, 2^18 tensors, 2^22 values, 2^18 arrays, nesting depth 8, and a bounded header size.
      Models need a fraction of these limits.

    Raises ImportError without the `gguf` package; OSError (FileNotFoundError ...) if the file cannot be opened; BadParamError naming
    `path` if a check fails; BadParamError naming `names` if one of them is missing; BadTensorDtypeError for a tensor of a type other than
    the weight formats of `quantize_block`, the K-quants q4_k, q5_k and q6_k, f32, f16, bf16, f64, i8, i16, i32 and i64, unless such tensors are
    skipped.
    """
    tensors, file = open_gguf(path), shown(os.fsdecode(path))
    if names is not None:
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise BadParamError(f"names: expected None or several names of tensors, got {names!r}")
        names = list(names)
        if missing := [name for name in names if not isinstance(name, str) or name not in tensors]:
            there = _like(str(missing[0]), list(tensors))
            got = ", ".join(map(repr, missing))
            raise BadParamError(f"names: expected names of tensors in {file}, got {got}; there are {there}")
        tensors = {name: tensors[name] for name in names}
    known = (*_WEIGHTS, *_PLAIN)
    unsupported = [name for name, tensor in tensors.items() if tensor.tensor_type.name not in known]
    if unsupported and not skip_unsupported:
        first, more = unsupported[0], len(unsupported) - 1
        got = tensors[first].tensor_type.name + (f", and {more} more that are of no such type" if more else "")
        raise BadTensorDtypeError(f"{shown(first)}: expected a tensor of type {', '.join(known)}, got {got}; skip_unsupported=True loads the others")
    return supported(tensors)


def open_gguf(path: str | bytes | os.PathLike) -> Mapping[str, object]:
    """The gguf package's tensors of a checked file by name, in the order of the file. Raises as `load_gguf`."""
    read_header(path)
    from gguf import GGUFReader

    path = os.fsdecode(path)
    try:
        reader = GGUFReader(path, "c")
    except (ValueError, IndexError, KeyError, OverflowError) as error:  # the file has changed since, or a newer reader refuses it
        raise BadParamError(f"path: expected a GGUF file, got {shown(path)}: {error}") from error
    return {tensor.name: tensor for tensor in reader.tensors}


def read_header(path: str | bytes | os.PathLike) -> GgufHeader:
    """The header of a checked file. Raises as `load_gguf`."""
    try:
        from gguf import GGML_QUANT_SIZES
    except ModuleNotFoundError as error:
        if error.name != "gguf":
            raise
        raise ImportError("load_gguf: expected the package gguf, which is not installed; pip install gguf", name="gguf") from error
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise BadParamError(f"path: expected a path, got a {type(path).__name__}")
    path = os.fsdecode(path)
    return _check(path, shown(path), GGML_QUANT_SIZES)


def supported(tensors: Mapping[str, object]) -> dict[str, QuantizedTensor | torch.Tensor]:
    """Those of `open_gguf` whose types `load_gguf` returns."""
    return {name: _tensor(tensor) for name, tensor in tensors.items() if tensor.tensor_type.name in (*_WEIGHTS, *_PLAIN)}


def _check(path: str, shown: str, block_sizes: Mapping[int, tuple[int, int]]) -> GgufHeader:
    """The header. Raises BadParamError if path is not a regular file or its header is invalid, OSError if it cannot be opened."""
    try:
        mode = os.stat(path).st_mode
    except ValueError as error:  # a NUL, or a character not allowed in file names
        raise BadParamError(f"path: expected a path, got {shown}: {error}") from error
    if not stat.S_ISREG(mode):  # checked before opening, because opening a FIFO waits for a writer
        kind = {stat.S_IFDIR: "directory", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}.get(stat.S_IFMT(mode), "device")
        raise BadParamError(f"path: expected a regular file, got {shown}, which is a {kind}")
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:  # mmap refuses an empty file
            raise BadParamError(f"path: expected a GGUF file, got {shown}: the file is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return check_header(shown, data, block_sizes)


def shown(text: str) -> str:
    """A path or a name for an error message, with control characters escaped."""
    return text if text.isprintable() else repr(text)


def _like(name: str, names: list[str], most: int = 5) -> str:
    """The known names most similar to a missing one."""
    chosen = difflib.get_close_matches(name, names, most, 0.0)
    more = len(names) - len(chosen)
    return (", ".join(map(repr, chosen)) or "none") + (f" and {more} more" if more else "")


def _tensor(tensor) -> QuantizedTensor | torch.Tensor:
    kind = tensor.tensor_type.name
    if kind in _PLAIN:
        data = torch.from_numpy(tensor.data)
        return data.view(torch.bfloat16) if kind == "BF16" else data
    description = _WEIGHTS[kind]
    data = torch.from_numpy(tensor.data)
    return QuantizedTensor(description.name, data.unflatten(-1, (-1, description.block_bytes)))
