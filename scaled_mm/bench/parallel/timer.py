"""Times a call that all ranks make together. All ranks make the same number of calls, and a time is that of the slowest rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from scaled_mm.parallel.ranks import Ranks

REPLAYS, GRAPH_US, MOST_CALLS = 15, 1000.0, 50
_BUSY_CYCLES = 2_000_000  # about a millisecond


def agreed(us: list[float], ranks: Ranks, device: torch.device) -> list[float]:
    """Of each value the largest of all ranks."""
    values = torch.tensor(us, dtype=torch.float64, device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX, group=ranks.group)
    return values.tolist()


def samples_of(call: Callable[[], object], ranks: Ranks, device: torch.device, graph: bool) -> tuple[list[float], int]:
    """(microseconds of a call, one for each replay; calls in a replay). On a GPU a replay is a CUDA graph, or with graph=False a loop on the host."""
    for _ in range(3):
        call()
    replay, calls = (lambda: call()), 1
    if device.type == "cuda" and graph:
        replay = _graph(call, 1)
    estimate = max(1.0, statistics.median(agreed(_times(replay, 3, ranks, device), ranks, device)))
    calls = max(1, min(MOST_CALLS, round(GRAPH_US / estimate)))
    replay = _graph(call, calls) if device.type == "cuda" and graph else (lambda: [call() for _ in range(calls)])
    found = agreed(_times(replay, REPLAYS, ranks, device), ranks, device)
    return [us / calls for us in found], calls


def _graph(call: Callable[[], object], calls: int) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog queries events in a thread of its own
        for _ in range(calls):
            call()
    return graph.replay


def _times(replay: Callable[[], object], count: int, ranks: Ranks, device: torch.device) -> list[float]:
    """Microseconds of each replay on this rank, from where all ranks are ready."""
    ready, found = torch.zeros(1, device=device), []
    for _ in range(count):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            torch.cuda._sleep(_BUSY_CYCLES)  # meanwhile the host launches what is timed
            dist.all_reduce(ready, group=ranks.group)
            begin.record()
            replay()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) * 1e3)
        else:
            dist.all_reduce(ready, group=ranks.group)
            begin = time.perf_counter()
            replay()
            found.append((time.perf_counter() - begin) * 1e6)
    return found
