"""What the numbers of a document say: speed-ups, means, failures. Pure functions: nothing is measured or written."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources

from scaled_mm.bench.int8.peers import OURS, RIVALS
from scaled_mm.measure.record import BenchDocument, CaseRecord

RECORDED_FILE = "scaled_mm/bench/data/h200_int8_peers.json"


@dataclass(frozen=True)
class Speedup:
    """Ours against the faster rival of one case: `factor` = rival's microseconds / ours."""

    case: CaseRecord
    ours_us: float
    rival: str
    rival_us: float

    @property
    def factor(self) -> float:
        return self.rival_us / self.ours_us


@dataclass(frozen=True)
class Recorded:
    """Microseconds of other libraries that were measured earlier, on `gpu`, by (shape, M)."""

    gpu: str
    method: str
    labels: dict[str, str]
    us: dict[tuple[str, int], dict[str, float]]


def load_recorded() -> Recorded:
    """The committed microseconds of one H200."""
    text = resources.files("scaled_mm.bench").joinpath("data/h200_int8_peers.json").read_text()
    data = json.loads(text)
    names = list(data["implementations"])
    table = {}
    for row in data["rows"]:
        entry = dict(zip(data["columns"], row, strict=True))
        table[entry["shape"], entry["M"]] = {name: entry[name] for name in names}
    return Recorded(data["gpu"], data["method"], data["implementations"], table)


def us_of(case: CaseRecord, name: str) -> float | None:
    """Microseconds of an implementation on a case; None when it failed or was not run."""
    result = case.results.get(name)
    return None if result is None else result.us


def measured_speedups(document: BenchDocument) -> list[Speedup]:
    """Against the faster of the rivals that were measured in this run, for the cases that have one."""
    found = []
    for case in document.cases:
        rivals = {name: us for name in RIVALS if (us := us_of(case, name)) is not None}
        if (ours := us_of(case, OURS)) is not None and rivals:
            rival = min(rivals, key=rivals.__getitem__)
            found.append(Speedup(case, ours, rival, rivals[rival]))
    return found


def recorded_speedups(document: BenchDocument, recorded: Recorded) -> list[Speedup]:
    """Against the faster rival's recorded microseconds; none on another GPU than the recorded one."""
    if document.environment.gpu != recorded.gpu:
        return []
    found = []
    for case in document.cases:
        earlier = recorded.us.get((case.shape, case.M))
        ours = us_of(case, OURS)
        if earlier is not None and ours is not None:
            rival = min(RIVALS, key=earlier.__getitem__)
            found.append(Speedup(case, ours, rival, earlier[rival]))
    return found


def incomplete_rivals(document: BenchDocument) -> dict[str, int]:
    """Rival -> the number of cases on which it has no time, for the rivals that have such cases."""
    missing = {name: sum(us_of(case, name) is None for case in document.cases) for name in RIVALS}
    return {name: count for name, count in missing.items() if count}


def drift(document: BenchDocument, recorded: Recorded) -> dict[str, float]:
    """Implementation -> geometric mean of this run's time over its recorded one: how far the recording carries over."""
    if document.environment.gpu != recorded.gpu:
        return {}
    ratios: dict[str, list[float]] = {}
    for case in document.cases:
        for name, earlier in recorded.us.get((case.shape, case.M), {}).items():
            if (us := us_of(case, name)) is not None:
                ratios.setdefault(name, []).append(us / earlier)
    return {name: geometric_mean(values) for name, values in ratios.items()}


def geometric_mean(values: Iterable[float]) -> float:
    """exp(mean(log)). Raises ValueError for no values or one that is not positive."""
    logs = [math.log(value) for value in values]
    if not logs:
        raise ValueError("expected at least one value for a geometric mean")
    return math.exp(sum(logs) / len(logs))


def mean_by_m(speedups: list[Speedup]) -> dict[int, float]:
    """M -> geometric mean of the factors at that M, M ascending."""
    by_m: dict[int, list[float]] = {}
    for one in speedups:
        by_m.setdefault(one.case.M, []).append(one.factor)
    return {m: geometric_mean(by_m[m]) for m in sorted(by_m)}


def mean_by_shape(speedups: list[Speedup]) -> dict[str, float]:
    """Shape -> geometric mean of its factors, in order of appearance."""
    by_shape: dict[str, list[float]] = {}
    for one in speedups:
        by_shape.setdefault(one.case.shape, []).append(one.factor)
    return {shape: geometric_mean(factors) for shape, factors in by_shape.items()}


def of_roof(case: CaseRecord) -> float | None:
    """roof_us / our time: the fraction of what the hardware allows; None without either."""
    ours = us_of(case, OURS)
    return None if ours is None or case.roof_us is None else case.roof_us / ours


def failures(document: BenchDocument) -> list[tuple[CaseRecord, str, str]]:
    """(case, implementation, message) of everything that failed."""
    return [(case, name, result.failed) for case in document.cases for name, result in case.results.items() if result.failed is not None]


def wrong_cases(document: BenchDocument) -> list[CaseRecord]:
    """Cases on which ours ran and its bits are not the reference's."""
    return [case for case in document.cases if OURS in case.results and case.results[OURS].bit_equal is False]


def shapes(document: BenchDocument) -> dict[str, list[CaseRecord]]:
    """Shape -> its cases, M ascending; shapes in order of appearance."""
    found: dict[str, list[CaseRecord]] = {}
    for case in document.cases:
        found.setdefault(case.shape, []).append(case)
    return {shape: sorted(cases, key=lambda case: case.M) for shape, cases in found.items()}


def names_run(document: BenchDocument) -> list[str]:
    """Implementations that were available, ours first, in the document's order."""
    names = [one.name for one in document.implementations if one.unavailable is None]
    return sorted(names, key=lambda name: name != OURS)
