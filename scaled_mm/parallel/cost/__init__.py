"""A cost model of tensor and expert parallelism: bytes and latency. Linear layers were compared with two H200s (`linear`); nothing else was
measured on several GPUs.

Rooms: `links` (what connects GPUs), `collectives` (the time of one), `linear` (a linear layer whose input is divided), `experts`.
Times are microseconds, sizes bytes, rates bytes per second. Nothing here needs a GPU or a process group.
"""

from scaled_mm.parallel.cost.collectives import all_gather_us, all_reduce_us, all_to_all_us, fastest, reduce_scatter_us
from scaled_mm.parallel.cost.experts import experts_all_to_all, experts_replicated
from scaled_mm.parallel.cost.linear import WAYS, Prediction, best_chunks, chunk_rows, makespan, predict, product_us, rowwise_us, sent_bytes
from scaled_mm.parallel.cost.links import GPU_LINKS, LINKS, Hosts, Link, facts_of, hosts_of

__all__ = [
    "GPU_LINKS",
    "LINKS",
    "WAYS",
    "Hosts",
    "Link",
    "Prediction",
    "all_gather_us",
    "all_reduce_us",
    "all_to_all_us",
    "best_chunks",
    "chunk_rows",
    "experts_all_to_all",
    "experts_replicated",
    "facts_of",
    "fastest",
    "hosts_of",
    "makespan",
    "predict",
    "product_us",
    "reduce_scatter_us",
    "rowwise_us",
    "sent_bytes",
]
