"""Host time of a call: what Python, validation and the launch cost, the GPU's work not included."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from scaled_mm.measure.device import synchronize
from scaled_mm.measure.runner import Call
from scaled_mm.measure.sampling import ROUNDS, turns

HOST_WARM_UP_MS = 100.0  # of untimed calls before host time is sampled
HOST_LIMIT_MS = 2000.0  # of sampled host time of one implementation


@dataclass(frozen=True)
class Overhead:
    """Host microseconds per call: median of `samples`, each a batch of `calls` calls."""

    us: float
    samples: list[float]
    calls: int


def host_overhead(
    calls: Mapping[str, Call], device: torch.device, count: int = 200, batches: int = 32, rounds: int = ROUNDS
) -> dict[str, Overhead | Exception]:
    """Host microseconds that one call of each of `calls` costs, launches included, the GPU's work not.

    Each sample is a batch of `count` calls. The batches are taken in `rounds` over all of `calls` (`turns`), for a host
    that others use too is half as fast again for seconds on end; each turn begins with a batch that is not counted.

    The device is idle when a batch starts and a batch is far shorter than the driver's launch queue, so the host never
    waits for the GPU inside the timed loop; use a product small enough that neither side is held up by the other. On a
    CPU there is no queue and the figure is the whole call.

    A call that raises is left out of later rounds and its exception stands in its Overhead's place. One whose batches took HOST_LIMIT_MS
    gets no more of them.
    """

    def batch(call: Call) -> float:
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(count):
            call()
        elapsed = time.perf_counter() - begin
        synchronize(device)
        return elapsed * 1e6 / count

    samples: dict[str, list[float]] = {name: [] for name in calls}
    failed: dict[str, Exception] = {}

    def turn(name: str, many: int) -> None:
        if sum(samples[name]) * count >= HOST_LIMIT_MS * 1000:
            return
        try:
            batch(calls[name])  # may load a library
            for _ in range(many):
                if sum(samples[name]) * count < HOST_LIMIT_MS * 1000:
                    samples[name].append(batch(calls[name]))
        except Exception as error:  # noqa: BLE001 - handed to the caller, who records it
            failed[name] = error

    for name in calls:
        turn(name, 0)
    awake = time.perf_counter() + HOST_WARM_UP_MS / 1000
    while len(failed) < len(calls) and time.perf_counter() < awake:  # a core that slept takes milliseconds to its clock
        turn(next(name for name in calls if name not in failed), 0)
    for order in turns(list(calls), rounds):
        for name in order:
            if name not in failed:
                turn(name, batches // rounds)
    return {name: failed[name] if name in failed else Overhead(statistics.median(samples[name]), samples[name], count) for name in calls}
