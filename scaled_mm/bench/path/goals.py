"""The goals of the path, and whether a document meets them.

A goal is on a mean or on each case. Means are geometric. The layers of the grid have one for each M, and all of these must reach the goal. The random
layers of a band, whose M differ, have one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scaled_mm.bench.path import analysis
from scaled_mm.bench.path.cases import LAYER, RANDOM
from scaled_mm.bench.path.operators import OPERATORS
from scaled_mm.bench.path.peers import TORCH, VLLM
from scaled_mm.bench.path.record import PathCaseRecord, PathDocument
from scaled_mm.measure.stats import geometric_mean

ROOF_FROM = 4096 * 4096  # elements
Value = Callable[[PathCaseRecord], float | None]


@dataclass(frozen=True)
class Goal:
    """`value` of the cases of a part with least <= M <= most and `elements` or more of M x K: at least `floor`, in the mean or on each case."""

    what: str
    part: str
    value: Value
    floor: float
    unit: str = "x"
    mean: bool = False
    least: int = 1
    most: float = math.inf
    elements: int = 0

    def covers(self, case: PathCaseRecord) -> bool:
        return case.part == self.part and self.least <= case.M <= self.most and case.M * case.K >= self.elements


@dataclass(frozen=True)
class Outcome:
    """met: None if no case has a value. reached: the lowest mean, or the lowest value of a case. worst, at: the lowest value, and its case."""

    goal: Goal
    met: bool | None
    reached: float | None = None
    worst: float | None = None
    at: str = ""
    count: int = 0


def over(rival: str) -> Value:
    """The speed-up over an implementation."""

    def value(case: PathCaseRecord) -> float | None:
        found = analysis.speedup(case, rival)
        return None if found is None else found.factor

    return value


#: (what, least M, most M, floor) of the mean speed-up over vLLM's pair. Random layers have M between those of the grid.
BANDS = (("M up to 64", 1, 64, 1.5), ("M of 65 to 511", 65, 511, 1.2), ("M from 512", 512, math.inf, 1.05))
TORCH_FLOOR, ROOF_FLOOR = 1.7, 0.80


def goals() -> list[Goal]:
    """All of them: layers, random layers, operators."""
    found = []
    for part, name in ((LAYER, "layers"), (RANDOM, "random layers")):
        for band, least, most, floor in BANDS:
            found.append(Goal(f"int8_linear over vLLM's pair, {name}, {band}, mean", part, over(VLLM), floor, mean=True, least=least, most=most))
        found.append(Goal(f"int8_linear over vLLM's pair, {name}, each", part, over(VLLM), 1.0))
        found.append(Goal(f"int8_linear over torch.mm in bfloat16, {name}, mean", part, over(TORCH), TORCH_FLOOR, mean=True))
    found += [Goal(f"{name} over vLLM, each", name, over(VLLM), 1.0) for name in OPERATORS]
    what = "of the memory's bandwidth from 4096 x 4096, each"
    found += [Goal(f"{name}: {what}", name, analysis.of_roof, ROOF_FLOOR, unit="", elements=ROOF_FROM) for name in OPERATORS]
    return found


def outcomes(document: PathDocument) -> list[Outcome]:
    """One for every goal whose part was timed; none on a CPU, because the goals are for GPUs."""
    if document.environment.arch == "cpu":
        return []
    parts = {case.part for case in document.cases}
    return [outcome(goal, document.cases) for goal in goals() if goal.part in parts]


def outcome(goal: Goal, cases: Sequence[PathCaseRecord]) -> Outcome:
    """Whether the cases reach a goal. A case on which ours failed, or has no value, does not count: the report names it elsewhere."""
    values = [(value, case) for case in cases if goal.covers(case) and (value := goal.value(case)) is not None]
    if not values:
        return Outcome(goal, None)
    worst, case = min(values, key=lambda pair: pair[0])
    reached = _lowest_mean(values) if goal.mean else worst
    return Outcome(goal, reached >= goal.floor, reached, worst, case.label, len(values))


def _lowest_mean(values: Sequence[tuple[float, PathCaseRecord]]) -> float:
    by_m: dict[int, list[float]] = {}
    for value, case in values:
        by_m.setdefault(0 if case.part == RANDOM else case.M, []).append(value)
    return min(geometric_mean(same) for same in by_m.values())


HEADER, ALIGN = ("goal", "at least", "reached", "met", "worst case", "cases"), "lrrllr"


def cells(one: Outcome) -> list[str]:
    """A line of the table, in the order of `HEADER`."""
    goal, unit = one.goal, one.goal.unit
    if one.met is None:
        return [goal.what, f"{goal.floor:.2f}{unit}", "—", "not measured", "—", "0"]
    return [
        goal.what,
        f"{goal.floor:.2f}{unit}",
        f"{one.reached:.2f}{unit}",
        "yes" if one.met else "**no**",
        f"{one.worst:.2f}{unit} at {one.at}",
        str(one.count),
    ]
