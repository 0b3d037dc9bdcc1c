"""Random inputs, made on the device: weights shared by all implementations and M of a layer, activations per case.

Never zeros: they hide unwritten outputs and run faster than real data. The 16-bit and FP8 copies that other libraries
need hold the same matrix, dequantized or requantized, so that every implementation computes the same product and its
result can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import torch

from scaled_mm.measure import timing
from scaled_mm.measure.shapes import Case

OUT_DTYPE = torch.bfloat16

# int8 -128 .. 127 fills float8_e4m3fn's -448 .. 448 exactly at this factor.
FP8_STRETCH = 3.5
# Standard deviation of uniform int8: scales divide by it so that the product has entries near one.
INT8_STD = 73.9

# The weights of one layer in every format (int8 1 byte, fp8 1, bfloat16 2) stay below this on a GPU.
DEVICE_LIMIT_BYTES = 8 << 30
CPU_LIMIT_BYTES = 2 << 30
FORMAT_BYTES = 4


class WeightSets:
    """R random weights of one layer.

    int8: R tensors [N, K] int8, K contiguous; b of the product is `.t()`. scale: R tensors [1, N] float32.
    The other formats are made when first asked for and then kept.
    """

    def __init__(self, N: int, K: int, device: torch.device, generator: torch.Generator, sets: int | None = None):
        self.N, self.K, self.device = N, K, device
        cache = timing.last_level_cache_bytes(device)
        self.sets = sets or timing.rotation(N * K, cache, limit_bytes(device) // FORMAT_BYTES)
        self.cold = timing.is_cold(N * K, self.sets, cache)
        self.int8 = [_random_int8(N, K, device, generator) for _ in range(self.sets)]
        self.scale = [_random_scale((1, N), INT8_STD * math.sqrt(K), device, generator) for _ in range(self.sets)]

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


class RotatedOutputs:
    """The outputs of a case, [M, N], that implementations share, and the calls that fill them.

    Outputs rotate as the weights do, but no further than the cache asks for; weight set 0 has an output of its own, so
    that after any number of rotated calls it still shows set 0's product. `weights` has `sets`, `cold` and `device`.
    """

    def __init__(self, case: Case, weights, dtype: torch.dtype):
        self.case, self.weights, self.device = case, weights, weights.device
        cache = timing.last_level_cache_bytes(self.device)
        self.slots = output_slots(weights.sets, case.M * case.N * dtype.itemsize, cache)
        self.outs = self.make_outputs(case.M, dtype)

    def make_outputs(self, rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """One [rows, N] tensor per output slot, for an implementation whose output differs from the shared ones."""
        return [torch.empty(rows, self.case.N, dtype=dtype, device=self.device) for _ in range(self.slots)]

    def slot(self, i: int) -> int:
        """The output slot of weight set i: slot 0 is set 0's alone."""
        return 0 if i == 0 or self.slots == 1 else 1 + (i - 1) % (self.slots - 1)

    def out(self, i: int) -> torch.Tensor:
        return self.outs[self.slot(i)]

    def poison(self) -> None:
        """NaN into every shared output: what an implementation leaves unwritten then shows."""
        for out in self.outs:
            out.fill_(math.nan)

    def calls(self, make: Callable[[int], Callable[[], torch.Tensor]]) -> list[Callable[[], torch.Tensor]]:
        """`make(i)` for every weight set i."""
        return [make(i) for i in range(self.weights.sets)]

    def keeping(self, function: Callable[[int], torch.Tensor]) -> list[Callable[[], torch.Tensor]]:
        """Calls of a function that allocates its result: each result is held until its output slot comes round again.

        Without this the allocator would hand every call the same, cached, output, which the others do not get.
        """
        held: list[torch.Tensor | None] = [None] * self.slots

        def make(i: int) -> Callable[[], torch.Tensor]:
            slot = self.slot(i)

            def call() -> torch.Tensor:
                result = function(i)
                held[slot] = result
                return result

            return call

        return self.calls(make)


class Inputs(RotatedOutputs):
    """Everything one case needs: activations, the layer's weights, and the outputs that implementations share.

    a: int8 [M, K]; a_scale: float32 [M, 1]; b(i): int8 [K, N], a view of weight set i with K contiguous;
    b_scale(i): float32 [1, N]; out(i): bfloat16 [M, N].
    The activations are one set: a layer's input was written by the layer before it and is in the cache.
    """

    def __init__(self, case: Case, weights: WeightSets, generator: torch.Generator):
        super().__init__(case, weights, OUT_DTYPE)
        self.a = _random_int8(case.M, case.K, self.device, generator)
        self.a_scale = _random_scale((case.M, 1), INT8_STD, self.device, generator)

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


def output_slots(sets: int, bytes_each: int, cache_bytes: int) -> int:
    """How many outputs to rotate over `sets` weights: beyond three caches, at least two where there are two weights."""
    return min(sets, max(2, math.ceil(timing.CACHE_MULTIPLE * cache_bytes / bytes_each)))


def limit_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_LIMIT_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return min(DEVICE_LIMIT_BYTES, free // 3)


def _random_int8(rows: int, columns: int, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-128, 128, (rows, columns), dtype=torch.int8, device=device, generator=generator)


def _random_scale(shape: tuple[int, int], divisor: float, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    return (torch.rand(shape, device=device, generator=generator) + 0.5) / divisor


def _dequantize(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return q.to(dtype).mul_(scale.to(dtype))


def _to_fp8(q: torch.Tensor) -> torch.Tensor:
    return q.to(torch.bfloat16).mul_(FP8_STRETCH).to(torch.float8_e4m3fn)
