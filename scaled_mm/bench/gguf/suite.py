"""GGUF products: every implementation is compared with the formula in float64, ours also after timing."""

from __future__ import annotations

import math

import torch

from scaled_mm.bench.gguf.cases import GgufCase, group_by_format
from scaled_mm.bench.gguf.inputs import GgufInputs, GgufWeights, weight_bytes
from scaled_mm.bench.gguf.llama import LlamaTimes
from scaled_mm.bench.gguf.peers import OursGguf
from scaled_mm.bench.gguf.record import GgufCaseRecord
from scaled_mm.gguf import quantize_block, reference
from scaled_mm.measure.peer import Peer, TensorCall
from scaled_mm.measure.record import Result
from scaled_mm.measure.run import Check, Options, Suite, case_fields, plain_call

#: Rows of the weight and tokens that the reference computes, spread evenly from the first to the last.
CHECK_ROWS, CHECK_TOKENS = 128, 256


class GgufSuite(Suite):
    """llama: times to stand beside ours."""

    def __init__(self, llama: LlamaTimes | None = None):
        self._llama = {} if llama is None else llama.us

    def groups(self, cases: list[GgufCase]) -> list[list[GgufCase]]:
        return group_by_format(cases)

    def weights(self, case: GgufCase, device: torch.device, generator: torch.Generator, sets: int | None) -> GgufWeights:
        return GgufWeights(case, device, generator, sets)

    def inputs(self, case: GgufCase, weights: GgufWeights, generator: torch.Generator) -> GgufInputs:
        return GgufInputs(case, weights, generator)

    def check(self, inputs: GgufInputs, options: Options) -> Check:
        return FormulaCheck(inputs) if options.check else Check()

    def record(self, inputs: GgufInputs, check: Check, results: dict[str, Result]) -> GgufCaseRecord:
        case = inputs.case
        return GgufCaseRecord(
            **case_fields(inputs, results),
            fmt=case.fmt,
            weight_bytes=weight_bytes(case),
            llama_us=self._llama.get((case.fmt, case.N, case.K, case.M)),
        )


class FormulaCheck(Check):
    """Relative error against the documented formula of what a peer computes."""

    def __init__(self, inputs: GgufInputs):
        self._inputs = inputs
        self._formulas: dict[str, torch.Tensor] = {}

    def once(self, peer: Peer, call: TensorCall) -> dict[str, float]:
        return {"error": self._error(peer, plain_call(call, self._inputs))}

    def covers(self, peer: Peer) -> bool:
        return isinstance(peer, OursGguf)

    def after_timing(self, peer: Peer, result: Result) -> Result:
        after = self._error(peer, peer.out(self._inputs, 0))
        if after <= result.error or math.isnan(result.error):
            return result
        return result.model_copy(update={"error": after})

    def _error(self, peer: Peer, out: torch.Tensor) -> float:
        if peer.name not in self._formulas:
            self._formulas[peer.name] = formula(peer, self._inputs)
        return error_of(out, self._inputs, self._formulas[peer.name])


def spread(count: int, most: int, device: torch.device) -> torch.Tensor:
    """At most `most` of 0 ... count - 1, evenly spread, the first and the last among them."""
    return torch.linspace(0, count - 1, min(count, most), dtype=torch.float64, device=device).round().long().unique()


def _slices(inputs: GgufInputs) -> tuple[torch.Tensor, torch.Tensor]:
    case = inputs.case
    return spread(case.M, CHECK_TOKENS, inputs.device), spread(case.N, CHECK_ROWS, inputs.device)


def formula(peer: Peer, inputs: GgufInputs) -> torch.Tensor:
    """float64 [tokens, rows] of the slice of weight set 0's product: the documented formula of what this peer computes."""
    tokens, rows = _slices(inputs)
    weight, fmt = inputs.weights.first[rows], inputs.case.fmt
    if not isinstance(peer, OursGguf):
        return reference.gemm(weight, inputs.float32[tokens], fmt).t()
    activation = peer.activation(inputs)[tokens]
    if peer.quantizes(inputs):
        activation = quantize_block(activation, "q8_1")
    if activation.dtype is torch.uint8:
        return reference.gemm_q8_1(weight, activation, fmt).t()
    return reference.gemm(weight, activation, fmt).t()


def error_of(out: torch.Tensor, inputs: GgufInputs, want: torch.Tensor) -> float:
    """||out - want|| / ||want|| over the slice; NaN where any element of the whole output is not finite."""
    if not bool(out.isfinite().all()):
        return float("nan")
    tokens, rows = _slices(inputs)
    part = out[tokens][:, rows].double()
    return float((part - want).norm() / want.norm())
