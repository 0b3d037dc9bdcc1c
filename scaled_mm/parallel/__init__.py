"""Tensor parallelism with the same bits on any number of GPUs or processes, over torch.distributed (NCCL on GPUs, gloo on CPUs).

Rooms: `ranks` (the processes of a group, and what they must agree on), `collectives`, `functional` (the row-parallel product), `linear` (modules),
`model` (`parallelize_`), `cost` (a simulated cost model; imported by who wants it).
"""

from scaled_mm.parallel.functional import all_reduce_linear, reduce_scatter_linear
from scaled_mm.parallel.linear import ColumnParallelInt8Linear, RowParallelInt8Linear
from scaled_mm.parallel.model import parallelize_
from scaled_mm.parallel.ranks import rows_of

__all__ = ["ColumnParallelInt8Linear", "RowParallelInt8Linear", "all_reduce_linear", "parallelize_", "reduce_scatter_linear", "rows_of"]
