"""Block-scaled products, of a matrix and of experts (csrc/int8/block_scaled): c2x, with mma.sync, for aligned operands; generic for any operands.

The generated sources assert the shared memory computed here.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from scaled_mm.kernels.arch import WARP_SIZE, Arch
from scaled_mm.kernels.c2x import MAX_ACCUMULATORS, MAX_WARPS, stage_findings
from scaled_mm.kernels.config import KernelConfig
from scaled_mm.kernels.constants import Constants
from scaled_mm.kernels.dtypes import MAX_OUT_BYTES, OUT_DTYPES
from scaled_mm.kernels.family import Code, Family, FieldFinding, KernelCost, mangled
from scaled_mm.kernels.naming import candidate

SCALE_BLOCK = 128  # elements of K per scale; also columns per scale of b
_CHUNK = 16  # bytes per copy; also the padding of a finished row in shared memory
_GENERIC_THREADS = 128
_TILE_M, _TILE_N, _WARP_MN, _STAGES = (16, 32, 64, 128), (32, 64, 128), (16, 32, 64), (3, 4, 6, 8)  # of candidates


def threads(config: KernelConfig) -> int:
    """Threads per thread block of a c2x kernel."""
    return config.tile.m // config.warp.m * (config.tile.n // config.warp.n) * WARP_SIZE


class BlockScaled(Family):
    """Common to all families. Sums are float32, so there is no int32 output."""

    section = "block_scaled"
    built_for = tuple(name for name in OUT_DTYPES if name != "int32")

    @property
    def title(self) -> str:
        return f"block-scaled {self.name}"

    def scale_bytes(self, config: KernelConfig) -> int:
        """Of two stages: a float32 for each row of a, and for each of the blocks of K that a stage may have."""
        return 2 * config.tile.m * 4 * self.blocks_of_stage(config)

    def blocks_of_stage(self, config: KernelConfig) -> int:
        """Blocks of scales that a stage may have: twice as many if the kernel also takes blocks of half the size."""
        return config.tile.k // SCALE_BLOCK * (1 if self.block_size(config) == SCALE_BLOCK else 2)

    def rules(self, config: KernelConfig, arch: Arch) -> Iterator[FieldFinding]:
        tile = config.tile
        if tile.k != SCALE_BLOCK:
            yield "tile", f"tile k = {tile.k}, expected {SCALE_BLOCK}: a tile of K is a block of scales"
        if tile.n % 16 or SCALE_BLOCK % tile.n:
            yield "tile", f"tile n = {tile.n}, expected 16, 32, 64 or 128: the columns of a tile share a scale"


class BlockScaledC2x(BlockScaled):
    """For aligned operands."""

    name = "c2x"
    fields = ("tile", "warp", "stages", "swizzle")

    def cost(self, config: KernelConfig, limit: int, out_bytes: int = MAX_OUT_BYTES) -> KernelCost:
        """Shared memory: the ring of stages, whose memory the finished tile reuses, and the scales of two blocks of K. Accumulators: one int32
        and one float32 per element."""
        m, n, k = config.tile
        stage, finished = (m + n) * k, m * (n * out_bytes + _CHUNK)
        stages = 0 if config.stages == "auto" else config.stages
        accumulators = None if config.warp is None else 2 * config.warp.m * config.warp.n // WARP_SIZE
        return KernelCost(stage, finished, stages, max(stages * stage, finished) + self.scale_bytes(config), accumulators)

    def rules(self, config: KernelConfig, arch: Arch) -> Iterator[FieldFinding]:
        yield from super().rules(config, arch)
        yield from stage_findings(config, arch, self.title)
        shape = list(_shape(config))
        yield from shape
        cost = self.cost(config, arch.shared_memory)
        if not shape and cost.shared_memory > arch.shared_memory:
            what = f"{config.stages} stages of {cost.stage_bytes} bytes, or a tile of float32, and scales are {cost.shared_memory} bytes"
            yield "stages", f"{what} of shared memory, {arch.name} has {arch.shared_memory}"

    def code(self, config: KernelConfig, built_for: str, limit: int) -> Code:
        out, tile, warp = OUT_DTYPES[built_for], config.tile, config.warp
        sizes = (tile.m, tile.n, warp.m, warp.n, config.stages, config.swizzle)
        cxx = f"scaled_mm::block_scaled::C2x<{', '.join(map(str, sizes))}, {out.cxx}>"
        return Code("int8/block_scaled/c2x.cuh", cxx, self.cost(config, limit, out.bytes).shared_memory, mark=mangled("TileShape", sizes, out))

    def candidates(self, arch: Arch) -> Iterator[KernelConfig]:
        if arch.wgmma:
            return  # wgmma is faster there
        stages_of = _STAGES if arch.async_copies else (2,)
        for m, n, warp_m, warp_n, stages in itertools.product(_TILE_M, _TILE_N, _WARP_MN, _WARP_MN, stages_of):
            if warp_m <= m and warp_n <= n:
                swizzle = 4 if m * n >= 64 * 128 else 1  # as in the tables; names do not contain it
                yield candidate(self, tile=[m, n, SCALE_BLOCK], warp=[warp_m, warp_n, SCALE_BLOCK], stages=stages, swizzle=swizzle)

    def multiply_rate(self, config: KernelConfig, c: Constants) -> float:
        return c.promotion

    def block_size(self, config: KernelConfig) -> int:
        """All columns of a tile share one scale of b. With blocks of 64 it is for 64 columns, so wider tiles need blocks of 128."""
        return SCALE_BLOCK if config.tile.n > SCALE_BLOCK // 2 else 0

    def config_name(self, config: KernelConfig) -> str:
        return f"block_scaled_c2x_{config.tile}_w{config.warp}_s{config.stages}"


class BlockScaledGeneric(BlockScaled):
    """For operands with any strides and alignment."""

    name = "generic"
    fields = ("tile",)
    alignment = (1, 1, 1)
    tuned = False

    def cost(self, config: KernelConfig, limit: int, out_bytes: int = MAX_OUT_BYTES) -> KernelCost:
        m, n, k = config.tile
        stage = (m + n) * (k + _CHUNK)
        return KernelCost(stage, 0, 1, stage + self.scale_bytes(config), 2 * m * n // _GENERIC_THREADS)

    def rules(self, config: KernelConfig, arch: Arch) -> Iterator[FieldFinding]:
        yield from super().rules(config, arch)
        if config.tile.m not in (32, 64) or config.tile.n not in (32, 64):
            yield "tile", f"tile {config.tile.m} x {config.tile.n}; a generic row has 2 x 2 warps, and 32 or 64 each way"

    def code(self, config: KernelConfig, built_for: str, limit: int) -> Code:
        cxx = f"scaled_mm::block_scaled::Generic<{config.tile.m}, {config.tile.n}, {OUT_DTYPES[built_for].cxx}>"
        return Code("int8/block_scaled/generic.cuh", cxx)

    def config_name(self, config: KernelConfig) -> str:
        return f"block_scaled_generic_{config.tile}"


class OfExperts(BlockScaled):
    """A mixin: a family's kernels for grouped block-scaled products, in the same sizes."""

    section = "grouped_block_scaled"

    @property
    def title(self) -> str:
        return f"grouped {super().title}"

    def code(self, config: KernelConfig, built_for: str, limit: int) -> Code:
        code = super().code(config, built_for, limit)
        return dataclasses.replace(code, header="int8/block_scaled/grouped.cuh", type=code.type.replace("block_scaled::", "block_scaled::Grouped", 1))

    def config_name(self, config: KernelConfig) -> str:
        return f"grouped_{super().config_name(config)}"


