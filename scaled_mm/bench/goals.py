"""Goals of a benchmark, and whether its cases reach them: what the suites share.

A goal is on a mean or on each case. Means are geometric, one for each group of cases, and all of them must reach the goal.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from scaled_mm.measure.stats import geometric_mean

Case = TypeVar("Case")


@dataclass(frozen=True)
class Goal(Generic[Case]):
    """`value` of the cases that it covers: at least `floor`, in the mean of each group or, without `group`, on each case.

    value: None for a case that does not count. unit: behind the numbers. part: of the cases, for callers.
    """

    what: str
    value: Callable[[Case], float | None]
    floor: float
    covers: Callable[[Case], bool]
    unit: str = "x"
    group: Callable[[Case], Hashable] | None = None
    part: str = ""


@dataclass(frozen=True)
class Outcome(Generic[Case]):
    """met: None if no case has a value. reached: the lowest mean, or the lowest value of a case. worst, at: the lowest value, and its case."""

    goal: Goal[Case]
    met: bool | None
    reached: float | None = None
    worst: float | None = None
    at: str = ""
    count: int = 0


def outcome(goal: Goal[Case], cases: Sequence[Case], label: Callable[[Case], str]) -> Outcome[Case]:
    """Whether the cases reach a goal. A case on which ours failed, or has no value, does not count: the report names it elsewhere."""
    values = [(value, case) for case in cases if goal.covers(case) and (value := goal.value(case)) is not None]
    if not values:
        return Outcome(goal, None)
    worst, case = min(values, key=lambda pair: pair[0])
    reached = worst if goal.group is None else _lowest_mean(values, goal.group)
    return Outcome(goal, reached >= goal.floor, reached, worst, label(case), len(values))


def _lowest_mean(values: Sequence[tuple[float, Case]], group: Callable[[Case], Hashable]) -> float:
    groups: dict[Hashable, list[float]] = {}
    for value, case in values:
        groups.setdefault(group(case), []).append(value)
    return min(geometric_mean(same) for same in groups.values())


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


def count(found: Sequence[Outcome]) -> str:
    """How many are met, as the beginning of a sentence's list."""
    met, measured = sum(one.met is True for one in found), sum(one.met is not None for one in found)
    return f"{met} of {measured} met; {len(found) - measured} not measured in this run."
