"""The reference of the row-wise operators: docs/design/numerics.md in numpy, slow, one IEEE operation at a time. CPU tensors in and out.

It shares with the operators only the coefficients of the polynomials. The norms and activations return the float32 y32 of the specification;
`out` casts it, `static` and `token` quantize it.
"""

from __future__ import annotations

import numpy as np
import torch

from scaled_mm.rowwise.arithmetic import _ERFC, _EXP

_TINY = np.float32(2.0**-126)
_LOW = {np.float32: -110, np.float64: -760}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float = 1e-6) -> torch.Tensor:
    with np.errstate(all="ignore"):
        W = _type(x)
        v = _array(x, W)
        lanes = np.zeros((*v.shape[:-1], 1024), W)
        for k in range(v.shape[-1]):
            lane = k // 8 % 1024
            lanes[..., lane] += v[..., k] * v[..., k]
        for h in (512, 256, 128, 64, 32, 16, 8, 4, 2, 1):
            lanes[..., :h] += lanes[..., h : 2 * h]
        inverse = W(1) / np.sqrt(lanes[..., :1] / W(v.shape[-1]) + W(epsilon))
        return _y32((v * inverse) * _array(weight, W))


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """(y32, total)."""
    with np.errstate(all="ignore"):
        total = torch.from_numpy(_array(x, np.float32) + _array(residual, np.float32)).to(x.dtype)
    return rms_norm(total, weight, epsilon), total


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    with np.errstate(all="ignore"):
        W, g, u = _halves(x)
        return _y32(_sigmoid_times(g, g) * u)


def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    with np.errstate(all="ignore"):
        W, g, u = _halves(x)
        if approximate == "none":
            return _y32(((W(0.5) * g) * _erfc(-(g * W(np.sqrt(0.5))))) * u)
        c = W(2 * np.sqrt(2 / np.pi))
        return _y32(_sigmoid_times(g, c * (g * (W(1) + W(0.044715) * (g * g)))) * u)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Query or key, in its dtype."""
    with np.errstate(all="ignore"):
        W = _type(x)
        v, cos, sin = _array(x, W), _array(cos, W)[..., None, :], _array(sin, W)[..., None, :]
        d = v.shape[-1]
        y = np.empty_like(v)
        for pair in range(d // 2):
            i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + d // 2)
            ci, cj = (i, j) if cos.shape[-1] == d else (pair, pair)
            y[..., i] = v[..., i] * cos[..., ci] - v[..., j] * sin[..., ci]
            y[..., j] = v[..., j] * cos[..., cj] + v[..., i] * sin[..., cj]
        return _y32(y).to(x.dtype)


def moe_sort(topk_ids: torch.Tensor, num_experts: int, expert_map: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(order, ends, inverse). An id out of range is not here."""
    copies: list[list[int]] = [[] for _ in range(num_experts)]
    inverse = np.full(topk_ids.numel(), -1, np.int32)
    for copy, expert in enumerate(topk_ids.flatten().tolist()):
        if expert_map is not None:
            expert = int(expert_map[expert]) if 0 <= expert < len(expert_map) else -1
        if 0 <= expert < num_experts:
            copies[expert].append(copy)
    order = [copy for of_expert in copies for copy in of_expert]
    inverse[order] = range(len(order))
    ends = np.cumsum([len(of_expert) for of_expert in copies], dtype=np.int32)
    padded = np.array(order + [-1] * (topk_ids.numel() - len(order)), np.int32)
    return torch.from_numpy(padded), torch.from_numpy(ends), torch.from_numpy(inverse).view(topk_ids.shape)


