"""GGUF products on SM90. gguf_wgmma: persistent thread blocks share the tiles that remain after whole waves. gguf_wgmma_cluster: a cluster shares
every tile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from scaled_mm.gguf_formats import BLOCK, TILE_BLOCKS, TILE_ROWS
from scaled_mm.gguf_formats import WEIGHT_FORMATS as FORMATS
from scaled_mm.kernels.arch import Arch
from scaled_mm.kernels.config import KernelConfig
from scaled_mm.kernels.family import FieldFinding, KernelCost
from scaled_mm.kernels.gguf import Gguf
from scaled_mm.kernels.sharing import SHARING_CLUSTERS

if TYPE_CHECKING:
    from scaled_mm.kernels.constants import Constants

MOST_SHARES = 16  # the most thread blocks that share a tile, on average
_BARRIERS = 2048  # bytes
_LEAST_RING = 4  # stages of activations
_STAGES_WITHOUT_CLUSTERS = 2  # of a kernel config with clusters, where weights are not rounded
_MORE_TOKENS = (144, 160, 224)  # whose instructions take a further header
_TWO_PER_SM = 64  # tokens of a tile
_MOST_STAGES_OF_TWO = 3
_MMA_TOKENS = 16  # up to this many tokens, without clusters, mma.sync multiplies, and a stage also holds the activations for a whole tile of K


class GgufWgmma(Gguf):
    """A stage holds tiles of the weight, sums of activations, and with few tokens the activations."""

    name = "gguf_wgmma"
    fields = ("tile", "split_k", "stages")
    needs_wgmma = True
    compile_order = 3
    splits_k = True
    tokens = (8, 16, 32, 64, 96, 128, 144, 160, 192, 224, 256)
    weight_rows = (TILE_ROWS, 2 * TILE_ROWS)
    least_stages = 2
    stages_hint = "at least 2"

    def stage_bytes(self, config: KernelConfig, fmt: str) -> int:
        tokens = config.tile.m
        values = tokens * TILE_BLOCKS * (2 * BLOCK + 8) if tokens <= _MMA_TOKENS else 0
        sums = tokens * TILE_BLOCKS * 8 if FORMATS[fmt].second == "m" and not values else 0
        tiles = config.tile.n // TILE_ROWS
        # Kernels that round values read the powers of rows, but no sums.
        return max(tiles * FORMATS[fmt].bands_bytes + values + sums, tiles * FORMATS[fmt].tile_bytes)

    def stages(self, config: KernelConfig, fmt: str, limit: int) -> int:
        """As many as fit. A kernel config of more than 128 tokens also contains a kernel of 128 tokens with one stage more, which must fit too."""
        found = super().stages(config, fmt, limit)
        if config.tile.m <= 128:
            return found
        halved = config.model_copy(update={"tile": config.tile._replace(m=128), "stages": found + 1})
        return min(found, super().stages(halved, fmt, limit) - 1)

    def bytes_beside_stages(self, config: KernelConfig) -> int:
        """Barriers; with wgmma also the ring of activations, which `stages` does not count: 16-bit floats and two float32 per GGUF block."""
        tokens = config.tile.m
        if tokens <= _MMA_TOKENS:
            return _BARRIERS
        return _BARRIERS + (6 if tokens <= 128 else 4) * tokens * (2 * 64 + 2 * 8)

    def shared_memory(self, config: KernelConfig, fmt: str, limit: int) -> int:
        """Where weights round, the ring of activations of 96 to 224 tokens has up to eight stages, as many as fit, and no factors. If their number is
        no power of two, all weights round."""
        found, tokens = super().shared_memory(config, fmt, limit), config.tile.m
        if not 64 < tokens < 256:
            return found
        rounded = min(limit, found - self.bytes_beside_stages(config) + _BARRIERS + 8 * tokens * 2 * 64)
        return rounded if tokens & (tokens - 1) else max(found, rounded)

    def notes(self, config: KernelConfig, fmt: str, limit: int) -> Iterator[str]:
        if config.tile.m & (config.tile.m - 1):
            yield f"where weights are not rounded a tile has {128 if config.tile.m > 128 else 64} tokens"
        elif config.tile.m > 128:
            idle = " and where such tiles would leave SMs idle" if FORMATS[fmt].second == "m" else ""
            yield f"with q8_1 activations{idle} a tile has 128 tokens"

    def rules(self, config: KernelConfig, arch: Arch) -> Iterator[FieldFinding]:
        yield from super().rules(config, arch)
        if not 1 <= config.split_k <= MOST_SHARES:
            yield "split_k", f"split_k = {config.split_k}, expected 1 to {MOST_SHARES}: thread blocks that share the K of a tile that is left over"

    def most_parts(self, config: KernelConfig) -> int:
        return config.split_k if config.tile.m > _MMA_TOKENS else 0  # with fewer tokens no weight rounds, and times are for rounded weights

    def resident(self, config: KernelConfig, cost: KernelCost, shared_memory: int) -> int:
        """Thread blocks per SM that tiles are dealt to: kAtOnce of csrc/gguf/wgmma_shape.cuh for rounded weights, tiles of 128 rows and at most
        three stages."""
        return 2 if config.tile.m <= _TWO_PER_SM else 1

    def multiply_rate(self, config: KernelConfig, c: Constants) -> float:
        return 0.5  # 16-bit values

    def cxx(self, config: KernelConfig) -> tuple[str, str, str]:
        header = "gguf/wgmma_more.cuh" if config.tile.m in _MORE_TOKENS else "gguf/wgmma.cuh"
        return header, "Wgmma", f"{config.tile.m}, {config.tile.n}, {config.split_k}"

    def config_name(self, config: KernelConfig) -> str:
        split = f"_k{config.split_k}" if config.split_k > 1 else ""
        return f"gguf_wgmma_{config.tile.n}x{config.tile.m}{split}_x{config.stages}"


class GgufWgmmaCluster(GgufWgmma):
    """The K of every tile is shared by a cluster of 2, 3, 4, 6 or 8 thread blocks, at most split_k, as suits the product. For weights that round."""

    name = "gguf_wgmma_cluster"
    splits_in_clusters = True
    tokens = (16, 32, 64, 96, 128, 160)

    def stage_bytes(self, config: KernelConfig, fmt: str) -> int:
        return config.tile.n // TILE_ROWS * FORMATS[fmt].tile_bytes

    def stages(self, config: KernelConfig, fmt: str, limit: int) -> int:
        return Gguf.stages(self, config, fmt, limit)

    def bytes_beside_stages(self, config: KernelConfig) -> int:
        """Barriers, sums of the other thread blocks, and the least ring of activations."""
        return _BARRIERS + _received(config) + _LEAST_RING * config.tile.m * 2 * 64

    def shared_memory(self, config: KernelConfig, fmt: str, limit: int) -> int:
        """At most: the ring of activations has four stages with two thread blocks per SM, else up to eight, as many as fit."""
        own = Gguf.shared_memory(self, config, fmt, limit) + (8 - _LEAST_RING) * config.tile.m * 2 * 64
        tile = config.tile._replace(m=_tokens_without_clusters(config))
        without = config.model_copy(update={"tile": tile, "stages": _STAGES_WITHOUT_CLUSTERS})
        return min(limit, max(own, Gguf.shared_memory(GgufWgmma(), without, fmt, limit)))

    def notes(self, config: KernelConfig, fmt: str, limit: int) -> Iterator[str]:
        yield f"where weights are not rounded a tile has {_tokens_without_clusters(config)} tokens, and thread blocks are not in clusters"

    def rules(self, config: KernelConfig, arch: Arch) -> Iterator[FieldFinding]:
        yield from Gguf.rules(self, config, arch)
        if config.split_k not in SHARING_CLUSTERS:
            yield (
                "split_k",
                f"split_k = {config.split_k}, expected one of {', '.join(map(str, SHARING_CLUSTERS))}: the most thread blocks of a cluster",
            )

    def most_parts(self, config: KernelConfig) -> int:
        return 1

    def resident(self, config: KernelConfig, cost: KernelCost, shared_memory: int) -> int:
        """Two thread blocks per SM for few tokens and stages, if they fit, which those of 64 tokens and q8_0 do not: kPair of
        csrc/gguf/wgmma_shape.cuh."""
        return 2 if config.tile.m <= _TWO_PER_SM and config.stages <= _MOST_STAGES_OF_TWO else 1

    def cxx(self, config: KernelConfig) -> tuple[str, str, str]:
        header, _, _ = super().cxx(config)
        return header, "WgmmaCluster", f"{config.tile.m}, {config.tile.n}, {config.split_k}"

    def config_name(self, config: KernelConfig) -> str:
        return f"{self.name}_{config.tile.n}x{config.tile.m}_k{config.split_k}_x{config.stages}"


def _tokens_without_clusters(config: KernelConfig) -> int:
    """Of a tile where weights are not rounded."""
    return 128 if config.tile.m > 128 else 64


def _received(config: KernelConfig) -> int:
    """Bytes of the sums that a thread block receives for each tile: of its own tokens, from each other thread block of the cluster."""
    tokens, rows, _ = config.tile
    return max((blocks - 1) * -(-tokens // 8 // blocks) * 8 for blocks in SHARING_CLUSTERS if blocks <= config.split_k) * rows * 4
