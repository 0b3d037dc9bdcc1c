"""PNG plots of a GGUF document: time and TB/s against tokens, with llama.cpp, and the sweep of few tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scaled_mm.bench.analysis import by_weight, names_run
from scaled_mm.bench.gguf import analysis
from scaled_mm.bench.gguf.peers import BF16, OURS_BF16, OURS_F32, OURS_Q8_1, OURS_W4A8
from scaled_mm.bench.gguf.record import GgufCaseRecord, GgufDocument
from scaled_mm.bench.plots import Value, by_weight_figure, curve, curves, microseconds
from scaled_mm.measure import plots
from scaled_mm.measure.peer import OURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {
    OURS: "#c0392b",
    OURS_BF16: "#e67e73",
    OURS_F32: "#6e2c00",
    OURS_W4A8: "#d68910",
    OURS_Q8_1: "#8e44ad",
    BF16: "#1e8449",
    "mm": "#34495e",
    "dequantize_mm": "#7f8c8d",
}
LLAMA_COLOR = "#2471a3"


def names(stem: str) -> tuple[str, str, str]:
    """The files beside `<stem>.json`: time, bandwidth, sweep."""
    prefix = stem.removeprefix("bench_")
    return (f"{prefix}_time.png", f"{prefix}_bandwidth.png", f"{prefix}_sweep.png")


def draw(document: GgufDocument, directory: Path, stem: str) -> list[Path]:
    """Writes the plots that the document has cases for into `directory`; returns their paths."""
    weights, sweeps = by_weight(document), analysis.sweeps(document)
    time, bandwidth, sweep = (directory / name for name in names(stem))
    paths = []
    if weights:
        paths.append(plots.save(_figure(document, weights, "microseconds", microseconds, log=True), time))
        paths.append(plots.save(_figure(document, weights, "TB/s of weight bytes", analysis.terabytes, log=True), bandwidth))
    if sweeps:
        paths.append(plots.save(_figure(document, sweeps, "microseconds", microseconds, log=False), sweep))
    return paths


def ticks(tokens: Sequence[int]) -> list[int]:
    """Powers of two, and those of the other numbers of tokens that are half a power away from every tick."""
    found = [m for m in tokens if m & (m - 1) == 0]
    for m in tokens:
        if all(abs(math.log2(m / tick)) >= 0.5 for tick in found):
            found.append(m)
    return sorted(found)


def _figure(document: GgufDocument, weights: Mapping[str, Sequence[GgufCaseRecord]], what: str, value: Value, log: bool) -> Figure:
    size = 3 if log else 2

    def panel(axes: Axes, cases: Sequence[GgufCaseRecord]) -> None:
        llama = {"label": "llama.cpp", "color": LLAMA_COLOR, "linestyle": "--", "linewidth": 1.2}
        curve(axes, cases, lambda case: case.llama_us, value, marker="o", markersize=size, **llama)
        curves(axes, cases, names_run(document), value, COLORS, "tokens", size)
        if log:
            plots.log_axes(axes, ticks([case.M for case in cases]))
        else:
            axes.set_ylim(bottom=0)

    return by_weight_figure(f"{document.environment.gpu}: {what} against tokens", weights, panel)
