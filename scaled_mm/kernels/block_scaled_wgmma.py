"""wgmma in the section block_scaled (csrc/int8/block_scaled/wgmma.cuh): block-scaled products on SM90, for operands that TMA can load."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from scaled_mm.kernels.arch import CLUSTER_SIZES, WARPGROUP, Arch
from scaled_mm.kernels.block_scaled import SCALE_BLOCK, BlockScaled
from scaled_mm.kernels.config import KernelConfig
from scaled_mm.kernels.constants import Constants
from scaled_mm.kernels.dtypes import MAX_OUT_BYTES, OUT_DTYPES
from scaled_mm.kernels.family import Code, FieldFinding, KernelCost
from scaled_mm.kernels.naming import candidate
from scaled_mm.kernels.wgmma import USUAL_WIDTHS, WgmmaFamily

ROWS = (64, 128)  # of the MMA: 64 per warpgroup
WIDTHS = tuple(width for width in USUAL_WIDTHS if width <= SCALE_BLOCK)
_RESIDENT = 4  # thread blocks of one warpgroup per SM, at most


class BlockScaledWgmma(BlockScaled, WgmmaFamily):
    """With swap_ab the kernel computes out^T, for few rows of a."""

    name = "wgmma"
    fields = ("tile", "swap_ab", "stages", "swizzle")
    alignment = (16, 16, 1)

    def cost(self, config: KernelConfig, limit: int, out_bytes: int = MAX_OUT_BYTES) -> KernelCost:
        """Shared memory: the stages with two barriers each, rounded up to 1024. Accumulators: one int32 and one float32 per element."""
        m, n, k = config.tile
        stage = (m + n) * k + 16
        stages = 0 if config.stages == "auto" else config.stages
        return KernelCost(stage, 0, stages, -(-stages * stage // 1024) * 1024, 2 * 64 * n // WARPGROUP)

    def rules(self, config: KernelConfig, arch: Arch) -> Iterator[FieldFinding]:
        tile = config.tile
        if tile.m not in ROWS or tile.n not in WIDTHS or tile.k != SCALE_BLOCK:
            expected = f"m = 64 or 128, n of {', '.join(map(str, WIDTHS))} and k = {SCALE_BLOCK}"
            yield "tile", f"tile {tile}; a {self.title} row has {expected}"
        elif not config.swap_ab and SCALE_BLOCK % tile.n:
            yield "tile", f"tile n = {tile.n}, expected a divisor of {SCALE_BLOCK}: the columns of a tile share a scale"
        if config.stages == "auto" or config.stages < 2:
            yield "stages", f"stages = {config.stages}, expected a number of at least 2: the number decides how many thread blocks share an SM"
        elif (bytes_ := self.cost(config, arch.shared_memory).shared_memory) > arch.shared_memory:
            yield "stages", f"{config.stages} stages are {bytes_} bytes of shared memory, there are {arch.shared_memory}"

    def code(self, config: KernelConfig, built_for: str, limit: int) -> Code:
        out, tile = OUT_DTYPES[built_for], config.tile
        swap = "true" if config.swap_ab else "false"
        cxx = f"scaled_mm::block_scaled::Wgmma<{tile.m}, {tile.n}, {config.stages}, {config.swizzle}, {swap}, {out.cxx}>"
        return Code("int8/block_scaled/wgmma.cuh", cxx, self.cost(config, limit, out.bytes).shared_memory)

    def config_name(self, config: KernelConfig) -> str:
        return f"block_scaled_wgmma_{config.tile}_s{config.stages}{'_swap' if config.swap_ab else ''}"

    def candidates(self, arch: Arch) -> Iterator[KernelConfig]:
        if not arch.wgmma:
            return
        for m, n, swap_ab, resident in itertools.product(ROWS, WIDTHS, (False, True), CLUSTER_SIZES):
            trial = candidate(self, tile=[m, n, SCALE_BLOCK], swap_ab=swap_ab, stages=2)
            stages = (arch.shared_memory // resident - 1024) // self.cost(trial, arch.shared_memory).stage_bytes
            if 2 <= stages <= 12 and (swap_ab or SCALE_BLOCK % n == 0) and (m == 64 or resident == 1):
                yield candidate(self, tile=[m, n, SCALE_BLOCK], swap_ab=swap_ab, stages=stages, swizzle=1 if swap_ab else 4)

    def resident(self, config: KernelConfig, cost: KernelCost, shared_memory: int) -> int:
        return 1 if config.tile.m > 64 else min(_RESIDENT, super().resident(config, cost, shared_memory))

    def multiply_rate(self, config: KernelConfig, c: Constants) -> float:
        return WgmmaFamily.multiply_rate(self, config, c) * c.wgmma_promotion

    def loads_weights_early(self, config: KernelConfig) -> bool:
        return True
