"""What this package's schemas are made of: one Entry for each definition, a module for each kind of operator.

`python -m scaled_mm.schema.catalog` writes schemas/ from them, but for traces, which are measured. A new definition is an Entry that
`entries` of a module yields; tests hold the files to what is written here.
"""

from __future__ import annotations

from collections.abc import Iterator

from scaled_mm.schema.catalog import attention, elementwise, gemm, quantization
from scaled_mm.schema.catalog.entry import Entry


def entries() -> Iterator[Entry]:
    for module in (gemm, quantization, elementwise, attention):
        yield from module.entries()
