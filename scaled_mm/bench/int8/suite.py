"""INT8 products: every implementation is compared with the reference, ours bit for bit and also after timing."""

from __future__ import annotations

import torch

from scaled_mm.bench.int8.inputs import UNIFORM, Inputs, WeightSets
from scaled_mm.bench.int8.record import Int8CaseRecord
from scaled_mm.bench.overhead import OverheadRecord, measure_overhead
from scaled_mm.measure.peer import OURS, Peer, TensorCall
from scaled_mm.measure.record import Result, describe
from scaled_mm.measure.roofline import roof_us, traffic_bytes
from scaled_mm.measure.run import Check, Options, Suite, case_fields, plain_call
from scaled_mm.measure.shapes import Case

#: Small enough that the host, not the product, sets the pace; every peer accepts it.
TINY = Case("tiny", 32, 256, 256)


class Int8Suite(Suite):
    """data: the distribution of the int8 numbers, one of `inputs.INT8_STD`."""

    def __init__(self, data: str = UNIFORM):
        self._data = data

    def weights(self, case: Case, device: torch.device, generator: torch.Generator, sets: int | None) -> WeightSets:
        return WeightSets(case.N, case.K, device, generator, sets, self._data)

    def inputs(self, case: Case, weights: WeightSets, generator: torch.Generator) -> Inputs:
        return Inputs(case, weights, generator)

    def check(self, inputs: Inputs, options: Options) -> BitCheck:
        return BitCheck(inputs, *reference_product(inputs, options))

    def record(self, inputs: Inputs, check: BitCheck, results: dict[str, Result]) -> Int8CaseRecord:
        case, device = inputs.case, inputs.device
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        return Int8CaseRecord(
            **case_fields(inputs, results),
            traffic_bytes=traffic_bytes(case.M, case.N, case.K),
            roof_us=roof_us(case.M, case.N, case.K, gpu),
            check=check.status,
        )


class BitCheck(Check):
    """Relative error and equality of bits. expected: bfloat16 [M, N] of weight set 0, None where the case is not checked; status says why."""

    def __init__(self, inputs: Inputs, expected: torch.Tensor | None, status: str):
        self.status = status
        self._inputs, self._expected = inputs, expected

    def once(self, peer: Peer, call: TensorCall) -> dict[str, float | bool]:
        if self._expected is None:
            return {}
        out = peer.finish(plain_call(call, self._inputs), self._inputs)
        return {"error": relative_error(out, self._expected), "bit_equal": torch.equal(out, self._expected)}

    def covers(self, peer: Peer) -> bool:
        return peer.name == OURS and self._expected is not None

    def after_timing(self, peer: Peer, result: Result) -> Result:
        if torch.equal(self._inputs.out(0), self._expected) == result.bit_equal:
            return result
        note = "a plain call and the timed graph give different bits"
        return result.model_copy(update={"bit_equal": False, "note": note})


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


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """||out - expected|| / ||expected|| in float32 with float64 sums; NaN anywhere gives NaN."""
    difference = torch.linalg.vector_norm(out.float() - expected.float(), dtype=torch.float64)
    return float(difference / torch.linalg.vector_norm(expected.float(), dtype=torch.float64))


def run_overhead(peers: list[Peer], device: torch.device) -> list[OverheadRecord]:
    """Host microseconds per call of every available peer, on a tiny product."""
    generator = torch.Generator(device).manual_seed(0)
    return measure_overhead(peers, Inputs(TINY, WeightSets(TINY.N, TINY.K, device, generator, sets=1), generator))
