"""The quantizer of every GGUF format: 32 values of a row form a block and share a float16 scale."""

from __future__ import annotations

import torch

from scaled_mm.core.checks import check_strided
from scaled_mm.errors import BadParamError, BadTensorDtypeError, BadTensorShapeError
from scaled_mm.gguf import layout
from scaled_mm.gguf_formats import BLOCK, RULES, BlockFormat, lookup
from scaled_mm.rowwise import kernels
from scaled_mm.rowwise.operators import operator

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@torch.no_grad()
def quantize_block(x: torch.Tensor, fmt: str, rule: str = "absmax") -> torch.Tensor:
    """Quantizes `x` to the blocks of a GGUF format: float [..., K] to uint8 [..., K/32, bytes of a block].

    x: float16, bfloat16 or float32 [..., K], at least 1-d, K a multiple of 32, CPU or CUDA, any strides.
    fmt: "q4_0" (18 bytes), "q4_1" (20), "q5_0" (22), "q5_1" (24), "q8_0" (34) or "q8_1" (36).
    rule: "absmax" or "ggml"; it changes only formats with a level for 0, L: q4_0 (L = 8), q5_0 (16).

    Every float32 operation rounds by itself; round() rounds half away from zero. Formats with a level for 0:

    * "absmax": d = max|x| / (L - 1);  q = clamp(round(x / d) + L, 0, 2 L - 1). Symmetric; this project's rule.
    * "ggml": d = (the first x of largest magnitude) / -L;  q = min(trunc(x * (1 / d) + (L + 0.5)), 2^bits - 1). llama.cpp's rule; it
      also uses the level -L, which "absmax" does not, and has the smaller error.

    Formats with a minimum: m = min x;  d = (max x - m) / (2^bits - 1);  q = min(trunc((x - m) * (1 / d) + 0.5), 2^bits - 1).
    Signed levels: d = max|x| / 127;  q = round(x * (1 / d)). q8_1 also stores s, the sum of the 32 values before quantization, in float32:
    x[i] + x[i + 16], then the sums 8, 4, 2 and 1 apart.

    1 / d is 0 where d is 0. d, m and s are stored as float16, rounded to nearest even; q is computed with d before that rounding.

    If a block contains a NaN or an infinity, or d overflows float16 (65520), d is NaN or infinite and products with the block are not
    finite. NaN and infinite levels are stored as 0, by "absmax" as the level for 0. docs/design/gguf-formats.md has the details.
    The bits are those of the `gguf` package, except for q8_1 and the rule "absmax". CPU and CUDA give the same bits. Does not synchronise.

    Source: ggml-quants.c of llama.cpp (`quantize_row_*_ref`), and for s its CUDA quantizer.
    Raises BadParamError (fmt, rule, an x that is no tensor), BadTensorDtypeError or BadTensorShapeError.
    """
    _check(x, fmt, rule)
    if kernels.serve(x) and (served := _kernel(x, fmt, rule)) is not None:
        return served
    run = _operator if torch.compiler.is_compiling() else _quantize
    return run(x, fmt, rule)


def _check(x: torch.Tensor, fmt: str, rule: str) -> None:
    lookup(fmt)
    if not isinstance(rule, str) or rule not in RULES:
        raise BadParamError(f"rule: expected one of {', '.join(map(repr, RULES))}, got {rule!r}")
    check_strided("x", x)
    if x.dtype not in _DTYPES:
        raise BadTensorDtypeError(f"x: expected float16, bfloat16 or float32, got {x.dtype}")
    if x.dim() < 1 or x.shape[-1] % BLOCK:
        raise BadTensorShapeError(f"x: expected [..., K] with K a multiple of {BLOCK}, got {list(x.shape)}")


def _quantize(x: torch.Tensor, fmt: str, rule: str) -> torch.Tensor:
    description = lookup(fmt)
    out = _empty(x, fmt, rule)
    blocks, target = x.reshape(-1, BLOCK), out.view(-1, description.block_bytes)
    for chunk in layout.chunks(blocks):
        _encode(blocks[chunk].to(torch.float32), description, rule, target[chunk])
    return out


