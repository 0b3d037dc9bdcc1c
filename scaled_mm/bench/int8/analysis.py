"""What the numbers of an INT8 document say: speed-ups, the roof, wrong bits. Pure functions: nothing is measured or written."""

from __future__ import annotations

from dataclasses import dataclass

from scaled_mm.bench.analysis import us_of
from scaled_mm.bench.int8.peers import RIVALS
from scaled_mm.bench.int8.record import Int8Document
from scaled_mm.bench.recorded import read_recorded, recorded_path
from scaled_mm.measure.peer import OURS
from scaled_mm.measure.stats import Speedup, geometric_mean

_FILE = "h200_int8_peers.json"
RECORDED_FILE = recorded_path(_FILE)


@dataclass(frozen=True)
class Recorded:
    """Microseconds of other libraries that were measured earlier, on `gpu`, by (shape, M)."""

    gpu: str
    method: str
    labels: dict[str, str]
    us: dict[tuple[str, int], dict[str, float]]


def load_recorded() -> Recorded:
    """The committed microseconds of one H200."""
    data, rows = read_recorded(_FILE)
    us = {(row["shape"], row["M"]): {name: row[name] for name in data["implementations"]} for row in rows}
    return Recorded(data["gpu"], data["method"], data["implementations"], us)


def measured_speedups(document: Int8Document) -> list[Speedup]:
    """Against the faster of the rivals that were measured in this run, for the cases that have one."""
    found = []
    for case in document.cases:
        rivals = {name: us for name in RIVALS if (us := us_of(case, name)) is not None}
        if (ours := us_of(case, OURS)) is not None and rivals:
            rival = min(rivals, key=rivals.__getitem__)
            found.append(Speedup(case, ours, rival, rivals[rival]))
    return found


def recorded_speedups(document: Int8Document, recorded: Recorded) -> list[Speedup]:
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


def incomplete_rivals(document: Int8Document) -> dict[str, int]:
    """Rival -> the number of cases on which it has no time, for the rivals that have such cases."""
    missing = {name: sum(us_of(case, name) is None for case in document.cases) for name in RIVALS}
    return {name: count for name, count in missing.items() if count}


def drift(document: Int8Document, recorded: Recorded) -> dict[str, float]:
    """Implementation -> geometric mean of this run's time over its recorded one: how far the recording carries over."""
    if document.environment.gpu != recorded.gpu:
        return {}
    ratios: dict[str, list[float]] = {}
    for case in document.cases:
        for name, earlier in recorded.us.get((case.shape, case.M), {}).items():
            if (us := us_of(case, name)) is not None:
                ratios.setdefault(name, []).append(us / earlier)
    return {name: geometric_mean(values) for name, values in ratios.items()}
