"""Tile tables: which kernels an architecture has, and which of them serves which (M, N, K).

`load_table("sm90")` reads and checks `cutlass_configs/sm90.yaml`; `TileTable.select(M, N, K)` selects a kernel config. This package imports
pydantic and PyYAML, so `import scaled_mm` does not import it.
"""

from scaled_mm.kernels.config import ClusterShape, KernelConfig, TileShape
from scaled_mm.tables.loader import available_tables, check_table, configs_dir, load_table
from scaled_mm.tables.schema import Bucket, KernelRow, Problem, TableError, TileTable, Times
from scaled_mm.tables.select import FASTEST, Selection, time_fields

__all__ = [
    "FASTEST",
    "Bucket",
    "ClusterShape",
    "KernelConfig",
    "KernelRow",
    "Problem",
    "Selection",
    "TableError",
    "TileShape",
    "TileTable",
    "Times",
    "available_tables",
    "check_table",
    "configs_dir",
    "load_table",
    "time_fields",
]
