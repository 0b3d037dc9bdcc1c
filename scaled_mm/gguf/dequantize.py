"""Dequantizers of llama.cpp's block formats."""

from __future__ import annotations

from collections.abc import Callable

import torch

from scaled_mm.errors import BadTensorDtypeError
from scaled_mm.gguf import layout
from scaled_mm.gguf_formats import BLOCK, BlockFormat, lookup
from scaled_mm.quantize.ops import operator

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@torch.no_grad()
def dequantize_block(q: torch.Tensor, fmt: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values of blocks: uint8 [..., K/32, bytes of a block] to `dtype` [..., K], contiguous.

        d * (q - 8)   q4_0          d * (q - 16)   q5_0          d * q + m   q4_1, q5_1          d * q   q8_0, q8_1

    in float32: d * (q - zero) is exact, the addition of m rounds once, to nearest even, and so does the cast to a narrower dtype.
    The bits are those of the `gguf` package (a NaN equals a NaN), on CPU and CUDA. An infinite d gives infinities, and NaN where
    its factor is 0; a NaN in d or m gives NaN. Nothing waits for the device.

    q: CPU or CUDA; the blocks of a row one after the other, other strides as they are.
    fmt: "q4_0", "q4_1", "q5_0", "q5_1", "q8_0" or "q8_1". dtype: float32, float16 or bfloat16.
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
    layout.check_shape("q", q, lookup(fmt))  # a compiled graph may choose the strides of what it hands over
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
    """float32 [..., K/32, 32]: what the blocks stand for."""
    levels = layout.unpack_levels(parts)
    if description.zero:
        levels = levels.sub_(description.zero).view(torch.int8)  # modulo 256, hence right as a signed byte
    value = levels.to(torch.float32).mul_(parts.d.to(torch.float32).unsqueeze(-1))
    return value.add_(parts.second.to(torch.float32).unsqueeze(-1)) if description.second == "m" else value


_operator = operator("dequantize_block", 1, _dequantize, _check, "str fmt, ScalarType dtype", fake=_empty)


def _named(fmt: str) -> Callable[..., torch.Tensor]:
    def dequantize(q: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return dequantize_block(q, fmt, dtype)

    dequantize.__name__ = dequantize.__qualname__ = f"dequantize_{fmt}"
    dequantize.__doc__ = f'`dequantize_block(q, "{fmt}", dtype)`: uint8 [..., K/32, {lookup(fmt).block_bytes}] to [..., K].'
    return dequantize


dequantize_q4_0, dequantize_q4_1, dequantize_q5_0, dequantize_q5_1, dequantize_q8_0, dequantize_q8_1 = map(
    _named, ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q8_1")
)
