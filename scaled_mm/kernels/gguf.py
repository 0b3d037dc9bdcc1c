"""Shared by the families of GGUF products. A tile is [tokens, rows of the weight, 256 k]. They take any operands.

The sizes are upper bounds of those in csrc/gguf; the generated sources assert that a kernel's shared memory is at most the size computed here.
The number of stages that fit depends on the GGUF format: a kernel has `stages` stages, or as many as fit.
"""

from __future__ import annotations

from collections.abc import Iterator

from scaled_mm.gguf_formats import BLOCK, TILE_BLOCKS
from scaled_mm.gguf_formats import WEIGHT_FORMATS as FORMATS
from scaled_mm.kernels.arch import Arch
from scaled_mm.kernels.config import KernelConfig
from scaled_mm.kernels.dtypes import MAX_OUT_BYTES, WEIGHT_FORMATS
from scaled_mm.kernels.family import Code, Family, FieldFinding, KernelCost

TILE_K = TILE_BLOCKS * BLOCK


class Gguf(Family):
    """A subclass states the legal tiles, the bytes of a stage, and the bytes besides the stages.

    tokens, weight_rows: legal sizes of a tile. least_stages: the least number of stages. stages_hint: the same, for messages.
    """

    section = "gguf"
    alignment = (1, 1, 1)
    built_for = tuple(WEIGHT_FORMATS)
    built_for_what = "a format of the weight"
    tokens: tuple[int, ...]
    weight_rows: tuple[int, ...]
    least_stages: int
    stages_hint: str

    def stage_bytes(self, config: KernelConfig, fmt: str) -> int:
        """Bytes of one stage with a GGUF format."""
        raise NotImplementedError

    def bytes_beside_stages(self, config: KernelConfig) -> int:
        return 0

    def stages(self, config: KernelConfig, fmt: str, limit: int) -> int:
        """The number of stages with a GGUF format: config.stages, or as many as fit in `limit` bytes of shared memory."""
        return min(config.stages, max(0, limit - self.bytes_beside_stages(config)) // self.stage_bytes(config, fmt))

    def shared_memory(self, config: KernelConfig, fmt: str, limit: int) -> int:
        """An upper bound of a kernel's dynamic shared memory in bytes, for a GGUF format and a GPU with `limit` bytes.

        Excludes the optional activation buffer, used when activations are contiguous and 16-byte aligned (`notes`).
        """
        return self.stages(config, fmt, limit) * self.stage_bytes(config, fmt) + self.bytes_beside_stages(config)

    def notes(self, config: KernelConfig, fmt: str, limit: int) -> Iterator[str]:
        """How a kernel deviates from the fields of its config, as text for `table explain`."""
        return iter(())

    def cost(self, config: KernelConfig, limit: int, out_bytes: int = MAX_OUT_BYTES) -> KernelCost:
        """The resources with the GGUF format that needs the most shared memory."""
        if config.stages == "auto":
            return KernelCost(0, 0, 1, 0, None)
        memory = {fmt: self.shared_memory(config, fmt, limit) for fmt in FORMATS}
        largest = max(memory, key=memory.__getitem__)
        stage, beside = self.stage_bytes(config, largest), self.bytes_beside_stages(config)
        return KernelCost(stage, beside, self.stages(config, largest, limit), memory[largest], None)

    def rules(self, config: KernelConfig, arch: Arch) -> Iterator[FieldFinding]:
        tokens, rows, k = config.tile
        if tokens not in self.tokens:
            yield "tile", f"tile m = {tokens} tokens, expected {', '.join(map(str, self.tokens))}"
        if rows not in self.weight_rows:
            yield "tile", f"tile n = {rows} rows of the weight, expected {' or '.join(map(str, self.weight_rows))}"
        if k != TILE_K:
            yield "tile", f"tile k = {k}, expected {TILE_K}: a tile of a packed weight has {TILE_BLOCKS} blocks of {BLOCK}"
        if config.stages == "auto" or config.stages < self.least_stages:
            yield "stages", f"stages = {config.stages}; a {self.name} row says how many, {self.stages_hint}"
            return
        limit = arch.shared_memory
        if rows in self.weight_rows and max(self.stages(config, fmt, limit) for fmt in FORMATS) < config.stages:
            least = min(FORMATS, key=lambda fmt: self.stage_bytes(config, fmt))
            what = f"{config.stages} stages of {self.stage_bytes(config, least)} bytes and {self.bytes_beside_stages(config)} beside them"
            yield "stages", f"{what}, for {least}, which takes least, are more shared memory than the {limit} bytes of {arch.name}"

    def code(self, config: KernelConfig, built_for: str, limit: int) -> Code:
        header, name, sizes = self.cxx(config)
        cxx = f"scaled_mm::gguf::{name}<{WEIGHT_FORMATS[built_for].cxx}, {sizes}, {self.stages(config, built_for, limit)}>"
        mark = f"FormatILi{WEIGHT_FORMATS[built_for].code}E"  # of scaled_mm::gguf::Format, mangled
        return Code(header, cxx, self.shared_memory(config, built_for, limit), at_most=True, mark=mark)

    def cxx(self, config: KernelConfig) -> tuple[str, str, str]:
        """(header, class template, its arguments between the GGUF format and the stages)."""
        raise NotImplementedError
