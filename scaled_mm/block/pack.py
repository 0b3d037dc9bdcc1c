"""Weights packed once for the products: scales, minima, fifth bits and levels in tensors of their own."""

from __future__ import annotations

import dataclasses

import torch

from scaled_mm import checks
from scaled_mm.block import layout
from scaled_mm.block.formats import BLOCK, lookup, lookup_weight
from scaled_mm.errors import BadTensorShapeError


@dataclasses.dataclass(frozen=True, eq=False)
class PackedBlockWeight:
    """What `pack_block_weight` returns, to be given to `block_linear`.

    fmt: the format's name. levels: uint8 [M, K/2], nibbles as they lie in blocks, or of q8_0 int8 [M, K]. high: uint8 [M, K/8], the fifth
    bits of q5_0 and q5_1, or None. d: float16 [M, K/32]. m: float16 [M, K/32], the minima of q4_1 and q5_1, or None.
    All are contiguous. The layout may change with a release; what `unpack` returns does not.
    """

    fmt: str
    levels: torch.Tensor
    high: torch.Tensor | None
    d: torch.Tensor
    m: torch.Tensor | None

    @property
    def shape(self) -> torch.Size:
        """[M, K]: output features, input features."""
        return torch.Size((self.d.shape[0], self.d.shape[1] * BLOCK))

    @property
    def device(self) -> torch.device:
        return self.d.device

    @property
    def nbytes(self) -> int:
        """As many as the blocks had."""
        return self.d.numel() * lookup(self.fmt).block_bytes

    def to(self, device: torch.device | str) -> PackedBlockWeight:
        """The same weight on another device; BadParamError for what is none."""
        device = checks.device(device)
        levels, high, d, m = (None if t is None else t.to(device) for t in (self.levels, self.high, self.d, self.m))
        return PackedBlockWeight(self.fmt, levels, high, d, m)

    @torch.no_grad()
    def unpack(self) -> torch.Tensor:
        """The blocks, uint8 [M, K/32, bytes of a block], bit by bit those that were packed, NaN in scales included."""
        description = lookup(self.fmt)
        out = torch.empty((*self.d.shape, description.block_bytes), dtype=torch.uint8, device=self.device)
        layout.put_together(self.parts(), description, out)
        return out

    def parts(self) -> layout.Parts:
        """The fields by blocks: views."""
        description = lookup(self.fmt)
        high = None if self.high is None else self.high.view(*self.d.shape, description.high_bytes)
        return layout.Parts(self.d, self.m, high, self.levels.view(*self.d.shape, description.level_bytes))


@torch.no_grad()
def pack_block_weight(weight_q: torch.Tensor, fmt: str) -> PackedBlockWeight:
    """Packs a weight once for all products with it; a copy of the same size, exact.

    weight_q: uint8 [M, K/32, bytes of a block], CPU or CUDA; the blocks of a row one after the other.
    fmt: "q4_0", "q4_1", "q5_0", "q5_1" or "q8_0".
    Raises BadParamError (fmt, a weight_q that is no tensor), BadTensorDtypeError, BadTensorShapeError or BadTensorStridesError.
    """
    description = lookup_weight(fmt)
    check_matrix("weight_q", weight_q, fmt)
    d, m, high, levels = layout.take_apart(weight_q, description)
    return PackedBlockWeight(fmt, _own(levels), None if high is None else _own(high), d, m)


def check_matrix(name: str, q: object, fmt: str) -> None:
    """`layout.check_blocks`, and BadTensorShapeError unless it is a matrix of blocks."""
    description = lookup(fmt)
    layout.check_blocks(name, q, description)
    if q.dim() != 3:
        raise BadTensorShapeError(f"{name}: expected 3 dimensions [rows, K/32, {description.block_bytes}], got {list(q.shape)}")


def _own(fields: torch.Tensor) -> torch.Tensor:
    # Never a view of the weight, also where that has one block.
    return fields.clone(memory_format=torch.contiguous_format).flatten(-2)
