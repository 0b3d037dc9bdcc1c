"""Rules for the grouped kernels of every family. Their tiles are counted on the device, so some fields cannot be used."""

from __future__ import annotations

from collections.abc import Iterator

from scaled_mm.kernels.arch import Arch
from scaled_mm.kernels.config import KernelConfig
from scaled_mm.kernels.family import Family, FieldFinding


class Grouped(Family):
    """A mixin: a family's kernels for grouped products."""

    section = "grouped"
    splits_k = False

    def rules(self, config: KernelConfig, arch: Arch) -> Iterator[FieldFinding]:
        if config.split_k > 1:
            yield "split_k", "a grouped row has none: leave it out"
        if config.scheduler != "persistent":
            yield "scheduler", "grouped rows are persistent: leave it out"
        if config.prefetch:
            yield "prefetch", "a grouped row has none: its first tile is known on the device only"
        if config.early_weights:
            yield "early_weights", "a grouped row has none: its first tile is known on the device only"
        if config.schedule == "warp_specialized":
            yield "schedule", "warp_specialized gives each block one tile; the tiles of a grouped product are counted on the device"
        yield from super().rules(config, arch)

    def config_name(self, config: KernelConfig) -> str:
        return f"grouped_{super().config_name(config)}"
