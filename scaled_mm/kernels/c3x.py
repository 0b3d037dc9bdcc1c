"""c3x: CUTLASS 3.x on SM90, with TMA and wgmma.

Sources of the rules: the static assertions of CUTLASS's SM90 kernels (schedules, tile sizes) and the PTX ISA's wgmma shapes for s8.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from scaled_mm.kernels.arch import CLUSTER_SIZES, KIB, MAX_CLUSTER, WARPGROUP, Arch
from scaled_mm.kernels.config import KernelConfig
from scaled_mm.kernels.constants import Constants
from scaled_mm.kernels.dtypes import MAX_OUT_BYTES, OUT_DTYPES
from scaled_mm.kernels.family import Code, FieldFinding, KernelCost
from scaled_mm.kernels.grouped import Grouped
from scaled_mm.kernels.naming import candidate, short_options
from scaled_mm.kernels.wgmma import ALL_WIDTHS, USUAL_WIDTHS, WgmmaFamily

# CUTLASS gives a consumer thread 240 registers. The others hold addresses and the epilogue's values.
MAX_ACCUMULATORS = 224
SWIZZLE_ROWS = 8  # the 128-byte shared memory swizzle repeats every 8 rows
SCHEDULES = {"warp_specialized": "ws", "pingpong": "pp", "cooperative": "co"}  # in names
_CXX_SCHEDULES = {"warp_specialized": "WarpSpecialized", "pingpong": "Pingpong", "cooperative": "Cooperative"}
_STREAM_K = "sk"  # in names, in place of the schedule
_LEAST_STEPS = 8  # of K in a part of a tile: min_iters_per_sk_unit_ of CUTLASS's PersistentTileSchedulerSm90StreamKParams
_CXX_RASTERS = {"heuristic": "Heuristic", "along_m": "AlongM", "along_n": "AlongN"}

# Candidates. The epilogue stores each of these tile n in pieces of 8, 16 or 32 columns.
_TILE_M = (64, 128, 256)
_TILE_N = (8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_TILE_K = (128, 256)
_CLUSTERS = ((1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (2, 2))
_STAGES = ("auto", 3, 4, 5, 6, 8, 10)  # with fewer stages than fit, two thread blocks share an SM
_SWIZZLES = (1, 2, 4, 8)
_PREFETCH = (0, 1024)


def epilogue_bytes(config: KernelConfig, out_bytes: int = MAX_OUT_BYTES, warpgroups: int | None = None) -> int:
    """Shared memory of the epilogue: two buffers for the TMA store and four fp32 or int32 vectors.

    The store writes pieces of (64, or 128 if two warpgroups share the tile) x 32 elements, as in CUTLASS's SM90 epilogue builder; gemm.cuh stores 16
    columns of the widest tiles, so this is an upper bound. The vectors run along the tile's n: scale, bias, zero
    point and the sums that correct for it. warpgroups: that share the tile; default: those of the schedule.
    """
    tile = config.tile
    piece_m = min(64 * (warpgroups or (2 if config.schedule == "cooperative" else 1)), tile.m)
    piece_n = next(n for n in (32, 16, 8, 4, 2, 1) if tile.n % n == 0)
    pieces = (tile.m // piece_m) * (tile.n // piece_n)
    return _round_up(min(pieces, 2) * piece_m * piece_n * out_bytes + 4 * 4 * tile.n, 128)


def early_weights(tile_m: int, tile_n: int, swap_ab: bool, prefetch: int) -> bool:
    """Whether a candidate loads constant weights early. The rule follows sm90.yaml, whose kernel configs may differ from it.

    True for swapped operands with a narrow tile, and for 64-row tiles that do not prefetch the weights into L2.
    """
    return tile_n <= 64 if swap_ab else tile_m == 64 and not prefetch


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class C3x(WgmmaFamily):
    """Products."""

    name = "c3x"
    fields = ("tile", "cluster", "schedule", "scheduler", "swap_ab", "raster", "swizzle", "prefetch", "early_weights", "stages", "split_k")
    store_bytes = 16
    auto_stages = True
    compile_order = 4
    compiled_in_pairs = True
    mma_widths = ALL_WIDTHS
    stream_k_schedules = ("cooperative",)
    widest_pingpong: int | None = 160  # tile n of 128 rows; of wider ones, kernels with four-byte outputs are cooperative (csrc/int8/c3x/gemm.cuh)

    def consumer_warpgroups(self, config: KernelConfig, out_bytes: int = MAX_OUT_BYTES) -> int:
        """Warpgroups that share one tile's accumulators. Pingpong also has two, but each computes its own tile."""
        wide = self.widest_pingpong is not None and config.schedule == "pingpong" and config.tile.m == 128 and config.tile.n > self.widest_pingpong
        return 2 if config.schedule == "cooperative" or (wide and out_bytes == 4) else 1

    def cost(self, config: KernelConfig, limit: int, out_bytes: int = MAX_OUT_BYTES) -> KernelCost:
        """stages = (shared memory - epilogue) / (tile_m * tile_k + tile_n * tile_k + 16 bytes of barriers), as CUTLASS's
        StageCountAutoCarveout counts them."""
        stage = _round_up((config.tile.m + config.tile.n) * config.tile.k, 128) + 16
        warpgroups = self.consumer_warpgroups(config, out_bytes)
        epilogue = epilogue_bytes(config, out_bytes, warpgroups)
        stages = max(0, limit - epilogue) // stage if config.stages == "auto" else config.stages
        most = max(self.accumulators(config, dtype.bytes) for dtype in OUT_DTYPES.values())
        return KernelCost(stage, epilogue, stages, epilogue + stages * stage, most)

    def accumulators(self, config: KernelConfig, out_bytes: int) -> int:
        return -(-config.tile.m * config.tile.n // (WARPGROUP * self.consumer_warpgroups(config, out_bytes)))

    # ---- legality -------------------------------------------------------------------------------------------------------

    def rules(self, config: KernelConfig, arch: Arch) -> Iterator[FieldFinding]:
        yield from _tile_and_schedule(config)
        yield from _cluster(config)
        yield from self._resources(config, arch)

    def _resources(self, config: KernelConfig, arch: Arch) -> Iterator[FieldFinding]:
        limit, cost = arch.shared_memory, self.cost(config, arch.shared_memory)
        if cost.accumulators > MAX_ACCUMULATORS:
            threads = config.tile.m * config.tile.n // cost.accumulators
            what = f"{config.tile.m} x {config.tile.n} accumulators over {threads} threads"
            yield "tile", f"{what} are {cost.accumulators} registers per thread, at most {MAX_ACCUMULATORS} stay out of local memory"
        if config.stages == "auto" and cost.stages < 2:
            what = f"one stage of {cost.stage_bytes} bytes beside an epilogue of {cost.epilogue_bytes}"
            yield "tile", f"{what}: {cost.stages} fit in the {limit} bytes of {arch.name}, a pipeline needs 2"
        elif config.stages != "auto" and config.stages < 2:
            yield "stages", f"stages = {config.stages}, a pipeline needs at least 2"
        elif cost.shared_memory > limit:
            what = f"{cost.stages} stages of {cost.stage_bytes} bytes and an epilogue of {cost.epilogue_bytes}"
            yield "stages", f"{what} are {cost.shared_memory} bytes of shared memory, {arch.name} has {limit}"

    # ---- C++ ------------------------------------------------------------------------------------------------------------

    def code(self, config: KernelConfig, built_for: str, limit: int) -> Code:
        early = "true" if config.early_weights else "false"
        options = f"scaled_mm::c3x::Raster::{_CXX_RASTERS[config.raster]}, {config.swizzle}, {config.prefetch}, {early}"
        return Code(
            "int8/c3x/gemm.cuh" if config.tile.n in USUAL_WIDTHS else "int8/c3x/extended_gemm.cuh",
            f"scaled_mm::c3x::Gemm<{_shape(config)}, scaled_mm::c3x::{_schedule(config)}, {options}, {OUT_DTYPES[built_for].cxx}>",
        )

    # ---- the autotuner --------------------------------------------------------------------------------------------------

    def config_name(self, config: KernelConfig) -> str:
        """The name omits raster, and early_weights, which follows from the other fields (`early_weights`)."""
        stages = "" if config.stages == "auto" else config.stages
        options = short_options(("s", config.swizzle, 1), ("p", config.prefetch, 0), ("x", stages, ""))
        cluster = "" if config.cluster == (1, 1) else f"_c{config.cluster.m}{config.cluster.n}"
        schedule = _STREAM_K if config.scheduler == "stream_k" else SCHEDULES[config.schedule]
        return f"c3x_{config.tile}_{schedule}{cluster}{'_swap' if config.swap_ab else ''}{options}"

    def candidates(self, arch: Arch) -> Iterator[KernelConfig]:
        half = (arch.shared_memory - KIB) // 2
        grid = itertools.product(_TILE_M, _TILE_N, _TILE_K, SCHEDULES, _CLUSTERS, (False, True), _SWIZZLES, _PREFETCH, _STAGES)
        for m, n, k, schedule, cluster, swap_ab, swizzle, prefetch, stages in grid:
            # Skips candidates that the rules would refuse, and duplicates: faster than creating the config.
            if schedule == "warp_specialized" and swizzle > 1:
                continue
            if stages != "auto" and (stages * (m + n) * k > half or schedule != "warp_specialized"):
                continue  # only two non-persistent thread blocks share an SM, with half of the shared memory each
            if prefetch and schedule == "pingpong":
                continue  # pingpong computes several tiles per thread block, so the first tile's loads matter little
            fields = dict(tile=[m, n, k], schedule=schedule, cluster=list(cluster), swap_ab=swap_ab, stages=stages)
            yield candidate(self, **fields, swizzle=swizzle, prefetch=prefetch, early_weights=early_weights(m, n, swap_ab, prefetch))
            if schedule in self.stream_k_schedules and swizzle == 1 and not prefetch:
                yield candidate(self, **fields, scheduler="stream_k")

    def least_steps(self, config: KernelConfig) -> int:
        return _LEAST_STEPS if config.scheduler == "stream_k" else 0

    def epilogue_overlaps(self, config: KernelConfig) -> bool:
        return config.schedule == "pingpong"

    def start_us(self, config: KernelConfig, c: Constants) -> float:
        return c.stream_k_us * (config.scheduler == "stream_k")

    def resident(self, config: KernelConfig, cost: KernelCost, shared_memory: int) -> int:
        return super().resident(config, cost, shared_memory) if config.schedule == "warp_specialized" else 1  # 1: persistent


class GroupedC3x(Grouped, C3x):
    """Grouped products."""

    mma_widths = USUAL_WIDTHS
    stream_k_schedules = ()
    widest_pingpong = None

    def code(self, config: KernelConfig, built_for: str, limit: int) -> Code:
        # Visits tiles along the tokens first, so that consecutive tiles share the weights. With swapped operands the tokens are the MMA's n.
        raster = {"heuristic": "along_n" if config.swap_ab else "along_m"}.get(config.raster, config.raster)
        options = f"scaled_mm::c3x::Raster::{_CXX_RASTERS[raster]}, {config.swizzle}"
        return Code(
            "int8/grouped/c3x.cuh",
            f"scaled_mm::grouped::C3x<{_shape(config)}, scaled_mm::grouped::{_schedule(config)}, {options}, {OUT_DTYPES[built_for].cxx}>",
        )

    def tile_us(self, config: KernelConfig, c: Constants) -> float:
        return c.map_us


def _shape(config: KernelConfig) -> str:
    return f"{config.tile.m}, {config.tile.n}, {config.tile.k}, {config.cluster.m}, {config.cluster.n}"


def _schedule(config: KernelConfig) -> str:
    """The schedule, the number of stages (0: auto), and whether operands are swapped."""
    stages = 0 if config.stages == "auto" else config.stages
    schedule = "StreamK" if config.scheduler == "stream_k" else _CXX_SCHEDULES[config.schedule]
    return f"{schedule}, {stages}, {'true' if config.swap_ab else 'false'}"


def _tile_and_schedule(config: KernelConfig) -> Iterator[FieldFinding]:
    m, n, k = config.tile
    if m % 64 or m > 256:
        yield "tile", f"tile m = {m}; wgmma needs a multiple of 64, TMA one of at most 256"
    if n % 8 or n > 256:
        yield "tile", f"tile n = {n}; wgmma needs a multiple of 8, at most 256"
    if k % 32:
        yield "tile", f"tile k = {k}; an INT8 wgmma takes 32 along k, so a multiple of 32"
    if config.schedule is None:
        yield "schedule", "a c3x row needs a schedule: warp_specialized, pingpong or cooperative"
    if config.schedule == "cooperative" and m % 128:
        yield "schedule", f"cooperative splits the tile between two warpgroups of 64 rows: tile m = {m} is no multiple of 128"
    if config.schedule == "pingpong" and m not in (64, 128):
        yield "schedule", f"pingpong gives a whole tile to one warpgroup: tile m = {m}, expected 64 or 128"
    if config.scheduler == "stream_k":
        yield from _stream_k(config)
    if config.split_k > 1:
        yield "split_k", "c3x divides K by scheduler: stream_k; leave split_k out"
    if config.prefetch % k:
        yield "prefetch", f"prefetch = {config.prefetch} bytes of K; whole tiles of {k} are asked for"
    if config.schedule == "warp_specialized":
        for field, value, default in (("raster", config.raster, "heuristic"), ("swizzle", config.swizzle, 1)):
            if value != default:
                yield field, f"{value} orders the tiles of a persistent grid; warp_specialized gives each block one tile"


def _stream_k(config: KernelConfig) -> Iterator[FieldFinding]:
    if config.schedule not in C3x.stream_k_schedules:
        yield "scheduler", f"stream_k divides the tiles of cooperative kernels; this one is {config.schedule}"
    if config.prefetch:
        yield "prefetch", "leave it out of a stream_k row: a thread block's first step of K need not be the tile's"
    if config.swizzle > 1:
        yield "swizzle", "leave it out of a stream_k row: it would divide padding tiles of the swizzle"


def _cluster(config: KernelConfig) -> Iterator[FieldFinding]:
    for axis, size in zip("mn", config.cluster, strict=True):
        if size not in CLUSTER_SIZES:
            yield "cluster", f"cluster {axis} = {size}, expected one of {', '.join(map(str, CLUSTER_SIZES))}"
            return
    if (blocks := config.cluster.m * config.cluster.n) > MAX_CLUSTER:
        yield "cluster", f"{config.cluster} is {blocks} thread blocks; {MAX_CLUSTER} is the most that every GPU can schedule"
    # TMA multicast: the thread blocks along m share the n side of the tile, of which each loads a part; and vice versa.
    for side, size, axis, parts in (("n", config.tile.n, "m", config.cluster.m), ("m", config.tile.m, "n", config.cluster.n)):
        if size % (parts * SWIZZLE_ROWS) and size % SWIZZLE_ROWS == 0:
            what = f"the {parts} blocks along {axis} share tile {side} = {size}"
            yield "cluster", f"{what}: each part must be a multiple of {SWIZZLE_ROWS} rows"
