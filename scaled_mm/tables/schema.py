"""`TileTable`: kernel configs, and the buckets of (M, N, K) that they serve.

`loader` reads tables from YAML, `rules` checks them, `select` searches them. `KernelConfig` and the rules for it are in `scaled_mm.kernels`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from scaled_mm.errors import BadParamError, KernelNotFoundError
from scaled_mm.kernels.config import KernelConfig
from scaled_mm.kernels.gpu import GpuFacts, typical
from scaled_mm.kernels.sections import OTHER_SECTIONS, SECTIONS
from scaled_mm.kernels.time_model import OUT_BYTES, TimeModel, estimate
from scaled_mm.tables.select import MODES, Selection, select_bucket

_INT64_MAX = 2**63 - 1  # `open` in the C interface
KernelRow = KernelConfig  # an entry of `rows` in a tile table


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem of a table. line: from 1; None for the file as a whole."""

    file: str
    line: int | None
    field: str
    reason: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.field}: {self.reason}" if self.field else f"{place}: {self.reason}"


class TableError(BadParamError):
    """An invalid tile table. `problems` contains every reason. The message has one line per problem: `<file>:<line>: <field>: <reason>`."""

    def __init__(self, problems: list[Problem] | tuple[Problem, ...]):
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self):
        return type(self), (self.problems,)


def _bound(value: Any) -> Any:
    if value is None or value == "open":
        return None
    if type(value) is int and 1 <= value < _INT64_MAX:
        return value
    raise ValueError("expected a positive integer or open")


LowerBound = Annotated[StrictInt, Field(ge=0, lt=_INT64_MAX)]
UpperBound = Annotated[int | None, BeforeValidator(_bound)]
_FROZEN = ConfigDict(frozen=True, extra="forbid")
GgufMode = Literal["w4a8", "w4a16", "w16a16"]
MODE_FLAGS = {mode: 2 << i for i, mode in enumerate(MODES)}
"""SCALED_MM_BUCKET_* of each mode."""
_MINIMA_FLAG = 16  # SCALED_MM_BUCKET_MINIMA


class Bucket(BaseModel):
    """Serves products with m_min <= M <= m, n_min <= N <= n and k_min <= K <= k (None: no bound) by the kernel config named `kernel`, or by the one
    with the least predicted time (FASTEST).

    constant_b: only products whose b is a constant PreparedWeight, which some kernels load before the preceding kernel has ended.
    mode: only GGUF products of that mode; "auto" is replaced by the mode that it stands for.
    minima: only GGUF products whose format has minima, q4_1 and q5_1.
    """

    model_config = _FROZEN

    m: UpperBound = None
    n: UpperBound = None
    k: UpperBound = None
    m_min: LowerBound = 0
    n_min: LowerBound = 0
    k_min: LowerBound = 0
    constant_b: StrictBool = False
    mode: GgufMode | None = None
    minima: StrictBool = False
    kernel: StrictStr

    @property
    def least(self) -> tuple[int, int, int]:
        """(m_min, n_min, k_min)."""
        return self.m_min, self.n_min, self.k_min

    @property
    def flags(self) -> int:
        """SCALED_MM_BUCKET_* of the C interface."""
        return int(self.constant_b) | (MODE_FLAGS[self.mode] if self.mode else 0) | _MINIMA_FLAG * self.minima

    def covers(self, M: int, N: int, K: int, constant_b: bool = False, mode: str | None = None, minima: bool = False) -> bool:
        if (self.constant_b and not constant_b) or (self.mode and self.mode != mode) or (self.minima and not minima):
            return False
        sizes = ((M, self.m_min, self.m), (N, self.n_min, self.n), (K, self.k_min, self.k))
        return all(least <= size and (most is None or size <= most) for size, least, most in sizes)


def _number(value: Any) -> Any:
    if isinstance(value, bool):  # 5e-05 is text in YAML, so a strict float does not do
        raise ValueError("expected a number")
    return value


Number = Annotated[float, BeforeValidator(_number)]
Microseconds = Annotated[Number, Field(ge=0, le=1e9)]


class Times(BaseModel):
    """The fitted coefficients of a kernel config's predicted time (`scaled_mm.kernels.time_model` has the formula).

    start, step, tile, wait, sharing, two_tiles: microseconds. memory: a factor on the memory's bandwidth, > 0. GGUF kernel configs have no memory;
    those that share the tiles after whole waves have sharing and two_tiles.
    """

    model_config = _FROZEN

    start: Microseconds
    step: Microseconds
    tile: Microseconds
    memory: Annotated[Number, Field(gt=0, allow_inf_nan=False)] | None = None
    wait: Microseconds = 0.0
    sharing: Microseconds = 0.0
    two_tiles: Microseconds = 0.0


class ModeRule(BaseModel):
    """The meaning of mode "auto" for float16 and bfloat16 activations of at most m tokens (None: no bound). Outputs in float32 and unpacked weights
    get w4a16 instead of w16a16."""

    model_config = _FROZEN

    m: UpperBound = None
    mode: GgufMode


