"""wgmma in the section block_scaled (csrc/int8/block_scaled/wgmma.cuh): block-scaled products on SM90, for operands that TMA can load."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from scaled_mm.kernels.arch import WARP_SIZE, WARPGROUP, Arch
from scaled_mm.kernels.block_scaled import SCALE_BLOCK, BlockScaled
from scaled_mm.kernels.config import KernelConfig
from scaled_mm.kernels.constants import Constants
from scaled_mm.kernels.dtypes import MAX_OUT_BYTES, OUT_DTYPES
from scaled_mm.kernels.family import Code, FieldFinding, KernelCost
from scaled_mm.kernels.naming import candidate
from scaled_mm.kernels.wgmma import USUAL_WIDTHS, WgmmaFamily

ROWS = (64, 128)  # of the MMA: 64 per warpgroup
WIDTHS = tuple(width for width in USUAL_WIDTHS if width <= SCALE_BLOCK)
DEPTHS = (1, 2, 4)  # blocks of K in a stage
_STAGES = (2, 3, 4, 5, 6, 8, 12, 16)  # of candidates
_RESIDENT = 4  # thread blocks of one warpgroup per SM, at most
_REGISTERS, _AFTER_SETMAXNREG = 512, 224  # per lane of a scheduler's register file; per thread after setmaxnreg
_SCHEDULERS = 4  # per SM; warps are distributed evenly among them


class BlockScaledWgmma(BlockScaled, WgmmaFamily):
    """With swap_ab the kernel computes out^T, for few rows of a."""

    name = "wgmma"
    fields = ("tile", "swap_ab", "stages", "swizzle")
    alignment = (16, 16, 1)

    def cost(self, config: KernelConfig, limit: int, out_bytes: int = MAX_OUT_BYTES) -> KernelCost:
        """Shared memory: the stages with two barriers each and their scales, rounded up to 1024. tile k: the K of a stage.

        Accumulators: one int32 and one float32 per element.
        """
        m, n, k = config.tile
        stage = (m + n) * k + 16 + self.scale_bytes(config)
        stages = 0 if config.stages == "auto" else config.stages
        return KernelCost(stage, 0, stages, -(-stages * stage // 1024) * 1024, 2 * 64 * n // WARPGROUP)

    def scale_bytes(self, config: KernelConfig) -> int:
        """Of a stage, for each of the blocks of K that it may have: a float32 for each row of a, and one for b."""
        return 4 * ((config.tile.n if config.swap_ab else config.tile.m) + 1) * self.blocks_of_stage(config)

    def depth(self, config: KernelConfig) -> int:
        """Blocks of K in a stage."""
        return config.tile.k // SCALE_BLOCK

    def registers(self, config: KernelConfig) -> int:
        """Approximate registers per thread: sums, indices, and for each block of a stage its accumulators and scales."""
        sums, scales = config.tile.n // 2, config.tile.n // 4 if config.swap_ab else 2
        return sums + (sums + scales) * self.depth(config) + 24

    def rules(self, config: KernelConfig, arch: Arch) -> Iterator[FieldFinding]:
        tile = config.tile
        depths = [depth * SCALE_BLOCK for depth in DEPTHS]
        if tile.m not in ROWS or tile.n not in WIDTHS or tile.k not in depths:
            expected = f"m = 64 or 128, n of {', '.join(map(str, WIDTHS))} and k of {', '.join(map(str, depths))}"
            yield "tile", f"tile {tile}; a {self.title} row has {expected}"
        elif not config.swap_ab and SCALE_BLOCK % tile.n:
            yield "tile", f"tile n = {tile.n}, expected a divisor of {SCALE_BLOCK}: the columns of a tile share a scale"
        if config.stages == "auto" or config.stages < 2:
            yield "stages", f"stages = {config.stages}, expected a number of at least 2: the number decides how many thread blocks share an SM"
        elif (bytes_ := self.cost(config, arch.shared_memory).shared_memory) > arch.shared_memory:
            yield "stages", f"{config.stages} stages are {bytes_} bytes of shared memory, there are {arch.shared_memory}"
        else:
            needed, had = self.registers(config), self._registers_had(config, arch)
            if needed > had:
                what = f"tile {tile} needs about {needed} registers of a thread's {had}"
                yield "tile", f"{what}, with as many thread blocks on an SM as {config.stages} stages leave room for"

    def code(self, config: KernelConfig, built_for: str, limit: int) -> Code:
        out, tile = OUT_DTYPES[built_for], config.tile
        swap = "true" if config.swap_ab else "false"
        sizes = f"{tile.m}, {tile.n}, {config.stages}, {self.depth(config)}, {config.swizzle}"
        cxx = f"scaled_mm::block_scaled::Wgmma<{sizes}, {swap}, {out.cxx}>"
        return Code("int8/block_scaled/wgmma.cuh", cxx, self.cost(config, limit, out.bytes).shared_memory)

    def config_name(self, config: KernelConfig) -> str:
        return f"block_scaled_wgmma_{config.tile}_s{config.stages}{'_swap' if config.swap_ab else ''}"

    def candidates(self, arch: Arch) -> Iterator[KernelConfig]:
        for m, n, depth, stages, swap_ab in itertools.product(ROWS, WIDTHS, DEPTHS, _STAGES, (False, True)):
            swizzle = 4 if "swizzle" in self.fields and not swap_ab else 1  # as in the tables; names do not contain it
            yield candidate(self, tile=[m, n, depth * SCALE_BLOCK], stages=stages, swap_ab=swap_ab, swizzle=swizzle)

    def block_size(self, config: KernelConfig) -> int:
        """Blocks of 64: with one warpgroup, and columns of a tile that share a scale of b."""
        return 0 if config.tile.m == 64 and (config.swap_ab or config.tile.n <= SCALE_BLOCK // 2) else SCALE_BLOCK

    def resident(self, config: KernelConfig, cost: KernelCost, shared_memory: int) -> int:
        return 1 if config.tile.m > 64 else min(_RESIDENT, super().resident(config, cost, shared_memory))

    def _registers_had(self, config: KernelConfig, arch: Arch) -> int:
        """Registers of a thread: after setmaxnreg with two warpgroups, else as __launch_bounds__ leaves them."""
        if config.tile.m > 64:
            return _AFTER_SETMAXNREG
        resident = self.resident(config, self.cost(config, arch.shared_memory), arch.shared_memory)
        loaders = 1 if self.depth(config) == 1 else 3  # warps
        warps = -(-resident * (WARPGROUP // WARP_SIZE + loaders) // _SCHEDULERS)  # of a scheduler
        return min(255, _REGISTERS // warps // 8 * 8)

    def multiply_rate(self, config: KernelConfig, c: Constants) -> float:
        return WgmmaFamily.multiply_rate(self, config, c) * c.wgmma_promotion
