"""What the isolated process needs for a section of the tile table: operands, our kernel as a peer, and a check.

Operands and checks are those of the bench suites, except that products of experts have their own operands: all experts have equally many rows.
"""

from __future__ import annotations

import dataclasses
import math

import torch

import scaled_mm as sm
from scaled_mm.bench.int8.inputs import INT8_STD, OUT_DTYPE, UNIFORM
from scaled_mm.bench.ours import OurPeer, our_handle
from scaled_mm.errors import InternalError
from scaled_mm.measure.peer import OURS, Peer, TensorCall
from scaled_mm.measure.rotation import RotatedOutputs, RotatedWeights, memory_limit
from scaled_mm.measure.run import Check, Options
from scaled_mm.measure.shapes import Case

CHECKED_ROWS = 48


@dataclasses.dataclass
class Workbench:
    """Of plain products. experts: of a product; 1 without experts."""

    device: torch.device
    generator: torch.Generator
    options: Options
    experts: int = 1

    def weights(self, N: int, K: int) -> RotatedWeights:
        from scaled_mm.bench.int8.inputs import WeightSets

        return WeightSets(N, K, self.device, self.generator)

    def inputs(self, case: Case, weights: RotatedWeights) -> RotatedOutputs:
        from scaled_mm.bench.int8.inputs import Inputs

        return Inputs(case, weights, self.generator)

    def check(self, inputs: RotatedOutputs) -> Check:
        """InternalError if the product is not checked: a kernel config that is not checked may not win."""
        from scaled_mm.bench.int8.suite import BitCheck, reference_product

        expected, why = reference_product(inputs, self.options)
        if expected is None:
            case = inputs.case
            raise InternalError(f"M={case.M} N={case.N} K={case.K}: {why}; a kernel config that is not checked may not win")
        return BitCheck(inputs, expected, "checked")

    def peer(self, row: str) -> Peer:
        """Our kernel config of that name."""
        from scaled_mm.bench.int8 import peers

        return peers.Ours(row, name=OURS)


class BlockScaledWorkbench(Workbench):
    """Of block-scaled products: some rows of the output are compared with the CPU backend."""

    def weights(self, N: int, K: int) -> RotatedWeights:
        from scaled_mm.bench.block_scaled.inputs import BlockScaledWeights

        return BlockScaledWeights(Case(f"{N}x{K}", 1, N, K), self.device, self.generator)

    def inputs(self, case: Case, weights: RotatedWeights) -> RotatedOutputs:
        from scaled_mm.bench.block_scaled.inputs import BlockScaledInputs

        return BlockScaledInputs(case, weights, self.generator)

    def check(self, inputs: RotatedOutputs) -> Check:
        from scaled_mm.bench.rows_check import RowsCheck

        return RowsCheck(inputs, self.options, (OURS,))

    def peer(self, row: str) -> Peer:
        from scaled_mm.bench.block_scaled import peers

        return peers.Ours(row, name=OURS)


class ExpertsWeights(RotatedWeights):
    """R random weights of all experts, int8 [E, N, K] each, and their float32 scales: [E, N], or those of blocks, [E, ceil(N/128), ceil(K/128)]."""

    def __init__(self, N: int, K: int, bench: ExpertsWorkbench):
        E = bench.experts
        super().__init__(E * N * K, memory_limit(bench.device), bench.device, None)
        self.block_scales = bench.block_scales
        options = dict(device=bench.device, generator=bench.generator)
        shape = (E, -(-N // 128), -(-K // 128)) if bench.block_scales else (E, N)
        self.int8 = [
            torch.empty(E, N, K, dtype=torch.int8, device=bench.device).random_(-128, 128, generator=bench.generator) for _ in range(self.sets)
        ]
        self.scale = [(torch.rand(shape, **options) + 0.5) / (INT8_STD[UNIFORM] * math.sqrt(K)) for _ in range(self.sets)]


class ExpertsProducts(RotatedOutputs):
    """Experts with equally many rows. case.M: the rows of all of them. a: int8 [case.M, K]; a_scale: of tokens or blocks; ends: int32 [E]."""

    def __init__(self, case: Case, weights: ExpertsWeights, bench: ExpertsWorkbench):
        super().__init__(case, weights, OUT_DTYPE)
        quantize = sm.quantize_int8_block if bench.block_scales else sm.quantize_int8
        self.a, self.a_scale = quantize(torch.randn(case.M, case.K, device=self.device, generator=bench.generator))
        each = case.M // bench.experts
        self.ends = torch.arange(1, bench.experts + 1, dtype=torch.int32, device=self.device) * each
        count = min(case.M, CHECKED_ROWS)
        self.checked_rows = torch.linspace(0, case.M - 1, count, dtype=torch.float64).round().long().to(self.device)
        self.expected = self._expected(each).to(self.device)

    def operands(self, i: int) -> dict[str, torch.Tensor]:
        weight, scale = self.weights.int8[i], self.weights.scale[i]
        b_scale = scale.transpose(1, 2) if self.weights.block_scales else scale
        return dict(a=self.a, b=weight.transpose(1, 2), a_scale=self.a_scale, b_scale=b_scale, expert_offsets=self.ends)

    def _expected(self, each: int) -> torch.Tensor:
        """The checked rows by the CPU backend, with weight set 0."""
        t, found = self.operands(0), []
        product = sm.block_scaled_mm if self.weights.block_scales else sm.scaled_mm
        for row in self.checked_rows.tolist():
            expert, one = row // each, slice(row, row + 1)
            operands = (t["a"][one], t["b"][expert], t["a_scale"][one], t["b_scale"][expert])
            found.append(product(*(operand.cpu() for operand in operands), out_dtype=OUT_DTYPE))
        return torch.cat(found)


class OurExperts(OurPeer):
    label, int8 = "scaled_mm (this project): products of experts by a descriptor", True

    def create(self, inputs: ExpertsProducts) -> sm.GroupedDescriptor | sm.GroupedBlockScaledDescriptor:
        create = sm.create_grouped_block_scaled_descriptor if inputs.weights.block_scales else sm.create_grouped_descriptor
        return create(our_handle(inputs.device), out=inputs.out(0), **inputs.operands(0), kernel=self._kernel)

    def call(self, descriptor, workspace: torch.Tensor | None, inputs: ExpertsProducts, i: int) -> TensorCall:
        out, operands = inputs.out(i), inputs.operands(i)

        def call() -> torch.Tensor:
            descriptor.calculate(out, **operands, workspace=workspace)
            return out

        return call


class ExpertsWorkbench(Workbench):
    """Of products of experts: some rows of the output are compared with the CPU backend. `inputs` takes a case whose M is the rows of one expert."""

    block_scales = False

    def weights(self, N: int, K: int) -> RotatedWeights:
        return ExpertsWeights(N, K, self)

    def inputs(self, case: Case, weights: RotatedWeights) -> RotatedOutputs:
        return ExpertsProducts(dataclasses.replace(case, M=self.experts * case.M), weights, self)

    def check(self, inputs: RotatedOutputs) -> Check:
        from scaled_mm.bench.rows_check import RowsCheck

        return RowsCheck(inputs, self.options, (OURS,))

    def peer(self, row: str) -> Peer:
        return OurExperts(row, name=OURS)


class BlockScaledExpertsWorkbench(ExpertsWorkbench):
    block_scales = True


WORKBENCHES: dict[str, type[Workbench]] = {
    "gemm": Workbench,
    "block_scaled": BlockScaledWorkbench,
    "grouped": ExpertsWorkbench,
    "grouped_block_scaled": BlockScaledExpertsWorkbench,
}
"""By section. Those that the autotuner tunes."""
