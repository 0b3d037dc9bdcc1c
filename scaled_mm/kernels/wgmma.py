"""Shared by the INT8 families that use wgmma (c3x, decode): the rate by MMA width, and the ring of stages that TMA fills."""

from __future__ import annotations

from scaled_mm.kernels.config import KernelConfig
from scaled_mm.kernels.constants import Constants
from scaled_mm.kernels.family import Family, KernelCost

_MMA_COLUMNS = (8, 16, 32, 64, 96, 128, 192, 256)


def mma_rate(columns: int) -> float:
    """The fraction of the tensor cores' peak rate that a tile with this many columns reaches.

    Cycles of one wgmma of 64 x n x 32: n / 2 on the tensor cores, 16 + n / 4 to read its operands from shared memory. CUTLASS builds
    a tile from the widest MMA that divides it: 112 columns are seven MMAs of 16.
    """
    n = max(width for width in _MMA_COLUMNS if columns % width == 0)
    return (n / 2) / max(n / 2, 16 + n / 4)


class WgmmaFamily(Family):
    """INT8 kernels that need wgmma and TMA."""

    needs_wgmma = True

    def multiply_rate(self, config: KernelConfig, c: Constants) -> float:
        return mma_rate(config.tile.n)

    def step_us(self, config: KernelConfig, cost: KernelCost, multiply: float, c: Constants) -> float:
        refilled = (multiply + c.refill_us) / max(1, cost.stages - 1)  # a stage is refilled once the next step has begun
        return max(super().step_us(config, cost, multiply, c), refilled)
