"""The configuration of one kernel: an entry of a tile table, checked for its types. `family` says which configurations are legal."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from scaled_mm.kernels.family import FAMILIES

Section = Literal["gemm", "grouped", "block_scaled", "gguf"]
SECTIONS: tuple[str, ...] = get_args(Section)
"""The sections of a tile table: a kind of product each. The table itself is the first."""

Positive = Annotated[StrictInt, Field(gt=0)]
# A kernel's name becomes a file name and part of a C symbol.
ConfigName = Annotated[StrictStr, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=64)]


class TileShape(NamedTuple):
    """Elements of the MMA's tile. Of a swapped kernel, `m` runs over N and `n` over M."""

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


def _family(value: str) -> str:
    if value in FAMILIES:
        return value
    *most, last = map(repr, FAMILIES)
    raise ValueError(f"Input should be {', '.join(most)} or {last}")


class KernelConfig(BaseModel):
    """One kernel: everything the build needs to generate its translation unit.

    family: the kernels of one source; each is a module of this room.
    section: the kind of product; its kernels differ from those of the same family in another section.
    warp: c2x only: the part of the tile that one warp multiplies; a smaller k splits the tile's K between warps.
        A c2x kernel's swizzle: blocks go down M over this many tiles of N. Its split_k: blocks that share a tile's K and add
        their int32 sums in the workspace. A gguf_wgmma kernel's: as many at most, on average, that share the K of a tile
        that is left after whole rounds of tiles.
    schedule: of c3x kernels; a decode kernel has cooperative where its blocks are persistent.
    swap_ab: compute out^T = b^T a^T, so that a small M fills the narrow side of the MMA.
    raster: the dimension of the MMA along which a persistent grid walks its tiles first; heuristic: the shorter one,
        or of a grouped kernel the one along the tokens.
    swizzle: tiles side by side before it walks on, at most; both decide what is still in L2 when it is wanted again.
    prefetch: bytes of each weight row of a block's first tile that it asks L2 for before the preceding kernel has ended.
    early_weights: where the weights are constant (a PreparedWeight), fill the stages of a block's first tile with them instead.
    stages: of the A/B pipeline in shared memory; auto takes what fits beside the epilogue. Of a GGUF kernel: as many, or what fits of the
        format's; 1 of gguf_mma is none, weights go from memory to registers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ConfigName
    family: Annotated[StrictStr, AfterValidator(_family)]
    section: Section = "gemm"
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
        """Bytes that pointers and row strides of (a, b, out) must be multiples of: 16 is what TMA asks for."""
        return self._kernels.alignment

    @property
    def store_bytes(self) -> int:
        """The kernel writes a row of out in whole pieces of these bytes, so that N must fill them: a TMA store does not cut its 16."""
        return self._kernels.store_bytes

    @property
    def _kernels(self) -> Any:
        # An illegal configuration may lack a kernel for its section; the rules say so, and until then any of the family's does.
        of_family = FAMILIES[self.family]
        return of_family.get(self.section) or next(iter(of_family.values()))
