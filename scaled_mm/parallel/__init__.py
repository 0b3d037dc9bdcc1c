"""Tensor parallelism with the same bits on any number of GPUs or processes, over torch.distributed (NCCL on GPUs, gloo on CPUs).

Rooms: `ranks` (the processes of a group, and what they must agree on), `collectives`, `overlap` (sums in chunks), `functional`, `linear`
and `descriptor` (linear layers), `experts` and `int8_experts`, `division` (what of a model is split), `model` (`parallelize_`), `load` (
`from_pretrained` with tp=), `cost` (a cost model, imported where it is needed).
"""

from scaled_mm.parallel.descriptor import ReduceScatterLinearDescriptor, create_reduce_scatter_linear_descriptor
from scaled_mm.parallel.experts import all_reduce_experts, all_to_all_experts
from scaled_mm.parallel.functional import all_gather_rows, all_reduce_linear, gather_linear, reduce_scatter_linear
from scaled_mm.parallel.int8_experts import ExpertParallelInt8Experts
from scaled_mm.parallel.linear import ColumnParallelInt8Linear, RowParallelInt8Linear
from scaled_mm.parallel.model import parallelize_
from scaled_mm.parallel.ranks import part_of

__all__ = [
    "ColumnParallelInt8Linear",
    "ExpertParallelInt8Experts",
    "ReduceScatterLinearDescriptor",
    "RowParallelInt8Linear",
    "all_gather_rows",
    "all_reduce_experts",
    "all_reduce_linear",
    "all_to_all_experts",
    "create_reduce_scatter_linear_descriptor",
    "gather_linear",
    "parallelize_",
    "part_of",
    "reduce_scatter_linear",
]
