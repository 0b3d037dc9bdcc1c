"""Operands of grouped block-scaled products."""

from __future__ import annotations

import dataclasses

import torch

import scaled_mm as sm
from scaled_mm import reference

from .block_scaled_cases import _floats, _to
from .grouped_cases import random_offsets

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LAYOUTS = ("columns", "apart", "rows")  # of b: a weight's transpose; the same with a gap between the experts; contiguous


@dataclasses.dataclass(frozen=True)
class ExpertsCase:
    """One product; `make` turns it into tensors, the same ones each time.

    pad: rows of a and of the weights begin on multiples of this many bytes, and rows of out on multiples of 16. offsets: of `random_offsets`.
    scales: "rows" are contiguous, "columns" a checkpoint's transposed weight_scale_inv and out_scale, "spread" have gaps.
    """

    tokens: int
    experts: int
    k: int
    n: int
    out_dtype: torch.dtype = torch.bfloat16
    offsets: str = "random"
    b_layout: str = "columns"
    pad: int = 0
    values: str = "full"
    scale_values: str = "positive"
    scales: str = "rows"
    bias: str | None = None
    seed: int = 0
    block_size: int = 128

    def make(self, device: str | torch.device = "cpu") -> dict[str, torch.Tensor | None]:
        generator = torch.Generator().manual_seed(self.seed)
        rows_k = -(-max(self.k, 1) // max(self.pad, 1)) * max(self.pad, 1)
        a = self._integers(generator, self.tokens, rows_k)[:, : self.k]
        weight = self._integers(generator, self.experts, self.n + (self.b_layout == "apart"), rows_k)[:, : self.n, : self.k]
        b = weight.transpose(1, 2)
        blocks_k, blocks_n = -(-self.k // self.block_size), -(-self.n // self.block_size)
        bias = None
        if self.bias is not None:
            bias = _floats((self.experts, self.n), "signed", generator).to(self.out_dtype if self.bias == "out" else torch.float32)
        host = {
            "a": a,
            "b": b.contiguous() if self.b_layout == "rows" else b,
            "a_scale": self._scales(generator, self.tokens, blocks_k),
            "b_scale": self._scales(generator, self.experts, blocks_k, blocks_n),
            "bias": bias,
            "expert_offsets": random_offsets(self.tokens, self.experts, generator, self.offsets),
        }
        return {name: None if t is None else _to(t, device) for name, t in host.items()}

    def poisoned(self, device: str | torch.device = "cpu") -> torch.Tensor:
        """An output [tokens, n] of NaN; with pad, in longer rows."""
        columns = -(-self.n // 8) * 8 + 8 if self.pad else self.n
        return torch.full((self.tokens, columns), float("nan"), dtype=self.out_dtype, device=device)[:, : self.n]

    def check(self, out: torch.Tensor, inputs: dict[str, torch.Tensor | None], what: str = "") -> None:
        """out is what the reference says, computed on the CPU."""
        on_cpu = {name: None if t is None else t.cpu() for name, t in inputs.items()}
        expected = reference.grouped_block_scaled_mm(**on_cpu, out_dtype=self.out_dtype)
        assert reference.same_bits(out.cpu(), expected), f"{what} {self!r}: {reference.describe_difference(out.cpu(), expected)}"

    def _integers(self, generator: torch.Generator, *shape: int) -> torch.Tensor:
        if self.values == "minimum":
            return torch.full(shape, -128, dtype=torch.int8)
        if self.values == "extremes":
            return torch.where(torch.rand(shape, generator=generator) < 0.5, -128, 127).to(torch.int8)
        return torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)

    def _scales(self, generator: torch.Generator, *shape: int) -> torch.Tensor:
        data = _floats(shape, self.scale_values, generator)
        if self.scales == "columns":
            return data.transpose(-1, -2).contiguous().transpose(-1, -2)
        return torch.stack((data, data + 1), -1)[..., 0] if self.scales == "spread" else data


def loop(case: ExpertsCase, inputs: dict[str, torch.Tensor | None]) -> torch.Tensor:
    """The product as a loop of `block_scaled_mm` over the experts, with the clamping that the documentation gives."""
    out, begin = torch.zeros(case.tokens, case.n, dtype=case.out_dtype, device=inputs["a"].device), 0
    for expert, offset in enumerate(inputs["expert_offsets"].tolist()):
        end = max(begin, min(offset, case.tokens))
        rows = slice(begin, end)
        if end > begin:
            bias = None if inputs["bias"] is None else inputs["bias"][expert]
            operands = (inputs["a"][rows], inputs["b"][expert], inputs["a_scale"][rows], inputs["b_scale"][expert], bias)
            out[rows] = sm.block_scaled_mm(*operands, out_dtype=case.out_dtype)
        begin = end
    return out
