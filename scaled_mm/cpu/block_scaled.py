"""The CPU backend of block-scaled products: the exact product of `integer_product` for each block of K, added in float32 in order of K."""

from __future__ import annotations

import torch

from scaled_mm.cpu import integer_product

# Elements of a chunk of out. The accumulators, scales and float32 sums of a chunk take 24 MiB together.
_CHUNK_ELEMENTS = 2 << 20


@torch.no_grad()
def gemm(out, a, b, a_scale, b_scale, bias) -> None:
    """Writes the product documented in `block_scaled_mm`. The core has validated all arguments.

    Each float32 operation is a separate torch call, so that none can be contracted.
    """
    m, n = out.shape
    if m == 0 or n == 0:
        return
    bias = None if bias is None else bias.reshape(1, n).float()
    block_size = _block_size(a.shape[1], n, a_scale, b_scale)
    # b_scale of each column: [blocks of K, N].
    column_scale = b_scale.repeat_interleave(block_size, dim=1)[:, :n] if b_scale.numel() else b_scale
    rows = max(1, _CHUNK_ELEMENTS // n)
    for top in range(0, m, rows):
        chunk = slice(top, min(top + rows, m))
        target = out[chunk]
        total = _product(a[chunk], b, a_scale[chunk], column_scale, block_size)
        if bias is not None:
            total.add_(bias)
        target.copy_(total)


def _block_size(k: int, n: int, a_scale: torch.Tensor, b_scale: torch.Tensor) -> int:
    """The elements of a block along K and along N, which the numbers of scales tell: 128 or 64."""
    return 128 if (a_scale.shape[1], b_scale.shape[1]) == (-(-k // 128), -(-n // 128)) else 64


def _product(a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, column_scale: torch.Tensor, block_size: int) -> torch.Tensor:
    total = torch.zeros((a.shape[0], b.shape[1]), dtype=torch.float32, device="cpu")
    value, scale = torch.empty_like(total), torch.empty_like(total)
    for block in range(a_scale.shape[1]):
        k = slice(block * block_size, (block + 1) * block_size)
        value.copy_(integer_product.accumulate(a[:, k], b[k]))  # below 2^24, hence exact
        torch.mul(a_scale[:, block, None], column_scale[block], out=scale)
        total.add_(value.mul_(scale))
    return total
