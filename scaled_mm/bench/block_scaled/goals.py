"""The goals of block-scaled products, and whether a document meets them."""

from __future__ import annotations

import math
from collections.abc import Callable

from scaled_mm.bench.analysis import of_roof, over, us_of
from scaled_mm.bench.block_scaled.peers import TRITON
from scaled_mm.bench.block_scaled.record import BlockScaledCaseRecord, BlockScaledDocument
from scaled_mm.bench.goals import Goal, Outcome, outcome
from scaled_mm.measure.peer import OURS


def over_triton(case: BlockScaledCaseRecord) -> float | None:
    return over(case, TRITON)


def terabytes_per_second(case: BlockScaledCaseRecord) -> float | None:
    """`traffic_bytes` over our time."""
    us = us_of(case, OURS)
    return None if us is None else case.traffic_bytes / us * 1e-6


def goals() -> list[Goal[BlockScaledCaseRecord]]:
    return [
        Goal("over Triton, M from 64, mean", over_triton, 2.0, _within(64), group=_all),
        Goal("over Triton, M below 64, mean", over_triton, 1.3, _within(1, 63), group=_all),
        Goal("over Triton, each", over_triton, 1.0, _within(1)),
        Goal("of the roof, M from 1024, each", of_roof, 0.60, _within(1024), unit=""),
        Goal("TB/s, M up to 16, each", terabytes_per_second, 3.9, _within(1, 16), unit=""),
    ]


def outcomes(document: BlockScaledDocument) -> list[Outcome[BlockScaledCaseRecord]]:
    """Empty on a CPU: the goals are for GPUs."""
    if document.environment.arch == "cpu":
        return []
    return [outcome(goal, document.cases, lambda case: case.label) for goal in goals()]


def _all(_: BlockScaledCaseRecord) -> int:
    """One group."""
    return 0


def _within(least: int, most: float = math.inf) -> Callable[[BlockScaledCaseRecord], bool]:
    return lambda case: least <= case.M <= most
