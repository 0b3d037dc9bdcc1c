"""The goals of the path, and whether a document meets them.

The layers of the grid have a mean for each M. The random layers of a band, whose M differ, have one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from scaled_mm.bench import analysis
from scaled_mm.bench.goals import ALIGN, HEADER, Goal, Outcome, cells, count, outcome
from scaled_mm.bench.path.cases import LAYER, RANDOM
from scaled_mm.bench.path.operators import OPERATORS
from scaled_mm.bench.path.peers import TORCH, VLLM
from scaled_mm.bench.path.record import PathCaseRecord, PathDocument

__all__ = ["ALIGN", "HEADER", "Outcome", "cells", "count", "goals", "outcomes"]

ROOF_FROM = 4096 * 4096  # elements
Value = Callable[[PathCaseRecord], float | None]


def over(rival: str) -> Value:
    """The speed-up over an implementation."""
    return lambda case: analysis.over(case, rival)


#: (what, least M, most M, floor) of the mean speed-up over vLLM's pair. Random layers have M between those of the grid.
BANDS = (("M up to 64", 1, 64, 1.5), ("M of 65 to 511", 65, 511, 1.2), ("M from 512", 512, math.inf, 1.05))
TORCH_FLOOR, ROOF_FLOOR = 1.7, 0.80


def goals() -> list[Goal[PathCaseRecord]]:
    """All of them: layers, random layers, operators."""
    found = []
    for part, name in ((LAYER, "layers"), (RANDOM, "random layers")):
        for band, least, most, floor in BANDS:
            what = f"int8_linear over vLLM's pair, {name}, {band}, mean"
            found.append(Goal(what, over(VLLM), floor, _covers(part, least, most), group=_group, part=part))
        found.append(Goal(f"int8_linear over vLLM's pair, {name}, each", over(VLLM), 1.0, _covers(part), part=part))
        found.append(Goal(f"int8_linear over torch.mm in bfloat16, {name}, mean", over(TORCH), TORCH_FLOOR, _covers(part), group=_group, part=part))
    found += [Goal(f"{name} over vLLM, each", over(VLLM), 1.0, _covers(name), part=name) for name in OPERATORS]
    what = "of the memory's bandwidth from 4096 x 4096, each"
    for name in OPERATORS:
        found.append(Goal(f"{name}: {what}", analysis.of_roof, ROOF_FLOOR, _covers(name, elements=ROOF_FROM), unit="", part=name))
    return found


def outcomes(document: PathDocument) -> list[Outcome[PathCaseRecord]]:
    """One for every goal whose part was timed; none on a CPU, because the goals are for GPUs."""
    if document.environment.arch == "cpu":
        return []
    parts = {case.part for case in document.cases}
    return [outcome(goal, document.cases, lambda case: case.label) for goal in goals() if goal.part in parts]


def _covers(part: str, least: int = 1, most: float = math.inf, elements: int = 0) -> Callable[[PathCaseRecord], bool]:
    """Whether a case is of a part, with least <= M <= most and `elements` or more of M x K."""
    return lambda case: case.part == part and least <= case.M <= most and case.M * case.K >= elements


def _group(case: PathCaseRecord) -> int:
    return 0 if case.part == RANDOM else case.M
