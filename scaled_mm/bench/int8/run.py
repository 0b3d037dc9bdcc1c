"""The loop over the grid: inputs, checks, timing, records.

A peer that raises on a case is recorded as failed there, with its message. Ours is compared with the reference bit for
bit twice: a plain call, and what is in memory after the timed graph ran, where calls overlap as they do in a model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from scaled_mm.bench.int8.inputs import Inputs, RotatedOutputs, WeightSets
from scaled_mm.bench.int8.peers import OURS, RIVALS, Peer
from scaled_mm.measure import timing
from scaled_mm.measure.record import CaseRecord, Implementation, OverheadRecord, Result
from scaled_mm.measure.roofline import roof_us, traffic_bytes
from scaled_mm.measure.shapes import Case, group_by_weight

#: Small enough that the host, not the product, sets the pace; every peer accepts it.
TINY = Case("tiny", 32, 256, 256)

#: Products above this are not checked unless asked for: the float64 reference takes seconds.
CHECK_LIMIT_GMAC = {"cuda": 8192.0, "cpu": 4.0}


@dataclass(frozen=True)
class Options:
    """budget_ms: time per implementation and case. check: compare with the reference, up to check_limit_gmac billion
    multiply-adds. sets: weight sets to rotate; None lets the cache decide."""

    budget_ms: float = timing.DEFAULT_BUDGET_MS
    check: bool = True
    check_limit_gmac: float = CHECK_LIMIT_GMAC["cuda"]
    seed: int = 0
    sets: int | None = None


#: Called before each step with the case and the implementation's name.
Progress = Callable[[Case, str], None]
Compare = Callable[[Peer, Callable[[], torch.Tensor]], dict]
Again = Callable[[Peer, Result, timing.Runner], Result]


def no_progress(case: Case, name: str) -> None:
    """For callers that show nothing."""


def implementations(peers: list[Peer], device: torch.device) -> list[Implementation]:
    """Asks every peer whether it can run here."""
    return [
        Implementation(
            name=peer.name,
            label=peer.label,
            int8=peer.int8,
            rival=peer.name in RIVALS,
            unavailable=peer.available(device),
            version=peer.version(),
            library=peer.library(),
        )
        for peer in peers
    ]


def run_grid(
    cases: list[Case],
    peers: list[Peer],
    device: torch.device,
    options: Options,
    progress: Progress = no_progress,
) -> Iterator[list[CaseRecord]]:
    """Runs every case with every peer (all available ones) and yields the records of one layer after another."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    for layer in layers(cases, device, options):
        yield [run_case(layer.inputs(case), peers, gpu, options, progress) for case in layer.cases]


class Layer:
    """The cases that share one weight matrix, and its rotated copies."""

    def __init__(self, cases: list[Case], device: torch.device, generator: torch.Generator, sets: int | None):
        self.cases = cases
        self._generator = generator
        self._weights = self.make_weights(cases[0], device, generator, sets)

    @staticmethod
    def make_weights(case: Case, device: torch.device, generator: torch.Generator, sets: int | None):
        return WeightSets(case.N, case.K, device, generator, sets)

    @staticmethod
    def make_inputs(case: Case, weights, generator: torch.Generator):
        return Inputs(case, weights, generator)

    def inputs(self, case: Case):
        """Fresh activations and outputs for one case, over the layer's weights."""
        assert self._weights is not None, "the layer is closed"
        return self.make_inputs(case, self._weights, self._generator)

    def close(self) -> None:
        """Lets go of the weights, so that the next layer's do not come on top of them."""
        self._weights = None


def layers(cases: list[Case], device: torch.device, options: Options, kind: type[Layer] = Layer) -> Iterator[Layer]:
    """One layer after another, each closed before the next one is made."""
    generator = torch.Generator(device).manual_seed(options.seed)
    timing.wake(device)
    for group in group_by_weight(cases):
        layer = kind(group, device, generator, options.sets)
        try:
            yield layer
        finally:
            layer.close()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the next layer's weights have other sizes


def run_case(inputs: Inputs, peers: list[Peer], gpu: str, options: Options, progress: Progress) -> CaseRecord:
    """One case: every peer prepared and checked, then all of them timed in turns."""
    case = inputs.case
    progress(case, "reference")
    expected, check = reference_product(inputs, options)

    def compare(peer: Peer, call: Callable[[], torch.Tensor]) -> dict[str, float | bool]:
        return compare_once(peer, call, inputs, expected)

    def again(peer: Peer, result: Result, runner: timing.Runner) -> Result:
        return result if peer.name != OURS or expected is None else _checked_after_timing(result, runner, inputs, expected)

    results = time_peers(inputs, peers, options, compare, again, progress)
    return CaseRecord(
        shape=case.shape,
        M=case.M,
        N=case.N,
        K=case.K,
        traffic_bytes=traffic_bytes(case.M, case.N, case.K),
        roof_us=roof_us(case.M, case.N, case.K, gpu),
        rotation=inputs.weights.sets,
        outputs=inputs.slots,
        cold=inputs.weights.cold,
        check=check,
        results=results,
    )