class TileTable(BaseModel):
    """The kernel configs of one architecture, and the buckets that select among them. The first matching bucket is used.

    serves: architectures whose GPUs use this table. Kernels are compiled for the oldest of them.
    tuned: measured on one GPU model by the autotuner. gpu: the driver's name of that model.
    version: the version of scaled_mm that measured it.
    rows: the kernel configs.
    times: fitted coefficients of their predicted times, by name. Those of the others follow from the architecture's numbers; in `gguf` they have
        none.
    fallback: the name of the kernel config for products that no other can take (unaligned or strided operands, K = 0).
    grouped: the section for grouped products. Its M is the number of tokens per expert, ceil(tokens / experts).
    block_scaled: the section for block-scaled products.
    gguf: the section for products with GGUF formats (m: tokens, n: rows of the weight).
    grouped_block_scaled: the section for grouped block-scaled products. Its M is that of `grouped`.
    auto: in `gguf` only: the meaning of mode "auto"; the first matching entry is used.
    """

    model_config = _FROZEN

    arch: str
    serves: tuple[str, ...] = ()
    source: str
    tuned: bool
    gpu: str | None = None
    version: str | None = None
    rows: tuple[KernelRow, ...]
    times: dict[str, Times] = {}
    buckets: tuple[Bucket, ...]
    fallback: str
    grouped: TileTable | None = None
    block_scaled: TileTable | None = None
    gguf: TileTable | None = None
    grouped_block_scaled: TileTable | None = None
    auto: tuple[ModeRule, ...] = ()

    @property
    def sections(self) -> tuple[TileTable, ...]:
        """The table itself and its sections."""
        return tuple(section for section in self.by_kind if section)

    @property
    def by_kind(self) -> tuple[TileTable | None, ...]:
        """The section of each kind of product, in the order of scaledMMTableKind_t; None for a missing one."""
        return (self, *(getattr(self, name) for name in OTHER_SECTIONS))

    @property
    def all_rows(self) -> tuple[KernelRow, ...]:
        """The kernel configs of all sections. Names are unique across sections."""
        return tuple(row for section in self.sections for row in section.rows)

    def row(self, name: str) -> KernelRow:
        """The kernel config of that name. KernelNotFoundError lists the known names."""
        for row in self.all_rows:
            if row.name == name:
                return row
        known = ", ".join(row.name for row in self.all_rows)
        raise KernelNotFoundError(f"kernel: {self.source} has no row named {name!r}; its rows: {known}")

    @property
    def section(self) -> str:
        """The section whose kernel configs these are; "gemm" for a whole table."""
        return self.rows[0].section

    def has_predicted_time(self, row: KernelRow) -> bool:
        """False for the fallback, and in the section gguf for kernel configs without `times`."""
        return row.name != self.fallback and (SECTIONS[row.section].same_bits or row.name in self.times)

    @property
    def predicted_rows(self) -> tuple[KernelRow, ...]:
        """The kernel configs that have a predicted time."""
        return tuple(row for row in self.rows if self.has_predicted_time(row))

    def predicted_us(self, row: KernelRow, M: int, N: int, K: int, gpu: GpuFacts, constant_b: bool = True, count: int = 1) -> float:
        """The predicted microseconds of a kernel config, one of `rows` or another of the section. The arguments: see `fastest`."""
        return self.time_model(row).us(M, N, K, gpu, count, constant_b, SECTIONS[self.section].mean_m)

    def time_model(self, row: KernelRow) -> TimeModel:
        """The model of the predicted time of one of `rows`."""
        return _time_model(row, self.arch, self.times.get(row.name))

    def fastest(
        self,
        M: int,
        N: int,
        K: int,
        constant_b: bool = False,
        gpu: GpuFacts | None = None,
        out_bytes: int = OUT_BYTES,
        count: int = 1,
        block_size: int = 128,
    ) -> list[tuple[float, KernelRow]]:
        """(predicted microseconds, kernel config) of those that write rows of N elements of out_bytes, the fastest first; without the fallback.

        M, N, K: elements, >= 1. gpu: default the one that the table was tuned on, or a common one of the architecture. Times are those of 16-bit
        outputs. In the section gguf only kernel configs with `times` are listed, whose times are those of mode w16a16. count: products in one launch;
        for grouped products, the experts that have rows. block_size: of block-scaled products, 128 or 64.
        """
        gpu = gpu or typical(self.arch, self.gpu)
        rows = [row for row in self.predicted_rows if N * out_bytes % row.store_bytes == 0 and row.block_size <= block_size]
        found = [(self.predicted_us(row, M, N, K, gpu, constant_b, count), row) for row in rows]
        return sorted(found, key=lambda pair: pair[0])

    def select(
        self,
        M: int,
        N: int,
        K: int,
        constant_b: bool = False,
        mode: str | None = None,
        gpu: GpuFacts | None = None,
        count: int = 1,
        minima: bool = False,
    ) -> Selection:
        """The kernel config for an aligned product of this size, and the reason.

        M, N, K: elements, >= 0 (BadParamError otherwise). K = 0 takes the fallback, except in the section gguf.
        constant_b: whether b is a constant PreparedWeight. mode: of a GGUF product, never "auto"; None: no bucket of a mode is used.
        gpu, count: see `fastest`; used by buckets with `kernel: fastest` only. minima: whether the format of a GGUF product has minima.
        The alignment of a call's operands is checked by the C core (csrc/core/problem.cpp); see also `select.contiguous_misfits`.
        """
        return select_bucket(self, M, N, K, constant_b, mode, gpu, count, minima)


@functools.lru_cache(maxsize=4096)
def _time_model(row: KernelRow, arch: str, times: Times | None) -> TimeModel:
    model = estimate(row, arch)
    if times is None:
        return model
    fitted = dict(
        start_us=times.start, step_us=times.step, tile_us=times.tile, wait_us=times.wait, sharing_us=times.sharing, two_tiles_us=times.two_tiles
    )
    if times.memory is not None:
        fitted["memory"] = times.memory
    return dataclasses.replace(model, **fitted)
