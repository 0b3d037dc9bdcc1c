"""Inputs of the row-wise operators, rotated so that they come from memory, and the calls of every implementation on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from scaled_mm.bench.path.cases import PathCase
from scaled_mm.bench.path.inputs import PathInputs, activations
from scaled_mm.bench.path.operators import OPERATORS, Operator, Tensors
from scaled_mm.measure.roofline import memory_us
from scaled_mm.measure.rotation import RotatedWeights, memory_limit
from scaled_mm.measure.run import Options

#: Elements that the reference, which is slow, computes of a case: of more, rows that are spread evenly.
CHECKED_ELEMENTS = 1 << 22
COPIES = 3  # of the inputs that may exist at once: ours, those that vLLM writes to, and results


@dataclass(frozen=True)
class Rows:
    """Some rows of the inputs, on the CPU."""

    x: torch.Tensor
    residual: torch.Tensor | None
    weight: torch.Tensor
    scale: torch.Tensor


class RowSets(RotatedWeights):
    """R inputs of an operator. x: bfloat16 [M, K], or [M, 2 K] of a gated activation; residual: like x, or None."""

    def __init__(self, case: PathCase, operator: Operator, device: torch.device, generator: torch.Generator, sets: int | None):
        super().__init__(operator.traffic_bytes(case.M, case.K), memory_limit(device) // COPIES, device, sets)
        columns = operator.width * case.K
        self.x = [activations(case.M, columns, device, generator) for _ in range(self.sets)]
        self.residual = [activations(case.M, columns, device, generator) if operator.adds else None for _ in range(self.sets)]


class RowInputs(PathInputs):
    """A case of an operator. x(i), residual(i): of set i. weight: bfloat16 [K]. scale: float32 [1], static, of set 0.

    out(i), row_scale(i): int8 or bfloat16 [M, K], and float32 [M, 1], for implementations that write to given tensors.
    """

    def __init__(self, case: PathCase, device: torch.device, generator: torch.Generator, sets: int | None):
        self.operator = operator = OPERATORS[case.part]
        super().__init__(case, RowSets(case, operator, device, generator, sets), operator.out)
        self.weight = (1 + 0.1 * torch.randn(case.K, device=device, generator=generator)).to(torch.bfloat16)
        self.scale = (self.x(0).abs().max().to(torch.float32) / 127).reshape(1)

    def x(self, i: int) -> torch.Tensor:
        return self.weights.x[i]

    def residual(self, i: int) -> torch.Tensor:
        return self.weights.residual[i]

    @cached_property
    def row_scales(self) -> list[torch.Tensor]:
        return self.share([torch.empty(self.case.M, 1, device=self.device) for _ in range(self.slots)])

    def row_scale(self, i: int) -> torch.Tensor:
        return self.row_scales[self.slot(i)]

    def ours(self, name: str) -> list[Callable[[], Tensors]]:
        return self.keep(name, lambda i: self.operator.run(self, i))

    def torch(self) -> list[Callable[[], Tensors]]:
        return self.keeping(lambda i: self.operator.torch(self, i))

    def vllm(self, packet: Callable[[str], Callable]) -> list[Callable[[], Tensors]]:
        operator = packet(self.operator.vllm)
        return self.calls(lambda i: self.operator.bind(operator, self, i))

    def expected(self, options: Options) -> tuple[Tensors | None, torch.Tensor | None, str]:
        if not options.check:
            return None, None, "not checked: switched off"
        m = self.case.M
        count = min(m, max(1, CHECKED_ELEMENTS // self.x(0).shape[1]))
        index = torch.linspace(0, m - 1, count, dtype=torch.float64).round().long().to(self.device)
        residual = self.residual(0)[index].cpu() if self.operator.adds else None
        rows = Rows(self.x(0)[index].cpu(), residual, self.weight.cpu(), self.scale.cpu())
        expected = tuple(one.to(self.device) for one in self.operator.expected(rows))
        if count == m:
            return expected, None, "checked"
        return expected, index, f"checked: {count} of {m} rows"

    def kernel(self) -> dict[str, str]:
        return {}

    @property
    def traffic_bytes(self) -> int:
        return self.operator.traffic_bytes(self.case.M, self.case.K)

    def roof_us(self, gpu: str) -> float | None:
        return memory_us(self.traffic_bytes, gpu)
