"""The loop over a grid, the same for every suite: inputs, checks, timing, records.

A peer that raises on a case is recorded as failed there, with its message. What is checked is compared twice: a plain call,
and what is in memory after the timed graph ran, where calls overlap as they do in a model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from scaled_mm.measure import device as devices
from scaled_mm.measure.peer import Peer, TensorCall
from scaled_mm.measure.record import Result, describe
from scaled_mm.measure.regime import STANDARD
from scaled_mm.measure.rotation import RotatedOutputs, RotatedWeights
from scaled_mm.measure.runner import Runner
from scaled_mm.measure.sampling import DEFAULT_BUDGET_MS
from scaled_mm.measure.shapes import Case, group_by_weight
from scaled_mm.measure.timing import Timing, interleave, open_runner

#: INT8 products above this are not checked unless asked for: the float64 reference takes seconds.
CHECK_LIMIT_GMAC = {"cuda": 8192.0, "cpu": 4.0}


@dataclass(frozen=True)
class Options:
    """budget_ms: time per implementation and case. check: compare with the reference, up to check_limit_gmac billion
    multiply-adds. sets: weight sets to rotate; None lets the cache decide. regime: one of `regime.REGIMES`."""

    budget_ms: float = DEFAULT_BUDGET_MS
    check: bool = True
    check_limit_gmac: float = CHECK_LIMIT_GMAC["cuda"]
    seed: int = 0
    sets: int | None = None
    regime: str = STANDARD


#: Called before each step with the case and the implementation's name.
Progress = Callable[[Case, str], None]

#: Steps of a case besides its peers: the reference, and timing.
OTHER_STEPS = 2


def no_progress(case: Case, name: str) -> None:
    """For callers that show nothing."""


class WrongResult(Exception):
    """Of `Check.once`: what was computed is so wrong that its time says nothing. The message is the record's."""


class Check:
    """Compares what peers compute on one case with what is right."""

    def once(self, peer: Peer, call: TensorCall) -> dict[str, Any]:
        """Fields of the `Result`, from one plain call. Raises WrongResult where timing would be pointless."""
        return {}

    def covers(self, peer: Peer) -> bool:
        """Whether `after_timing` has something to say of a peer."""
        return False

    def after_timing(self, peer: Peer, result: Result) -> Result:
        """The result, after a look at the outputs: they were poisoned, then the timed pass ran once more."""
        return result


class Suite:
    """One kind of product: how cases share weights, what the inputs are, how results are checked and recorded."""

    def groups(self, cases: list[Case]) -> list[list[Case]]:
        """The cases, those of one weight together."""
        return group_by_weight(cases)

    def weights(self, case: Case, device: torch.device, generator: torch.Generator, sets: int | None) -> RotatedWeights:
        raise NotImplementedError

    def inputs(self, case: Case, weights: RotatedWeights, generator: torch.Generator) -> RotatedOutputs:
        """Fresh activations and outputs for one case."""
        raise NotImplementedError

    def check(self, inputs: RotatedOutputs, options: Options) -> Check:
        raise NotImplementedError

    def record(self, inputs: RotatedOutputs, check: Check, results: dict[str, Result]) -> Any:
        """What the suite's file holds of one case."""
        raise NotImplementedError


def run_grid(
    suite: Suite, cases: list[Case], peers: list[Peer], device: torch.device, options: Options, progress: Progress = no_progress
) -> Iterator[list[Any]]:
    """Runs every case with every peer (all available ones) and yields the records of one weight after another.

    Each weight starts from the seed, so its inputs do not depend on the other weights of the run.
    """
    for group in suite.groups(cases):
        devices.wake(device)
        generator = torch.Generator(device).manual_seed(options.seed)
        weights = suite.weights(group[0], device, generator, options.sets)
        records = [run_case(suite, suite.inputs(case, weights, generator), peers, options, progress) for case in group]
        del weights  # the next ones do not come on top of them
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the next weights have other sizes
        yield records


