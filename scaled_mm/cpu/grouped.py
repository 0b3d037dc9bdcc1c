"""The CPU backend of grouped products: `gemm` for each expert."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from scaled_mm.cpu import gemm as cpu_gemm


@torch.no_grad()
def grouped_gemm(out, a, b, a_scale, b_scale, bias, expert_offsets) -> None:
    """Writes the product of each expert's rows of a [tokens, K] with b[e] into out [tokens, N], and zeros into rows past the last expert.

    Operands as documented in `grouped_scaled_mm`. The core has validated all of them except the values of expert_offsets, which are
    clamped here. bias: [E, N] or None.
    """
    tokens = a.shape[0]
    if a_scale is not None and a_scale.numel() != 1:
        a_scale = a_scale.reshape(tokens)
    if b_scale is not None and b_scale.numel() != 1:
        b_scale = b_scale.flatten(1) if b_scale.dim() > 1 else b_scale.unsqueeze(1)
    end = 0
    for expert, begin, end in expert_rows(expert_offsets, tokens):
        rows = slice(begin, end)
        cpu_gemm.gemm(
            out[rows],
            a[rows],
            b[expert],
            a_scale if a_scale is None or a_scale.numel() == 1 else a_scale[rows],
            b_scale if b_scale is None or b_scale.numel() == 1 else b_scale[expert],
            None if bias is None else bias[expert],
            None,
            None,
        )
    out[end:].zero_()


def expert_rows(expert_offsets: torch.Tensor, tokens: int) -> Iterator[tuple[int, int, int]]:
    """(expert, its first row, one past its last row) of the experts with rows, offsets clamped as documented in `grouped_scaled_mm`."""
    begin = 0
    for expert, offset in enumerate(expert_offsets.tolist()):
        end = max(begin, min(offset, tokens))
        if end > begin:
            yield expert, begin, end
        begin = end
