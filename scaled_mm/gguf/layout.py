"""Splits the bytes of blocks into scales, minima or sums, and levels, and assembles them again. No arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from scaled_mm.core.checks import check_strided
from scaled_mm.errors import BadParamError, BadTensorDtypeError, BadTensorShapeError, BadTensorStridesError
from scaled_mm.gguf_formats import BLOCK, BlockFormat
from scaled_mm.gguf_k_quants import KQuant

_HALF = BLOCK // 2
_NAN = 0x7E00  # float16, quiet, positive

# Values converted at a time: on a CPU 4 MiB of float32, which stay in its caches; on a GPU 2^26, which bounds memory.
_CHUNK_ELEMENTS = {"cpu": 1 << 20}
_CHUNK_ELEMENTS_ELSEWHERE = 1 << 26


def chunks(blocks: torch.Tensor, block_values: int = BLOCK) -> Iterator[slice]:
    """Slices of [blocks, ...] for conversion in chunks."""
    size = max(_CHUNK_ELEMENTS.get(blocks.device.type, _CHUNK_ELEMENTS_ELSEWHERE) // block_values, 1)
    for start in range(0, blocks.shape[0], size):
        yield slice(start, start + size)


def check_blocks(name: str, q: object, description: BlockFormat | KQuant) -> None:
    """Raises a typed error unless `q` is uint8 [..., K/32, bytes of a block], at least 2-d, with contiguous blocks in each row.

    The same with K/256 for the super-blocks of a K-quant.
    """
    check_shape(name, q, description)
    size = description.block_bytes
    if q.stride(-1) != 1 or (q.shape[-2] > 1 and q.stride(-2) != size):
        wanted = f"blocks one after the other, the last two strides {size} and 1"
        raise BadTensorStridesError(f"{name}: expected {wanted}, got strides {list(q.stride())} of shape {list(q.shape)}")


def check_shape(name: str, q: object, description: BlockFormat | KQuant) -> None:
    """As `check_blocks`, for any strides."""
    check_no_quantized_tensor(name, q, "a tensor")
    check_strided(name, q)
    size = description.block_bytes
    if q.dtype is not torch.uint8:
        raise BadTensorDtypeError(f"{name}: expected uint8, got {q.dtype}{quantizer_hint(q.dtype, description)}")
    if q.dim() < 2 or q.shape[-1] != size:
        flat = q.dim() == 2 and q.shape[-1] > 0 and q.shape[-1] % size == 0  # rows of bytes, as in files and numpy arrays
        hint = f"; rows of bytes become blocks by .unflatten(-1, (-1, {size}))" if flat else ""
        raise BadTensorShapeError(f"{name}: expected [..., K/{description.block_values}, {size}] for {description.name}, got {list(q.shape)}{hint}")


def check_no_quantized_tensor(name: str, value: object, expected: str, advice: str = "give its .q, and its .fmt") -> None:
    """Raises BadParamError, with a hint, for a QuantizedTensor (from `load_gguf`) where its blocks are expected."""
    if not isinstance(value, torch.Tensor) and hasattr(value, "q") and hasattr(value, "fmt"):
        raise BadParamError(f"{name}: expected {expected}, got a {type(value).__name__}; {advice}")


def quantizer_hint(dtype: torch.dtype, description: BlockFormat | KQuant | None = None) -> str:
    """A hint for the error message if a float tensor was given instead of blocks. Nothing here quantizes to a K-quant."""
    if not dtype.is_floating_point or isinstance(description, KQuant):
        return ""
    activations = description is not None and not description.is_weight
    return f"; sm.quantize_{description.name} makes them" if activations else "; sm.quantize_block makes blocks"


class Parts(NamedTuple):
    """The fields of blocks, with any strides.

    d: float16 [..., K/32]. second: m or s, float16 [..., K/32], or None. high: the fifth bits, uint8 [..., K/32, 4], or None.
    levels: nibbles, uint8 [..., K/32, 16]; for 8-bit formats int8 [..., K/32, 32].
    """

    d: torch.Tensor
    second: torch.Tensor | None
    high: torch.Tensor | None
    levels: torch.Tensor

    def slice(self, *index: slice) -> Parts:
        """The fields of some rows, and of some blocks in these rows."""
        return Parts(*(None if part is None else part[index] for part in self))


def take_apart(q: torch.Tensor, description: BlockFormat) -> Parts:
    """The fields of q, uint8 [..., K/32, bytes of a block]: copies of the float16 fields, views of the others."""
    high, levels = description.high_offset, description.levels_offset
    return Parts(
        _halves(q, 0),
        None if description.second is None else _halves(q, 2),
        q[..., high : high + description.high_bytes] if description.high_bytes else None,
        q[..., levels:].view(torch.int8) if description.signed else q[..., levels:],
    )


def put_together(parts: Parts, description: BlockFormat, out: torch.Tensor) -> None:
    """Writes the fields to out, uint8 [..., K/32, bytes of a block]: the exact inverse of `take_apart`."""
    high, levels = description.high_offset, description.levels_offset
    out[..., :2] = parts.d.unsqueeze(-1).contiguous().view(torch.uint8)
    if parts.second is not None:
        out[..., 2:4] = parts.second.unsqueeze(-1).contiguous().view(torch.uint8)
    if parts.high is not None:
        out[..., high:levels] = parts.high
    out[..., levels:] = parts.levels.view(torch.uint8)


def _halves(q: torch.Tensor, offset: int) -> torch.Tensor:
    # A copy even of a single block, because two bytes inside a block may be unaligned.
    return q[..., offset : offset + 2].clone(memory_format=torch.contiguous_format).view(torch.float16).squeeze(-1)


def to_half(value: torch.Tensor) -> torch.Tensor:
    """Converts to float16, to nearest even, infinite from 65520 on. Every NaN becomes 0x7e00, because CPU and GPU produce different NaNs."""
    half = value.to(torch.float16)
    return half.view(torch.int16).masked_fill_(half.isnan(), _NAN).view(torch.float16)


def pack_levels(levels: torch.Tensor, description: BlockFormat) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(high, levels) as in `Parts`, from levels uint8 [..., 32]. 8-bit levels, int8 [..., 32], stay unchanged."""
    if description.signed:
        return None, levels
    high = None
    if description.high_bytes:
        fifth = (levels >> 4).unflatten(-1, (description.high_bytes, 8))
        high = (fifth << bit_numbers(levels.device)).sum(-1, dtype=torch.uint8)
    return high, (levels[..., :_HALF] & 15) | (levels[..., _HALF:] << 4)


def unpack_levels(parts: Parts) -> torch.Tensor:
    """Contiguous levels: uint8 [..., K/32, 32]; int8 for 8-bit formats."""
    nibbles = parts.levels
    if nibbles.dtype is torch.int8:
        return nibbles.contiguous()
    levels = nibbles.new_empty((*nibbles.shape[:-1], BLOCK))
    torch.bitwise_and(nibbles, 15, out=levels[..., :_HALF])
    torch.bitwise_right_shift(nibbles, 4, out=levels[..., _HALF:])
    return levels if parts.high is None else levels.bitwise_or_(fifth_bits(parts.high))


def fifth_bits(high: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K/32, 32], 16 or 0: the fifth bits at their position in a level."""
    return ((high.unsqueeze(-1) >> bit_numbers(high.device)) & 1).mul_(16).flatten(-2)


def bit_numbers(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
