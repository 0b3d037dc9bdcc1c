"""The CPU backend of grouped block-scaled products: the block-scaled product of each expert."""

from __future__ import annotations

import torch

from scaled_mm.cpu import block_scaled
from scaled_mm.cpu.grouped import expert_rows


@torch.no_grad()
def grouped_gemm(out, a, b, a_scale, b_scale, bias, expert_offsets) -> None:
    """Writes the product of each expert's rows of a [tokens, K] with b[e] into out [tokens, N], and zeros into rows past the last expert.

    Operands as documented in `grouped_block_scaled_mm`. The core has validated all of them except the values of expert_offsets.
    """
    end = 0
    for expert, begin, end in expert_rows(expert_offsets, a.shape[0]):
        rows = slice(begin, end)
        block_scaled.gemm(out[rows], a[rows], b[expert], a_scale[rows], b_scale[expert], None if bias is None else bias[expert])
    out[end:].zero_()
