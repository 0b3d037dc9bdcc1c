"""What `experts.json` holds: the models are the schema, as those of `scaled_mm.measure.record`."""

from __future__ import annotations

from typing import ClassVar

from scaled_mm.measure.record import CaseRecord, Document


class ExpertsCaseRecord(CaseRecord):
    """M: tokens. part, routing, scales: of `cases`. rotation: routings. traffic_bytes, roof_us: of the mean routing. check: what was compared."""

    part: str
    routing: str
    scales: str
    traffic_bytes: int
    roof_us: float | None
    check: str

    @property
    def weight(self) -> str:
        return f"{self.shape}, {self.part}, scales of {self.scales}s, {self.routing} routing"

    @property
    def label(self) -> str:
        return f"{self.weight}, T={self.M}"


class ExpertsDocument(Document):
    FILES: ClassVar[tuple[str, ...]] = ("experts.json",)

    cases: list[ExpertsCaseRecord] = []
