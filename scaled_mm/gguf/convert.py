"""`convert_k_quant`: K-quants in a format that products read."""

from __future__ import annotations

import torch

from scaled_mm.gguf import k_quants, layout
from scaled_mm.gguf.gguf_file import QuantizedTensor


@torch.no_grad()
def convert_k_quant(q: torch.Tensor, fmt: str) -> QuantizedTensor:
    """Converts a K-quant to a format that products read: "q4_k" to q4_1 and "q5_k" to q5_1, uint8 [..., K/256, bytes] to [..., K/32, bytes].

        d' = float16(d * scale)          m' = float16(-(dmin * minimum))          levels unchanged

    for each 32 values; d and dmin are the super-block's float16, scale and minimum its numbers of 6 bits. The products are exact in float32 and
    round once, to nearest even. The result dequantizes to d' * q + m', which differs from the value of the K-quant by at most
    2^-11 |d * scale * q| + 2^-11 |dmin * minimum|; subnormal d' and m' are exact. A d' or m' of 65520 or more is infinite, and a NaN is stored as
    0x7e00. CPU and CUDA give the same bits. Does not synchronise.

    q: uint8 [..., K/256, 144] (q4_k) or [..., K/256, 176] (q5_k), CPU or CUDA; the super-blocks of a row are contiguous, other strides are free.
    fmt: "q4_k" or "q5_k". "q6_k" has a scale for each 16 values, which no format of a product has: the error says what to do.
    Returns new memory: 160 bytes for each 144, or 192 for each 176.
    Source: ggml-quants.c of llama.cpp (`dequantize_row_q4_K`, `dequantize_row_q5_K`); docs/design/gguf-formats.md has the measured error.
    Raises BadParamError (fmt, a q that is no tensor), BadTensorDtypeError, BadTensorShapeError or BadTensorStridesError.
    """
    description = k_quants.lookup(fmt)
    layout.check_blocks("q", q, description)
    return QuantizedTensor(description.converted, k_quants.convert(q, description.name))
