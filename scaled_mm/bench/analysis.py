"""What the numbers of any suite's document say. Pure functions: nothing is measured or written."""

from __future__ import annotations

from scaled_mm.measure.peer import OURS
from scaled_mm.measure.record import CaseRecord, Document


def us_of(case: CaseRecord, name: str) -> float | None:
    """Microseconds of an implementation on a case; None when it failed or was not run."""
    result = case.results.get(name)
    return None if result is None else result.us


def kernel_of(case: CaseRecord, name: str = OURS) -> str | None:
    """The tile configuration that served an implementation; None when it failed, was not run, or has none."""
    result = case.results.get(name)
    return None if result is None else result.kernel


def failures(document: Document) -> list[tuple[CaseRecord, str, str]]:
    """(case, implementation, message) of everything that failed."""
    return [(case, name, result.failed) for case in document.cases for name, result in case.results.items() if result.failed is not None]


def by_weight(document: Document) -> dict[str, list[CaseRecord]]:
    """Weight -> its cases, M ascending; weights in order of appearance."""
    found: dict[str, list[CaseRecord]] = {}
    for case in document.cases:
        found.setdefault(case.weight, []).append(case)
    return {weight: sorted(cases, key=lambda case: case.M) for weight, cases in found.items()}


def names_run(document: Document) -> list[str]:
    """Implementations that were available, ours first, in the document's order."""
    names = [one.name for one in document.implementations if one.unavailable is None]
    return sorted(names, key=lambda name: name != OURS)


def warm_weights(document: Document) -> list[str]:
    """Weights so small that even the rotated sets fit into the cache."""
    return sorted({case.weight for case in document.cases if not case.cold})
