"""What the numbers of a GGUF document say: rates, ratios, the check, monotony. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from scaled_mm.bench.analysis import by_weight, kernel_of, us_of
from scaled_mm.bench.gguf.peers import ERROR_BOUND, OURS_BF16, OURS_F32, OURS_Q8_1, OURS_W4A8
from scaled_mm.bench.gguf.record import GgufCaseRecord, GgufDocument
from scaled_mm.measure.peer import OURS

#: How much longer fewer tokens may take than more of them.
TOLERANCE = 0.05
OURS_ALL = (OURS, OURS_BF16, OURS_F32, OURS_W4A8, OURS_Q8_1)
#: Those whose times stand next to llama.cpp's.
LIKE_LLAMA = (OURS, OURS_F32, OURS_W4A8)
SWEEP_END, SWEEP_LEAST = 64, 8


@dataclass(frozen=True)
class Pair:
    """Two cases of one weight, `first` with fewer tokens, by one implementation."""

    name: str
    first: GgufCaseRecord
    second: GgufCaseRecord

    @property
    def ratio(self) -> float:
        """The time of `first` over that of `second`."""
        return us_of(self.first, self.name) / us_of(self.second, self.name)


def terabytes(case: GgufCaseRecord, us: float) -> float:
    """TB/s of weight bytes."""
    return case.weight_bytes / us * 1e-6


def llama_ratio(case: GgufCaseRecord, name: str) -> float | None:
    """llama.cpp's microseconds over those of an implementation."""
    us = us_of(case, name)
    return None if us is None or case.llama_us is None else case.llama_us / us


def check_of(case: GgufCaseRecord, bounds: Mapping[str, float] = MappingProxyType({})) -> str:
    """ "yes" when all of ours that ran are within their bounds, else "NO" with the largest error that exceeds its bound, or "not checked"."""
    errors = {name: result.error for name in OURS_ALL if (result := case.results.get(name)) is not None and result.error is not None}
    if not errors:
        return "not checked"
    wrong = [error for name, error in errors.items() if not error <= bounds.get(name, ERROR_BOUND)]
    return "yes" if not wrong else f"NO {max(wrong, key=lambda error: (error != error, error)):.1e}"


def wrong_cases(document: GgufDocument) -> list[GgufCaseRecord]:
    return [case for case in document.cases if check_of(case, document.bounds).startswith("NO")]


def sweeps(document: GgufDocument) -> dict[str, list[GgufCaseRecord]]:
    """Weight -> its cases of up to 64 tokens, for weights that were timed at enough of these to be drawn as a sweep."""
    found = {key: [case for case in cases if case.M <= SWEEP_END] for key, cases in by_weight(document).items()}
    return {key: cases for key, cases in found.items() if len(cases) >= SWEEP_LEAST and any(map(_next_to, cases, cases[SWEEP_LEAST - 1 :]))}


def _next_to(first: GgufCaseRecord, later: GgufCaseRecord) -> bool:
    return later.M - first.M == SWEEP_LEAST - 1  # of an ascending list: nothing is missing between them


def drops(cases: list[GgufCaseRecord], name: str) -> list[Pair]:
    """Where time is not monotone within 5 %: pairs whose first, with fewer tokens, takes longer. cases: of one weight, ascending.

    Each drop is listed once, from the longest time before it.
    """
    found: list[Pair] = []
    peak: GgufCaseRecord | None = None
    for case in cases:
        if us_of(case, name) is None:
            continue
        if peak is None or us_of(case, name) >= us_of(peak, name):
            peak = case
        elif (pair := Pair(name, peak, case)).ratio > 1 + TOLERANCE:
            found.append(pair)
            peak = case
    return found


def all_drops(document: GgufDocument) -> list[Pair]:
    return [pair for cases in by_weight(document).values() for name in OURS_ALL for pair in drops(cases, name)]


def hand_overs(document: GgufDocument) -> list[Pair]:
    """Neighbouring numbers of tokens, one apart, at which ours goes from one kernel to another."""
    return [
        pair
        for cases in by_weight(document).values()
        for name in OURS_ALL
        for pair in (Pair(name, *two) for two in zip(cases, cases[1:]))
        if pair.second.M == pair.first.M + 1
        and us_of(pair.first, name) is not None
        and us_of(pair.second, name) is not None
        and kernel_of(pair.first, name) != kernel_of(pair.second, name)
    ]
