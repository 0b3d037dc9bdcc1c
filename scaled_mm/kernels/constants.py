"""The constants of the model of a kernel's time for kernel configs without fitted times. `scaled_mm.kernels.time_model` has the formula."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Constants:
    """Microseconds, and ratios to the GPU's peak rates. Fitted to kernel configs of sm90 (docs/design/autotuner.md), unless stated otherwise."""

    tile_us: float = 1.38  # of a thread block's tile, and of the launch
    edge_us: float = 0.0151  # more, for each element of the edge of a square tile of the same size
    pingpong: float = 0.081  # the part of these that each further tile of a thread block costs
    cooperative: float = 0.583
    one_tile: float = 0.758  # the same of a thread block that computes one tile
    multiply: float = 1.014  # time of a step's operations, over that at the peak rate
    step_us: float = 0.0072  # of each step of K
    refill_us: float = 0.696  # the latency of loading a stage, which the other stages hide
    decode_us: float = 0.038  # decode: its launch
    decode_step_us: float = 0.0181  # decode: a step of K
    decode_column_us: float = 0.0016  # decode: and for each column of the tile
    memory: float = 0.979  # of the memory's bandwidth
    l2: float = 84.8e3  # bytes per microsecond that an SM receives from L2, if all do
    wait_us: float = 1.5  # not fitted: what loading constant weights early saves
    split_us: float = 2.0  # not fitted: c2x kernels that split K clear counters in the workspace
    stream_k_us: float = 9.0  # not fitted: stream-K clears counters and adds sums in the workspace; what fitted starts exceed the estimate by
    wgmma_promotion: float = 0.7  # not fitted (docs/decisions/0023): block-scaled wgmma: the fraction of the rate that the additions leave
    # By hand, so that the choice among sm80's, sm90's block-scaled and sm90's grouped kernel configs on an H100 loses least (docs/decisions/0020):
    part_us: float = 0.5  # c2x that splits K: of a tile, for each part of K
    part_traffic: float = 4.0  # the same: how often a part's sums go between an SM and L2
    promotion: float = 0.5  # block-scaled: the fraction of the tensor cores' rate that the float32 additions leave
    map_us: float = 0.8  # grouped c3x: of a tile, to edit its tensor maps


FITTED = Constants()
