"""`KernelConfig`: one kernel, an entry of a tile table's `rows`. Pydantic checks the types; `family.py` checks which configs are legal."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from scaled_mm.kernels.family import FAMILIES
from scaled_mm.kernels.sections import SECTIONS, TOP_LEVEL

Positive = Annotated[StrictInt, Field(gt=0)]
# A kernel's name becomes a file name and part of a C symbol.
ConfigName = Annotated[StrictStr, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=64)]


class TileShape(NamedTuple):
    """Elements of the MMA's tile. With `swap_ab`, `m` runs over N and `n` over M."""

    m: Positive
    n: Positive
    k: Positive

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


class ClusterShape(NamedTuple):
    """Thread blocks per cluster along the MMA's m and n."""

    m: Positive
    n: Positive

    def __str__(self) -> str:
        return f"{self.m}x{self.n}"


def _stages(value: Any) -> Any:
    if value == "auto" or (type(value) is int and value >= 1):
        return value
    raise ValueError("expected auto or a positive integer")


def _one_of(values: Iterable[str], value: str) -> str:
    if value in values:
        return value
    *most, last = map(repr, values)
    raise ValueError(f"Input should be {', '.join(most)} or {last}")


class KernelConfig(BaseModel):
    """One kernel config: everything the build needs to generate a translation unit.

    family: the kernel family; each is a module of this room.
    section: the kind of product. A family has different kernels in each section.
    warp: c2x only: the part of the tile that one warp multiplies. If its k is smaller than the tile's, warps share the tile's K.
    cluster: thread blocks per cluster.
    schedule: c3x only. Exception: on a decode kernel, cooperative makes thread blocks persistent.
    scheduler: cooperative c3x only. stream_k: the tiles after the last but one full wave are divided along K, so that all thread blocks compute
        equally many steps; their int32 sums are added in the workspace.
    swap_ab: compute out^T = b^T a^T, so that a small M fills the narrow side of the MMA.
    raster: the dimension of the MMA along which a persistent grid visits tiles first. heuristic: the shorter one; for grouped kernels the
        one along the tokens.
    swizzle: the most tiles in the other dimension that are visited together. raster and swizzle determine the hit rate in L2. c2x: thread
        blocks go down M over this many tiles of N.
    prefetch: bytes of each weight row of a thread block's first tile that are prefetched into L2 before the preceding kernel has ended.
    early_weights: for constant weights: load the stages of a thread block's first tile before the preceding kernel has ended.
    stages: of the pipeline in shared memory; auto takes as many as fit beside the epilogue. GGUF kernels take this number, or as many as
        fit with the GGUF format. gguf_mma with 1 stage has no pipeline: weights go from device memory to registers.
    split_k: thread blocks that share a tile's K. c2x: they add int32 sums in the workspace. decode: they form a cluster. gguf_wgmma: the
        largest average number, for the tiles left after whole rounds. gguf_wgmma_cluster: the most of a cluster.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ConfigName
    family: Annotated[StrictStr, AfterValidator(partial(_one_of, FAMILIES))]
    section: Annotated[StrictStr, AfterValidator(partial(_one_of, SECTIONS))] = TOP_LEVEL
    tile: TileShape
    warp: TileShape | None = None
    cluster: ClusterShape = ClusterShape(1, 1)
    schedule: Literal["warp_specialized", "pingpong", "cooperative"] | None = None
    scheduler: Literal["persistent", "stream_k"] = "persistent"
    swap_ab: StrictBool = False
    raster: Literal["heuristic", "along_m", "along_n"] = "heuristic"
    swizzle: Literal[1, 2, 4, 8] = 1
    prefetch: Annotated[StrictInt, Field(ge=0)] = 0
    early_weights: StrictBool = False
    stages: Annotated[int | Literal["auto"], BeforeValidator(_stages)] = "auto"
    split_k: Positive = 1

    @property
    def alignment(self) -> tuple[int, int, int]:
        """(a, b, out): the bytes of which their pointers and row strides must be multiples. TMA needs 16."""
        return self._kernels.alignment

    @property
    def store_bytes(self) -> int:
        """The kernel stores rows of out in pieces of this many bytes, so a row's bytes must be a multiple of it. TMA stores 16."""
        return self._kernels.store_bytes

    @property
    def block_size(self) -> int:
        """Of block-scaled products: the kernel takes blocks of at least so many elements of K. 0: of any size."""
        return self._kernels.block_size(self)

    @property
    def _kernels(self) -> Any:
        # The family of an illegal config may have no kernel for its section. The rules report that; until then any kernel of the family will do.
        of_family = FAMILIES[self.family]
        return of_family.get(self.section) or next(iter(of_family.values()))