def run_case(suite: Suite, inputs: RotatedOutputs, peers: list[Peer], options: Options, progress: Progress) -> Any:
    """The record of one case: every peer prepared and checked, then all of them timed in turns."""
    progress(inputs.case, "reference")
    check = suite.check(inputs, options)
    return suite.record(inputs, check, time_peers(inputs, peers, check, options, progress))


def time_peers(
    inputs: RotatedOutputs,
    peers: list[Peer],
    check: Check,
    options: Options,
    progress: Progress = no_progress,
    limit_us: float | None = None,
) -> dict[str, Result]:
    """Name -> result: every peer prepared and checked, then all of them timed in turns, then checked again.

    A peer is not timed to the end once a round takes more than limit_us microseconds a call in the median.
    """
    results: dict[str, Result] = {}
    runners: dict[str, Runner] = {}
    facts: dict[str, dict[str, Any]] = {}
    try:
        for peer in peers:
            progress(inputs.case, peer.name)
            try:
                calls = peer.prepare(inputs)
                facts[peer.name] = peer.details(inputs) | check.once(peer, calls[0])
                runners[peer.name] = open_runner(calls, inputs.device, options.budget_ms, inputs.weights.cold, options.regime)
            except WrongResult as error:
                results[peer.name] = Result(failed=str(error))
            except Exception as error:  # noqa: BLE001 - recorded: a peer's failure is a result
                results[peer.name] = Result(failed=describe(error))
        progress(inputs.case, "timing")
        for name, timed in interleave(runners, limit_us=limit_us).items():
            drawn = None if isinstance(timed, Exception) else runners[name].draw()
            results[name] = as_result(timed, facts[name] | ({} if drawn is None else drawn._asdict()))
        for peer in peers:
            if results[peer.name].failed is None and check.covers(peer):
                results[peer.name] = _checked_again(peer, results[peer.name], runners[peer.name], check, inputs)
    finally:
        close(runners, peers)
    return {peer.name: results[peer.name] for peer in peers}


def _checked_again(peer: Peer, result: Result, runner: Runner, check: Check, inputs: RotatedOutputs) -> Result:
    inputs.poison()
    try:
        runner.replay()
    except RuntimeError as error:
        return Result(failed=f"after timing: {describe(error)}")
    return check.after_timing(peer, result)


def plain_call(call: TensorCall, inputs: RotatedOutputs) -> torch.Tensor:
    """What one call returns over poisoned outputs, once the device is done with it."""
    inputs.poison()
    out = call()
    devices.synchronize(inputs.device)
    return out


def case_fields(inputs: RotatedOutputs, results: dict[str, Result]) -> dict[str, Any]:
    """The fields that the `CaseRecord` of every suite has."""
    case = inputs.case
    return {
        "shape": case.shape,
        "M": case.M,
        "N": case.N,
        "K": case.K,
        "rotation": inputs.weights.sets,
        "outputs": inputs.slots,
        "cold": inputs.weights.cold,
        "results": results,
    }


def as_result(timed: Timing | Exception, facts: dict[str, Any]) -> Result:
    """The record of a Timing (times to a nanosecond) or of the exception in its place."""
    if isinstance(timed, Exception):
        return Result(failed=describe(timed))
    return Result(
        us=round(timed.us, 3),
        samples=[round(sample, 3) for sample in timed.samples],
        calls_per_graph=timed.calls_per_graph,
        method=timed.method,
        spread=round(timed.spread, 4),
        **facts,
    )


def close(runners: dict[str, Runner], peers: list[Peer]) -> None:
    """Closes every runner and releases every peer, whatever one of them raises; an error is raised at the end."""
    with contextlib.ExitStack() as stack:
        for peer in peers:
            stack.callback(peer.release)
        for runner in runners.values():
            stack.callback(runner.close)
