"""Shared by the INT8 families that use wgmma (c3x, decode): the rate by MMA width, and the ring of stages that TMA fills."""

from __future__ import annotations

from collections.abc import Sequence

from scaled_mm.kernels.config import KernelConfig
from scaled_mm.kernels.constants import Constants
from scaled_mm.kernels.family import Family, KernelCost

#: Columns of the wgmma instructions that CUTLASS declares, and those that CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED adds (cute/arch/mma_sm90_gmma.hpp).
USUAL_WIDTHS = (8, 16, 32, 64, 96, 128, 192, 256)
ALL_WIDTHS = (8, 24, *range(16, 257, 16))


def mma_rate(columns: int, widths: Sequence[int] = USUAL_WIDTHS) -> float:
    """The fraction of the tensor cores' peak rate that a tile with this many columns reaches.

    Cycles of one wgmma of 64 x n x 32: n / 2 on the tensor cores, 16 + n / 4 to read its operands from shared memory. CUTLASS builds
    a tile from the widest MMA of `widths` that divides it: 112 columns are seven of 16 among the usual ones.
    """
    n = max(width for width in widths if columns % width == 0)
    return (n / 2) / max(n / 2, 16 + n / 4)


class WgmmaFamily(Family):
    """INT8 kernels that need wgmma and TMA."""

    needs_wgmma = True
    mma_widths: Sequence[int] = USUAL_WIDTHS

    def multiply_rate(self, config: KernelConfig, c: Constants) -> float:
        return mma_rate(config.tile.n, self.mma_widths)

    def step_us(self, config: KernelConfig, cost: KernelCost, multiply: float, c: Constants) -> float:
        refilled = (multiply + c.refill_us) / max(1, cost.stages - 1)  # a stage is refilled once the next step has begun
        return max(super().step_us(config, cost, multiply, c), refilled)
