"""`TensorDesc`: a tensor without its data."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence

import torch

from scaled_mm.core import binding, checks
from scaled_mm.errors import BadParamError
from scaled_mm.gguf_formats import BLOCK, FORMATS, TILE_BLOCKS, TILE_ROWS, name_hint


def _alignment_of(address: int) -> int:
    return min(16, address & -address) if address else 16


@dataclasses.dataclass(frozen=True)
class TensorDesc:
    """A tensor without its data.

    shape: elements per dimension. strides: in elements; default: contiguous (the last dimension fastest).
    alignment: the data pointer will be a multiple of this number of bytes. torch's allocations are at least 16-byte aligned.
    A b [K, N] that is the transpose of a [N, K] weight has strides (1, K).
    constant: only for a weight (b). `calculate` will get a PreparedWeight or PackedBlockWeight whose memory no work in flight writes.

    For a tensor in a GGUF format (`create_block_descriptor`), dtype is the format's name, such as "q4_0", and shape is [rows, K] in values.
    strides[0] is the bytes between rows, by default those of K values; strides[1] is 1. packed: a PackedBlockWeight, which has no strides.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    strides: tuple[int, ...] | None = None
    alignment: int = 16
    constant: bool = False
    packed: bool = False

    def __post_init__(self):
        object.__setattr__(self, "shape", _integers("shape", self.shape))
        blocks = isinstance(self.dtype, str) and self.dtype in FORMATS
        if not blocks and not isinstance(self.dtype, torch.dtype):
            known = ", ".join(FORMATS)
            raise BadParamError(f"dtype: expected a torch.dtype or a GGUF format ({known}), got {self.dtype!r}{name_hint(self.dtype)}")
        if blocks and len(self.shape) != 2:
            raise BadParamError(f"shape: expected [rows, K] of a tensor of {self.dtype} blocks, got {list(self.shape)}")
        if self.packed and not blocks:
            raise BadParamError(f"packed: expected a GGUF format as dtype of a packed weight, got {self.dtype}")
        contiguous = [1] * len(self.shape)
        for i in reversed(range(len(self.shape) - 1)):
            contiguous[i] = contiguous[i + 1] * max(self.shape[i + 1], 1)
        if blocks:
            contiguous[0] = self.shape[1] // BLOCK * FORMATS[self.dtype].block_bytes
        object.__setattr__(self, "strides", tuple(contiguous) if self.strides is None else _integers("strides", self.strides))
        if self.packed and self.strides != tuple(contiguous):
            raise BadParamError(f"strides: expected None for a packed weight, which has none, got {self.strides}")
        if len(self.strides) != len(self.shape):
            raise BadParamError(f"strides: expected one per dimension of {self.shape}, got {self.strides}")
        object.__setattr__(self, "alignment", _integers("alignment", (self.alignment,))[0])
        if self.constant and self.alignment % 16:  # see prepare_weight
            raise BadParamError(f"alignment: expected a multiple of 16 bytes for a constant b, got {self.alignment}")

    @functools.cached_property
    def bytes(self) -> int:
        """Bytes from the data pointer to the end of the last element; 0 for a tensor without elements."""
        if 0 in self.shape:
            return 0
        if isinstance(self.dtype, str):
            rows, blocks, description = self.shape[0], self.shape[1] // BLOCK, FORMATS[self.dtype]
            if self.packed:
                return -(-rows // TILE_ROWS) * -(-blocks // TILE_BLOCKS) * description.tile_bytes
            return (rows - 1) * self.strides[0] + blocks * description.block_bytes
        return (sum((size - 1) * stride for size, stride in zip(self.shape, self.strides)) + 1) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorDesc:
        """The TensorDesc of a tensor: its shape, dtype, strides, and the alignment of its data pointer (at most 16)."""
        desc = object.__new__(cls)  # skips the checks above, which an existing tensor does not need
        desc.__dict__.update(
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            strides=tensor.stride(),
            alignment=_alignment_of(tensor.data_ptr()),
            constant=False,
            packed=False,
        )
        return desc

    def _c(self) -> binding.TensorDescC:
        flags = (binding.TENSOR_CONSTANT if self.constant else 0) | (binding.TENSOR_PACKED if self.packed else 0)
        return binding.tensor_desc(self.dtype, self.shape, self.strides, self.alignment, flags)


def _integers(name: str, values: Sequence[int]) -> tuple[int, ...]:
    try:
        result = tuple(operator.index(value) for value in values)
    except TypeError as error:
        raise BadParamError(f"{name}: expected a sequence of integers, got {values!r}") from error
    if any(abs(value) >= 2**63 for value in result):
        raise BadParamError(f"{name}: expected 64-bit integers, got {values!r}")
    return result


def describe(name: str, value: torch.Tensor | TensorDesc | None, device: torch.device) -> TensorDesc | None:
    if value is None or isinstance(value, TensorDesc):
        return value
    if not isinstance(value, torch.Tensor):
        raise BadParamError(f"{name}: expected a tensor or a TensorDesc, got {type(value).__name__}")
    checks.check_device(name, value, device)
    return TensorDesc.of(value)
