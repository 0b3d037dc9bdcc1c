"""Experts: ours is compared with the CPU backend on some rows, bit for bit, before and after timing; the others by their relative error."""

from __future__ import annotations

import torch

from scaled_mm.bench.experts.cases import BLOCK, ExpertsCase
from scaled_mm.bench.experts.inputs import ExpertsInputs, ExpertsWeights
from scaled_mm.bench.experts.peers import OURS_ALL
from scaled_mm.bench.experts.record import ExpertsCaseRecord
from scaled_mm.bench.rows_check import RowsCheck
from scaled_mm.measure.record import Result
from scaled_mm.measure.run import Options, Suite, case_fields


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
        return RowsCheck(inputs, options, OURS_ALL)

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
