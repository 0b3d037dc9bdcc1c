"""The constants of a kernel's predicted time (`scaled_mm.autotune.model`, which has the formula)."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Constants:
    """What was fitted. Times in microseconds, rates as fractions of the GPU's peak. `decode_` and `split_us` are of one family each."""

    start_us: float = 2.04
    latency_us: float = 0.917
    dram: float = 0.837  # of the memory's bandwidth
    tensor: float = 0.895  # of the peak operations
    power: float = 9.23  # slowdown of operations by 1 / tile m + 1 / tile n
    l2: float = 2.7  # L2's bandwidth, of the memory's
    epilogue_us: float = 1.72
    store: float = 0.744  # of the memory's bandwidth, for what a block writes
    wave_us: float = 0.257  # between one block and the next
    ws_us: float = 2.42  # of a grid that is not persistent and has more than one wave
    cluster_us: float = 0.488  # for each further block in a cluster
    swap_us: float = 0.00012
    reread: float = 0.138  # of what each wave's blocks need, how much comes from memory again
    padding: float = 0.2  # not fitted: what loads of rows that do not exist cost, of the memory's time (decision 0007: up to 30%)
    pressure: float = 0.15  # not fitted: slowdown where accumulators leave a thread few registers
    prefetch_us: float = 0.3  # not fitted: the measured rows have it where it helps
    split_us: float = 2.0  # not fitted: no measured c2x row splits K
    decode_us: float = -1.75  # by hand: of a decode row, whose blocks hold weights before the preceding kernel has ended (decision 0012)
    decode_split_us: float = 0.8  # by hand: for each time that a decode row halves K
    decode_step_us: float = 0.24  # by hand: the least time of a decode block's step of K
    decode_column_us: float = 0.0017  # by hand: what each column of the tile adds to that
    decode_multiply: float = 2.6  # by hand: what a decode block's wide MMAs take, which nothing overlaps with others
    refill_us: float = 0.4  # by hand: from asking for a stage to having it


FITTED = Constants()  # see docs/design/autotuner.md
