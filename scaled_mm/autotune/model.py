"""A predicted time for a row on a product: which candidates are worth measuring, and what to take where nothing was measured.

    time = start + max(memory, waves * block)                                                        microseconds
    start   what a launch costs, less what prefetch or early weights hide of the first loads
    memory  the compulsory bytes (`roofline.traffic_bytes`) over the bandwidth that the bytes in flight sustain:
            min(bandwidth, multiprocessors in use * stages in flight / latency)                       Little's law
            or what the blocks of all waves fetch, where tiles lie so that a wave needs much of both operands
    waves   ceil(blocks / (multiprocessors * blocks per multiprocessor)), whole clusters, whole splits of K
    block   max(multiply, load, refill) * steps of K + epilogue: each block computes a whole tile, so M and N are padded to it
              multiply  the tile's operations over a multiprocessor's rate; narrow tiles wait for shared memory instead of the
                        tensor cores, and what is fetched per operation costs power, which sets the clock (decision 0004)
              load      bytes of the tile's two sides, shared within a cluster, over a multiprocessor's share of L2
              refill    a step and the time to fetch one, over the stages that are not being read: few stages hide little
              A decode block waits for each step's wgmma before it takes the next: it needs a least time for a step

What differs between kernel families (resident blocks, rate, refill, start) is theirs to say: `scaled_mm.kernels`, which has the constants
too. They were fitted once to the H200's rows (tests/autotune/fit_model.py); docs/design/autotuner.md says how well it does there.
For other GPUs the facts change and the constants stay: a guess, which is why the autotuner measures.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection, Mapping, Sequence

from scaled_mm.errors import BadParamError
from scaled_mm.kernels.arch import ARCHES, GPUS, KIB, Gpu
from scaled_mm.kernels.config import KernelConfig
from scaled_mm.kernels.constants import FITTED, Constants
from scaled_mm.kernels.registry import config_cost, family_of
from scaled_mm.measure.roofline import traffic_bytes

Product = tuple[int, int, int]  # M, N, K


@dataclasses.dataclass(frozen=True)
class GpuFacts:
    """What the model knows of a GPU. Operations per second (dense INT8), bytes per second, bytes of shared memory per multiprocessor."""

    arch: str
    multiprocessors: int
    operations: float
    bandwidth: float

    @property
    def shared_memory(self) -> int:
        return ARCHES[self.arch].shared_memory + KIB  # a block's limit leaves 1 KiB to the system


def facts(gpu: str, arch: str, multiprocessors: int) -> GpuFacts:
    """Facts of a GPU by the driver's name for it; for an unknown one those of a common GPU of its table, scaled.

    arch: that of the table which serves the GPU. BadParamError for one without a table.
    """
    common = typical(arch)
    if gpu in GPUS:
        return GpuFacts(arch, multiprocessors, GPUS[gpu].operations, GPUS[gpu].bandwidth)
    scale = multiprocessors / common.multiprocessors
    return GpuFacts(arch, multiprocessors, common.operations * scale, common.bandwidth * scale)


def typical(arch: str) -> GpuFacts:
    """Facts of a common GPU of an architecture's table, for where there is none to ask. BadParamError if no such GPU is known."""
    gpu: Gpu | None = ARCHES[arch].typical if arch in ARCHES else None
    if gpu is None:
        known = ", ".join(one.name for one in ARCHES.values() if one.typical)
        raise BadParamError(f"arch: expected one of {known}, got {arch!r}")
    return GpuFacts(arch, gpu.multiprocessors, gpu.operations, gpu.bandwidth)


_MANY_ACCUMULATORS = 192