def moe_combine(y: torch.Tensor, topk_weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The weighted sum, in y's dtype."""
    with np.errstate(all="ignore"):
        W = _type(y)
        v, weights = _array(y, W), _array(topk_weights, W)
        total = np.zeros((rows.shape[0], y.shape[1]), W)
        for token, of_token in enumerate(rows.tolist()):
            for j, row in enumerate(of_token):
                if row >= 0:
                    total[token] = total[token] + weights[token, j] * v[row]
        return _y32(total).to(y.dtype)


def topk_softmax(logits: torch.Tensor, k: int, renormalize: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, ids)."""
    with np.errstate(all="ignore"):
        v = _array(logits, np.float32)
        weights, ids = np.empty((*v.shape[:-1], k), np.float32), np.empty((*v.shape[:-1], k), np.int32)
        for place in np.ndindex(v.shape[:-1]):
            row = v[place]
            ids[place] = sorted(range(len(row)), key=lambda i: (not np.isnan(row[i]), -row[i], i))[:k]
            e = _exp(row - np.max(row))
            lanes = [np.float32(0)] * 32
            for i in range(len(row)):
                lanes[i % 32] = lanes[i % 32] + e[i]
            for h in (16, 8, 4, 2, 1):
                lanes = [lanes[i] + lanes[i + h] for i in range(h)]
            p = e[ids[place]] / lanes[0]
            total = np.float32(0)
            for each in p:
                total = total + each
            weights[place] = p / total if renormalize else p
    return torch.from_numpy(weights), torch.from_numpy(ids)


def static(y: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None = None) -> torch.Tensor:
    """int8: y / scale. scale, zero_point: broadcast to y."""
    with np.errstate(all="ignore"):
        q = np.rint(_array(y, np.float32) / _array(scale, np.float32))
        q = np.where(np.isnan(q), np.float32(0), q)
        q = q if zero_point is None else q + zero_point.numpy().astype(np.float32)
        return torch.from_numpy(np.clip(q, -128, 127).astype(np.int8))


def quantize(x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None = None) -> torch.Tensor:
    """int8: x * scale + offset."""
    with np.errstate(all="ignore"):
        v = _array(x, np.float32) * _array(scale, np.float32)
        q = np.rint(v if offset is None else v + _array(offset, np.float32))
        return torch.from_numpy(np.clip(np.where(np.isnan(q), np.float32(0), q), -128, 127).astype(np.int8))


def token(y: torch.Tensor, smooth_scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scale [..., 1]): one scale per row, max|y| / 127."""
    with np.errstate(all="ignore"):
        v = _array(y, np.float32)
        v = v if smooth_scale is None else v * _array(smooth_scale, np.float32)
        scale = np.maximum(np.max(np.abs(v), axis=-1, keepdims=True, initial=0) / np.float32(127), _TINY)  # NaN stays NaN
        q = np.clip(np.rint(v / scale), -127, 127)
        return torch.from_numpy(np.where(np.isfinite(scale), q, 0).astype(np.int8)), torch.from_numpy(scale)


def dynamic_quant(x: torch.Tensor, smooth_scales: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    q, scale = token(x, smooth_scales)
    return q, scale[..., 0]


def _sigmoid_times(g: np.ndarray, v: np.ndarray) -> np.ndarray:
    t = _exp(-np.abs(v))
    return np.where(v < 0, g * t, g) * (t.dtype.type(1) / (t.dtype.type(1) + t))


def _exp(v: np.ndarray) -> np.ndarray:
    W = v.dtype.type
    x = np.maximum(v, W(_LOW[W])) * W(np.log2(np.e))
    n = np.rint(x)
    f = x - n
    e = _horner(_EXP, f) * f + W(1)
    n = np.where(np.isnan(n), 0, n).astype(np.int32)
    return (e * np.ldexp(W(1), n // 2)) * np.ldexp(W(1), n - n // 2)


def _erfc(z: np.ndarray) -> np.ndarray:
    W = z.dtype.type
    a = np.abs(z)
    t = W(1) / (W(1) + W(0.5) * a)
    e = _exp(-(a * a)) * (_horner(_ERFC, t) * t)
    return np.where(z < 0, W(2) - e, e)


def _horner(table: dict, x: np.ndarray) -> np.ndarray:
    W = x.dtype.type
    first, *others = table[torch.float32 if W is np.float32 else torch.float64]
    p = np.full_like(x, W(first))
    for coefficient in others:
        p = p * x + W(coefficient)
    return p


def _type(x: torch.Tensor) -> type:
    return np.float64 if x.dtype is torch.float32 else np.float32


def _array(x: torch.Tensor, W: type) -> np.ndarray:
    return x.detach().to(torch.float32).numpy().astype(W)


def _halves(x: torch.Tensor) -> tuple[type, np.ndarray, np.ndarray]:
    v, h = _array(x, _type(x)), x.shape[-1] // 2
    return _type(x), v[..., :h], v[..., h:]


def _y32(y: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(y, np.float32))
