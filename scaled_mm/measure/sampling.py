"""How many calls and passes a timing takes, and in which order implementations take turns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MIN_CALLS, MAX_CALLS = 20, 256  # calls in a graph
MIN_PASS_US = 1000.0  # a graph this long makes the few microseconds of its launch invisible
MIN_PASSES, MAX_PASSES = 4, 60
DEFAULT_BUDGET_MS = 60.0
ROUNDS = 4


@dataclass(frozen=True)
class Plan:
    """`calls` in one pass (a graph, or a timed loop) and how often the pass is sampled."""

    calls: int
    passes: int


def plan(call_us: float, sets: int, budget_ms: float = DEFAULT_BUDGET_MS) -> Plan:
    """Calls per pass and passes for a call of about `call_us`, so that the samples cost about `budget_ms`.

    A pass is whole rotations, at least 20 calls and about a millisecond; a call so slow that this would not fit four
    times into the budget gets fewer, down to one rotation, and one that fills the budget alone gets single calls.
    """
    call_us = max(call_us, 0.1)
    budget_us = budget_ms * 1000
    if call_us * sets > budget_us:
        return Plan(calls=max(1, int(budget_us / ROUNDS / call_us)), passes=ROUNDS)
    wanted = min(max(MIN_CALLS, math.ceil(MIN_PASS_US / call_us)), MAX_CALLS)
    rotations = math.ceil(wanted / sets)
    affordable = max(1, int(budget_us / MIN_PASSES / (call_us * sets)))
    calls = sets * min(rotations, affordable)
    passes = min(max(int(budget_us / (calls * call_us)), MIN_PASSES), MAX_PASSES)
    return Plan(calls, passes)


def turns(names: Sequence[str], rounds: int) -> list[list[str]]:
    """An order for each round: forwards and backwards in turn, and each pair of rounds starts further on."""
    orders = []
    for number in range(rounds):
        first = number // 2 * max(1, len(names) // 2) % max(1, len(names))
        order = [*names[first:], *names[:first]]
        orders.append(order[::-1] if number % 2 else order)
    return orders
