"""The CPU backend of block-scaled products: the integer product of `cpu_product` for each block of K, promoted to float32 in order."""

from __future__ import annotations

import torch

from scaled_mm.cpu import integer_product

BLOCK = 128

# Elements of a chunk of out; the accumulators, their scales and the float32 sums of a chunk exist at the same time: 24 MiB.
_CHUNK_ELEMENTS = 2 << 20


@torch.no_grad()
def gemm(out, a, b, a_scale, b_scale, bias) -> None:
    """Writes the product that `block_scaled_mm` documents. The core has validated everything; nothing is checked again.

    A torch call for each float32 operation, so that nothing can contract them.
    """
    m, n = out.shape
    if m == 0 or n == 0:
        return
    bias = None if bias is None else bias.reshape(1, n).float()
    # b_scale of each column: [ceil(K/128), N].
    column_scale = b_scale.repeat_interleave(BLOCK, dim=1)[:, :n] if b_scale.numel() else b_scale
    rows = max(1, _CHUNK_ELEMENTS // n)
    for top in range(0, m, rows):
        chunk = slice(top, min(top + rows, m))
        target = out[chunk]
        total = _product(a[chunk], b, a_scale[chunk], column_scale)
        if bias is not None:
            total.add_(bias)
        target.copy_(total)


def _product(a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, column_scale: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((a.shape[0], b.shape[1]), dtype=torch.float32, device="cpu")
    value, scale = torch.empty_like(total), torch.empty_like(total)
    for block in range(a_scale.shape[1]):
        k = slice(block * BLOCK, (block + 1) * BLOCK)
        value.copy_(integer_product.accumulate(a[:, k], b[k]))  # below 2^24, hence exact
        torch.mul(a_scale[:, block, None], column_scale[block], out=scale)
        total.add_(value.mul_(scale))
    return total
