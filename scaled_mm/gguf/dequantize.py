"""The dequantizer of every GGUF format."""

from __future__ import annotations

import torch

from scaled_mm.errors import BadTensorDtypeError
from scaled_mm.gguf import layout
from scaled_mm.gguf_formats import BLOCK, BlockFormat, lookup
from scaled_mm.rowwise.operators import operator

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@torch.no_grad()
def dequantize_block(q: torch.Tensor, fmt: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values of GGUF blocks: uint8 [..., K/32, bytes of a block] to `dtype` [..., K], contiguous.

        d * (q - 8)   q4_0          d * (q - 16)   q5_0          d * q + m   q4_1, q5_1          d * q   q8_0, q8_1

    in float32: d * (q - zero) is exact; the addition of m and the cast to a narrower dtype each round once, to nearest even.
    CPU and CUDA give the bits of the `gguf` package (any NaN equals any NaN). An infinite d gives infinities, and NaN where its factor
    is 0; a NaN in d or m gives NaN. Does not synchronise.

    q: CPU or CUDA; the blocks of a row are contiguous, other strides are free.
    fmt: the name of a format, as `quantize_block` takes it. dtype: float32, float16 or bfloat16.
    Source: ggml-quants.c of llama.cpp (`dequantize_row_*`).
    Raises BadParamError (fmt, a q that is no tensor), BadTensorDtypeError, BadTensorShapeError or BadTensorStridesError.
    """
    description = lookup(fmt)
    layout.check_blocks("q", q, description)
    _check_dtype(dtype)
    run = _operator if torch.compiler.is_compiling() else _dequantize
    return run(q, description.name, dtype)


def _check_dtype(dtype: torch.dtype) -> None:
    if not isinstance(dtype, torch.dtype) or dtype not in _DTYPES:
        raise BadTensorDtypeError(f"dtype: expected {', '.join(map(str, _DTYPES))}, got {dtype!r}")


def _check(q: torch.Tensor, fmt: str, dtype: torch.dtype) -> None:
    layout.check_shape("q", q, lookup(fmt))  # not the strides: a compiled graph may choose them
    _check_dtype(dtype)


def _dequantize(q: torch.Tensor, fmt: str, dtype: torch.dtype) -> torch.Tensor:
    description = lookup(fmt)
    out = _empty(q, fmt, dtype)
    blocks, target = q.reshape(-1, description.block_bytes), out.view(-1, BLOCK)
    for chunk in layout.chunks(blocks):
        target[chunk] = values(layout.take_apart(blocks[chunk], description), description)
    return out


def _empty(q: torch.Tensor, fmt: str, dtype: torch.dtype) -> torch.Tensor:
    return q.new_empty((*q.shape[:-2], q.shape[-2] * BLOCK), dtype=dtype)


def values(parts: layout.Parts, description: BlockFormat) -> torch.Tensor:
    """float32 [..., K/32, 32]: the dequantized values."""
    levels = layout.unpack_levels(parts)
    if description.zero:
        levels = levels.sub_(description.zero).view(torch.int8)  # modulo 256, hence right as a signed byte
    value = levels.to(torch.float32).mul_(parts.d.to(torch.float32).unsqueeze(-1))
    return value.add_(parts.second.to(torch.float32).unsqueeze(-1)) if description.second == "m" else value


_operator = operator("dequantize_block", 1, _dequantize, _check, "str fmt, ScalarType dtype", fake=_empty)
