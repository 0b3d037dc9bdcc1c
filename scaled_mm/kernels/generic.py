"""generic: any strides and alignment, on every architecture. The fallback of the tables."""

from __future__ import annotations

from collections.abc import Iterator

from scaled_mm.kernels.arch import STATIC_SHARED_MEMORY, Arch
from scaled_mm.kernels.config import KernelConfig
from scaled_mm.kernels.dtypes import MAX_OUT_BYTES, OUT_DTYPES
from scaled_mm.kernels.family import Code, Family, FieldFinding, KernelCost
from scaled_mm.kernels.grouped import Grouped


class Generic(Family):
    """Products."""

    name = "generic"
    fields = ("tile", "raster", "swizzle")  # the last two are ignored; tables may contain them
    alignment = (1, 1, 1)
    tuned = False

    def cost(self, config: KernelConfig, limit: int, out_bytes: int = MAX_OUT_BYTES) -> KernelCost:
        """One stage, and no epilogue in shared memory."""
        stage = (config.tile.m + config.tile.n) * config.tile.k
        return KernelCost(stage, 0, 1, stage, None)

    def rules(self, config: KernelConfig, arch: Arch) -> Iterator[FieldFinding]:
        # 2 x 2 warps with whole m16n8k32 fragments; 128 threads that copy whole 16-byte vectors.
        m, n, k = config.tile
        for axis, size, step in (("m", m, 32), ("n", n, 16), ("k", k, 32)):
            if size % step or size > 128:
                yield "tile", f"tile {axis} = {size}; a generic row needs a multiple of {step}, at most 128"
        for axis, size in (("m", m), ("n", n)):
            if size * k % 2048:
                yield "tile", f"tile {axis} * k = {size * k}; a generic row's 128 threads need a multiple of 2048 bytes"
        shared = self.cost(config, arch.shared_memory).shared_memory
        if shared > STATIC_SHARED_MEMORY:
            yield "tile", f"{shared} bytes of shared memory, a generic row has {STATIC_SHARED_MEMORY}"

    def code(self, config: KernelConfig, built_for: str, limit: int) -> Code:
        return Code("int8/generic/launch.cuh", f"scaled_mm::generic::Gemm<{_tile(config)}, {OUT_DTYPES[built_for].cxx}>")

    def config_name(self, config: KernelConfig) -> str:
        return f"generic_{config.tile}"


class GroupedGeneric(Grouped, Generic):
    """Grouped products."""

    def code(self, config: KernelConfig, built_for: str, limit: int) -> Code:
        return Code("int8/grouped/generic.cuh", f"scaled_mm::grouped::Generic<{_tile(config)}, {OUT_DTYPES[built_for].cxx}>")


def _tile(config: KernelConfig) -> str:
    return f"{config.tile.m}, {config.tile.n}, {config.tile.k}"
