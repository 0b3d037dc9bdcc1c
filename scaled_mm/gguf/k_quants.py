"""Decodes the super-blocks of K-quants, and converts those of q4_k and q5_k to blocks of 32 values that products read."""

from __future__ import annotations

from typing import NamedTuple

import torch

from scaled_mm.errors import BadParamError
from scaled_mm.gguf import layout
from scaled_mm.gguf_formats import BLOCK, FORMATS
from scaled_mm.gguf_k_quants import K_QUANTS, SUPER_BLOCK, KQuant
from scaled_mm.rowwise.operators import composite

_BLOCKS = SUPER_BLOCK // BLOCK  # blocks of 32 values in a super-block
_SCALE_VALUES = 16  # values that share a scale of q6_k


class _Decoded(NamedTuple):
    """scale, offset: float32 [super-blocks, scales], exact: a value is scale * level - offset. levels: [super-blocks, scales, values of a scale].

    offset: None for q6_k, which has none. levels: uint8, for q6_k int8, from which 32 is subtracted.
    """

    scale: torch.Tensor
    offset: torch.Tensor | None
    levels: torch.Tensor


def _half(q: torch.Tensor, offset: int) -> torch.Tensor:
    """float32 [super-blocks, 1]: the float16 at this offset."""
    return q[:, offset : offset + 2].clone(memory_format=torch.contiguous_format).view(torch.float16).to(torch.float32)


def _six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales, minima), uint8 [super-blocks, 8], from 12 bytes: number j of each is in byte j and byte j + 4, and number j + 4 in byte j + 8.

    Byte j + 8 has the low four bits of both; their high two bits are the high two bits of bytes j and j + 4. j = 0..3.
    """
    scales, minima, low = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    return (
        torch.cat((scales & 63, (low & 15) | (scales >> 6 << 4)), 1),
        torch.cat((minima & 63, (low >> 4) | (minima >> 6 << 4)), 1),
    )


def _nibbles(q: torch.Tensor, width: int) -> torch.Tensor:
    """uint8 [super-blocks, groups, width]: of each `width` bytes the low nibbles, then the high ones."""
    q = q.unflatten(1, (-1, 1, width))
    return torch.cat((q & 15, q >> 4), 2).flatten(1, 2)


def _decode(q: torch.Tensor, description: KQuant) -> _Decoded:
    if description.bits == 6:
        low = _nibbles(q[:, :128], 64).unflatten(2, (2, BLOCK)).flatten(1, 2)
        bits = q[:, 128:192].unflatten(1, (-1, 1, BLOCK))
        high = torch.cat([(bits >> shift) & 3 for shift in (0, 2, 4, 6)], 2).flatten(1, 2)
        levels = (low | (high << 4)).view(torch.int8).sub_(32)
        scales = q[:, 192:208].clone(memory_format=torch.contiguous_format).view(torch.int8)
        return _Decoded(_half(q, 208) * scales, None, levels.reshape(-1, SUPER_BLOCK // _SCALE_VALUES, _SCALE_VALUES))
    scales, minima = _six_bits(q[:, 4:16])
    levels = _nibbles(q[:, -128:], BLOCK)
    if description.bits == 5:
        fifth = q[:, 16:48].unsqueeze(1) >> layout.bit_numbers(q.device).unsqueeze(-1)
        levels = levels | ((fifth & 1) << 4)
    return _Decoded(_half(q, 0) * scales, _half(q, 2) * minima, levels)


def values(q: torch.Tensor, description: KQuant) -> torch.Tensor:
    """float32 [super-blocks, 256]: the values of uint8 [super-blocks, bytes of a super-block]. Only the subtraction rounds."""
    scale, offset, levels = _decode(q, description)
    value = levels.to(torch.float32).mul_(scale.unsqueeze(-1))  # exact: at most 11 + 6 + 5 bits, for q6_k 11 + 7 + 5
    return (value if offset is None else value.sub_(offset.unsqueeze(-1))).flatten(1)


def lookup(fmt: object, *others: str) -> KQuant:
    """The convertible K-quant of this name; BadParamError if there is none. others: names that the caller takes too, for the message."""
    found = K_QUANTS.get(fmt.lower()) if isinstance(fmt, str) else None
    if found is not None and found.name == fmt and found.converted:
        return found
    names = (*others, *(name for name, description in K_QUANTS.items() if description.converted))
    hint = "" if found is None else "; formats are spelled in lower case" if found.converted else f"; {found.advice}"
    raise BadParamError(f"fmt: expected one of {', '.join(map(repr, names))}, got {fmt!r}{hint}")


def _check(q: torch.Tensor, fmt: str) -> None:
    layout.check_shape("q", q, lookup(fmt))  # not the strides: a compiled graph may choose them


def _convert(q: torch.Tensor, fmt: str) -> torch.Tensor:
    description = lookup(fmt)
    target_format = FORMATS[description.converted]
    out = _empty(q, fmt)
    blocks, target = q.reshape(-1, description.block_bytes), out.view(-1, _BLOCKS, target_format.block_bytes)
    for chunk in layout.chunks(blocks, SUPER_BLOCK):
        scale, offset, levels = _decode(blocks[chunk], description)
        parts = layout.Parts(layout.to_half(scale), layout.to_half(-offset), *layout.pack_levels(levels, target_format))
        layout.put_together(parts, target_format, target[chunk])
    return out


def _empty(q: torch.Tensor, fmt: str) -> torch.Tensor:
    return q.new_empty((*q.shape[:-2], q.shape[-2] * _BLOCKS, FORMATS[lookup(fmt).converted].block_bytes))


convert = composite("convert_k_quant", 1, _convert, _check, "str fmt", fake=_empty)
"""uint8 [..., K/32, bytes of a block] in the format `converted`, from checked super-blocks of q4_k or q5_k."""
