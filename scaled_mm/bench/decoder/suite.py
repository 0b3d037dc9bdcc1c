"""Decoder layers: every implementation is compared with the layer in float32, and the graph of ours with its plain call, bit for bit."""

from __future__ import annotations

import torch

from scaled_mm.bench.decoder import plain
from scaled_mm.bench.decoder.cases import DecoderCase
from scaled_mm.bench.decoder.inputs import DecoderInputs, DecoderWeights, Pair
from scaled_mm.bench.decoder.record import DecoderCaseRecord
from scaled_mm.bench.int8.suite import relative_error
from scaled_mm.measure.peer import OURS, Peer, TensorCall
from scaled_mm.measure.record import Result
from scaled_mm.measure.run import Check, Options, Suite, WrongResult, case_fields, plain_call

#: Largest relative error: int8 quantization, and tokens whose router selects other experts because of it.
ALLOWED_ERROR = 0.25


class DecoderSuite(Suite):
    def weights(self, case: DecoderCase, device: torch.device, generator: torch.Generator, sets: int | None) -> DecoderWeights:
        return DecoderWeights(case.model, device, generator, sets)

    def inputs(self, case: DecoderCase, weights: DecoderWeights, generator: torch.Generator) -> DecoderInputs:
        return DecoderInputs(case, weights, generator)

    def check(self, inputs: DecoderInputs, options: Options) -> DecoderCheck:
        return DecoderCheck(inputs, options)

    def record(self, inputs: DecoderInputs, check: DecoderCheck, results: dict[str, Result]) -> DecoderCaseRecord:
        return DecoderCaseRecord(**case_fields(inputs, results))


class DecoderCheck(Check):
    """Two parts of the result are compared: what attention adds to the residual, and the output of the feed-forward network."""

    def __init__(self, inputs: DecoderInputs, options: Options):
        self._inputs = inputs
        self._before = inputs.x.float() + inputs.residual.float()
        self._expected = self._parts(plain.reference(inputs)) if options.check else None
        self._ours: Pair | None = None

    def _parts(self, found: Pair) -> Pair:
        return found[0].float(), found[1].float() - self._before

    def once(self, peer: Peer, call: TensorCall) -> dict[str, float | bool | str]:
        """The larger error of the parts. Ours is called twice, for the same bits."""
        if self._expected is None:
            return {}
        found = plain_call(call, self._inputs)
        error = max(relative_error(*pair) for pair in zip(self._parts(found), self._expected, strict=True))
        if not error <= ALLOWED_ERROR:
            raise WrongResult(f"expected an error of {ALLOWED_ERROR} at most, got {error:.3g}")
        if peer.name != OURS:
            return {"error": error}
        self._ours = tuple(one.clone() for one in found)
        if self._equal(plain_call(call, self._inputs)):
            return {"error": error, "bit_equal": True}
        return {"error": error, "bit_equal": False, "note": "two plain calls give different bits"}

    def covers(self, peer: Peer) -> bool:
        return peer.name == OURS and self._ours is not None

    def after_timing(self, peer: Peer, result: Result) -> Result:
        if result.bit_equal is False or self._equal(self._inputs.kept(OURS)):
            return result
        return result.model_copy(update={"bit_equal": False, "note": "a plain call and the timed graph give different bits"})

    def _equal(self, found: Pair) -> bool:
        return all(torch.equal(*pair) for pair in zip(found, self._ours, strict=True))
