"""Block-scaled products: ours is compared with the CPU backend on some rows, bit for bit, before and after timing; the others by their relative
error."""

from __future__ import annotations

import torch

from scaled_mm.bench.block_scaled.inputs import BlockScaledInputs, BlockScaledWeights
from scaled_mm.bench.block_scaled.record import BlockScaledCaseRecord
from scaled_mm.bench.rows_check import RowsCheck
from scaled_mm.measure.peer import OURS
from scaled_mm.measure.record import Result
from scaled_mm.measure.roofline import PEAKS
from scaled_mm.measure.run import Options, Suite, case_fields
from scaled_mm.measure.shapes import Case


class BlockScaledSuite(Suite):
    def weights(self, case: Case, device: torch.device, generator: torch.Generator, sets: int | None) -> BlockScaledWeights:
        return BlockScaledWeights(case, device, generator, sets)

    def inputs(self, case: Case, weights: BlockScaledWeights, generator: torch.Generator) -> BlockScaledInputs:
        return BlockScaledInputs(case, weights, generator)

    def check(self, inputs: BlockScaledInputs, options: Options) -> RowsCheck:
        return RowsCheck(inputs, options, (OURS,))

    def record(self, inputs: BlockScaledInputs, check: RowsCheck, results: dict[str, Result]) -> BlockScaledCaseRecord:
        case, traffic = inputs.case, inputs.traffic_bytes
        gpu = torch.cuda.get_device_name(inputs.device) if inputs.device.type == "cuda" else ""
        roof = None
        if gpu in PEAKS:
            operations, bandwidth = PEAKS[gpu]
            roof = 1e6 * max(2 * case.M * case.N * case.K / operations, traffic / bandwidth)
        return BlockScaledCaseRecord(**case_fields(inputs, results), traffic_bytes=traffic, roof_us=roof, check=check.status)
