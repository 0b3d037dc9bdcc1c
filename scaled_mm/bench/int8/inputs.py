"""Random inputs, made on the device: weights shared by all implementations and M of a layer, activations per case.

Never zeros: they hide unwritten outputs and run faster than real data. The 16-bit and FP8 copies that other libraries
need hold the same matrix, dequantized or requantized, so that every implementation computes the same product and its
result can be compared.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch

from scaled_mm.measure.rotation import RotatedOutputs, RotatedWeights, memory_limit
from scaled_mm.measure.shapes import Case

OUT_DTYPE = torch.bfloat16

# int8 -128 .. 127 fills float8_e4m3fn's -448 .. 448 exactly at this factor.
FP8_STRETCH = 3.5
UNIFORM, GAUSS = "uniform", "gauss"
#: Distribution of the int8 numbers -> its standard deviation: scales divide by it so that the product has entries near one. gauss: rounded normal
#: numbers, as weights and activations have them. Data change the power that a product draws, and so the clocks.
INT8_STD = {UNIFORM: 73.9, GAUSS: 30.0}
FORMAT_BYTES = 4  # of one weight in every format: int8 1, fp8 1, bfloat16 2


class WeightSets(RotatedWeights):
    """R random weights of one layer. data: one of `INT8_STD`.

    int8: R tensors [N, K] int8, K contiguous; b of the product is `.t()`. scale: R tensors [1, N] float32.
    The other formats are made when first asked for and then kept.
    """

    def __init__(self, N: int, K: int, device: torch.device, generator: torch.Generator, sets: int | None = None, data: str = UNIFORM):
        super().__init__(N * K, memory_limit(device) // FORMAT_BYTES, device, sets)
        self.N, self.K, self.data = N, K, data
        self.int8 = [_random_int8(N, K, data, device, generator) for _ in range(self.sets)]
        self.scale = [_random_scale((1, N), INT8_STD[data] * math.sqrt(K), device, generator) for _ in range(self.sets)]

    @cached_property
    def bf16(self) -> list[torch.Tensor]:
        """R tensors [N, K] bfloat16: the dequantized weights."""
        return [_dequantize(q, s.t(), torch.bfloat16) for q, s in zip(self.int8, self.scale, strict=True)]

    @cached_property
    def fp32(self) -> list[torch.Tensor]:
        """R tensors [N, K] float32: the dequantized weights."""
        return [_dequantize(q, s.t(), torch.float32) for q, s in zip(self.int8, self.scale, strict=True)]

    @cached_property
    def fp8(self) -> list[torch.Tensor]:
        """R tensors [N, K] float8_e4m3fn, to be used with `fp8_scale`."""
        return [_to_fp8(q) for q in self.int8]

    @cached_property
    def fp8_scale(self) -> list[torch.Tensor]:
        """R tensors [1, N] float32."""
        return [s / FP8_STRETCH for s in self.scale]


class Inputs(RotatedOutputs):
    """Everything one case needs: activations, the layer's weights, and the outputs that implementations share.

    a: int8 [M, K]; a_scale: float32 [M, 1]; b(i): int8 [K, N], a view of weight set i with K contiguous;
    b_scale(i): float32 [1, N]; out(i): bfloat16 [M, N].
    The activations are one set: a layer's input was written by the layer before it and is in the cache.
    """

    def __init__(self, case: Case, weights: WeightSets, generator: torch.Generator):
        super().__init__(case, weights, OUT_DTYPE)
        self.a = _random_int8(case.M, case.K, weights.data, self.device, generator)
        self.a_scale = _random_scale((case.M, 1), INT8_STD[weights.data], self.device, generator)

    def b(self, i: int) -> torch.Tensor:
        return self.weights.int8[i].t()

    def b_scale(self, i: int) -> torch.Tensor:
        return self.weights.scale[i]

    @cached_property
    def a_bf16(self) -> torch.Tensor:
        return _dequantize(self.a, self.a_scale, torch.bfloat16)

    @cached_property
    def a_fp32(self) -> torch.Tensor:
        return _dequantize(self.a, self.a_scale, torch.float32)

    @cached_property
    def a_fp8(self) -> torch.Tensor:
        return _to_fp8(self.a)

    @cached_property
    def a_fp8_scale(self) -> torch.Tensor:
        return self.a_scale / FP8_STRETCH


def epilogue(accumulator: torch.Tensor, inputs: Inputs, i: int) -> torch.Tensor:
    """int32 [M, N] -> bfloat16 [M, N]: cast((f32(acc) * b_scale) * a_scale), the formula of docs/design/numerics.md without a bias."""
    return accumulator.to(torch.float32).mul_(inputs.b_scale(i)).mul_(inputs.a_scale).to(OUT_DTYPE)


def _random_int8(rows: int, columns: int, data: str, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    if data == GAUSS:
        return torch.randn(rows, columns, device=device, generator=generator).mul_(INT8_STD[GAUSS]).round_().clamp_(-128, 127).to(torch.int8)
    return torch.randint(-128, 128, (rows, columns), dtype=torch.int8, device=device, generator=generator)


def _random_scale(shape: tuple[int, int], divisor: float, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    return (torch.rand(shape, device=device, generator=generator) + 0.5) / divisor


def _dequantize(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return q.to(dtype).mul_(scale.to(dtype))


def _to_fp8(q: torch.Tensor) -> torch.Tensor:
    return q.to(torch.bfloat16).mul_(FP8_STRETCH).to(torch.float8_e4m3fn)