def predict(row: KernelConfig, product: Product, gpu: GpuFacts, c: Constants = FITTED) -> float:
    """Microseconds of out [M,N] = a [M,K] x b [K,N] with 16-bit out. Positive, finite."""
    M, N, K = product
    family, tile = family_of(row), row.tile
    cost = config_cost(row, gpu.arch, family.model_out_bytes)
    over_m, over_n = (N, M) if row.swap_ab else (M, N)  # of the MMA
    tiles_m = math.ceil(math.ceil(over_m / tile.m) / row.cluster.m) * row.cluster.m
    tiles_n = math.ceil(math.ceil(over_n / tile.n) / row.cluster.n) * row.cluster.n
    blocks = tiles_m * tiles_n * row.split_k
    resident = family.resident(row, cost, gpu.shared_memory)
    slots = gpu.multiprocessors * resident
    waves = math.ceil(blocks / slots)
    together = min(resident, math.ceil(blocks / gpu.multiprocessors))  # blocks that share a multiprocessor

    steps = math.ceil(K / row.split_k / tile.k)
    per_operation = 1 / tile.m + 1 / tile.n
    rate = gpu.operations / gpu.multiprocessors * c.tensor / 1e6 * family.multiply_rate(row, c)  # operations per microsecond
    multiply = 2 * tile.m * tile.n * tile.k / rate * (1 + c.power * per_operation)
    if (cost.accumulators or 0) > _MANY_ACCUMULATORS:
        multiply *= 1 + c.pressure
    fetched = (tile.m / row.cluster.n + tile.n / row.cluster.m) * tile.k
    load = fetched / (gpu.bandwidth * c.l2 / gpu.multiprocessors / 1e6)
    epilogue = c.epilogue_us + 2 * tile.m * tile.n / (gpu.bandwidth * c.store / gpu.multiprocessors / 1e6)
    if row.schedule == "pingpong" and waves > 1:
        epilogue /= 2  # behind the other warpgroup's main loop, but for the last
    step = family.step_us(row, cost, together * max(multiply, load), multiply, c)
    block = step * steps + epilogue + c.wave_us

    in_use = min(blocks, slots) / resident if blocks < slots else gpu.multiprocessors
    useful = min(tile.m, over_m) + min(tile.n, over_n)  # rows beyond M or N are filled with zeros, and bring nothing
    in_flight = in_use * together * cost.stages * tile.k * useful
    sustained = min(gpu.bandwidth * c.dram, in_flight / c.latency_us * 1e6)
    memory = max(traffic_bytes(M, N, K), c.reread * waves * _wave_bytes(row, (tiles_m, tiles_n), slots, K)) / sustained * 1e6
    memory *= 1 + c.padding * (1 - useful / (tile.m + tile.n))

    start = c.start_us + family.start_us(row, c) - c.prefetch_us * (row.prefetch > 0)
    start += c.ws_us * (row.schedule == "warp_specialized" and blocks > slots)
    start += c.cluster_us * (row.cluster.m * row.cluster.n - 1) + c.swap_us * row.swap_ab
    return start + max(memory, waves * block)


def _wave_bytes(row: KernelConfig, tiles: tuple[int, int], slots: int, K: int) -> float:
    """Bytes of both operands that the blocks of one wave need: the grid walks the shorter dimension, `swizzle` tiles side by side."""
    across = 1 if tiles[1] > tiles[0] else 0  # the longer dimension
    along_count, across_count = tiles[1 - across], tiles[across]
    along = min(along_count, math.ceil(slots / row.swizzle))
    wide = min(across_count, row.swizzle * math.ceil(slots / row.swizzle / along_count))
    edge = (row.tile.m, row.tile.n)
    return (along * edge[1 - across] + wide * edge[across]) * K


def shortlist(rows: Sequence[KernelConfig], known: Collection[str], product: Product, gpu: GpuFacts, count: int) -> list[KernelConfig]:
    """The `count` rows that are worth measuring, by predicted time: half of them from `known`, the names of rows that have proven good.

    Rows that differ in cluster, swizzle, stages or schedule alone are nearly equal to the model. At most two of one tile and side
    are taken, so that they are not all of the list.
    """

    def rank(row: KernelConfig) -> tuple:
        stages = -row.stages if isinstance(row.stages, int) else -math.inf  # of rows that are equal, those that hide more latency
        return predict(row, product, gpu), row.cluster, row.swizzle, stages, row.name

    ranked = sorted(rows, key=rank)
    found = [row for row in ranked if row.name in known][: count // 2]
    taken: dict[tuple, int] = {}
    for row in ranked:
        kind = (row.tile.m, row.tile.n, row.swap_ab, row.split_k)
        taken[kind] = taken.get(kind, 0) + 1
        if len(found) < count and taken[kind] <= 2 and row not in found:
            found.append(row)
    return sorted(found, key=ranked.index)


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """The model's first choice among the measured rows of each product. Losses: its time over the best one's, minus one.

    top1, top3: products whose best row is the model's first, or among its first three. chance: the median loss of all rows.
    """

    products: int
    top1: int
    top3: int
    median_loss: float
    mean_loss: float
    worst_loss: float
    chance: float


def accuracy(times: Mapping[Product, Mapping[str, float]], rows: Mapping[str, KernelConfig], gpu: GpuFacts, c: Constants = FITTED) -> Accuracy | None:
    """How well the model predicts measured winners; of products with two rows or more, None where there are none.

    times: microseconds by product and row; rows: by name.
    """
    losses, everyone, top1, top3 = [], [], 0, 0
    for product, us in times.items():
        if len(us) < 2:
            continue
        best = min(us.values())
        ranked = sorted(us, key=lambda name: (predict(rows[name], product, gpu, c), name))
        losses.append(us[ranked[0]] / best - 1)
        everyone += [time / best - 1 for time in us.values()]
        top1 += us[ranked[0]] == best
        top3 += any(us[name] == best for name in ranked[:3])
    if not losses:
        return None
    return Accuracy(len(losses), top1, top3, statistics.median(losses), statistics.mean(losses), max(losses), statistics.median(everyone))