def time_peers(inputs: RotatedOutputs, peers: list[Peer], options: Options, compare: Compare, again: Again, progress: Progress) -> dict[str, Result]:
    """Name -> result: every peer prepared and compared, then all of them timed in turns.

    compare: what one call gives, for the record. again: the result of one that was timed, after a look at what its graph left.
    """
    results: dict[str, Result] = {}
    runners: dict[str, timing.Runner] = {}
    facts: dict[str, dict] = {}
    try:
        for peer in peers:
            progress(inputs.case, peer.name)
            try:
                calls = peer.prepare(inputs)
                facts[peer.name] = peer.details(inputs) | compare(peer, calls[0])
                runners[peer.name] = timing.open_runner(calls, inputs.device, options.budget_ms, inputs.weights.cold)
            except Exception as error:  # noqa: BLE001 - recorded: a peer's failure is a result
                results[peer.name] = Result(failed=describe(error))
        progress(inputs.case, "timing")
        for name, timed in timing.interleave(runners).items():
            results[name] = as_result(timed, facts[name])
        for peer in peers:
            if results[peer.name].failed is None:
                results[peer.name] = again(peer, results[peer.name], runners[peer.name])
    finally:
        close(runners, peers)
    return {peer.name: results[peer.name] for peer in peers}


def reference_product(inputs: Inputs, options: Options) -> tuple[torch.Tensor | None, str]:
    """(the reference's bfloat16 [M, N] of weight set 0, "checked") or (None, why the case is not checked)."""
    from scaled_mm.reference import scaled_mm as reference

    case = inputs.case
    gmac = case.M * case.N * case.K * 1e-9
    if not options.check:
        return None, "not checked: switched off"
    if gmac > options.check_limit_gmac:
        return None, f"not checked: {gmac:.0f} billion multiply-adds, above the limit of {options.check_limit_gmac:g}"
    try:
        expected = reference(inputs.a, inputs.b(0), inputs.a_scale, inputs.b_scale(0), None, out_dtype=inputs.out(0).dtype)
    except torch.OutOfMemoryError as error:
        return None, f"not checked: {describe(error)}"
    return expected, "checked"


def compare_once(peer: Peer, call: Callable[[], torch.Tensor], inputs: Inputs, expected: torch.Tensor | None) -> dict[str, float | bool]:
    """Runs one call over poisoned outputs and compares it with the reference: relative error and equality of bits."""
    if expected is None:
        return {}
    inputs.poison()
    out = peer.finish(call(), inputs)
    timing.synchronize(inputs.device)
    return {"error": relative_error(out, expected), "bit_equal": torch.equal(out, expected)}


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """||out - expected|| / ||expected|| in float32 with float64 sums; NaN anywhere gives NaN."""
    difference = torch.linalg.vector_norm(out.float() - expected.float(), dtype=torch.float64)
    return float(difference / torch.linalg.vector_norm(expected.float(), dtype=torch.float64))


def time_one(peer: Peer, inputs: Inputs, expected: torch.Tensor | None, options: Options, limit_us: float | None = None) -> Result:
    """One implementation on one case, alone: compared with the reference, timed, and compared again with what the timed graph left.

    Not timed to the end once a round takes more than limit_us microseconds a call in the median.
    """
    runners: dict[str, timing.Runner] = {}
    try:
        try:
            calls = peer.prepare(inputs)
            facts = peer.details(inputs) | compare_once(peer, calls[0], inputs, expected)
            runners[peer.name] = timing.open_runner(calls, inputs.device, options.budget_ms, inputs.weights.cold)
        except Exception as error:  # noqa: BLE001 - recorded: a failure is a result
            return Result(failed=describe(error))
        result = as_result(timing.interleave(runners, limit_us=limit_us)[peer.name], facts)
        if result.failed is not None or expected is None:
            return result
        return _checked_after_timing(result, runners[peer.name], inputs, expected)
    finally:
        close(runners, [peer])


def _checked_after_timing(result: Result, runner: timing.Runner, inputs: Inputs, expected: torch.Tensor) -> Result:
    inputs.poison()
    try:
        runner.replay()
    except RuntimeError as error:
        return Result(failed=f"after timing: {describe(error)}")
    if torch.equal(inputs.out(0), expected) == result.bit_equal:
        return result
    note = "a plain call and the timed graph give different bits"
    return result.model_copy(update={"bit_equal": False, "note": note})


def as_result(timed: timing.Timing | Exception, facts: dict) -> Result:
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


def run_overhead(peers: list[Peer], device: torch.device) -> list[OverheadRecord]:
    """Host microseconds per call of every available peer, on a tiny product."""
    generator = torch.Generator(device).manual_seed(0)
    inputs = Inputs(TINY, WeightSets(TINY.N, TINY.K, device, generator, sets=1), generator)
    calls: dict[str, timing.Call] = {}
    refused = []
    try:
        for peer in peers:
            try:
                calls |= peer.overhead_calls(inputs)
            except Exception as error:  # noqa: BLE001 - recorded
                refused.append(OverheadRecord(name=peer.name, failed=describe(error)))
        measured = timing.host_overhead(calls, device)
    finally:
        close({}, peers)
    return [_overhead_record(name, one) for name, one in measured.items()] + refused


def _overhead_record(name: str, one: timing.Overhead | Exception) -> OverheadRecord:
    if isinstance(one, Exception):
        return OverheadRecord(name=name, failed=describe(one))
    samples = [round(sample, 3) for sample in one.samples]
    return OverheadRecord(name=name, us=round(one.us, 3), samples=samples, calls=one.calls)


def close(runners: dict[str, timing.Runner], peers: list[Peer]) -> None:
    """Closes every runner and releases every peer, whatever one of them raises; an error is raised at the end."""
    with contextlib.ExitStack() as stack:
        for peer in peers:
            stack.callback(peer.release)
        for runner in runners.values():
            stack.callback(runner.close)


def describe(error: BaseException) -> str:
    """`Type: first line of the message`, for a record."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
