"""What `decoder.json` holds: the models are the schema, as those of `scaled_mm.measure.record`."""

from __future__ import annotations

from typing import ClassVar

from scaled_mm.measure.record import CaseRecord, Document


class DecoderCaseRecord(CaseRecord):
    """M: tokens. N, K: hidden. bit_equal of ours: whether the timed graph has the bits of a plain call."""

    @property
    def label(self) -> str:
        return f"{self.shape}, T={self.M}"


class DecoderDocument(Document):
    FILES: ClassVar[tuple[str, ...]] = ("decoder.json",)

    cases: list[DecoderCaseRecord] = []
