"""gguf_mma: GGUF products by mma.sync, on every architecture."""

from __future__ import annotations

from collections.abc import Iterator

from scaled_mm.gguf_formats import TILE_ROWS
from scaled_mm.gguf_formats import WEIGHT_FORMATS as FORMATS
from scaled_mm.kernels.config import KernelConfig
from scaled_mm.kernels.gguf import Gguf

BAND_ROWS = 16  # rows of an MMA; a warp multiplies one or two such bands


def warps(config: KernelConfig) -> int:
    """Warps per thread block. More tokens need more registers, so fewer warps fit."""
    return 8 if config.tile.m > 16 else 16


class GgufMma(Gguf):
    """A stage holds a tile's rows for each warp. stages = 1 means no pipeline: weights go from device memory to registers."""

    name = "gguf_mma"
    fields = ("tile", "stages")
    tokens = (8, 16, 32)
    weight_rows = (BAND_ROWS, 2 * BAND_ROWS)
    least_stages = 1
    stages_hint = "1 for none"

    def stage_bytes(self, config: KernelConfig, fmt: str) -> int:
        return warps(config) * FORMATS[fmt].bands_bytes * config.tile.n // TILE_ROWS

    def stages(self, config: KernelConfig, fmt: str, limit: int) -> int:
        return max(super().stages(config, fmt, limit), 1)

    def shared_memory(self, config: KernelConfig, fmt: str, limit: int) -> int:
        count = self.stages(config, fmt, limit)  # the warps' partial sums reuse the stages' memory
        return max(count * self.stage_bytes(config, fmt) if count > 1 else 0, warps(config) * config.tile.n * config.tile.m * 4)

    def notes(self, config: KernelConfig, fmt: str, limit: int) -> Iterator[str]:
        count = self.stages(config, fmt, limit)
        if config.tile.m <= 16 and count > 1:
            yield "contiguous, 16-byte aligned float16 and bfloat16 activations take shared memory too, if they fit (from SM80 on)"
            if config.tile.m == 8 and config.tile.n == BAND_ROWS:
                more = ", with one stage more, if that fits" if (count + 1) * self.stage_bytes(config, fmt) < limit else ""
                yield f"one or two such tokens have a kernel of their own{more} (from SM80 on)"

    def cxx(self, config: KernelConfig) -> tuple[str, str, str]:
        return "gguf/mma.cuh", "Mma", f"{config.tile.m}, {config.tile.n // BAND_ROWS}, {warps(config)}"

    def config_name(self, config: KernelConfig) -> str:
        return f"gguf_mma_{config.tile.n}x{config.tile.m}_x{config.stages}"
