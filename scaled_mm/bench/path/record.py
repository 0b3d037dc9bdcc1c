"""What `path.json` holds: the models are the schema, as those of `scaled_mm.measure.record`."""

from __future__ import annotations

from typing import ClassVar

from scaled_mm.bench.overhead import OverheadRecord
from scaled_mm.bench.path.cases import LAYER, LINEARS, RANDOM
from scaled_mm.measure.record import CaseRecord, Document, Model, Settings


class PathCaseRecord(CaseRecord):
    """part: layer, random, or an operator on M rows of K columns (N = K). traffic_bytes, roof_us: see `scaled_mm.measure.roofline`; of an operator
    the roof is the memory's. check: "checked", which rows, or why not."""

    part: str
    traffic_bytes: int
    roof_us: float | None
    check: str

    @property
    def linear(self) -> bool:
        return self.part in LINEARS

    @property
    def weight(self) -> str:
        """Name of the table: a layer, all random layers, an operator."""
        return {LAYER: self.shape, RANDOM: "random layers"}.get(self.part, self.part)

    @property
    def label(self) -> str:
        return f"{self.shape} M={self.M}" if self.linear else f"{self.part} {self.M}x{self.K}"


class Lacking(Model):
    """An implementation that could run, but lacks a part."""

    implementation: str
    part: str
    why: str


class PathSettings(Settings):
    """check_limit_gmac: linear layers of more billion multiply-adds are not checked."""

    check_limit_gmac: float


class PathDocument(Document):
    FILES: ClassVar[tuple[str, ...]] = ("path.json",)

    settings: PathSettings
    lacking: list[Lacking] = []
    cases: list[PathCaseRecord] = []
    overhead: list[OverheadRecord] = []
