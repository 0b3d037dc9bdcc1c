"""PNG plots of an INT8 document: the speed-up over shape and M, times and rates against M."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scaled_mm.bench.analysis import by_weight, names_run
from scaled_mm.bench.int8.record import Int8CaseRecord, Int8Document
from scaled_mm.bench.plots import Value, by_weight_figure, curve, curves, microseconds
from scaled_mm.measure import plots, roofline
from scaled_mm.measure.peer import OURS
from scaled_mm.measure.stats import Speedup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {
    OURS: "#c0392b",
    "vllm": "#2471a3",
    "sgl": "#1e8449",
    "intmm": "#8e44ad",
    "intmm_epilogue": "#8e44ad",
    "fp8row": "#d68910",
    "bf16": "#7f8c8d",
    "fp32": "#34495e",
}

NAMES = ("speedup.png", "time.png", "tops.png")


def draw(document: Int8Document, headline: tuple[str, list[Speedup]], directory: Path) -> list[Path]:
    """Writes speedup.png (when there are speed-ups), time.png and tops.png into `directory`; returns their paths.

    headline: what ours is compared with, and the speed-ups.
    """
    paths = []
    against, speedups = headline
    if speedups:
        paths.append(plots.save(plots.speedup_figure(speedups, against, document.environment.gpu), directory / NAMES[0]))
    if document.cases:
        paths.append(plots.save(_figure(document, "microseconds per call", microseconds), directory / NAMES[1]))
        paths.append(plots.save(_figure(document, "TOPS", _tops), directory / NAMES[2]))
    return paths


def _tops(case: Int8CaseRecord, us: float) -> float:
    return roofline.tops(case.M, case.N, case.K, us)


def _figure(document: Int8Document, what: str, value: Value) -> Figure:
    """One panel a shape, and the roof."""
    names = names_run(document)

    def panel(axes: Axes, cases: Sequence[Int8CaseRecord]) -> None:
        curves(axes, cases, names, value, COLORS, "M")
        curve(axes, cases, lambda case: case.roof_us, value, linestyle="--", linewidth=1.0, color="black", label="roof")
        plots.log_axes(axes, [case.M for case in cases])

    return by_weight_figure(f"{document.environment.gpu}: {what} against M", by_weight(document), panel)
