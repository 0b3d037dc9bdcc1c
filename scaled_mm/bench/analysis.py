"""What the numbers of any suite's document say. Pure functions: nothing is measured or written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scaled_mm.measure.peer import OURS
from scaled_mm.measure.record import CaseRecord, Document
from scaled_mm.measure.stats import Speedup


def us_of(case: CaseRecord, name: str) -> float | None:
    """Microseconds of an implementation on a case; None when it failed or was not run."""
    result = case.results.get(name)
    return None if result is None else result.us


def speedup(case: CaseRecord, rival: str) -> Speedup | None:
    """Of ours over an implementation; None where one of the two has no time."""
    ours, other = us_of(case, OURS), us_of(case, rival)
    return None if ours is None or other is None else Speedup(case, ours, rival, other)


def speedups(cases: Iterable[CaseRecord], rival: str) -> list[Speedup]:
    """Those of the cases that have one."""
    return [found for case in cases if (found := speedup(case, rival)) is not None]


def over(case: CaseRecord, rival: str) -> float | None:
    """The factor of `speedup`."""
    found = speedup(case, rival)
    return None if found is None else found.factor


def of_roof(case: CaseRecord) -> float | None:
    """`roof_us` of the record over our time: the fraction of what the hardware allows; None without either."""
    ours = us_of(case, OURS)
    return None if ours is None or case.roof_us is None else case.roof_us / ours


def wrong_cases(document: Document, names: Sequence[str] = (OURS,)) -> list[CaseRecord]:
    """Cases on which one of ours ran and its bits are not those it was compared with."""
    return [case for case in document.cases if any(name in case.results and case.results[name].bit_equal is False for name in names)]


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
