"""The CPU's products with GGUF formats for operators and descriptors: all activation types, modes, bias and cast."""

from __future__ import annotations

import torch

from scaled_mm.gguf import layout, product
from scaled_mm.gguf.quantize import quantize_block
from scaled_mm.gguf_formats import BlockFormat, lookup

FLOAT_ACTIVATIONS = (torch.float16, torch.bfloat16)
"""Activation dtypes that a product takes without quantizing."""


def activation_of(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, excess) for `product.multiply`, from q8_1 activations uint8 [M, K/32, 36].

    x = d * q is exact (11 bits times 7), and so is d * sum(q) (11 bits times 12). excess = s - d * sum(q) rounds once.
    """
    d, s, _, levels = layout.take_apart(q, lookup("q8_1"))
    d, levels = d.to(torch.float32).unsqueeze(-1), levels.to(torch.float32)
    excess = s.to(torch.float32) - levels.sum(-1) * d.squeeze(-1)
    return levels.mul_(d).flatten(-2), excess


def _operands(activation: torch.Tensor, mode: str) -> tuple[torch.Tensor, ...]:
    """The arguments after the description for `product.multiply`. Only w4a8 quantizes floats. w16a16 rounds nothing here."""
    if activation.dtype is torch.uint8:
        return activation_of(activation)
    if activation.shape[1] and mode == "w4a8":
        return activation_of(quantize_block(activation, "q8_1"))
    return (activation.to(torch.float32, memory_format=torch.contiguous_format),)


@torch.no_grad()
def gemm(
    weight: layout.Parts,
    description: BlockFormat,
    activation: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    mode: str,
    transposed_out: bool,
) -> torch.Tensor:
    """W A^T + bias as [N, M], or its transpose [M, N], contiguous; N rows, M tokens. The caller has checked all arguments.

    weight: the fields of [N, K/32] blocks. activation: q8_1 blocks uint8 [M, K/32, 36], or floats [M, K]. bias: [N] or None.
    """
    n, m = weight.d.shape[0], activation.shape[0]
    total = torch.empty((m, n) if transposed_out else (n, m), dtype=torch.float32, device="cpu")
    product.multiply(total.t() if transposed_out else total, weight, description, *_operands(activation, mode))
    if bias is not None:
        total.add_(bias if transposed_out else bias.unsqueeze(1))
    return total.to(out_dtype)
