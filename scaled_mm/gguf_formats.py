"""The GGUF formats, the one list on the Python side: quantizers, products, dtype codes, kernels, tables and schemas are derived from it.

csrc/include/scaled_mm/gguf_formats.h is the same list in C; tests/gguf/test_gguf_formats.py compares the two. No torch here: setup.py builds
kernels where there is none.

A block holds 32 consecutive values of a row. Its bytes, little-endian and without gaps:

    half d            the scale
    half m or s       as `second` says: the minimum, or the sum of the 32 values before they were quantized
    u8   qh[4]        five bits: bit j of this 32-bit word is the fifth bit of element j
    u8   qs[16]       four and five bits: byte j has the low bits of element j (low nibble) and of j + 16 (high nibble)
    i8   qs[32]       eight bits: element j

What they mean is in docs/design/gguf-formats.md. K-quants, which products do not read, are in gguf_k_quants.py.
"""

from __future__ import annotations

import dataclasses

from scaled_mm.errors import BadParamError
from scaled_mm.gguf_k_quants import K_QUANTS, KQuant

BLOCK = 32
"""Values in a block, in every format."""

TILE_ROWS, TILE_BLOCKS = 64, 8
"""Rows, and blocks of each row, in a tile of a packed weight on a GPU (docs/design/gguf-formats.md)."""


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """One format.

    name: as the API spells it; in capitals it is the format's name in GGUF files.
    code: the number of SCALED_MM_DTYPE_<NAME> in the C interface. It never changes; a new format takes the next free one.
    bits: of a stored level: 4, 5 (unsigned) or 8 (signed).
    zero: the level that stands for 0; it is subtracted before the scale is applied.
    second: the second float16 of a block: "m", a minimum that is added; "s", the sum of the values, for products with weights; or None.
    """

    name: str
    code: int
    bits: int
    zero: int = 0
    second: str | None = None

    @property
    def block_values(self) -> int:
        """Values in a block."""
        return BLOCK

    @property
    def signed(self) -> bool:
        """Whether levels are signed bytes."""
        return self.bits == 8

    @property
    def has_rules(self) -> bool:
        """Whether the quantizer's `rule` changes the blocks: it does for levels that lie around a level for 0."""
        return self.zero != 0

    @property
    def is_weight(self) -> bool:
        """Whether the weight of a product may have this format. The format with sums is for activations."""
        return self.second != "s"

    @property
    def high_offset(self) -> int:
        """Where the fifth bits begin, in bytes from the start of the block."""
        return 2 if self.second is None else 4

    @property
    def high_bytes(self) -> int:
        return BLOCK // 8 if self.bits == 5 else 0

    @property
    def levels_offset(self) -> int:
        """Where the levels (their low four bits) begin."""
        return self.high_offset + self.high_bytes

    @property
    def level_bytes(self) -> int:
        return BLOCK if self.signed else BLOCK // 2

    @property
    def block_bytes(self) -> int:
        return self.levels_offset + self.level_bytes

    @property
    def bands_bytes(self) -> int:
        """Bytes of the blocks of a tile of a packed weight, in another order."""
        return TILE_ROWS * TILE_BLOCKS * self.block_bytes

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile: the blocks, then a power of two of each row, float16."""
        return self.bands_bytes + 2 * TILE_ROWS


FORMATS: dict[str, BlockFormat] = {
    description.name: description
    for description in (
        BlockFormat("q4_0", code=5, bits=4, zero=8),
        BlockFormat("q4_1", code=6, bits=4, second="m"),
        BlockFormat("q5_0", code=7, bits=5, zero=16),
        BlockFormat("q5_1", code=8, bits=5, second="m"),
        BlockFormat("q8_0", code=9, bits=8),
        BlockFormat("q8_1", code=10, bits=8, second="s"),
    )
}
"""In the order of their codes. A line here makes a format known to every function that takes a format's name."""

WEIGHT_FORMATS: dict[str, BlockFormat] = {name: description for name, description in FORMATS.items() if description.is_weight}
"""The formats that the weight of a product may have."""

STORED: dict[str, BlockFormat | KQuant] = {**FORMATS, **K_QUANTS}
"""What a file may hold in blocks: the formats and the K-quants."""

RULES = ("absmax", "ggml")


def name_hint(fmt: object) -> str:
    """What an error adds for a format's name in capitals, as GGUF files spell it, and for a K-quant, which is not one of FORMATS."""
    lower = fmt.lower() if isinstance(fmt, str) else None
    if lower in K_QUANTS:
        return f"; {K_QUANTS[lower].advice}"
    return "; formats are spelled in lower case" if lower in FORMATS else ""


def lookup(fmt: object) -> BlockFormat:
    """The format of this name; BadParamError if there is none."""
    if not isinstance(fmt, str) or fmt not in FORMATS:
        raise BadParamError(f"fmt: expected one of {', '.join(map(repr, FORMATS))}, got {fmt!r}{name_hint(fmt)}")
    return FORMATS[fmt]


def lookup_stored(fmt: object) -> BlockFormat | KQuant:
    """The format or K-quant of this name; BadParamError if there is none."""
    if not isinstance(fmt, str) or fmt not in STORED:
        hint = "; formats are spelled in lower case" if isinstance(fmt, str) and fmt.lower() in STORED else ""
        raise BadParamError(f"fmt: expected one of {', '.join(map(repr, STORED))}, got {fmt!r}{hint}")
    return STORED[fmt]


def lookup_weight(fmt: object) -> BlockFormat:
    """The weight format of this name; BadParamError if there is none, also for a format of activations and a K-quant."""
    description = lookup(fmt)
    if not description.is_weight:
        raise BadParamError(f"fmt: expected the format of a weight, one of {', '.join(map(repr, WEIGHT_FORMATS))}, got {fmt!r}")
    return description
