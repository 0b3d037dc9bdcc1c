"""The dequantizer of every GGUF format and K-quant."""

from __future__ import annotations

import torch

from scaled_mm.errors import BadTensorDtypeError
from scaled_mm.gguf import k_quants, layout
from scaled_mm.gguf_formats import BlockFormat, lookup_stored
from scaled_mm.gguf_k_quants import KQuant
from scaled_mm.rowwise.operators import operator

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@torch.no_grad()
def dequantize_block(q: torch.Tensor, fmt: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values of GGUF blocks: uint8 [..., K/32, bytes of a block] to `dtype` [..., K], contiguous.

        d * (q - zero)   as q4_0, zero = 8          d * q + m   as q4_1          d * q   as q8_0

    The format decides which (docs/design/gguf-formats.md). In float32: d * (q - zero) is exact; the addition of m and the cast to a
    narrower dtype each round once, to nearest even.
    The super-blocks of a K-quant, uint8 [..., K/256, bytes of a super-block], are dequantized likewise:

        (d * scale) * q - dmin * minimum   for q4_k and q5_k          (d * scale) * (q - 32)   for q6_k

    All products are exact; the subtraction rounds once.
    CPU and CUDA give the bits of the `gguf` package (any NaN equals any NaN). An infinite d gives infinities, and NaN where its factor
    is 0; a NaN in d or m gives NaN. Does not synchronise.

    q: CPU or CUDA; the blocks of a row are contiguous, other strides are free.
    fmt: the name of a format, as `quantize_block` takes it, or "q4_k" (144 bytes), "q5_k" (176) or "q6_k" (210). dtype: float32, float16 or bfloat16.
    Source: ggml-quants.c of llama.cpp (`dequantize_row_*`).
    Raises BadParamError (fmt, a q that is no tensor), BadTensorDtypeError, BadTensorShapeError or BadTensorStridesError.
    """
    description = lookup_stored(fmt)
    layout.check_blocks("q", q, description)
    _check_dtype(dtype)
    run = _operator if torch.compiler.is_compiling() else _dequantize
    return run(q, description.name, dtype)


def _check_dtype(dtype: torch.dtype) -> None:
    if not isinstance(dtype, torch.dtype) or dtype not in _DTYPES:
        raise BadTensorDtypeError(f"dtype: expected {', '.join(map(str, _DTYPES))}, got {dtype!r}")


def _check(q: torch.Tensor, fmt: str, dtype: torch.dtype) -> None:
    layout.check_shape("q", q, lookup_stored(fmt))  # not the strides: a compiled graph may choose them
    _check_dtype(dtype)


def _dequantize(q: torch.Tensor, fmt: str, dtype: torch.dtype) -> torch.Tensor:
    description = lookup_stored(fmt)
    decode = k_quants.values if isinstance(description, KQuant) else _values
    out = _empty(q, fmt, dtype)
    blocks, target = q.reshape(-1, description.block_bytes), out.view(-1, description.block_values)
    for chunk in layout.chunks(blocks, description.block_values):
        target[chunk] = decode(blocks[chunk], description)
    return out


def _empty(q: torch.Tensor, fmt: str, dtype: torch.dtype) -> torch.Tensor:
    return q.new_empty((*q.shape[:-2], q.shape[-2] * lookup_stored(fmt).block_values), dtype=dtype)


def _values(q: torch.Tensor, description: BlockFormat) -> torch.Tensor:
    """float32 [blocks, 32]: the values of uint8 [blocks, bytes of a block]."""
    parts = layout.take_apart(q, description)
    levels = layout.unpack_levels(parts)
    if description.zero:
        levels = levels.sub_(description.zero).view(torch.int8)  # modulo 256, hence right as a signed byte
    value = levels.to(torch.float32).mul_(parts.d.to(torch.float32).unsqueeze(-1))
    return value.add_(parts.second.to(torch.float32).unsqueeze(-1)) if description.second == "m" else value


_operator = operator("dequantize_block", 1, _dequantize, _check, "str fmt, ScalarType dtype", fake=_empty)
