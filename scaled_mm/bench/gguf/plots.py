"""PNG plots of a block document: time and TB/s against tokens, with llama.cpp, and the sweep of few tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from scaled_mm.bench.gguf import analysis
from scaled_mm.bench.gguf.peers import OURS_Q8_1, OURS_W4A8
from scaled_mm.bench.gguf.record import BlockCaseRecord, BlockDocument
from scaled_mm.bench.int8 import plots
from scaled_mm.bench.int8.peers import OURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {OURS: "#c0392b", OURS_W4A8: "#d68910", OURS_Q8_1: "#8e44ad", "mm": "#34495e", "dequantize_mm": "#7f8c8d"}
LLAMA_COLOR = "#2471a3"

NAMES = ("block_time.png", "block_bandwidth.png", "block_sweep.png")

Value = Callable[[BlockCaseRecord, float], float]


def draw(document: BlockDocument, directory: Path) -> list[Path]:
    """Writes the plots that the document has cases for into `directory`; returns their paths."""
    weights, sweeps = analysis.weights(document), analysis.sweeps(document)
    paths = []
    if weights:
        paths.append(plots.save(_figure(document, weights, "microseconds", _time, log=True), directory / NAMES[0]))
        paths.append(plots.save(_figure(document, weights, "TB/s of weight bytes", analysis.terabytes, log=True), directory / NAMES[1]))
    if sweeps:
        paths.append(plots.save(_figure(document, sweeps, "microseconds", _time, log=False), directory / NAMES[2]))
    return paths


def _time(case: BlockCaseRecord, us: float) -> float:
    return us


def _figure(document: BlockDocument, weights: dict, what: str, value: Value, log: bool) -> Figure:
    named = {f"{fmt} {shape}: N={cases[0].N} K={cases[0].K}": cases for (fmt, shape), cases in weights.items()}
    names = [one.name for one in document.implementations if one.unavailable is None]
    heading = f"{document.environment.gpu}: {what} against tokens"
    return plots.panels(heading, named, lambda axes, cases: _panel(axes, names, cases, value, log))


def _panel(axes: Axes, names: list[str], cases: list[BlockCaseRecord], value: Value, log: bool) -> None:
    def curve(time_of: Callable[[BlockCaseRecord], float | None], **style: object) -> None:
        timed = [(case.M, value(case, us)) for case in cases if (us := time_of(case)) is not None]
        if timed:
            axes.plot(*zip(*timed, strict=True), marker="o", markersize=3 if log else 2, **style)

    curve(lambda case: case.llama_us, label="llama.cpp", color=LLAMA_COLOR, linestyle="--", linewidth=1.2)
    for name in reversed(names):  # ours in mode auto last: on top
        width = 2.0 if name == OURS else 1.2
        curve(lambda case, name=name: analysis.us_of(case, name), label=name, color=COLORS.get(name), linewidth=width)
    if log:
        tokens = [case.M for case in cases]
        plots.log_axes(axes, [m for m in tokens if m & (m - 1) == 0] or tokens)
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens", fontsize=8)
