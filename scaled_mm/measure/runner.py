"""A runner holds the calls of one implementation, warmed up and ready to be sampled; `CpuRunner` is the one for a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from scaled_mm.measure.sampling import Plan, plan

Call = Callable[[], object]

CPU_ROTATED = "perf_counter_rotated"
OVERRUN = 4  # times its budget that a runner may take on a CPU


class Draw(NamedTuple):
    """joules: of one call, the whole device's. sm_mhz: the SM clock, read once, just after the metered replays."""

    joules: float
    sm_mhz: float


class Runner:
    """Calls of one implementation, warmed up and ready to be sampled. Close it to free its graph."""

    method: str
    plan: Plan

    def sample(self, passes: int) -> list[float]:
        """Microseconds per call of each of `passes` timed passes."""
        raise NotImplementedError

    def load(self) -> None:
        """Keeps the device busy before the first turn of a case, for as long as the regime says. Nothing on a CPU."""

    def draw(self) -> Draw | None:
        """What the device draws while it runs nothing else, where the regime meters it and the device can tell."""
        return None

    def replay(self) -> None:
        """One untimed pass, finished when this returns: for checks of what the timed work computes."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class CpuRunner(Runner):
    """`time.perf_counter` around whole passes over the rotation."""

    method = CPU_ROTATED

    def __init__(self, calls: Sequence[Call], budget_ms: float):
        self._calls = list(calls)
        self._left_us = OVERRUN * budget_ms * 1000
        self._calls[0]()
        first = self._elapsed_us(1)
        self.plan = Plan(calls=len(self._calls), passes=1)  # every call once, unless they take longer than the budget
        call_us = first if first > budget_ms * 1000 else self._pass()
        self.plan = plan(call_us, len(self._calls), budget_ms)

    def _elapsed_us(self, count: int) -> float:
        begin = time.perf_counter()
        for i in range(count):
            self._calls[i % len(self._calls)]()
        return (time.perf_counter() - begin) * 1e6

    def _pass(self) -> float:
        """Microseconds per call of a pass, which ends early once no time is left."""
        begin = now = time.perf_counter()
        deadline = begin + self._left_us / 1e6
        done = 0
        while done < self.plan.calls and (now < deadline or done == 0):
            self._calls[done % len(self._calls)]()
            done += 1
            now = time.perf_counter()
        self._left_us -= (now - begin) * 1e6
        return (now - begin) * 1e6 / done

    def sample(self, passes: int) -> list[float]:
        samples = [self._pass()]
        while len(samples) < passes and self._left_us > 0:
            samples.append(self._pass())
        return samples

    def replay(self) -> None:
        self._elapsed_us(self.plan.calls)

    def close(self) -> None:
        self._calls.clear()
