"""`rope`: rotary position embedding of query and key in one call."""

from __future__ import annotations

import torch

from scaled_mm.core.checks import check_device, has_shape
from scaled_mm.errors import BadParamError, BadTensorDtypeError, BadTensorShapeError
from scaled_mm.rowwise import kernels
from scaled_mm.rowwise.arithmetic import wide
from scaled_mm.rowwise.operands import check_float, check_rows
from scaled_mm.rowwise.operators import composite


@torch.no_grad()
def rope(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(query, key), each rotated by the angles of its token.

        y[i] = x[i] * cos[i] - x[j] * sin[i],  y[j] = x[j] * cos[j] + x[i] * sin[j]      for each pair (i, j) of a head

    query: [..., HQ, D], key: [..., HK, D], float16, bfloat16 or float32, the same dtype, 2 to 8 dimensions, D even, any strides, CPU or CUDA.
    cos, sin: [..., D], or [..., D/2] for pairs that share an angle, with query's dimensions before the heads; any of these dtypes.
    interleaved: False pairs (i, i + D/2), as Llama and GPT-NeoX do; True pairs (2 i, 2 i + 1), as GPT-J does.

    Products and sum round separately, in float32 for 16-bit operands and in float64 for float32 ones: a CPU and every GPU give the same bits.
    Contiguous outputs in query's dtype. No gradient.
    Raises a ScaledMMError subclass that names the argument, what was expected and what was given.
    """
    if not isinstance(interleaved, bool):
        raise BadParamError(f"interleaved: expected True or False, got {interleaved!r}")
    _check(query, key, cos, sin, interleaved)
    if kernels.serve(query) and (served := kernels.rotated(query, key, cos, sin, interleaved)):
        return served
    return _rope(query, key, cos, sin, interleaved)


def _check(query, key, cos, sin, interleaved) -> None:
    check_rows("query", query, least=2)
    check_rows("key", key, least=2)
    check_device("key", key, query.device)
    if key.dtype != query.dtype:
        raise BadTensorDtypeError(f"key: expected {query.dtype} as query, got {key.dtype}")
    tokens, d = query.shape[:-2], query.shape[-1]
    if d % 2:
        raise BadTensorShapeError(f"query: expected [..., HQ, D] with an even D, got {list(query.shape)}")
    if key.shape[:-2] != tokens or key.shape[-1] != d:
        raise BadTensorShapeError(f"key: expected {[*tokens, 'HK', d]} as query {list(query.shape)}, got {list(key.shape)}")
    for name, angle in (("cos", cos), ("sin", sin)):
        check_float(name, angle)
        check_device(name, angle, query.device)
        if not has_shape(angle, (*tokens, d), (*tokens, d // 2)):
            raise BadTensorShapeError(
                f"{name}: expected {[*tokens, d]} or {[*tokens, d // 2]} for query {list(query.shape)}, got {list(angle.shape)}"
            )
    if cos.shape != sin.shape:
        raise BadTensorShapeError(f"sin: expected {list(cos.shape)} as cos, got {list(sin.shape)}")


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    w = wide(x)
    pairs = w.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else w.chunk(2, dim=-1)
    cos, sin = (_of_pairs(angle.to(w.dtype).unsqueeze(-2), w.shape[-1], interleaved) for angle in (cos, sin))
    first = pairs[0] * cos[0] - pairs[1] * sin[0]
    second = pairs[1] * cos[1] + pairs[0] * sin[1]
    rotated = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    return rotated.to(torch.float32).to(x.dtype).contiguous()


def _of_pairs(angle: torch.Tensor, d: int, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of the first and of the second element of each pair."""
    if angle.shape[-1] != d:
        return angle, angle
    return tuple(angle.unflatten(-1, (-1, 2)).unbind(-1)) if interleaved else tuple(angle.chunk(2, dim=-1))


def _both(query, key, cos, sin, interleaved) -> tuple[torch.Tensor, torch.Tensor]:
    return _rotated(query, cos, sin, interleaved), _rotated(key, cos, sin, interleaved)


_rope = composite("rope", 2, _both, _check, "Tensor key, Tensor cos, Tensor sin, bool interleaved", first="query", kernel=kernels.rotated)
