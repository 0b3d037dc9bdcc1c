"""decode (csrc/int8/decode): small M on SM90. In a cluster, split_k thread blocks share a tile's K, and cluster.m tiles of columns share the
rows of a that they load."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from scaled_mm.kernels.arch import CLUSTER_SIZES, KIB, MAX_CLUSTER, WARPGROUP, Arch
from scaled_mm.kernels.config import KernelConfig
from scaled_mm.kernels.constants import Constants
from scaled_mm.kernels.dtypes import MAX_OUT_BYTES, OUT_DTYPES
from scaled_mm.kernels.family import Code, FieldFinding, KernelCost
from scaled_mm.kernels.naming import candidate
from scaled_mm.kernels.wgmma import WgmmaFamily

COLUMNS = (64, 128)  # of b, the wide side of the MMA: 64 per warpgroup
STEP_K = 128  # the width of the shared memory swizzle
MAX_ROWS = 256  # of a, the narrow side of the MMA
SPLITS = CLUSTER_SIZES  # thread blocks of a cluster that share K
SHARES = CLUSTER_SIZES  # tiles of columns in a cluster

# Candidates: as many stages as fit with one, two, three and four thread blocks per SM.
_TILE_N = (8, 16, 32, 48, 64, 96, 128)
_CANDIDATE_SHARES = (1, 2, 4)
_RESIDENT = (1, 2, 3, 4)


def owners(config: KernelConfig) -> int:
    """Thread blocks of a cluster that own rows of a tile: the most that divide it into whole fragments of 8 rows."""
    split = config.split_k
    while split > 1 and config.tile.n // 8 % split:
        split //= 2
    return split


class Decode(WgmmaFamily):
    """Plain products with small M."""

    name = "decode"
    compile_order = 2
    fields = ("tile", "swap_ab", "split_k", "stages", "cluster", "schedule")
    alignment = (16, 16, 1)
    splits_k = True
    splits_in_clusters = True

    def cost(self, config: KernelConfig, limit: int, out_bytes: int = MAX_OUT_BYTES) -> KernelCost:
        """Bytes of shared memory, as in `Shared` of csrc/int8/decode/storage.cuh, and accumulators per thread.

        A stage has a tile of both operands and two barriers. Besides the stages, a thread block has an output tile, scales, bias and
        zero-point terms for the rows that it owns. If K is split, it also has the other thread blocks' sums with two barriers, twice if the
        kernel is persistent. The total is rounded up to 1024.
        """
        columns, rows = config.tile.m, config.tile.n
        stage = (columns + rows) * STEP_K + 16
        stages = 0 if config.stages == "auto" else config.stages
        owned = rows // owners(config)
        out = owned * (columns * out_bytes + 16)
        exchange = (2 if config.schedule else 1) * ((config.split_k - 1) * columns * owned * 4 + 16) if config.split_k > 1 else 8
        epilogue = out + exchange + (2 * columns + owned) * 4 + (columns + owned) * 8
        return KernelCost(stage, epilogue, stages, -(-(stages * stage + epilogue) // 1024) * 1024, 64 * rows // WARPGROUP)

    # ---- legality -------------------------------------------------------------------------------------------------------

    def rules(self, config: KernelConfig, arch: Arch) -> Iterator[FieldFinding]:
        tile, cluster = config.tile, config.cluster
        if not config.swap_ab:
            yield "swap_ab", "a decode row computes out^T: swap_ab: true"
        if tile.m not in COLUMNS or tile.k != STEP_K:
            yield "tile", f"tile {tile}; a decode row has m = 64 or 128 and k = {STEP_K}"
        if tile.n % (8 if tile.n <= 32 else 16) or tile.n > MAX_ROWS:
            yield "tile", f"tile n = {tile.n}, expected a multiple of 8, from 32 on of 16, at most {MAX_ROWS}: wgmma's shapes for int8"
        if config.split_k not in SPLITS:
            yield "split_k", f"split_k = {config.split_k}, expected one of {', '.join(map(str, SPLITS))}: blocks of a cluster"
        if cluster.n != 1 or cluster.m not in SHARES:
            yield "cluster", f"cluster {cluster}; expected m of {', '.join(map(str, SHARES))}, tiles of columns that share rows of a, and n = 1"
        elif cluster.m * config.split_k > MAX_CLUSTER:
            what = f"{cluster.m} tiles of {config.split_k} blocks each"
            yield "cluster", f"{what}; a cluster of {MAX_CLUSTER} blocks is the most that every GPU can schedule"
        elif tile.n % (8 * cluster.m):
            yield "cluster", f"tile n = {tile.n}: each of {cluster.m} blocks loads a part of the rows, whole groups of 8"
        if config.schedule not in (None, "cooperative"):
            yield "schedule", f"{config.schedule}; a decode row has cooperative, a persistent kernel, or none: each cluster has one tile"
        if config.stages == "auto" or config.stages < 2:
            what = f"stages = {config.stages}, expected a number of at least 2"
            yield "stages", f"{what}: the number decides how many thread blocks share an SM"
        elif (bytes_ := self.cost(config, arch.shared_memory).shared_memory) > arch.shared_memory:
            yield "stages", f"{config.stages} stages are {bytes_} bytes of shared memory, there are {arch.shared_memory}"

    # ---- C++ ------------------------------------------------------------------------------------------------------------

    def code(self, config: KernelConfig, built_for: str, limit: int) -> Code:
        out = OUT_DTYPES[built_for]
        persistent = "true" if config.schedule else "false"
        sizes = f"{config.tile.m}, {config.tile.n}, {config.split_k}, {config.cluster.m}, {config.stages}, {persistent}"
        cxx = f"scaled_mm::decode::Gemm<{sizes}, {out.cxx}>"
        return Code("int8/decode/gemm.cuh", cxx, self.cost(config, limit, out.bytes).shared_memory)

    # ---- the autotuner --------------------------------------------------------------------------------------------------

    def config_name(self, config: KernelConfig) -> str:
        cluster = "" if config.cluster == (1, 1) else f"_c{config.cluster.m}{config.cluster.n}"
        return f"decode_{config.tile}{'_co' if config.schedule else ''}{cluster}_k{config.split_k}_x{config.stages}"

    def candidates(self, arch: Arch) -> Iterator[KernelConfig]:
        if not arch.wgmma:
            return
        for m, n, split_k, share, schedule in itertools.product(COLUMNS, _TILE_N, SPLITS, _CANDIDATE_SHARES, (None, "cooperative")):
            if n % (8 * share) or share * split_k > MAX_CLUSTER:
                continue
            fields = dict(tile=[m, n, 128], swap_ab=True, split_k=split_k, cluster=[share, 1], schedule=schedule)
            trial = candidate(self, **fields, stages=2)
            for stages in {self._most_stages(trial, arch.shared_memory, blocks) for blocks in _RESIDENT}:
                if stages >= 2:
                    yield candidate(self, **fields, stages=stages)

    def _most_stages(self, config: KernelConfig, limit: int, blocks: int) -> int:
        """The most stages with which `blocks` thread blocks share an SM. With blocks = 1 for every output dtype, else for 16-bit outputs."""
        cost = self.cost(config, limit, MAX_OUT_BYTES if blocks == 1 else 2)
        return ((limit + KIB) // blocks // KIB * KIB - KIB - cost.epilogue_bytes) // cost.stage_bytes

    def loads_weights_early(self, config: KernelConfig) -> bool:
        return True

    def step_us(self, config: KernelConfig, cost: KernelCost, multiply: float, c: Constants) -> float:
        return max(multiply, c.decode_step_us + c.decode_column_us * config.tile.n)

    def start_us(self, config: KernelConfig, c: Constants) -> float:
        return c.decode_us
