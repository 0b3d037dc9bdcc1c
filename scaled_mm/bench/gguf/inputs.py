"""Weights of a GGUF format, rotated, and activations of the four kinds that products take."""

from __future__ import annotations

import math
from functools import cached_property

import torch

from scaled_mm.bench.gguf.cases import GgufCase
from scaled_mm.gguf import PackedBlockWeight, dequantize_block, pack_block_weight, quantize_block
from scaled_mm.gguf_formats import BLOCK, lookup
from scaled_mm.measure.rotation import RotatedOutputs, RotatedWeights, memory_limit

#: The dtype of outputs for float32 and q8_1 activations, as llama.cpp's products have it.
OUT_DTYPE = torch.float32


def weight_bytes(case: GgufCase) -> int:
    """Of the weight, each block read once."""
    return case.N * case.K // BLOCK * lookup(case.fmt).block_bytes


class GgufWeights(RotatedWeights):
    """R weights [N, K] of normal values in one format, by the rule "ggml".

    blocks(i): uint8 [N, K/32, bytes of a block]. packed: what `pack_block_weight` makes of each. Set i has the rows of
    set 0 in another order, in memory of its own. dequantized and bfloat16: [N, K] each, made when first asked for.
    """

    def __init__(self, case: GgufCase, device: torch.device, generator: torch.Generator, sets: int | None = None):
        each = weight_bytes(case)
        held = each if device.type == "cuda" else 2 * each + 4 * case.N * case.K  # packed, the blocks, dequantized
        super().__init__(each, memory_limit(device) * each // held, device, sets)
        self.fmt = case.fmt
        values = torch.randn(case.N, case.K, device=device, generator=generator)
        self.first = quantize_block(values, case.fmt, "ggml")
        del values
        self.packed: list[PackedBlockWeight] = [pack_block_weight(self._turned(i), case.fmt) for i in range(self.sets)]

    def _turned(self, i: int) -> torch.Tensor:
        return self.first if i == 0 else self.first.roll(i, 0)

    @cached_property
    def blocks(self) -> list[torch.Tensor]:
        return [self._turned(i) for i in range(self.sets)]

    @cached_property
    def dequantized(self) -> list[torch.Tensor]:
        return [dequantize_block(q, self.fmt) for q in self.blocks]

    @cached_property
    def bfloat16(self) -> list[torch.Tensor]:
        return [dequantize_block(self._turned(i), self.fmt, torch.bfloat16) for i in range(self.sets)]


class GgufInputs(RotatedOutputs):
    """A case's activations, [M, K]: the same normal values as float16, bfloat16 and float32, and the latter as q8_1.

    out(i, dtype): [M, N], float32 without a dtype.
    """

    def __init__(self, case: GgufCase, weights: GgufWeights, generator: torch.Generator):
        super().__init__(case, weights, OUT_DTYPE)
        self.float32 = torch.randn(case.M, case.K, device=self.device, generator=generator)
        self.float16 = self.float32.half()
        self._outs = {OUT_DTYPE: self.outs}

    @cached_property
    def bfloat16(self) -> torch.Tensor:
        return self.float32.bfloat16()

    @cached_property
    def q8_1(self) -> torch.Tensor:
        """uint8 [M, K/32, 36]"""
        return quantize_block(self.float32, "q8_1")

    def out(self, i: int, dtype: torch.dtype = OUT_DTYPE) -> torch.Tensor:
        if dtype not in self._outs:
            self._outs[dtype] = self.make_outputs(self.case.M, dtype)
        return self._outs[dtype][self.slot(i)]

    def poison(self) -> None:
        for outs in self._outs.values():
            for out in outs:
                out.fill_(math.nan)
