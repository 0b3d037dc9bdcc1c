"""Means and speed-ups. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class Product(Protocol):
    """What a speed-up is of: a case of a benchmark, a product of a tuning run."""

    shape: str
    M: int


@dataclass(frozen=True)
class Speedup:
    """Ours against the faster rival of one case: `factor` = rival's microseconds / ours."""

    case: Product
    ours_us: float
    rival: str
    rival_us: float

    @property
    def factor(self) -> float:
        return self.rival_us / self.ours_us


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
