"""The CPU's product with a GGUF format: decodes some rows of the weight to float32 and multiplies them while they are in the caches.

There is no temporary of size M * N * K / 32, and no float32 copy of the whole weight. With few tokens, where reading the weight dominates,
this saves most of the time of "dequantize, then multiply".
"""

from __future__ import annotations

import torch

from scaled_mm.gguf.layout import Parts
from scaled_mm.gguf_formats import BLOCK, BlockFormat

# Values of the weight decoded at a time: 4 MiB of float32. With many tokens up to 64 MiB, because BLAS packs all tokens again for each
# chunk.
_CHUNK_ELEMENTS = 1 << 20
_CHUNK_MAX_ELEMENTS = 16 << 20
_CHUNK_ROWS_OF_MANY_TOKENS = 1024
# Elements of K per float32 sum: in one sum over all of K the rounding errors add up (docs/design/gguf-formats.md).
_CHUNK_K = 2048


def multiply(out: torch.Tensor, weight: Parts, description: BlockFormat, x: torch.Tensor, excess: torch.Tensor | None = None) -> None:
    """Writes out[n,m] = sum over k of w[n,k] * x[m,k] + sum over blocks of c[n,kb] * excess[m,kb], in float32, for N rows and M tokens.

    out: float32 [N, M], row-major or its transpose. weight: the parts of [N, K/32] blocks; w are their values. x: float32 [M, K],
    contiguous. excess: float32 [M, K/32], the stored sum of a block minus the sum of its x, or None. c: the factor of the sum in the
    formulas of docs/design/gguf-formats.md, m or -zero * d.
    """
    n, m = out.shape
    k = x.shape[1]
    if m == 0 or n == 0 or k == 0:
        out.zero_()
        return
    columns = [_in_the_order_of_decoded_rows(x[:, left : left + _CHUNK_K], description).t() for left in range(0, k, _CHUNK_K)]
    deepest = min(k, _CHUNK_K)
    rows = max(_CHUNK_ELEMENTS // deepest, min(m, _CHUNK_ROWS_OF_MANY_TOKENS))
    rows = min(n, rows, max(1, _CHUNK_MAX_ELEMENTS // deepest))
    decoder = _Decoder(rows, deepest // BLOCK, description)
    for top in range(0, n, rows):
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
    """Reorders x so that the elements of low nibbles come first. Then one long loop decodes all low nibbles of a row, and one all high ones."""
    if description.signed:
        return x.clone(memory_format=torch.contiguous_format)  # a view of one row would keep a stride that is slow in torch
    return x.unflatten(1, (-1, 2, BLOCK // 2)).transpose(1, 2).reshape(x.shape)


class _Decoder:
    """Decodes up to `rows` rows of blocks, into the same memory each time."""

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
                # Nibbles interleaved with scales are gathered first, because torch's loops only cover contiguous memory.
                nibbles = self.bytes.view(-1)[: nibbles.numel()].view(nibbles.shape).copy_(nibbles)
            torch.bitwise_and(nibbles, 15, out=levels[:, 0])
            torch.bitwise_right_shift(nibbles, 4, out=levels[:, 1])
            if part.high is not None:
                levels.bitwise_or_(_fifth_bits(part.high))
            if self.description.zero:
                levels.sub_(self.description.zero)  # modulo 256, hence correct as a signed byte
                levels = levels.view(torch.int8)
            value.copy_(levels)
        value.mul_(d[:, None, :, None])  # exact: 11 bits times at most 8
        if second is not None:
            value.add_(second[:, None, :, None])
        return value.view(rows, -1)


def _front(buffer: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """The start of a buffer [rows, halves, blocks, bytes], viewed as a contiguous buffer of fewer rows and blocks."""
    halves, size = buffer.shape[1], buffer.shape[3]
    return buffer.view(-1)[: rows * halves * blocks * size].view(rows, halves, blocks, size)


def _fifth_bits(high: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, 2, K/32, 16], 16 or 0, from uint8 [rows, K/32, 4]: elements 0 to 15, then 16 to 31. Looks up eight bits at a time."""
    halves = high.clone(memory_format=torch.contiguous_format).view(torch.int16).transpose(1, 2)
    high = halves.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    words = torch.tensor(_WORDS_OF_BITS, dtype=torch.int64, device="cpu").index_select(0, high.view(-1).to(torch.int32))
    return words.view(torch.uint8).view(*high.shape[:2], -1, BLOCK // 2)


# Byte i of word b is 16 times bit i of b. Not a tensor: a tensor created under a torch mode, such as fake tensors, would keep that mode.
_WORDS_OF_BITS = tuple(sum(16 * (b >> i & 1) << 8 * i for i in range(8)) for b in range(256))
