"""What the numbers of a path document say. Pure functions: nothing is measured or written."""

from __future__ import annotations

from collections.abc import Iterable

from scaled_mm.bench.analysis import us_of
from scaled_mm.bench.path.peers import OURS_ALL
from scaled_mm.bench.path.record import PathCaseRecord, PathDocument
from scaled_mm.measure.peer import OURS
from scaled_mm.measure.stats import Speedup


def speedup(case: PathCaseRecord, rival: str) -> Speedup | None:
    """Of ours over an implementation; None where one of the two has no time."""
    ours, other = us_of(case, OURS), us_of(case, rival)
    return None if ours is None or other is None else Speedup(case, ours, rival, other)


def speedups(cases: Iterable[PathCaseRecord], rival: str) -> list[Speedup]:
    """Those of the cases that have one."""
    return [found for case in cases if (found := speedup(case, rival)) is not None]


def of_roof(case: PathCaseRecord) -> float | None:
    """roof_us / our time; None without either."""
    ours = us_of(case, OURS)
    return None if ours is None or case.roof_us is None else case.roof_us / ours


def wrong_cases(document: PathDocument) -> list[PathCaseRecord]:
    """Cases on which the bits of ours, in one call or two, are not the reference's."""
    return [case for case in document.cases if any(name in case.results and case.results[name].bit_equal is False for name in OURS_ALL)]


def checked_cases(document: PathDocument) -> list[PathCaseRecord]:
    """Cases on which ours was compared with the reference."""
    return [case for case in document.cases if OURS in case.results and case.results[OURS].bit_equal is not None]


def bits(case: PathCaseRecord) -> str:
    """Whether ours has the reference's bits: "equal", "WRONG" or "not checked"."""
    found = [case.results[name].bit_equal for name in OURS_ALL if name in case.results]
    if False in found:
        return "WRONG"
    return "equal" if True in found else "not checked"
