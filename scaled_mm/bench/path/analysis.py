"""What the numbers of a path document say. Pure functions: nothing is measured or written."""

from __future__ import annotations

from scaled_mm.bench.path.peers import OURS_ALL
from scaled_mm.bench.path.record import PathCaseRecord, PathDocument
from scaled_mm.measure.peer import OURS


def checked_cases(document: PathDocument) -> list[PathCaseRecord]:
    """Cases on which ours was compared with the reference."""
    return [case for case in document.cases if OURS in case.results and case.results[OURS].bit_equal is not None]


def bits(case: PathCaseRecord) -> str:
    """Whether ours has the reference's bits: "equal", "WRONG" or "not checked"."""
    found = [case.results[name].bit_equal for name in OURS_ALL if name in case.results]
    if False in found:
        return "WRONG"
    return "equal" if True in found else "not checked"
