"""The predicted time of a kernel on a product. It chooses the kernel in a bucket of `kernel: fastest`, and the candidates of the autotuner.

    time    = start + sqrt(compute^2 + memory^2 + l2^2)                              microseconds
    compute = steps * step + waves * tile, or sqrt((steps * step)^2 + (waves * tile)^2) where a tile's epilogue overlaps another's steps (pingpong)
    waves   = ceil(units / units that run at a time)     a unit is a cluster, or the thread blocks that share a tile's K.
              M and N are rounded up to whole units. With mean_m, M is the mean number of rows of an expert,
              and there are max(1, M / unit_m + 0.5) units along M
    steps   = waves * ceil(K / elements of K in a step of all parts)
              stream-K divides the steps of all units evenly, if a unit has at least twice the fewest of a part: units * ceil(...) / units that run
              at a time, but at least the fewest
    memory  = (M * K + N * K + 2 * M * N) / (memory coefficient * bandwidth of device memory)
    l2      = what all units load, over what an SM receives from L2

GGUF kernel configs add floats in different orders, so their last bits differ, and the choice between them must not depend on a GPU's bandwidth. Their
formula leaves the memory out, whose time is nearly the same for all of them. Thread blocks share the tiles that remain after whole waves (`sharing`):

    time    = start + steps * step + waves * tile + (sharing if tiles are shared) + (two_tiles if a thread block then has parts of two tiles)
    steps   = whole waves * ceil(K / elements of K in a step) + ceil(steps of the shared tiles / thread blocks that share them)

Where a cluster shares the K of every tile, tiles are the units (`cluster_blocks`):

    time    = start + waves * (ceil(steps of a tile / thread blocks of a cluster) * step + tile)

The coefficients start, step, tile, sharing, two_tiles (microseconds) and memory are fitted to measured times, in the table's `times`. For a kernel
config without an entry they follow from the architecture's numbers (`estimate`); in the section gguf it has no predicted time.
csrc/core/time_model.cpp computes the same; a test compares them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from scaled_mm.kernels.config import KernelConfig
from scaled_mm.kernels.constants import FITTED, Constants
from scaled_mm.kernels.gpu import GpuFacts, typical
from scaled_mm.kernels.registry import config_cost, family_of
from scaled_mm.kernels.sharing import cluster_blocks, sharing_blocks, usable_multiprocessors

OUT_BYTES = 2  # of an output element, for which times are predicted


class Parts(NamedTuple):
    """A predicted time, in microseconds; see the formula."""

    start: float
    compute: float
    memory: float
    l2: float
    waves: int

    @property
    def us(self) -> float:
        if not (self.memory or self.l2):
            return self.start + self.compute
        return self.start + math.sqrt(self.compute * self.compute + self.memory * self.memory + self.l2 * self.l2)

    def __str__(self) -> str:
        waves = f"{self.waves} wave{'s' * (self.waves != 1)}"
        return f"start {self.start:.3g}, compute {self.compute:.3g} in {waves}, memory {self.memory:.3g}, L2 {self.l2:.3g}"


@dataclasses.dataclass(frozen=True)
class TimeModel:
    """The coefficients of one kernel config.

    unit_m, unit_n: rows and columns of out that a unit computes. unit_k: elements of K in one step of all its parts.
    blocks: thread blocks of a unit. cluster: of these, those in one cluster; of the third formula, the most of a cluster.
    resident: thread blocks on an SM at a time.
    least_steps: the fewest of a part of a unit; 0: units are not divided.
    epilogue_overlaps: see the formula.
    start_us, step_us, tile_us, memory: see the formula. wait_us: in addition if weights are not constant, where constant ones are loaded early.
    l2: bytes per microsecond that one SM receives from L2.
    most_parts: of the second formula: the largest average number of thread blocks for a shared tile; 1 for the third, 0 for the first.
    sharing_us, two_tiles_us: see the second formula.
    """

    unit_m: int
    unit_n: int
    unit_k: int
    blocks: int
    cluster: int
    resident: int
    least_steps: int
    epilogue_overlaps: bool
    start_us: float
    step_us: float
    tile_us: float
    memory: float
    wait_us: float
    l2: float
    most_parts: int = 0
    sharing_us: float = 0.0
    two_tiles_us: float = 0.0

    def slots(self, multiprocessors: int) -> int:
        """Units that run at a time."""
        return max(1, usable_multiprocessors(self.cluster, multiprocessors) * self.resident // self.blocks)

    def parts(self, M: int, N: int, K: int, gpu: GpuFacts, count: int = 1, constant_b: bool = True, mean_m: bool = False) -> Parts:
        """The predicted time of `count` products out [M,N] = a [M,K] x b [K,N] in one launch. mean_m: M is a mean, see the formula."""
        if self.most_parts:
            return self._shared(M, N, K, gpu, count, constant_b)
        units_m = max(1.0, M / self.unit_m + 0.5) if mean_m else -(-M // self.unit_m)
        units = units_m * -(-N // self.unit_n) * count
        waves = int(-(-units // self.slots(gpu.multiprocessors)))
        of_unit = -(-K // self.unit_k)
        divided = self.least_steps > 0 and of_unit >= 2 * self.least_steps
        steps = max(units * of_unit / self.slots(gpu.multiprocessors), self.least_steps) if divided else waves * of_unit
        multiply, tiles = steps * self.step_us, waves * self.tile_us
        compute = math.sqrt(multiply * multiply + tiles * tiles) if self.epilogue_overlaps else multiply + tiles
        memory = count * (M * K + N * K + OUT_BYTES * M * N) / (self.memory * (gpu.bandwidth * 1e-6))
        l2 = units * (self.unit_m + self.unit_n) * K / (self.l2 * gpu.multiprocessors)
        return Parts(self.start_us + (0.0 if constant_b else self.wait_us), compute, memory, l2, waves)

    def _shared(self, M: int, N: int, K: int, gpu: GpuFacts, count: int, constant_b: bool) -> Parts:
        at_once, of_tile = max(1, gpu.multiprocessors * self.resident), -(-K // self.unit_k)
        tiles = -(-M // self.unit_m) * -(-N // self.unit_n) * count
        start = self.start_us + (0.0 if constant_b else self.wait_us)
        if self.cluster > 1:
            blocks, waves = cluster_blocks(tiles, of_tile, gpu.multiprocessors, self.resident, self.cluster)
            return Parts(start, waves * (-(-of_tile // blocks) * self.step_us + self.tile_us), 0.0, 0.0, waves)
        whole, rest = divmod(tiles, at_once)
        blocks = sharing_blocks(rest, of_tile, at_once, self.most_parts, self.unit_m)
        waves = whole + (rest > 0)
        if blocks == 0:
            compute = waves * (of_tile * self.step_us + self.tile_us)
        else:
            steps = whole * of_tile + -(-rest * of_tile // blocks)
            compute = steps * self.step_us + waves * self.tile_us + self.sharing_us + (self.two_tiles_us if blocks % rest else 0.0)
        return Parts(start, compute, 0.0, 0.0, waves)

    def us(self, M: int, N: int, K: int, gpu: GpuFacts, count: int = 1, constant_b: bool = True, mean_m: bool = False) -> float:
        """The microseconds of `parts` in all. Positive, finite."""
        return self.parts(M, N, K, gpu, count, constant_b, mean_m).us


def estimate(row: KernelConfig, arch: str, c: Constants = FITTED) -> TimeModel:
    """The model of a kernel config from the architecture's numbers. arch: that of its table."""
    family, gpu, tile = family_of(row), typical(arch), row.tile
    cost = config_cost(row, arch, OUT_BYTES)
    resident = family.resident(row, cost, gpu.shared_memory)
    m, n = tile.m * row.cluster.m, tile.n * row.cluster.n
    most_parts = family.most_parts(row)
    split_k = 1 if most_parts else row.split_k
    cluster = row.cluster.m * row.cluster.n * (row.split_k if family.splits_in_clusters else 1)
    peak = gpu.operations / gpu.multiprocessors * 1e-6  # operations per microsecond
    multiply = c.multiply * 2 * tile.m * tile.n * tile.k / peak / family.multiply_rate(row, c)
    # A tile costs more the larger it is; a part of it, by schedule, is hidden behind the next tile, or only paid once.
    each = c.tile_us + c.edge_us * math.sqrt(tile.m * tile.n)
    share = {"pingpong": c.pingpong, "cooperative": c.cooperative}.get(row.schedule or "", c.one_tile)
    early = family.loads_weights_early(row)
    return TimeModel(
        unit_m=n if row.swap_ab else m,
        unit_n=m if row.swap_ab else n,
        unit_k=tile.k * split_k,
        blocks=row.cluster.m * row.cluster.n * split_k,
        cluster=cluster,
        resident=resident,
        least_steps=family.least_steps(row),
        epilogue_overlaps=family.epilogue_overlaps(row),
        start_us=max(0.0, (1 - share) * each + family.start_us(row, c)),
        step_us=resident * family.step_us(row, cost, multiply, c),
        tile_us=share * each + family.tile_us(row, c),
        memory=c.memory,
        wait_us=c.wait_us if early else 0.0,
        l2=c.l2,
        most_parts=most_parts,
    )
