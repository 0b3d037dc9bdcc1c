"""The goals of experts, and whether a document meets them."""

from __future__ import annotations

from collections.abc import Callable

from scaled_mm.bench.analysis import us_of
from scaled_mm.bench.experts.cases import BLOCK, CHANNEL, LAYER
from scaled_mm.bench.experts.peers import CHAIN, TRITON
from scaled_mm.bench.experts.record import ExpertsCaseRecord, ExpertsDocument
from scaled_mm.bench.goals import Goal, Outcome, outcome
from scaled_mm.measure.peer import OURS

CHAIN_TOKENS = 512


def over(case: ExpertsCaseRecord, rival: str) -> float | None:
    """The speed-up of ours over an implementation; None where one of the two has no time."""
    ours, other = us_of(case, OURS), us_of(case, rival)
    return None if ours is None or other is None else other / ours


def over_triton(case: ExpertsCaseRecord) -> float | None:
    return over(case, TRITON)


def over_chain(case: ExpertsCaseRecord) -> float | None:
    return over(case, CHAIN)


def of_roof(case: ExpertsCaseRecord) -> float | None:
    ours = us_of(case, OURS)
    return None if ours is None or case.roof_us is None else case.roof_us / ours


def goals() -> list[Goal[ExpertsCaseRecord]]:
    products = _covers(lambda case: case.part != LAYER)
    layers = _covers(lambda case: case.part == LAYER and case.M <= CHAIN_TOKENS)
    found = []
    for scales in (CHANNEL, BLOCK):
        of_kind, layers_of_kind = products(scales), layers(scales)
        what, of_layers = f"grouped products, scales of {scales}s", f"layers, scales of {scales}s, up to {CHAIN_TOKENS} tokens"
        found += [
            Goal(f"{what}, over Triton, mean", over_triton, 1.3, of_kind, group=_all),
            Goal(f"{what}, over Triton, each", over_triton, 1.0, of_kind),
            Goal(f"{of_layers}, over the chain, mean", over_chain, 1.3, layers_of_kind, group=_all),
        ]
    found.append(Goal("grouped products, scales of channels, of the roof, mean", of_roof, 0.75, products(CHANNEL), unit="", group=_all))
    return found


def outcomes(document: ExpertsDocument) -> list[Outcome[ExpertsCaseRecord]]:
    """None on a CPU, because the goals are for GPUs."""
    if document.environment.arch == "cpu":
        return []
    return [outcome(goal, document.cases, lambda case: case.label) for goal in goals()]


def _all(_: ExpertsCaseRecord) -> int:
    """One group."""
    return 0


def _covers(of_part: Callable[[ExpertsCaseRecord], bool]) -> Callable[[str], Callable[[ExpertsCaseRecord], bool]]:
    return lambda scales: lambda case: of_part(case) and case.scales == scales
