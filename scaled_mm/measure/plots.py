"""PNG plots by matplotlib, drawn without a display and without global state."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scaled_mm.measure.stats import Speedup, geometric_mean, mean_by_m, mean_by_shape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@functools.cache
def unavailable() -> str | None:
    """Why nothing can be drawn, None when it can. Loads matplotlib, whose compiled parts may refuse a process that others are loaded in."""
    try:
        importlib.import_module("matplotlib.backends.backend_agg")
        importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        return f'{error.name} is not installed; pip install ".[bench]"'
    except Exception as error:  # whatever an extension module fails with: the measurements are worth more than their plots
        return f"matplotlib cannot be loaded in this process, {type(error).__name__}: {error}"
    return None


def preload() -> None:
    """Import matplotlib now: after vLLM's library is in the process, its compiled parts fail to load (seen with 3.10)."""
    unavailable()


def save(figure: Figure, path: Path) -> Path:
    """Writes a figure as PNG and returns its path."""
    figure.savefig(path, dpi=130, metadata={"Software": None})  # no version stamp: the same numbers give the same file
    return path


def panels(heading: str, named: Mapping[str, Sequence], draw: Callable[[Axes, Sequence], None]) -> Figure:
    """A figure of one panel an entry of `named`, by its title; `draw` fills it."""
    from matplotlib.figure import Figure

    columns = min(3, len(named))
    rows = math.ceil(len(named) / columns)
    figure = Figure(figsize=(4.6 * columns, 3.3 * rows + 0.6), layout="constrained")
    for index, (title, cases) in enumerate(named.items()):
        axes = figure.add_subplot(rows, columns, index + 1)
        draw(axes, cases)
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=7)
        axes.grid(True, which="major", linewidth=0.3)
        if index == 0 and axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
    figure.suptitle(heading, fontsize=11)
    return figure


def log_axes(axes: Axes, ticks: Sequence[int]) -> None:
    """Both logarithmic, with these ticks alone below."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [str(tick) for tick in ticks], rotation=45)
    axes.set_xticks([], minor=True)


def speedup_figure(speedups: list[Speedup], against: str, gpu: str) -> Figure:
    """Heat map shape x M; the colour scale is logarithmic and symmetric about 1, red where ours is slower."""
    from matplotlib.figure import Figure

    shapes = list(mean_by_shape(speedups))
    ms = list(mean_by_m(speedups))
    factors = {(one.case.shape, one.case.M): one.factor for one in speedups}
    grid = [[math.log2(factors[s, m]) if (s, m) in factors else math.nan for m in ms] for s in shapes]
    reach = max(0.25, max(abs(math.log2(one.factor)) for one in speedups))
    figure = Figure(figsize=(2.5 + 0.8 * len(ms), 2.0 + 0.45 * len(shapes)), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(grid, cmap="RdBu", vmin=-reach, vmax=reach, aspect="auto")
    axes.set_xticks(range(len(ms)), [str(m) for m in ms])
    axes.set_yticks(range(len(shapes)), shapes)
    axes.set_xlabel("M")
    for y, shape in enumerate(shapes):
        for x, m in enumerate(ms):
            if (shape, m) in factors:
                color = "white" if abs(grid[y][x]) > 0.65 * reach else "black"
                axes.text(x, y, f"{factors[shape, m]:.2f}", ha="center", va="center", fontsize=9, color=color)
    overall = geometric_mean(one.factor for one in speedups)
    axes.set_title(f"{gpu}: speed-up, geometric mean {overall:.3f}x\nover {against}", fontsize=10, loc="left")
    return figure
