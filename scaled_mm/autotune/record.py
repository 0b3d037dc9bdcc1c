"""What `autotune.json` holds: every sample, and what was made of them. The models are the schema. Times are microseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, model_validator

from scaled_mm.autotune.model import Accuracy
from scaled_mm.autotune.state import Cell
from scaled_mm.measure.record import Clocks, Environment, write_atomically

SCHEMA_VERSION = 1
AUTOTUNE_JSON = "autotune.json"
JOURNAL = "autotune.jsonl"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ProductRecord(_Model):
    """One product. row: the tuned table's, us: its time (null unless how is measured); base_row: that of the table before.

    shape: the layer's name, or NxK. how: see `choose.Choice`. roof_us: the floor (`measure.roofline`).
    """

    shape: str
    M: int
    N: int
    K: int
    row: str | None
    how: Literal["measured", "inherited", "predicted", "none"]
    us: float | None
    base_row: str
    base_us: float | None
    roof_us: float | None

    @property
    def speedup(self) -> float | None:
        """Of the tuned row over the base table's."""
        return None if self.us is None or self.base_us is None else self.base_us / self.us


class LeftOut(_Model):
    row: str
    M: int
    N: int
    K: int


class AutotuneDocument(_Model):
    """One run. legal: candidates that the rules let through; resumed: cells of earlier runs; table: the file written, if any.

    section: of the tile table, whose products were tuned. experts: of a product, with M rows each; 1 for sections without experts.
    """

    schema_version: int = SCHEMA_VERSION
    created: str
    command: str
    environment: Environment
    clocks: list[Clocks] = []
    base: str
    section: str = "gemm"
    experts: int = 1
    budget_minutes: float
    budget_ms: float
    seed: int
    top: int
    legal: int
    resumed: int
    worker_starts: int
    table: str | None
    ended: str | None
    products: list[ProductRecord]
    model_picked: list[ProductRecord] = []  # of reports before 0.2: narrower products, whose rows the model picked
    cells: list[Cell]
    unbuilt: dict[str, str]
    left_out: list[LeftOut]
    cliffs: list[str]
    accuracy: Accuracy | None

    @model_validator(mode="after")
    def _known_schema(self) -> AutotuneDocument:
        if self.schema_version != SCHEMA_VERSION:
            raise ValueError(f"schema_version {self.schema_version}: this version of scaled_mm reads {SCHEMA_VERSION}")
        return self


def save(document: AutotuneDocument, directory: Path) -> Path:
    """Writes `autotune.json`, whole or not at all, and returns its path."""
    return write_atomically(directory / AUTOTUNE_JSON, document.model_dump_json(indent=1) + "\n")


def load(directory: Path) -> AutotuneDocument:
    """Reads and validates `autotune.json`; pydantic.ValidationError names the field that does not fit, or says that it is no JSON."""
    return AutotuneDocument.model_validate_json((directory / AUTOTUNE_JSON).read_bytes())
