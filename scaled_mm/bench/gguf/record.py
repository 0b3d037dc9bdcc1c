"""What `bench_gguf.json` holds: the models are the schema, as those of `scaled_mm.measure.record`."""

from __future__ import annotations

from typing import ClassVar, Literal

from scaled_mm.measure.record import CaseRecord, Document, Model


class LlamaSource(Model):
    """Where llama.cpp's times come from. told: one sentence for a reader; status "none" says there why there are none."""

    status: Literal["measured", "recorded", "none"]
    told: str


class GgufCaseRecord(CaseRecord):
    """A weight [N, K] in the format `fmt`. weight_bytes: of its blocks. llama_us: llama.cpp's time.

    The results' error is ||out - formula in float64|| / ||formula||, the larger of before and after timing, null when unchecked.
    """

    fmt: str
    weight_bytes: int
    llama_us: float | None

    @property
    def weight(self) -> str:
        return f"{self.fmt} {self.shape}"

    @property
    def label(self) -> str:
        return f"{self.weight} at {self.M} token{'s' * (self.M != 1)}"


class GgufDocument(Document):
    FILES: ClassVar[tuple[str, ...]] = ("bench_gguf.json", "bench_block.json")

    llama: LlamaSource
    bounds: dict[str, float] = {}  # of the error, by implementation; ERROR_BOUND where none is given
    cases: list[GgufCaseRecord] = []
