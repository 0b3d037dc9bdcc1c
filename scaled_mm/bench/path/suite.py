"""The path: ours is compared with the reference, bit for bit, before and after timing; the others by their relative error."""

from __future__ import annotations

import torch

from scaled_mm.bench.int8.suite import relative_error
from scaled_mm.bench.overhead import OverheadRecord, measure_overhead
from scaled_mm.bench.path.cases import LAYER, LINEARS, PathCase
from scaled_mm.bench.path.inputs import PathInputs
from scaled_mm.bench.path.linear import LinearInputs, LinearWeights
from scaled_mm.bench.path.operators import Tensors
from scaled_mm.bench.path.peers import OURS_ALL, PathPeer, serving
from scaled_mm.bench.path.record import PathCaseRecord
from scaled_mm.bench.path.rows import RowInputs
from scaled_mm.measure.peer import Peer, TensorCall
from scaled_mm.measure.record import Result
from scaled_mm.measure.run import Check, Options, Suite, case_fields, plain_call

#: Small enough that the host sets the pace: M, N, K of a linear layer; M, K of an operator.
TINY_LINEAR, TINY_ROWS = (32, 256, 256), (16, 1024)


class PathSuite(Suite):
    """A linear layer has rotated weights; the inputs of an operator rotate themselves, so each case of one has its own."""

    def __init__(self) -> None:
        self._sets: tuple[torch.device, int | None] | None = None

    def weights(self, case: PathCase, device: torch.device, generator: torch.Generator, sets: int | None) -> LinearWeights | None:
        self._sets = (device, sets)
        return LinearWeights(case.N, case.K, device, generator, sets) if case.part in LINEARS else None

    def inputs(self, case: PathCase, weights: LinearWeights | None, generator: torch.Generator) -> PathInputs:
        if weights is not None:
            return LinearInputs(case, weights, generator)
        device, sets = self._sets
        return RowInputs(case, device, generator, sets)

    def check(self, inputs: PathInputs, options: Options) -> PathCheck:
        return PathCheck(inputs, options)

    def record(self, inputs: PathInputs, check: PathCheck, results: dict[str, Result]) -> PathCaseRecord:
        gpu = torch.cuda.get_device_name(inputs.device) if inputs.device.type == "cuda" else ""
        return PathCaseRecord(
            **case_fields(inputs, results),
            part=inputs.case.part,
            traffic_bytes=inputs.traffic_bytes,
            roof_us=inputs.roof_us(gpu),
            check=check.status,
        )


class PathCheck(Check):
    """status: "checked", which rows, or why not."""

    def __init__(self, inputs: PathInputs, options: Options):
        self._inputs = inputs
        self._expected, self._rows, self.status = inputs.expected(options)

    def once(self, peer: Peer, call: TensorCall) -> dict[str, float | bool]:
        if self._expected is None:
            return {}
        found = self._of_rows(plain_call(call, self._inputs))
        return {"error": relative_error(value(found), value(self._expected)), "bit_equal": equal(found, self._expected)}

    def covers(self, peer: Peer) -> bool:
        return peer.name in OURS_ALL and self._expected is not None

    def after_timing(self, peer: Peer, result: Result) -> Result:
        if equal(self._of_rows(self._inputs.kept(peer.name)), self._expected) == result.bit_equal:
            return result
        return result.model_copy(update={"bit_equal": False, "note": "a plain call and the timed graph give different bits"})

    def _of_rows(self, results: Tensors) -> Tensors:
        return results if self._rows is None else tuple(one[self._rows] for one in results)


def equal(found: Tensors, expected: Tensors) -> bool:
    """Whether the results have the same dtypes, shapes and bits."""
    return len(found) == len(expected) and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected))


def value(results: Tensors) -> torch.Tensor:
    """float32: y, or q * scale; q alone if its scale is static."""
    first = results[0].float()
    return first * results[1] if results[0].dtype is torch.int8 and len(results) > 1 else first


def run_overhead(peers: list[PathPeer], parts: list[str], device: torch.device) -> list[OverheadRecord]:
    """Host microseconds per call of every implementation of every part; layers and random layers are one."""
    found: list[OverheadRecord] = []
    for part in dict.fromkeys(LAYER if part in LINEARS else part for part in parts):
        suite, generator = PathSuite(), torch.Generator(device).manual_seed(0)
        m, n, k = TINY_LINEAR if part == LAYER else (TINY_ROWS[0], TINY_ROWS[1], TINY_ROWS[1])
        case = PathCase("tiny", m, n, k, part)
        inputs = suite.inputs(case, suite.weights(case, device, generator, 1), generator)
        found += measure_overhead(serving(peers, part), inputs, lambda name, part=part: f"{'linear' if part == LAYER else part}: {name}")
    return found
