"""What `bench.json` holds: the models are the schema, as those of `scaled_mm.measure.record`."""

from __future__ import annotations

from typing import ClassVar

from scaled_mm.bench.overhead import OverheadRecord
from scaled_mm.measure.record import CaseRecord, Document, Settings


class Int8CaseRecord(CaseRecord):
    """traffic_bytes, roof_us: see `scaled_mm.measure.roofline`. check: "checked", or why not."""

    traffic_bytes: int
    roof_us: float | None
    check: str


class Int8Settings(Settings):
    """check_limit_gmac: products of more billion multiply-adds are not checked. data: one of `inputs.INT8_STD`."""

    check_limit_gmac: float
    data: str = "uniform"


class Int8Document(Document):
    FILES: ClassVar[tuple[str, ...]] = ("bench.json",)

    settings: Int8Settings
    cases: list[Int8CaseRecord] = []
    overhead: list[OverheadRecord] = []
