"""The CPU backend of grouped products: `gemm` for each expert."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from scaled_mm.cpu import gemm as cpu_gemm


@torch.no_grad()
def grouped_gemm(
    out, a, b, a_scale, b_scale, bias, expert_offsets, a_zero_point=None, b_zero_point=None, a_row_sums=None, b_column_sums=None
) -> None:
    """Writes the product of each expert's rows of a [tokens, K] with b[e] into out [tokens, N], and zeros into rows past the last expert.

    Operands as documented in `grouped_scaled_mm`. The core has validated all of them except the values of expert_offsets, which are
    clamped here. bias: [E, N] or None.
    """
    tokens, (experts, _, columns) = a.shape[0], b.shape
    a_scale, a_zero_point, a_row_sums = (_of_rows(t, tokens) for t in (a_scale, a_zero_point, a_row_sums))
    b_column_sums = None if b_column_sums is None else b_column_sums.reshape(experts, columns)
    b_scale, b_zero_point = map(_of_experts, (b_scale, b_zero_point))
    end = 0
    for expert, begin, end in expert_rows(expert_offsets, tokens):
        rows = slice(begin, end)
        cpu_gemm.gemm(
            out[rows],
            a[rows],
            b[expert],
            _part(a_scale, rows),
            _part(b_scale, expert),
            None if bias is None else bias[expert],
            _part(a_zero_point, rows),
            _part(b_zero_point, expert),
            _part(a_row_sums, rows),
            None if b_column_sums is None else b_column_sums[expert],
        )
    out[end:].zero_()


def _of_rows(values: torch.Tensor | None, tokens: int) -> torch.Tensor | None:
    return values if values is None or values.numel() == 1 else values.reshape(tokens)


def _of_experts(values: torch.Tensor | None) -> torch.Tensor | None:
    """[E, N] or [E, 1]; one value as it is."""
    if values is None or values.numel() == 1:
        return values
    return values.flatten(1) if values.dim() > 1 else values.unsqueeze(1)


def _part(values: torch.Tensor | None, index: slice | int) -> torch.Tensor | None:
    return values if values is None or values.numel() == 1 else values[index]


def expert_rows(expert_offsets: torch.Tensor, tokens: int) -> Iterator[tuple[int, int, int]]:
    """(expert, its first row, one past its last row) of the experts with rows, offsets clamped as documented in `grouped_scaled_mm`."""
    begin = 0
    for expert, offset in enumerate(expert_offsets.tolist()):
        end = max(begin, min(offset, tokens))
        if end > begin:
            yield expert, begin, end
        begin = end
