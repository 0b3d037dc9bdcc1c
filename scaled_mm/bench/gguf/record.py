"""What `bench_block.json` holds: the models are the schema, as those of `scaled_mm.measure.record`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import model_validator

from scaled_mm.measure.record import Clocks, Environment, Implementation, Model, Result, write_atomically

SCHEMA_VERSION = 1
BLOCK_JSON = "bench_block.json"


class LlamaSource(Model):
    """Where llama.cpp's times come from. told: one sentence for a reader; status "none" says there why there are none."""

    status: Literal["measured", "recorded", "none"]
    told: str


class BlockSettings(Model):
    budget_ms: float
    rounds: int
    check: bool
    seed: int
    kernel: str | None


class BlockCaseRecord(Model):
    """One product: M tokens, a weight [N, K] in the format `fmt`. weight_bytes: of its blocks. rotation: weight sets.

    The results' error is ||out - formula in float64|| / ||formula||, the larger of before and after timing, null when unchecked.
    """

    fmt: str
    shape: str
    M: int
    N: int
    K: int
    weight_bytes: int
    rotation: int
    outputs: int
    cold: bool
    llama_us: float | None
    results: dict[str, Result]


class BlockDocument(Model):
    schema_version: int = SCHEMA_VERSION
    created: str
    command: str
    settings: BlockSettings
    environment: Environment
    clocks: list[Clocks] = []
    implementations: list[Implementation]
    llama: LlamaSource
    cases: list[BlockCaseRecord] = []

    @model_validator(mode="after")
    def _known_schema(self) -> BlockDocument:
        if self.schema_version != SCHEMA_VERSION:
            raise ValueError(f"schema_version {self.schema_version}: this version of scaled_mm reads {SCHEMA_VERSION}")
        return self


def save(document: BlockDocument, directory: Path) -> Path:
    """Writes `bench_block.json`, whole or not at all, and returns its path."""
    return write_atomically(directory / BLOCK_JSON, document.model_dump_json(indent=1) + "\n")


def load(directory: Path) -> BlockDocument:
    """Reads and validates `bench_block.json`; pydantic.ValidationError says what does not fit."""
    return BlockDocument.model_validate_json((directory / BLOCK_JSON).read_bytes())
