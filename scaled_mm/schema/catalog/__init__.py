"""The source of this package's schemas: one Entry per definition, one module per kind of operator.

`python -m scaled_mm.schema.catalog` writes schemas/ from these entries, except traces, which are measured. To add a definition, yield an Entry
from `entries` of a module. Tests check that the files match the catalog.
"""

from __future__ import annotations

from collections.abc import Iterator

from scaled_mm.schema.catalog import attention, elementwise, gemm, moe, quantization
from scaled_mm.schema.catalog.entry import Entry


def entries() -> Iterator[Entry]:
    for module in (gemm, quantization, elementwise, attention, moe):
        yield from module.entries()
