"""Curves against M, one panel a weight: what the plots of all suites are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from scaled_mm.bench.analysis import us_of
from scaled_mm.measure.peer import OURS
from scaled_mm.measure.plots import panels
from scaled_mm.measure.record import CaseRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: What is drawn of a case that took so many microseconds.
Value = Callable[[CaseRecord, float], float]


def microseconds(case: CaseRecord, us: float) -> float:
    return us


def by_weight_figure(heading: str, weights: Mapping[str, Sequence[CaseRecord]], draw: Callable[[Axes, Sequence[CaseRecord]], None]) -> Figure:
    """One panel a weight, which `draw` fills."""
    return panels(heading, {f"{weight}: N={cases[0].N} K={cases[0].K}": cases for weight, cases in weights.items()}, draw)


def curve(axes: Axes, cases: Sequence[CaseRecord], us: Callable[[CaseRecord], float | None], value: Value, **style: object) -> None:
    """`value` of the cases that have microseconds, against M; nothing where none has."""
    points = [(case.M, value(case, time)) for case in cases if (time := us(case)) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), **style)


def curves(
    axes: Axes, cases: Sequence[CaseRecord], names: Sequence[str], value: Value, colors: Mapping[str, str], xlabel: str, markersize: int = 3
) -> None:
    """A curve an implementation, the first name on top."""
    for name in reversed(names):
        style = {"color": colors.get(name), "linewidth": 2.0 if name == OURS else 1.2}
        curve(axes, cases, lambda case, name=name: us_of(case, name), value, marker="o", markersize=markersize, label=name, **style)
    axes.set_xlabel(xlabel, fontsize=8)
