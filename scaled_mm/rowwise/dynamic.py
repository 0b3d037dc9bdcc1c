"""Dynamic INT8 quantization: scales, and zero points, computed from the data. The formulas of `quantize_int8`."""

from __future__ import annotations

import torch


def dynamic(x: torch.Tensor, dim: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scale), symmetric. dim: see `quantize_int8`."""
    scale = _scale(x.reshape(1, -1) if dim == "tensor" else x)
    q = quantized(x, scale.view(()) if dim == "tensor" else scale)
    if dim == "tensor":
        return q, scale.view(1)
    return q, scale.flatten(-2).unsqueeze(-2) if dim == "channel" else scale


def quantized(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """int8, contiguous: clamp(round half to even(x / scale), -127, 127)."""
    ratio = x.to(torch.float32) / scale
    # inf / inf and x / NaN are NaN, whose conversion to int8 is undefined.
    return ratio.round_().clamp_(-127, 127).nan_to_num_(nan=0.0).to(torch.int8, memory_format=torch.contiguous_format)


def truncated(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """int8, contiguous: x / scale, rounded toward zero, clamped to [-127, 127]."""
    ratio = x.to(torch.float32) / scale
    return ratio.trunc_().clamp_(-127, 127).nan_to_num_(nan=0.0).to(torch.int8, memory_format=torch.contiguous_format)


def dynamic_asymmetric(x: torch.Tensor, dim: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The fields of an AsymmetricInt8. dim: see `quantize_int8`."""
    rows = x.reshape(1, -1) if dim == "tensor" else x
    low, high = _range(rows)
    divisor = torch.full((), 255.0, dtype=torch.float32, device=x.device)  # on the device: see _scale
    scale = (high / divisor - low / divisor).clamp_min_(torch.finfo(torch.float32).tiny)
    spoilt = scale.isfinite().logical_not_()  # NaN or infinite
    zero_point = (-128 - low / scale).round_().clamp_(-128, 127).masked_fill_(spoilt, 0)
    q = (rows.to(torch.float32) / scale).round_().add_(zero_point).clamp_(-128, 127).masked_fill_(spoilt, 0)
    q = q.to(torch.int8, memory_format=torch.contiguous_format).reshape(x.shape)
    sums = q.to(torch.int32).view(1) if q.dim() == 0 else q.sum(dim=-1, keepdim=True, dtype=torch.int32)
    zero_point = zero_point.to(torch.int32)
    if dim == "tensor":
        return q, scale.view(1), zero_point.view(1), sums
    if dim == "channel":
        scale, zero_point, sums = (t.flatten(-2).unsqueeze(-2) for t in (scale, zero_point, sums))
    return q, scale, zero_point, sums


def _range(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(low, high), float32 [..., 1] each: minimum and maximum over the last dimension and 0."""
    if x.shape[-1] == 0:
        zeros = torch.zeros((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
        return zeros, zeros
    low, high = torch.aminmax(x, dim=-1, keepdim=True)
    return low.to(torch.float32).clamp_max_(0), high.to(torch.float32).clamp_min_(0)


def _scale(x: torch.Tensor) -> torch.Tensor:
    """float32 [..., 1]: max|x| / 127 over the last dimension, at least 2^-126."""
    if x.shape[-1] == 0:
        largest = torch.zeros((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    else:
        largest = x.abs().amax(dim=-1, keepdim=True)
    return scale_of(largest)


def scale_of(largest: torch.Tensor) -> torch.Tensor:
    """float32: largest / 127, at least 2^-126."""
    largest = largest.to(torch.float32)
    # The divisor must be a device tensor: for a Python number, torch's CUDA kernel multiplies by the reciprocal, which rounds once
    # more than the CPU's division.
    divisor = torch.full((), 127.0, dtype=torch.float32, device=largest.device)
    return (largest / divisor).clamp_min_(torch.finfo(torch.float32).tiny)
