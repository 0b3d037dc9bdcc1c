"""Candidate rows of a section: every legal combination of the fields of a row, named as the tables name theirs. No nvcc, no GPU.

Each kernel family crosses values of its fields (`scaled_mm.kernels`); what its rules find nothing against is a candidate. There are
thousands; `model` says which of them are worth compiling for a product.
"""

from __future__ import annotations

import itertools

from scaled_mm.kernels.arch import ARCHES
from scaled_mm.kernels.config import KernelConfig
from scaled_mm.kernels.registry import config_findings, families_of, family_of
from scaled_mm.tables import TileTable


def candidates(table: TileTable) -> list[KernelConfig]:
    """The legal rows for the products of a table, or of a section: its own, then every other combination that its rules let through.

    A table serves several architectures; a candidate is legal on all of them, as the table's own rows are. No generic rows:
    they are the fallback, not rivals. Names are unique; one that the table has means the table's row.
    """
    found = {row.name: row for row in table.rows if family_of(row).tuned}
    served = table.serves or (table.arch,)
    for row in itertools.chain.from_iterable(family.candidates(ARCHES[table.arch]) for family in families_of(table.section)):
        if row.name not in found and not any(config_findings(row, arch) for arch in served):
            found[row.name] = row
    return list(found.values())


def row_name(row: KernelConfig) -> str:
    """The canonical name of a row, from its fields: what makes two rows of a table different is in it."""
    return family_of(row).config_name(row)
