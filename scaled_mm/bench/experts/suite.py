"""Experts: ours is compared with the CPU backend on some rows, bit for bit, before and after timing; the others by their relative error."""

from __future__ import annotations

import torch

from scaled_mm.bench.experts.cases import BLOCK, ExpertsCase
from scaled_mm.bench.experts.inputs import ExpertsInputs, ExpertsWeights
from scaled_mm.bench.experts.peers import OURS_ALL
from scaled_mm.bench.experts.record import ExpertsCaseRecord
from scaled_mm.bench.int8.suite import relative_error
from scaled_mm.measure.peer import Peer, TensorCall
from scaled_mm.measure.record import Result
from scaled_mm.measure.run import Check, Options, Suite, case_fields, plain_call


class ExpertsSuite(Suite):
    def groups(self, cases: list[ExpertsCase]) -> list[list[ExpertsCase]]:
        """By model and kind of scale: its parts share the weights."""
        found: dict[tuple[str, str], list[ExpertsCase]] = {}
        for case in cases:
            found.setdefault((case.shape, case.scales), []).append(case)
        return list(found.values())

    def weights(self, case: ExpertsCase, device: torch.device, generator: torch.Generator, sets: int | None) -> ExpertsWeights:
        return ExpertsWeights(case.model, case.scales == BLOCK, device, generator)

    def inputs(self, case: ExpertsCase, weights: ExpertsWeights, generator: torch.Generator) -> ExpertsInputs:
        return ExpertsInputs(case, weights, generator)

    def check(self, inputs: ExpertsInputs, options: Options) -> RowsCheck:
        return RowsCheck(inputs, options)

    def record(self, inputs: ExpertsInputs, check: RowsCheck, results: dict[str, Result]) -> ExpertsCaseRecord:
        case = inputs.case
        gpu = torch.cuda.get_device_name(inputs.device) if inputs.device.type == "cuda" else ""
        return ExpertsCaseRecord(
            **case_fields(inputs, results) | {"rotation": len(inputs.routings)},
            part=case.part,
            routing=case.routing,
            scales=case.scales,
            traffic_bytes=inputs.traffic_bytes,
            roof_us=inputs.roof_us(gpu),
            check=check.status,
        )


class RowsCheck(Check):
    """status: how many rows are compared, or why none."""

    def __init__(self, inputs: ExpertsInputs, options: Options):
        self._inputs, self._switched_on = inputs, options.check and len(inputs.checked_rows) > 0
        self.status = f"checked: {len(inputs.checked_rows)} rows" if self._switched_on else "not checked"

    def once(self, peer: Peer, call: TensorCall) -> dict[str, float | bool]:
        if not self._switched_on:
            return {}
        found = peer.finish(plain_call(call, self._inputs), self._inputs)[self._inputs.checked_rows]
        return {"error": relative_error(found, self._inputs.expected), "bit_equal": torch.equal(found, self._inputs.expected)}

    def covers(self, peer: Peer) -> bool:
        return peer.name in OURS_ALL and self._switched_on

    def after_timing(self, peer: Peer, result: Result) -> Result:
        if torch.equal(self._inputs.out(0)[self._inputs.checked_rows], self._inputs.expected) == result.bit_equal:
            return result
        return result.model_copy(update={"bit_equal": False, "note": "a plain call and the timed graph give different bits"})
