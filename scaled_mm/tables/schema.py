"""What a tile table says: kernel configurations, and the buckets of (M, N, K) that they serve.

These are the values; `rules` says which tables are sound, `loader` reads them from YAML, `select` searches them. A kernel's
configuration, and which of them can be built, is the matter of `scaled_mm.kernels`.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from scaled_mm.errors import BadParamError, KernelNotFoundError
from scaled_mm.kernels.config import SECTIONS, KernelConfig
from scaled_mm.tables.select import Selection, select_bucket

_INT64_MAX = 2**63 - 1  # what the C interface has for open
KernelRow = KernelConfig  # an entry of `rows` in a tile table


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing wrong with a table. `line` counts from 1; None when the file as a whole is meant."""

    file: str
    line: int | None
    field: str
    reason: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.field}: {self.reason}" if self.field else f"{place}: {self.reason}"


class TableError(BadParamError):
    """A tile table that cannot be used. `problems` has every reason; the message has one per line.

    Each line reads `<file>:<line>: <field>: <reason>`.
    """

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


class Bucket(BaseModel):
    """Serves every product with m_min <= M <= m, n_min <= N <= n and k_min <= K <= k (None: no bound) with the row named `kernel`.

    constant_b: only products whose b is a constant PreparedWeight, which some rows load before the preceding kernel has ended.
    activation: q8_1: only block products whose activations are, or are quantized to, that.
    """

    model_config = _FROZEN

    m: UpperBound = None
    n: UpperBound = None
    k: UpperBound = None
    m_min: LowerBound = 0
    n_min: LowerBound = 0
    k_min: LowerBound = 0
    constant_b: StrictBool = False
    activation: Literal["q8_1"] | None = None
    kernel: StrictStr

    @property
    def least(self) -> tuple[int, int, int]:
        """(m_min, n_min, k_min)."""
        return self.m_min, self.n_min, self.k_min

    @property
    def flags(self) -> int:
        """SCALED_MM_BUCKET_* of the C interface."""
        return int(self.constant_b) | (2 if self.activation else 0)

    def covers(self, M: int, N: int, K: int, constant_b: bool = False, q8_1: bool = False) -> bool:
        if (self.constant_b and not constant_b) or (self.activation and not q8_1):
            return False
        sizes = ((M, self.m_min, self.m), (N, self.n_min, self.n), (K, self.k_min, self.k))
        return all(least <= size and (most is None or size <= most) for size, least, most in sizes)


class ModeRule(BaseModel):
    """What mode "auto" is for float16 and bfloat16 activations of at most m tokens (None: no bound)."""

    model_config = _FROZEN

    m: UpperBound = None
    mode: Literal["w4a8", "w4a16"]


class TileTable(BaseModel):
    """The rows of one architecture and the buckets that choose among them; the first bucket that fits wins.

    serves: architectures whose GPUs use this table; their oldest is what its kernels are compiled for.
    tuned: measured on one GPU model by the autotuner. gpu: that model, by the driver's name for it.
    version: of the scaled_mm that measured it.
    fallback: name of the row that takes what no bucket's row can (unaligned or strided operands, K = 0).
    grouped: rows and buckets of grouped products, as a table whose M is the rows per expert, ceil(tokens / experts).
    block_scaled: rows and buckets of block-scaled products.
    gguf: rows and buckets of products with block formats (m: tokens, n: rows of the weight), and `auto`.
    auto: of `gguf` alone: the first that fits says what mode "auto" is.
    """

    model_config = _FROZEN

    arch: str
    serves: tuple[str, ...] = ()
    source: str
    tuned: bool
    gpu: str | None = None
    version: str | None = None
    rows: tuple[KernelRow, ...]
    buckets: tuple[Bucket, ...]
    fallback: str
    grouped: TileTable | None = None
    block_scaled: TileTable | None = None
    gguf: TileTable | None = None
    auto: tuple[ModeRule, ...] = ()

    @property
    def sections(self) -> tuple[TileTable, ...]:
        """The table itself and the sections that it has."""
        return (self, *(section for name in SECTIONS[1:] if (section := getattr(self, name))))

    @property
    def by_kind(self) -> tuple[TileTable | None, ...]:
        """The table of each kind of product, in the order of scaledMMTableKind_t; None for one that it lacks."""
        return self, self.grouped, self.block_scaled, self.gguf

    @property
    def all_rows(self) -> tuple[KernelRow, ...]:
        """The rows of all sections: every kernel of the architecture has one name."""
        return tuple(row for section in self.sections for row in section.rows)

    def row(self, name: str) -> KernelRow:
        """The row of that name; KernelNotFoundError lists the names that exist."""
        for row in self.all_rows:
            if row.name == name:
                return row
        known = ", ".join(row.name for row in self.all_rows)
        raise KernelNotFoundError(f"kernel: {self.source} has no row named {name!r}; its rows: {known}")

    def select(self, M: int, N: int, K: int, constant_b: bool = False, q8_1: bool = False) -> Selection:
        """The row for an aligned product of this size, and why.

        M, N, K: elements, >= 0 (BadParamError otherwise). K = 0 has nothing to load, so it takes the fallback row, but of block products.
        constant_b: whether b is a constant PreparedWeight. q8_1: whether activations are, or are quantized to, that.
        Whether the operands of one call are aligned is the dispatcher's to check: see `select.contiguous_misfits`.
        """
        return select_bucket(self, M, N, K, constant_b, q8_1)
