"""wgmma in the sections grouped and grouped_block_scaled (csrc/int8/grouped/wgmma.cuh), for operands that TMA can load."""

from __future__ import annotations

from scaled_mm.kernels.arch import WARPGROUP
from scaled_mm.kernels.block_scaled_wgmma import BlockScaledWgmma
from scaled_mm.kernels.config import KernelConfig
from scaled_mm.kernels.constants import Constants
from scaled_mm.kernels.dtypes import MAX_OUT_BYTES, OUT_DTYPES
from scaled_mm.kernels.family import Code, KernelCost
from scaled_mm.kernels.wgmma import WgmmaFamily


class GroupedBlockScaledWgmma(BlockScaledWgmma):
    """With scales of blocks. Sizes are those of a matrix's kernels; tiles of all experts share a persistent grid."""

    section = "grouped_block_scaled"
    fields = ("tile", "swap_ab", "stages")
    block_scales = True

    @property
    def title(self) -> str:
        return f"grouped {super().title}"

    def code(self, config: KernelConfig, built_for: str, limit: int) -> Code:
        out, tile = OUT_DTYPES[built_for], config.tile
        swap, block = (str(flag).lower() for flag in (config.swap_ab, self.block_scales))
        cxx = f"scaled_mm::grouped::Wgmma<{tile.m}, {tile.n}, {config.stages}, {self.depth(config)}, {swap}, {block}, {out.cxx}>"
        return Code("int8/grouped/wgmma.cuh", cxx, self.cost(config, limit, out.bytes).shared_memory)

    def config_name(self, config: KernelConfig) -> str:
        return f"grouped_{super().config_name(config)}"


class GroupedWgmma(GroupedBlockScaledWgmma):
    """With scales of rows and of each expert's columns."""

    section = "grouped"
    built_for = tuple(OUT_DTYPES)
    block_scales = False

    @property
    def title(self) -> str:
        return f"grouped {self.name}"

    def cost(self, config: KernelConfig, limit: int, out_bytes: int = MAX_OUT_BYTES) -> KernelCost:
        """Accumulators: one int32 per element."""
        cost = super().cost(config, limit, out_bytes)
        return KernelCost(cost.stage_bytes, 0, cost.stages, cost.shared_memory, 64 * config.tile.n // WARPGROUP)

    def registers(self, config: KernelConfig) -> int:
        """Accumulators, and about 64 for the epilogue and indices."""
        return config.tile.n // 2 + 64

    def scale_bytes(self, config: KernelConfig) -> int:
        """Scales are no part of the stages."""
        return 0

    def block_size(self, config: KernelConfig) -> int:
        return 0

    def config_name(self, config: KernelConfig) -> str:
        return super().config_name(config).replace("block_scaled_", "")

    def multiply_rate(self, config: KernelConfig, c: Constants) -> float:
        return WgmmaFamily.multiply_rate(self, config, c)
