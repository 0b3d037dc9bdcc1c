"""The constants of the model of a kernel's time. `scaled_mm.autotune.model` has the formula."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Constants:
    """Times in microseconds, rates as fractions of the GPU's peak. Fitted, unless stated otherwise. `decode_*` is for the decode family only,
    `split_us` for c2x only."""

    start_us: float = 2.04
    latency_us: float = 0.917
    dram: float = 0.837  # of the memory's bandwidth
    tensor: float = 0.895  # of the peak operations
    power: float = 9.23  # slowdown of operations per (1 / tile m + 1 / tile n)
    l2: float = 2.7  # L2's bandwidth, relative to the memory's
    epilogue_us: float = 1.72
    store: float = 0.744  # of the memory's bandwidth, for a thread block's stores
    wave_us: float = 0.257  # between one thread block and the next
    ws_us: float = 2.42  # of a grid that is not persistent and has more than one wave
    cluster_us: float = 0.488  # for each further thread block in a cluster
    swap_us: float = 0.00012
    reread: float = 0.138  # the part of each wave's operands that is read from memory again
    padding: float = 0.2  # not fitted: the cost of loading rows past the end, relative to the memory's time (decision 0007: up to 30%)
    pressure: float = 0.15  # not fitted: slowdown where accumulators leave a thread few registers
    prefetch_us: float = 0.3  # not fitted: the measured kernel configs prefetch only where it helps
    split_us: float = 2.0  # not fitted: no measured c2x kernel config splits K
    decode_us: float = -1.75  # by hand: decode kernels load weights before the preceding kernel has ended (decision 0012)
    decode_split_us: float = 0.8  # by hand: for each halving of K
    decode_step_us: float = 0.24  # by hand: the least time of a thread block's step of K
    decode_column_us: float = 0.0017  # by hand: the addition per column of the tile
    decode_multiply: float = 2.6  # by hand: slowdown of wide MMAs, which overlap with nothing
    refill_us: float = 0.4  # by hand: the latency of loading a stage


FITTED = Constants()  # see docs/design/autotuner.md
