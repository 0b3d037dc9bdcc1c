"""Packs weights once for all their products: on a GPU as tiles in the kernels' order, elsewhere as one tensor per field of the blocks."""

from __future__ import annotations

import dataclasses

import torch

from scaled_mm.core import checks
from scaled_mm.core.constant import is_written
from scaled_mm.errors import BadParamError, BadTensorShapeError
from scaled_mm.gguf import k_quants, layout, tiles
from scaled_mm.gguf_formats import BLOCK, WEIGHT_FORMATS, BlockFormat, lookup, lookup_stored, lookup_weight
from scaled_mm.gguf_k_quants import KQuant


@dataclasses.dataclass(frozen=True, eq=False)
class PackedBlockWeight:
    """The result of `pack_block_weight`, for `block_linear`, the products and descriptors.

    fmt: the format's name. rows, k: the weight's `shape` is [rows, k].
    tiles: on CUDA uint8 [ceil(rows/64), ceil(k/256), bytes of a tile]; None elsewhere.
    fields: the fields of the blocks, [rows, k/32, ...], each contiguous; None on CUDA.
    constant: products may read the tiles before the preceding kernel of their stream has ended (docs/decisions/0011). Only
        `pack_block_weight` sets it, for memory that it wrote. `dataclasses.replace` and unpickling reset it.
    The layout may change between releases, and a pickle with another layout of tiles raises BadParamError. The result of `unpack` does not change.
    """

    fmt: str
    rows: int
    k: int
    tiles: torch.Tensor | None
    fields: layout.Parts | None
    constant: bool = dataclasses.field(default=False, init=False)

    def __post_init__(self) -> None:
        description, got = lookup_weight(self.fmt), [self.rows, self.k]
        if (self.tiles is None) == (self.fields is None):
            raise BadParamError(f"tiles: expected tiles or fields, got {'neither' if self.tiles is None else 'both'}")
        blocks = self.k // BLOCK
        name, part, expected = (
            ("fields", self.fields.d, (self.rows, blocks))
            if self.tiles is None
            else ("tiles", self.tiles, tiles.shape(self.rows, blocks, description))
        )
        if self.k % BLOCK or tuple(part.shape) != expected:
            raise BadTensorShapeError(f"rows, k: expected those of the {name}, {list(part.shape)} here, got {got}")

    def __repr__(self) -> str:  # the tensors are not printed
        return f"PackedBlockWeight({self.fmt}, {self.rows} x {self.k}, {self.device}, constant={self.constant})"

    def __getstate__(self) -> dict:
        return {**self.__dict__, "constant": False, "layout": tiles.LAYOUT}

    def __setstate__(self, state: dict) -> None:
        values = dict(state)
        layout_of_tiles = values.pop("layout", 1)
        if values["tiles"] is not None and layout_of_tiles != tiles.LAYOUT:
            raise BadParamError(f"state: expected a pickle with layout {tiles.LAYOUT} of tiles, got {layout_of_tiles}: pack the weight again")
        self.__dict__.update(values)

    @property
    def shape(self) -> torch.Size:
        """[N, K]: output features, input features."""
        return torch.Size((self.rows, self.k))

    @property
    def device(self) -> torch.device:
        return self.fields.d.device if self.tiles is None else self.tiles.device

    @property
    def nbytes(self) -> int:
        """Size in bytes: that of the blocks. Tiles round rows up to a multiple of 64, and the blocks of a row to a multiple of 8."""
        if self.tiles is not None:
            return self.tiles.numel()
        return self.fields.d.numel() * lookup(self.fmt).block_bytes

    def to(self, device: torch.device | str) -> PackedBlockWeight:
        """The same weight on another device, in that device's layout.

        Raises BadParamError for an invalid device name, and for a weight on the meta device, which has no data. Raises
        DeviceNotSupportedError if this torch or this machine does not have the device.
        """
        wanted = checks.device(device)
        target = checks.usable_device(wanted)
        if self.device.type == "meta" and target != self.device:
            raise BadParamError(f"device: expected meta, where this weight is, which has no data to copy, got {wanted}")
        return self if target == self.device else pack_block_weight(self.unpack().to(target), self.fmt)

    @torch.no_grad()
    def unpack(self) -> torch.Tensor:
        """The packed blocks, uint8 [N, K/32, bytes of a block], bit for bit, including NaN in scales."""
        description = lookup(self.fmt)
        if self.tiles is not None:
            return tiles.to_blocks(self.tiles, self.rows, self.k // BLOCK, description)
        out = torch.empty((*self.fields.d.shape, description.block_bytes), dtype=torch.uint8, device=self.device)
        layout.put_together(self.fields, description, out)
        return out

    def parts(self) -> layout.Parts:
        """The fields of the blocks: the stored ones, or new ones made from tiles."""
        return self.fields if self.tiles is None else layout.take_apart(self.unpack(), lookup(self.fmt))


@torch.no_grad()
def pack_block_weight(weight_q: torch.Tensor, fmt: str) -> PackedBlockWeight:
    """Packs a weight once for all its products: an exact copy of the same size. On CUDA padding adds up to 63 rows, and 7 blocks per row.

    weight_q: uint8 [N, K/32, bytes of a block], CPU or CUDA; the blocks of a row are contiguous.
    fmt: the name of a format of `quantize_block`, except "q8_1", which is for activations; or "q4_k" or "q5_k", uint8 [N, K/256, 144 or 176],
        which `convert_k_quant` first converts to q4_1 or q5_1: that is the format of the packed weight, and `unpack` returns its blocks.
        "q6_k" is refused, because no format has its scales of 16 values; the error says what to do.
    On CUDA it waits for the current stream, so that products may read the weight early, as after `prepare_weight`. During graph capture,
    compilation and tracing it does not wait, and products do not read early.
    Raises BadParamError (invalid fmt, or weight_q is not a tensor), BadTensorDtypeError, BadTensorShapeError or BadTensorStridesError.
    """
    if isinstance(lookup_stored(fmt), KQuant):
        source = k_quants.lookup(fmt, *WEIGHT_FORMATS)
        check_matrix("weight_q", weight_q, source)
        weight_q, fmt = k_quants.convert(weight_q, source.name), source.converted
    description = lookup_weight(fmt)
    check_matrix("weight_q", weight_q, description)
    rows, k = weight_q.shape[0], weight_q.shape[1] * BLOCK
    if weight_q.is_cuda:
        packed = PackedBlockWeight(fmt, rows, k, tiles.from_blocks(weight_q, description), None)
        object.__setattr__(packed, "constant", is_written(packed.tiles))
        return packed
    fields = layout.take_apart(weight_q, description)
    own = (None if field is None else field.clone(memory_format=torch.contiguous_format) for field in fields)  # copies, never views of the weight
    return PackedBlockWeight(fmt, rows, k, None, layout.Parts(*own))


def check_matrix(name: str, q: object, description: BlockFormat | KQuant) -> None:
    """As `layout.check_blocks`; also raises BadTensorShapeError unless q is a matrix of blocks."""
    layout.check_blocks(name, q, description)
    if q.dim() != 3:
        expected = f"[rows, K/{description.block_values}, {description.block_bytes}]"
        raise BadTensorShapeError(f"{name}: expected 3 dimensions {expected}, got {list(q.shape)}")
