"""Dynamic groupwise INT8 quantization: one float32 scale per 128 or 64 elements of K of a token, or per 128 x 128 or 64 x 64 elements of a weight."""

from __future__ import annotations

from collections.abc import Callable

import torch

from scaled_mm.core.checks import check_strided
from scaled_mm.errors import BadParamError, BadTensorDtypeError, BadTensorShapeError
from scaled_mm.rowwise import kernels
from scaled_mm.rowwise.dynamic import quantized, scale_of, truncated
from scaled_mm.rowwise.operators import operator

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_DIMS = ("token", "weight")
_ROUNDINGS = ("nearest", "truncate")
_BLOCK_SIZES = (128, 64)


@torch.no_grad()
def quantize_int8_block(
    x: torch.Tensor, dim: str = "token", *, rounding: str = "nearest", block_size: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes each block of `x` to int8 by the rule of `quantize_int8`: scale = max|x| / 127, q = x / scale, rounded as `rounding` says.

    x: float16, bfloat16 or float32, CPU or CUDA, any strides. `dim` selects the values that share a scale, and the layout of the scales:

    * "token": an activation [..., K], at least 1-d. One scale per B elements of K of a row: scale [..., ceil(K/B)], the `a_scale` of
      `block_scaled_mm` for a = q.
    * "weight": a weight [..., N, K] as torch.nn.Linear stores it, at least 2-d. One scale per block of B x B:
      scale [..., ceil(N/B), ceil(K/B)], as checkpoints store it (`weight_scale_inv`); scale.t() is the `b_scale` for b = q.t().

    rounding: "nearest", half to even, or "truncate", toward zero, as the block quantizers of vLLM and SGLang. The error is then below scale, and that
    of a product more than twice as large (docs/guide/coming-from.md).

    block_size: B, 128 or 64.

    The last blocks along K and N are smaller if K or N is not a multiple of B. Returns (q, scale): q int8, contiguous, x's shape;
    scale float32, contiguous. With "nearest", q * scale differs from x by at most scale / 2, plus at most 2^-17 scale from rounding x / scale.
    Zeros, NaN and infinities behave as in `quantize_int8`: a scale is never below 2^-126, and a block with NaN or infinity has that as its scale and
    q = 0. CPU and GPU give the same bits. Does not synchronize with the device.

    Raises BadTensorDtypeError, BadTensorShapeError (too few dimensions) or BadParamError (invalid `dim`, `rounding` or
    `block_size`, or x is not a tensor).
    """
    _check(x, dim, rounding, block_size)
    if kernels.serve(x) and (served := _by_kernel(x, dim, rounding, block_size)):
        return served
    return (_operator if torch.compiler.is_compiling() else _quantize)(x, dim, rounding, block_size)


def _check(x: torch.Tensor, dim: str, rounding: str = "nearest", block_size: int = 128) -> None:
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size not in _BLOCK_SIZES:
        raise BadParamError(f"block_size: expected one of {', '.join(map(str, _BLOCK_SIZES))}, got {block_size!r}")
    if not isinstance(rounding, str) or rounding not in _ROUNDINGS:
        raise BadParamError(f"rounding: expected one of {', '.join(map(repr, _ROUNDINGS))}, got {rounding!r}")
    if not isinstance(dim, str) or dim not in _DIMS:
        raise BadParamError(f"dim: expected one of {', '.join(map(repr, _DIMS))}, got {dim!r}")
    check_strided("x", x)
    if x.dtype not in _DTYPES:
        raise BadTensorDtypeError(f"x: expected float16, bfloat16 or float32, got {x.dtype}")
    if x.dim() < 1 + _DIMS.index(dim):
        raise BadTensorShapeError(f"x: dim={dim!r} needs at least {1 + _DIMS.index(dim)} dimensions, got shape {tuple(x.shape)}")


def _by_kernel(x: torch.Tensor, dim: str, rounding: str = "nearest", block_size: int = 128) -> tuple[torch.Tensor, torch.Tensor] | None:
    return kernels.quantized_by_block(x, dim == "weight", rounding == "truncate", block_size)


def _quantize(x: torch.Tensor, dim: str, rounding: str = "nearest", block_size: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    return (_by_token if dim == "token" else _by_weight)(x, quantized if rounding == "nearest" else truncated, block_size)


def _by_weight(x: torch.Tensor, quantized: Callable, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    # Zero padding completes the last blocks; zeros do not change max|x|.
    n, k = x.shape[-2:]
    shape = (-(-n // block), block, -(-k // block), block)
    blocks = torch.nn.functional.pad(x, (0, -k % block, 0, -n % block)).reshape(*x.shape[:-2], *shape)
    scale = scale_of(blocks.abs().amax(dim=(-3, -1), keepdim=True))  # [..., blocks of N, 1, blocks of K, 1]
    q = quantized(blocks, scale).reshape(*x.shape[:-2], shape[0] * block, shape[2] * block)[..., :n, :k]
    return q.contiguous(), scale.squeeze(-1).squeeze(-2)


def _by_token(x: torch.Tensor, quantized: Callable, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    k = x.shape[-1]
    whole = k // block * block
    parts = []
    if whole or not k:
        parts.append(x[..., :whole].reshape(*x.shape[:-1], whole // block, block))
    if whole < k:
        parts.append(x[..., whole:].unsqueeze(-2))
    scales = [scale_of(part.abs().amax(dim=-1, keepdim=True)) for part in parts]  # each [..., blocks, 1]
    q = [quantized(part, scale).flatten(-2) for part, scale in zip(parts, scales)]
    if len(parts) == 1:
        return q[0], scales[0].squeeze(-1)
    return torch.cat(q, -1), torch.cat(scales, -2).squeeze(-1)


_operator = operator("quantize_int8_block", 2, _quantize, _check, "str dim, str rounding='nearest', int block_size=128", kernel=_by_kernel)
