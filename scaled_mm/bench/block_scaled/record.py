"""What `block_scaled.json` holds: the models are the schema, as those of `scaled_mm.measure.record`."""

from __future__ import annotations

from typing import ClassVar

from scaled_mm.measure.record import CaseRecord, Document


class BlockScaledCaseRecord(CaseRecord):
    """traffic_bytes: of the operands, read and written once. roof_us: the larger of INT8 arithmetic and this traffic. check: what was compared."""

    traffic_bytes: int
    roof_us: float | None
    check: str


class BlockScaledDocument(Document):
    FILES: ClassVar[tuple[str, ...]] = ("block_scaled.json",)

    cases: list[BlockScaledCaseRecord] = []
