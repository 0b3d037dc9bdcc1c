"""The CPU's block product: rows of the weight are decoded to float32 where they stay in the caches, and multiplied there.

Nothing of the size M * N * K / 32 exists, and the weight is never whole in float32: at small N, where a product reads the weight and
little else, that saves most of the time of "dequantize, then multiply".
"""

from __future__ import annotations

import torch

from scaled_mm.gguf.layout import Parts
from scaled_mm.gguf_formats import BLOCK, BlockFormat

# Values of the weight that are decoded at a time: 4 MiB of float32. More pays off with many tokens only, for a product packs all of them
# again for each chunk, but at most 64 MiB.
_CHUNK_ELEMENTS = 1 << 20
_CHUNK_MAX_ELEMENTS = 16 << 20
_CHUNK_ROWS_OF_MANY_TOKENS = 1024
# A product's float32 sums are over this many k at a time: in one sum over all of K the roundings add up (docs/design/gguf-formats.md).
_CHUNK_K = 2048


def multiply(out: torch.Tensor, weight: Parts, description: BlockFormat, x: torch.Tensor, excess: torch.Tensor | None = None) -> None:
    """Writes out[m,n] = sum over k of w[m,k] * x[n,k] + sum over blocks of c[m,kb] * excess[n,kb], in float32.

    out: float32 [M, N], row-major or the transpose of that. weight: the parts of [M, K/32] blocks, w their values. x: float32 [N, K],
    contiguous. excess: float32 [N, K/32], how much a block's stored sum is above the sum of its x, or None; c: what the
    formulas of docs/design/gguf-formats.md multiply the sum with, m or -zero * d.
    """
    m, n = out.shape
    k = x.shape[1]
    if m == 0 or n == 0 or k == 0:
        out.zero_()
        return
    columns = [_in_the_order_of_decoded_rows(x[:, left : left + _CHUNK_K], description).t() for left in range(0, k, _CHUNK_K)]
    deepest = min(k, _CHUNK_K)
    rows = max(_CHUNK_ELEMENTS // deepest, min(n, _CHUNK_ROWS_OF_MANY_TOKENS))
    rows = min(m, rows, max(1, _CHUNK_MAX_ELEMENTS // deepest))
    decoder = _Decoder(rows, deepest // BLOCK, description)
    for top in range(0, m, rows):
        part = weight.slice(slice(top, top + rows))
        target = out[top : top + rows]
        d = part.d.to(torch.float32)
        second = part.second.to(torch.float32) if description.second == "m" else None
        for i, operand in enumerate(columns):
            blocks = slice(i * _CHUNK_K // BLOCK, (i + 1) * _CHUNK_K // BLOCK)
            decoded = decoder.decode(part.slice(slice(None), blocks), d[:, blocks], None if second is None else second[:, blocks])
            if i == 0:
                torch.mm(decoded, operand, out=target)
            else:
                target.addmm_(decoded, operand)
        if excess is not None and (description.zero or second is not None):
            target.addmm_(d * -description.zero if second is None else second, excess.t())


def _in_the_order_of_decoded_rows(x: torch.Tensor, description: BlockFormat) -> torch.Tensor:
    """x, of nibbles with the elements of low nibbles first: a row of low nibbles is then decoded by one long loop, one of high ones too."""
    if description.signed:
        return x.clone(memory_format=torch.contiguous_format)  # a view of one row would keep a stride that takes torch to a slow path
    return x.unflatten(1, (-1, 2, BLOCK // 2)).transpose(1, 2).reshape(x.shape)


class _Decoder:
    """Decodes up to `rows` rows of blocks into the same memory each time."""

    def __init__(self, rows: int, blocks: int, description: BlockFormat):
        self.description = description
        halves = (1, BLOCK) if description.signed else (2, BLOCK // 2)
        self.value = torch.empty((rows, halves[0], blocks, halves[1]), dtype=torch.float32, device="cpu")
        self.levels = self.bytes = None
        if not description.signed:
            self.levels = torch.empty(self.value.shape, dtype=torch.uint8, device="cpu")
            self.bytes = torch.empty((rows, blocks, BLOCK // 2), dtype=torch.uint8, device="cpu")

    def decode(self, part: Parts, d: torch.Tensor, second: torch.Tensor | None) -> torch.Tensor:
        """float32 [rows, K] in the order of `_in_the_order_of_decoded_rows`; overwritten by the next call."""
        rows, blocks = d.shape
        value = _front(self.value, rows, blocks)
        if self.levels is None:
            value.copy_(part.levels.unsqueeze(1))
        else:
            levels = _front(self.levels, rows, blocks)
            nibbles = part.levels
            if blocks > 1 and nibbles.stride(1) != BLOCK // 2:
                # Bytes that lie between scales are gathered first: torch's loops are as long as what is contiguous.
                nibbles = self.bytes.view(-1)[: nibbles.numel()].view(nibbles.shape).copy_(nibbles)
            torch.bitwise_and(nibbles, 15, out=levels[:, 0])
            torch.bitwise_right_shift(nibbles, 4, out=levels[:, 1])
            if part.high is not None:
                levels.bitwise_or_(_fifth_bits(part.high))
            if self.description.zero:
                levels.sub_(self.description.zero)  # modulo 256, hence right as a signed byte
                levels = levels.view(torch.int8)
            value.copy_(levels)
        value.mul_(d[:, None, :, None])  # exact: 11 bits times at most 8
        if second is not None:
            value.add_(second[:, None, :, None])
        return value.view(rows, -1)


def _front(buffer: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """The beginning of a buffer [rows, halves, blocks, bytes], as a contiguous one of fewer rows and blocks."""
    halves, size = buffer.shape[1], buffer.shape[3]
    return buffer.view(-1)[: rows * halves * blocks * size].view(rows, halves, blocks, size)


def _fifth_bits(high: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, 2, K/32, 16], 16 or 0, of uint8 [rows, K/32, 4]: those of elements 0 to 15, then of 16 to 31. Looked up by eights."""
    halves = high.clone(memory_format=torch.contiguous_format).view(torch.int16).transpose(1, 2)
    high = halves.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    words = torch.tensor(_WORDS_OF_BITS, dtype=torch.int64, device="cpu").index_select(0, high.view(-1).to(torch.int32))
    return words.view(torch.uint8).view(*high.shape[:2], -1, BLOCK // 2)


# Byte i of word b is 16 times bit i of b. Not a tensor: one that a first call makes under a mode of torch, as of fake tensors, stays of it.
_WORDS_OF_BITS = tuple(sum(16 * (b >> i & 1) << 8 * i for i in range(8)) for b in range(256))
