"""The goals of experts, and whether a document meets them."""

from __future__ import annotations

from collections.abc import Callable

from scaled_mm.bench.analysis import of_roof, over, us_of
from scaled_mm.bench.experts.cases import BLOCK, CHANNEL, LAYER
from scaled_mm.bench.experts.peers import CHAIN, STEPS, TRITON
from scaled_mm.bench.experts.record import ExpertsCaseRecord, ExpertsDocument
from scaled_mm.bench.goals import Goal, Outcome, outcome
from scaled_mm.measure.peer import OURS

CHAIN_TOKENS, LEAST_TOKENS = 512, 64
SHARE = "share of products and activation"


def over_triton(case: ExpertsCaseRecord) -> float | None:
    return over(case, TRITON)


def over_chain(case: ExpertsCaseRecord) -> float | None:
    return over(case, CHAIN)


def share_of_products(case: ExpertsCaseRecord) -> float | None:
    """Of a layer's time, what its sort, quantizer and weighted sum do not take: products and activation."""
    layer, steps = us_of(case, OURS), us_of(case, STEPS)
    return None if layer is None or steps is None else 1 - steps / layer


def goals() -> list[Goal[ExpertsCaseRecord]]:
    products = _covers(lambda case: case.part != LAYER)
    layers = _covers(lambda case: case.part == LAYER and case.M <= CHAIN_TOKENS)
    larger_layers = _covers(lambda case: case.part == LAYER and case.M >= LEAST_TOKENS)
    found = []
    for scales in (CHANNEL, BLOCK):
        of_kind, layers_of_kind, larger = products(scales), layers(scales), larger_layers(scales)
        what, of_layers = f"grouped products, scales of {scales}s", f"layers, scales of {scales}s, up to {CHAIN_TOKENS} tokens"
        found += [
            Goal(f"{what}, over Triton, mean", over_triton, 1.3, of_kind, group=_all),
            Goal(f"{what}, over Triton, each", over_triton, 1.0, of_kind),
            Goal(f"{of_layers}, over the chain, mean", over_chain, 1.3, layers_of_kind, group=_all),
            Goal(f"layers, scales of {scales}s, from {LEAST_TOKENS} tokens on, {SHARE}", share_of_products, 0.85, larger, unit=""),
        ]
    found.append(Goal("grouped products, scales of channels, of the roof, mean", of_roof, 0.75, products(CHANNEL), unit="", group=_all))
    return found


def outcomes(document: ExpertsDocument) -> list[Outcome[ExpertsCaseRecord]]:
    """Empty on a CPU: the goals are for GPUs."""
    if document.environment.arch == "cpu":
        return []
    return [outcome(goal, document.cases, lambda case: case.label) for goal in goals()]


def _all(_: ExpertsCaseRecord) -> int:
    """One group."""
    return 0


def _covers(of_part: Callable[[ExpertsCaseRecord], bool]) -> Callable[[str], Callable[[ExpertsCaseRecord], bool]]:
    return lambda scales: lambda case: of_part(case) and case.scales == scales