class GroupedBlockScaledC2x(OfExperts, BlockScaledC2x):
    """For aligned operands."""


class GroupedBlockScaledGeneric(OfExperts, BlockScaledGeneric):
    """For operands with any strides and alignment."""


def _shape(config: KernelConfig) -> Iterator[FieldFinding]:
    tile, warp = config.tile, config.warp
    if warp is None:
        yield "warp", "a block-scaled c2x row needs a warp tile"
        return
    for axis, whole, part in zip("mn", tile, warp):
        if part % 16:
            yield "warp", f"warp {axis} = {part}, expected a multiple of 16"
        elif whole % part:
            yield "warp", f"warp {axis} = {part} does not divide tile {axis} = {whole}"
    if warp.k != tile.k:
        yield "warp", f"warp k = {warp.k}, expected {tile.k}: a warp sums a whole block of K"
    if any(part % 16 or whole % part for whole, part in zip(tile[:2], warp[:2])):
        return  # the other rules divide by these fields
    count = threads(config)
    if count > MAX_WARPS * WARP_SIZE or count % 64:
        yield "warp", f"{count // WARP_SIZE} warps, expected an even number of at most {MAX_WARPS}"
        return
    if count < tile.m:
        yield "warp", f"{count} threads fetch one row's scale each, and the tile has {tile.m}"
    for axis, size in (("m", tile.m), ("n", tile.n)):
        if size * SCALE_BLOCK % (count * _CHUNK):
            yield "tile", f"tile {axis} = {size} rows of {SCALE_BLOCK} bytes; {count} threads load {count * _CHUNK} bytes at a time"
    if (accumulators := 2 * warp.m * warp.n // WARP_SIZE) > MAX_ACCUMULATORS:
        what = f"{warp.m} x {warp.n} accumulators and as many sums over {WARP_SIZE} threads are {accumulators} registers per thread"
        yield "warp", f"{what}, at most {MAX_ACCUMULATORS} stay out of local memory"
