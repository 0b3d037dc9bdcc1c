"""c2x: CUTLASS 2.x, mma.sync, on every architecture.

Sources of the rules: CUTLASS's threadblock MMA, and the thread map with which its epilogue stores 16 bytes per thread. The generated sources
assert the shared memory computed here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from scaled_mm.kernels.arch import REGISTERS, WARP_SIZE, Arch
from scaled_mm.kernels.config import KernelConfig
from scaled_mm.kernels.constants import Constants
from scaled_mm.kernels.dtypes import MAX_OUT_BYTES, OUT_DTYPES
from scaled_mm.kernels.family import Code, Family, FieldFinding, KernelCost, mangled
from scaled_mm.kernels.grouped import Grouped
from scaled_mm.kernels.naming import candidate, short_options

MAX_WARPS = 8
# Of a thread's 255 registers. The others hold operand fragments, scales and addresses.
MAX_ACCUMULATORS = 128
_OTHER_REGISTERS = 64  # estimate: registers per thread besides the accumulators
_RESIDENT_WARPS = 2048 // WARP_SIZE  # per SM
_SPLITS = (1, 2, 4, 8)
_ACCESS_BYTES = 16
_OUT_BYTES = tuple({dtype.bytes for dtype in OUT_DTYPES.values()})
_EXCHANGE_ROWS, _EXCHANGE_PADDING = 8, 8  # the epilogue's exchange through shared memory: rows per warp, and padding columns of int32

# Candidates.
_TILE_MN = (16, 32, 64, 128, 256)
_TILE_K = (64, 128)
_WARP_MN = (16, 32, 64)
_STAGES = (3, 4, 5, 6)
_SWIZZLES = (1, 4, 8)


def warps(config: KernelConfig) -> tuple[int, int, int]:
    """Warps along m, n and k of the tile."""
    return tuple(tile // warp for tile, warp in zip(config.tile, config.warp))


def stage_findings(config: KernelConfig, arch: Arch, title: str) -> Iterator[FieldFinding]:
    """Checks the number of stages of an mma.sync kernel. title: of the family, in messages."""
    if config.stages == "auto":
        yield "stages", f"a {title} row says how many: 2 on sm75, at least 3 elsewhere"
    elif not arch.async_copies and config.stages != 2:
        yield "stages", f"stages = {config.stages}; {arch.code_name} has no asynchronous copies to shared memory, so it takes 2"
    elif arch.async_copies and config.stages < 3:
        yield "stages", f"stages = {config.stages}; with asynchronous copies at least 3 (2 is Turing's kernel)"


class C2x(Family):
    """Products."""

    name = "c2x"
    compile_order = 1
    compiled_in_pairs = True
    fields = ("tile", "warp", "stages", "swizzle", "split_k")
    splits_k = True

    def cost(self, config: KernelConfig, limit: int, out_bytes: int = MAX_OUT_BYTES) -> KernelCost:
        """Shared memory: the ring of stages, whose memory the epilogue's exchange reuses."""
        stage = (config.tile.m + config.tile.n) * config.tile.k
        stages = 0 if config.stages == "auto" else config.stages
        if config.warp is None:
            return KernelCost(stage, 0, stages, stages * stage, None)
        m, _, k = warps(config)
        exchange = m * k * _EXCHANGE_ROWS * (config.tile.n + _EXCHANGE_PADDING) * 4
        return KernelCost(stage, exchange, stages, max(stages * stage, exchange), config.warp.m * config.warp.n // WARP_SIZE)

    # ---- legality -------------------------------------------------------------------------------------------------------

    def rules(self, config: KernelConfig, arch: Arch) -> Iterator[FieldFinding]:
        if config.split_k not in _SPLITS:
            yield "split_k", f"split_k = {config.split_k}, expected one of {', '.join(map(str, _SPLITS))}"
        yield from stage_findings(config, arch, self.title)
        shape = list(_shape(config, arch))
        yield from shape
        if shape:
            return  # the other rules divide by these fields
        yield from _threads(config)
        cost = self.cost(config, arch.shared_memory)
        if cost.shared_memory > arch.shared_memory:
            what = f"{config.stages} stages of {cost.stage_bytes} bytes are {cost.shared_memory} bytes of shared memory"
            yield "stages", f"{what}, {arch.name} has {arch.shared_memory}"

    # ---- C++ ------------------------------------------------------------------------------------------------------------

    def code(self, config: KernelConfig, built_for: str, limit: int) -> Code:
        cost = self.cost(config, limit)
        return Code("int8/c2x/gemm.cuh", self._gemm(config, built_for), cost.shared_memory, mark=self._mark(config, built_for))

    def _sizes(self, config: KernelConfig) -> tuple[int, ...]:
        return *config.tile, *config.warp, config.stages, config.swizzle, config.split_k

    def _gemm(self, config: KernelConfig, built_for: str) -> str:
        return f"scaled_mm::c2x::Gemm<{', '.join(map(str, self._sizes(config)))}, {OUT_DTYPES[built_for].cxx}>"

    def _mark(self, config: KernelConfig, built_for: str) -> str:
        return mangled("Gemm", self._sizes(config), OUT_DTYPES[built_for])

    # ---- the autotuner --------------------------------------------------------------------------------------------------

    def config_name(self, config: KernelConfig) -> str:
        options = short_options(("z", config.swizzle, 1), ("k", config.split_k, 1))
        return f"c2x_{config.tile}_w{config.warp}_s{config.stages}{options}"

    def candidates(self, arch: Arch) -> Iterator[KernelConfig]:
        if arch.wgmma:
            return  # c3x and decode are faster there
        stages_of = _STAGES if arch.async_copies else (2,)
        for m, n, k in itertools.product(_TILE_MN, _TILE_MN, _TILE_K):
            for warp_m, warp_n in itertools.product(_WARP_MN, _WARP_MN):
                if warp_m > m or warp_n > n:
                    continue
                for stages, swizzle, split_k in itertools.product(stages_of, _SWIZZLES, _SPLITS):
                    for warp_k in {64, k}:
                        yield candidate(self, tile=[m, n, k], warp=[warp_m, warp_n, warp_k], stages=stages, swizzle=swizzle, split_k=split_k)

    def resident(self, config: KernelConfig, cost: KernelCost, shared_memory: int) -> int:
        m, n, k = warps(config)
        by_registers = REGISTERS // (4 * WARP_SIZE) // ((cost.accumulators + _OTHER_REGISTERS) * m * n * k // 4)
        return min(super().resident(config, cost, shared_memory), max(1, _RESIDENT_WARPS // (m * n * k)), max(1, by_registers))

    def start_us(self, config: KernelConfig, c: Constants) -> float:
        return c.split_us * (config.split_k > 1)

    def tile_us(self, config: KernelConfig, c: Constants) -> float:
        if config.split_k == 1:
            return 0.0
        return config.split_k * (c.part_us + c.part_traffic * config.tile.m * config.tile.n * 4 / c.l2)


class GroupedC2x(Grouped, C2x):
    """Grouped products."""

    def code(self, config: KernelConfig, built_for: str, limit: int) -> Code:
        cxx = f"scaled_mm::grouped::C2x<{self._gemm(config, built_for)}, {OUT_DTYPES[built_for].cxx}>"
        return Code("int8/grouped/c2x.cuh", cxx, self.cost(config, limit).shared_memory, mark=self._mark(config, built_for))


def _shape(config: KernelConfig, arch: Arch) -> Iterator[FieldFinding]:
    if config.warp is None:
        yield "warp", "a c2x row needs a warp tile"
        return
    if config.tile.k not in _TILE_K:
        yield "tile", f"tile k = {config.tile.k}, expected 64 or 128: rows of shared memory hold 128 bytes"
    for axis, tile, warp in zip("mnk", config.tile, config.warp):
        if tile % warp:
            yield "warp", f"warp {axis} = {warp} does not divide tile {axis} = {tile}"
    # mma.m16n8k32: ldmatrix loads two along n, and the pipeline needs two along k. Turing: mma.m8n8k16, four of each.
    steps = (16, 16, 64) if arch.async_copies else (32, 32, 64)
    for axis, warp, step in zip("mnk", config.warp, steps):
        if warp % step:
            yield "warp", f"warp {axis} = {warp}; on {arch.name} a multiple of {step}"


def _threads(config: KernelConfig) -> Iterator[FieldFinding]:
    m, n, k = warps(config)
    count = m * n * k
    if count > MAX_WARPS:
        yield "warp", f"{m} x {n} x {k} = {count} warps, at most {MAX_WARPS}"
    accumulators = config.warp.m * config.warp.n // WARP_SIZE
    if accumulators > MAX_ACCUMULATORS:
        what = f"{config.warp.m} x {config.warp.n} accumulators over {WARP_SIZE} threads are {accumulators} registers per thread"
        yield "warp", f"{what}, at most {MAX_ACCUMULATORS} stay out of local memory"
    per_load = count * WARP_SIZE * _ACCESS_BYTES
    for axis, size in (("m", config.tile.m), ("n", config.tile.n)):
        if size * config.tile.k % per_load:
            yield "tile", f"tile {axis} * k = {size * config.tile.k} bytes; {count} warps load {per_load} at a time"
    if not all(_stores_whole_rows(config, out_bytes) for out_bytes in _OUT_BYTES):
        yield "warp", f"{count // m} warps share 8 rows of {config.tile.n} columns: too few to store 16 bytes per thread; use fewer"


def _stores_whole_rows(config: KernelConfig, out_bytes: int) -> bool:
    """Whether CUTLASS's OutputTileOptimalThreadMap covers the 8 rows of a step with 16 bytes per thread."""
    _, n, k = warps(config)
    if n * k not in (1, 2, 4):
        return False
    rows, width = _EXCHANGE_ROWS // (n * k), config.tile.n * out_bytes // _ACCESS_BYTES
    lanes_wide = min(width, 16)  # 256 bytes of a row
    lanes_high = min(_EXCHANGE_ROWS, WARP_SIZE // lanes_wide)
    return lanes_wide * lanes_high == WARP_SIZE and rows % lanes_high == 0 and width % lanes_wide == 0
