"""The sections of a tile table, one entry for each kind of product."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Section:
    """One section.

    name: its key in a table. The first section is the top level of the table.
    kernel, products: one of its kernels and its products, in messages.
    heading: in `scaled-mm table show`; default: products.
    has_modes: it has the list `auto`, and its buckets may be for one mode, or for formats with minima.
    mean_m: M is the mean number of rows of the experts that have rows.
    same_bits: all kernel configs give the same bits, so that one may stand in for another that is being built.
    k_bounded: a 32-bit accumulator bounds K.
    """

    name: str
    kernel: str
    products: str
    heading: str = ""
    has_modes: bool = False
    mean_m: bool = False
    same_bits: bool = True
    k_bounded: bool = True

    def __post_init__(self):
        if not self.heading:
            object.__setattr__(self, "heading", self.products)


SECTIONS: dict[str, Section] = {
    section.name: section
    for section in (
        Section("gemm", "kernel of plain products", "plain products"),
        Section("grouped", "grouped kernel", "grouped products", "grouped products (M: rows per expert)", mean_m=True),
        Section("block_scaled", "block-scaled kernel", "block-scaled products", k_bounded=False),
        Section(
            "gguf",
            "GGUF kernel",
            "GGUF products",
            "GGUF formats (M: tokens, N: rows of the weight)",
            has_modes=True,
            same_bits=False,
            k_bounded=False,
        ),
        Section(
            "grouped_block_scaled",
            "grouped block-scaled kernel",
            "grouped block-scaled products",
            "grouped block-scaled products (M: rows per expert)",
            mean_m=True,
            k_bounded=False,
        ),
    )
}
"""In the order of scaledMMTableKind_t. A new section is an entry here and a field of `TileTable` (`scaled_mm.tables.schema`)."""

TOP_LEVEL, *_others = SECTIONS
OTHER_SECTIONS: tuple[str, ...] = tuple(_others)
"""Those that are keys of a table, and fields of `TileTable`."""

OF_EXPERTS: tuple[str, ...] = tuple(name for name, section in SECTIONS.items() if section.mean_m)
"""Those of products of experts."""