def _empty(x: torch.Tensor, fmt: str, rule: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // BLOCK, lookup(fmt).block_bytes), dtype=torch.uint8)


def _kernel(x: torch.Tensor, fmt: str, rule: str) -> torch.Tensor | None:
    return kernels.gguf_quantized(x, _empty(x, fmt, rule), lookup(fmt).code, RULES.index(rule))


def _encode(x: torch.Tensor, description: BlockFormat, rule: str, out: torch.Tensor) -> None:
    """Writes the blocks of x, float32 [blocks, 32]. Separate torch calls cannot be contracted, so every operation rounds by itself."""
    second = None
    if description.second == "m":
        d, second, levels = _from_range(x, description)
    elif description.signed:
        d, levels = _from_magnitude(x)
        second = _sum(x) if description.second == "s" else None
    else:
        d, levels = (_from_largest if rule == "ggml" else _from_absmax)(x, description)
    high, packed = layout.pack_levels(levels, description)
    halves = (None if value is None else layout.to_half(value).squeeze(-1) for value in (d, second))
    layout.put_together(layout.Parts(*halves, high, packed), description, out)


def _from_absmax(x: torch.Tensor, description: BlockFormat) -> tuple[torch.Tensor, torch.Tensor]:
    d = x.abs().amax(-1, keepdim=True) / _number(description.zero - 1, x)
    levels = _round_away(x / d.masked_fill(d == 0, 1))
    levels = levels.nan_to_num_(0, 0, 0).add_(description.zero).clamp_(0, 2 * description.zero - 1)
    return d, levels.to(torch.uint8)


def _from_largest(x: torch.Tensor, description: BlockFormat) -> tuple[torch.Tensor, torch.Tensor]:
    d = x.gather(-1, x.abs().argmax(-1, keepdim=True)) / _number(-description.zero, x)
    levels = (x * _inverse(d)).add_(description.zero + 0.5)
    return d, _unsigned(levels, description)


def _from_range(x: torch.Tensor, description: BlockFormat) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # The sign of a minimum or maximum over -0.0 and +0.0 depends on the order of comparisons. Fixed here: minimum -0.0, maximum +0.0.
    has_negative_zero = (x.view(torch.int32) == -(2**31)).any(-1, keepdim=True)
    low = x.amin(-1, keepdim=True)
    low = torch.where(low == 0, torch.where(has_negative_zero, -0.0, 0.0), low)
    high = x.amax(-1, keepdim=True).add_(0.0)
    d = (high - low) / _number(2**description.bits - 1, x)
    levels = (x - low).mul_(_inverse(d)).add_(0.5)
    return d, low, _unsigned(levels, description)


def _from_magnitude(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    d = x.abs().amax(-1, keepdim=True) / _number(127, x)
    return d, _round_away(x * _inverse(d)).nan_to_num_(0, 0, 0).to(torch.int8)


def _sum(x: torch.Tensor) -> torch.Tensor:
    """float32 [blocks, 1], in the order of a warp's butterfly reduction: 16, 8, 4, 2, 1 lanes apart."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x


def _unsigned(levels: torch.Tensor, description: BlockFormat) -> torch.Tensor:
    # Non-finite levels become 0, as in the gguf package on x86.
    return levels.nan_to_num_(0, 0, 0).trunc_().clamp_(0, 2**description.bits - 1).to(torch.uint8)


def _inverse(d: torch.Tensor) -> torch.Tensor:
    """1 / d, 0 where d is 0; infinite where d is below 2^-128."""
    return torch.where(d == 0, 0.0, torch.ones_like(d) / d)


def _round_away(value: torch.Tensor) -> torch.Tensor:
    """Half away from zero, as C's roundf; NaN for an infinity. floor(x + 0.5) would be wrong for 0.49999997: that sum rounds to 1."""
    magnitude = value.abs()
    floor = magnitude.floor()
    return magnitude.sub_(floor).mul_(2).floor_().add_(floor).copysign_(value)


def _number(value: int, like: torch.Tensor) -> torch.Tensor:
    # On the device: torch's CUDA kernel divides by a host scalar by multiplying with its reciprocal, which rounds twice.
    return torch.full((), float(value), dtype=torch.float32, device=like.device)


_operator = operator("quantize_block", 1, _quantize, _check, "str fmt, str rule", fake=_empty, kernel=_kernel)
