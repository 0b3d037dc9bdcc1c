"""Dynamic INT8 quantization by blocks: a float32 scale for 128 k of a token, or for a 128 x 128 block of a weight."""

from __future__ import annotations

import torch

from scaled_mm.core.checks import check_strided
from scaled_mm.errors import BadParamError, BadTensorDtypeError, BadTensorShapeError
from scaled_mm.quantize.int8 import quantized, scale_of
from scaled_mm.quantize.ops import operator

_BLOCK = 128
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_DIMS = ("token", "weight")


@torch.no_grad()
def quantize_int8_block(x: torch.Tensor, dim: str = "token") -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes `x` to int8 by the rule of `quantize_int8`, a block at a time: scale = max|x| / 127, q = round half to even(x / scale).

    x: float16, bfloat16 or float32, CPU or CUDA, any strides. `dim` says what shares a scale, and its layout:

    * "token": an activation [..., K], at least 1-d. One scale for each 128 k of a row: scale [..., ceil(K/128)], ready as the
      `a_scale` of `block_scaled_mm` for a = q.
    * "weight": a weight [..., N, K] as torch.nn.Linear stores it, at least 2-d. One scale for each block of 128 x 128:
      scale [..., ceil(N/128), ceil(K/128)], as checkpoints store it (`weight_scale_inv`); scale.t() is the `b_scale` for b = q.t().

    Blocks at the end of K or N are smaller where these are no multiples of 128. Returns (q, scale): q int8, contiguous, of x's shape;
    scale float32, contiguous. Within a block q * scale is off by at most scale / 2 and what rounding x / scale adds, 2^-17 of the scale at most; its
    zeros, NaN and infinities are those of
    `quantize_int8`: a scale is never below 2^-126, and where a block has NaN or infinity its scale is that and its q are 0. CPU and GPU
    give the same bits. Nothing waits for the device.

    Raises BadTensorDtypeError, BadTensorShapeError (too few dimensions) or BadParamError (`dim`, or an x that is no tensor).
    """
    _check(x, dim)
    return _operator(x, dim) if torch.compiler.is_compiling() else _quantize(x, dim)


def _check(x: torch.Tensor, dim: str) -> None:
    if dim not in _DIMS:
        raise BadParamError(f"dim: expected one of {', '.join(map(repr, _DIMS))}, got {dim!r}")
    check_strided("x", x)
    if x.dtype not in _DTYPES:
        raise BadTensorDtypeError(f"x: expected float16, bfloat16 or float32, got {x.dtype}")
    if x.dim() < 1 + _DIMS.index(dim):
        raise BadTensorShapeError(f"x: dim={dim!r} needs at least {1 + _DIMS.index(dim)} dimensions, got shape {tuple(x.shape)}")


def _quantize(x: torch.Tensor, dim: str) -> tuple[torch.Tensor, torch.Tensor]:
    return _by_token(x) if dim == "token" else _by_weight(x)


def _by_weight(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Zeros, which are no largest value, make the last blocks whole.
    n, k = x.shape[-2:]
    shape = (-(-n // _BLOCK), _BLOCK, -(-k // _BLOCK), _BLOCK)
    blocks = torch.nn.functional.pad(x, (0, -k % _BLOCK, 0, -n % _BLOCK)).reshape(*x.shape[:-2], *shape)
    scale = scale_of(blocks.abs().amax(dim=(-3, -1), keepdim=True))  # [..., blocks of N, 1, blocks of K, 1]
    q = quantized(blocks, scale).reshape(*x.shape[:-2], shape[0] * _BLOCK, shape[2] * _BLOCK)[..., :n, :k]
    return q.contiguous(), scale.squeeze(-1).squeeze(-2)


def _by_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    k = x.shape[-1]
    whole = k // _BLOCK * _BLOCK
    parts = []
    if whole or not k:
        parts.append(x[..., :whole].reshape(*x.shape[:-1], whole // _BLOCK, _BLOCK))
    if whole < k:
        parts.append(x[..., whole:].unsqueeze(-2))
    scales = [scale_of(part.abs().amax(dim=-1, keepdim=True)) for part in parts]  # each [..., blocks, 1]
    q = [quantized(part, scale).flatten(-2) for part, scale in zip(parts, scales)]
    if len(parts) == 1:
        return q[0], scales[0].squeeze(-1)
    return torch.cat(q, -1), torch.cat(scales, -2).squeeze(-1)


_operator = operator("quantize_int8_block", 2, _quantize, _check)
