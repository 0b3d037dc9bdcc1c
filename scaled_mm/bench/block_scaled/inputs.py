"""The operands of block-scaled products: weights that rotate, and activations."""

from __future__ import annotations

import math
from functools import cached_property

import torch

import scaled_mm as sm
from scaled_mm.bench.int8.inputs import INT8_STD, OUT_DTYPE, UNIFORM
from scaled_mm.measure.rotation import RotatedOutputs, RotatedWeights, memory_limit
from scaled_mm.measure.shapes import Case

BLOCK = 128
CHECKED_ROWS = 48
BF16_BYTES = 2


class BlockScaledWeights(RotatedWeights):
    """R random weights. int8: each [N, K]; scale: each float32 [ceil(N/128), ceil(K/128)], as checkpoints store it.

    bf16: each [N, K], dequantized, made when first asked for.
    """

    def __init__(self, case: Case, device: torch.device, generator: torch.Generator, sets: int | None = None):
        each = case.N * case.K
        super().__init__(each, memory_limit(device) // (1 + BF16_BYTES), device, sets)
        shape, divisor = (-(-case.N // BLOCK), -(-case.K // BLOCK)), INT8_STD[UNIFORM] * math.sqrt(case.K)
        options = dict(device=device, generator=generator)
        self.int8 = [torch.randint(-128, 128, (case.N, case.K), dtype=torch.int8, **options) for _ in range(self.sets)]
        self.scale = [(torch.rand(shape, **options) + 0.5) / divisor for _ in range(self.sets)]

    @cached_property
    def bf16(self) -> list[torch.Tensor]:
        return [_dequantized(q, scale.repeat_interleave(BLOCK, 0)[: len(q)]) for q, scale in zip(self.int8, self.scale, strict=True)]


class BlockScaledInputs(RotatedOutputs):
    """A case. a: int8 [M, K]; a_scale: float32 [M, ceil(K/128)], of normal values. b(i), b_scale(i): weight set i, transposed."""

    def __init__(self, case: Case, weights: BlockScaledWeights, generator: torch.Generator):
        super().__init__(case, weights, OUT_DTYPE)
        self.a, self.a_scale = sm.quantize_int8_block(torch.randn(case.M, case.K, device=self.device, generator=generator))

    def b(self, i: int) -> torch.Tensor:
        return self.weights.int8[i].t()

    def b_scale(self, i: int) -> torch.Tensor:
        return self.weights.scale[i].t()

    @cached_property
    def a_bf16(self) -> torch.Tensor:
        return _dequantized(self.a, self.a_scale)

    @cached_property
    def checked_rows(self) -> torch.Tensor:
        """Rows of the output for weight set 0 that are compared with the reference."""
        count = min(self.case.M, CHECKED_ROWS)
        return torch.linspace(0, self.case.M - 1, count, dtype=torch.float64).round().long().to(self.device)

    @cached_property
    def expected(self) -> torch.Tensor:
        """These rows by the CPU backend, on the device."""
        a, a_scale = self.a[self.checked_rows].cpu(), self.a_scale[self.checked_rows].cpu()
        return sm.block_scaled_mm(a, self.b(0).cpu(), a_scale, self.b_scale(0).cpu(), out_dtype=OUT_DTYPE).to(self.device)

    @property
    def traffic_bytes(self) -> int:
        """int8 a and b and their scales read once, 16-bit out written once."""
        case = self.case
        blocks = -(-case.K // BLOCK)
        return case.M * case.K + case.N * case.K + 2 * case.M * case.N + 4 * blocks * (case.M + -(-case.N // BLOCK))


def _dequantized(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """bfloat16. scale: of 128 elements along the last dimension of q."""
    return q.to(torch.bfloat16).mul_(scale.to(torch.bfloat16).repeat_interleave(BLOCK, -1)[..., : q.shape[-1]])
