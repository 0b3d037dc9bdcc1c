"""The only place that times: `measure` times one implementation, `interleave` several in turns.

The parts: `sampling` plans calls and passes, `rotation` says how many weights rotate, `runner` and `cuda_runner` take the samples,
`host` times the host's share of a call, `device` wakes the GPU and waits for it.

On a GPU: a CUDA graph holds many calls, each on the next of R weight sets, so that no weight is still in the L2 cache
when its turn comes again and the gaps between launches are what a captured model would see. The graph is replayed
between CUDA events; one sample is one replay divided by its calls, and the result is the median of the samples. The
callables are captured back to back on one side stream with nothing between them, so that kernels which overlap with
their predecessor (programmatic dependent launch) do so here as they would in a model.

Before its samples the GPU rests, and the implementation then runs untimed, as the `regime` says.

On a CPU: the same rotation and the same plan, with `time.perf_counter` around each pass. A CPU that other programs use can be a hundred
times slower than the plan expects; a runner then stops at `runner.OVERRUN` times its budget, with the calls it has made.

All times are microseconds per call.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from scaled_mm.measure.cuda_runner import CudaRunner
from scaled_mm.measure.regime import STANDARD
from scaled_mm.measure.runner import Call, CpuRunner, Runner
from scaled_mm.measure.sampling import DEFAULT_BUDGET_MS, ROUNDS, turns


@dataclass(frozen=True)
class Timing:
    """One implementation on one case.

    `us`: median over `samples`, microseconds per call. `calls_per_graph`: calls behind each sample. `spread`: range of
    the rounds' medians over the overall median; a difference between implementations below it is noise.
    """

    us: float
    samples: list[float]
    calls_per_graph: int
    method: str
    spread: float = 0.0


def open_runner(
    calls: Sequence[Call], device: torch.device, budget_ms: float = DEFAULT_BUDGET_MS, cold: bool = True, regime: str = STANDARD
) -> Runner:
    """Warms up `calls` (one zero-argument callable per weight set) and readies them: a captured graph on a GPU.

    cold: whether the sets exceed the cache (`is_cold`); it only names the method. regime: one of `regime.REGIMES`; a CPU has none. Errors of the
    callables pass through.
    """
    if not calls:
        raise ValueError("expected at least one call to time, got none")
    if device.type == "cuda":
        return CudaRunner(calls, device, budget_ms, cold, regime)
    return CpuRunner(calls, budget_ms)


def interleave(runners: Mapping[str, Runner], rounds: int = ROUNDS, limit_us: float | None = None) -> dict[str, Timing | Exception]:
    """Samples every runner in turn, `rounds` times over, so that a drift of the clocks meets all of them alike.

    Each round has an order of its own (`turns`), and a rest stands between two runners (`regime.Regime`): on a GPU at its power limit a runner
    is 1-4% faster or slower by who ran before it, 100 ms of settling notwithstanding.

    A runner that raises is left out of later rounds and its exception stands in its Timing's place. So is one that takes more
    than limit_us in the median of a round: it keeps the samples that it has.
    """
    collected: dict[str, list[list[float]]] = {name: [] for name in runners}
    failed: dict[str, Exception] = {}
    slow: set[str] = set()
    for runner in list(runners.values())[:1]:
        runner.load()
    for order in turns(list(runners), rounds):
        for name in order:
            if name in failed or name in slow:
                continue
            runner = runners[name]
            try:
                collected[name].append(runner.sample(max(1, runner.plan.passes // rounds)))
            except Exception as error:  # noqa: BLE001 - handed to the caller, who records it
                failed[name] = error
                continue
            if limit_us is not None and statistics.median(collected[name][-1]) > limit_us:
                slow.add(name)
    return {
        name: failed[name] if name in failed else summarize(collected[name], runner.plan.calls, runner.method) for name, runner in runners.items()
    }


def summarize(rounds: Sequence[Sequence[float]], calls: int, method: str) -> Timing:
    """The Timing of samples that were taken in `rounds`."""
    samples = [sample for one in rounds for sample in one]
    median = statistics.median(samples)
    medians = [statistics.median(one) for one in rounds]
    spread = (max(medians) - min(medians)) / median if median > 0 else 0.0
    return Timing(us=median, samples=samples, calls_per_graph=calls, method=method, spread=spread)


def measure(calls: Sequence[Call], device: torch.device, budget_ms: float = DEFAULT_BUDGET_MS, cold: bool = True, regime: str = STANDARD) -> Timing:
    """Times one implementation alone, as `open_runner` readies it; raises what its calls raise."""
    runner = open_runner(calls, device, budget_ms, cold, regime)
    try:
        timing = interleave({"": runner})[""]
    finally:
        runner.close()
    if isinstance(timing, Exception):
        raise timing
    return timing
