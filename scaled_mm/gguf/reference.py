"""The reference for products with GGUF formats: the documented formulas in float64, block by block, independent of the code under test.

    C[n,m] = sum over blocks of d_w * (d_a * sum(q_w * q_a) - zero * s_a)          zero is not 0
             sum over blocks of d_w * d_a * sum(q_w * q_a) + m_w * s_a             with a minimum
             sum over blocks of d_w * d_a * sum(q_w * q_a)                         otherwise

q_w and q_a are the stored levels, s_a the stored sum, n a row of the weight and m a token. Sums of levels are integers, exact in float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class _Layout(NamedTuple):
    """Offsets in bytes from the start of a block; None: the format has no such field. bits: of a level. zero: subtracted from a level."""

    bits: int
    zero: int
    d: int
    levels: int
    fifth_bits: int | None = None
    minimum: int | None = None
    sum: int | None = None


# Written without scaled_mm/gguf_formats.py. A name has no meaning here.
_LAYOUTS = {
    "q4_0": _Layout(bits=4, zero=8, d=0, levels=2),
    "q4_1": _Layout(bits=4, zero=0, d=0, minimum=2, levels=4),
    "q5_0": _Layout(bits=5, zero=16, d=0, fifth_bits=2, levels=6),
    "q5_1": _Layout(bits=5, zero=0, d=0, minimum=2, fifth_bits=4, levels=8),
    "q8_0": _Layout(bits=8, zero=0, d=0, levels=2),
    "q8_1": _Layout(bits=8, zero=0, d=0, sum=2, levels=4),
}


def fields(q: torch.Tensor, fmt: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """float64 (stored levels [..., K/32, 32], d [..., K/32], m or s [..., K/32] or None)."""
    layout = _LAYOUTS[fmt]
    start, fifth, second = layout.levels, layout.fifth_bits, layout.sum if layout.minimum is None else layout.minimum
    byte = q.to(torch.int64)
    if layout.bits == 8:
        levels = [byte[..., start + j] for j in range(32)]
        levels = [level - 256 * (level >= 128) for level in levels]
    else:
        levels = [(byte[..., start + j % 16] // (1 if j < 16 else 16)) % 16 for j in range(32)]
    if fifth is not None:
        levels = [level + 16 * ((byte[..., fifth + j // 8] >> (j % 8)) % 2) for j, level in enumerate(levels)]
    return torch.stack(levels, -1).double(), _half(byte, layout.d), None if second is None else _half(byte, second)


def _half(byte: torch.Tensor, offset: int) -> torch.Tensor:
    """The IEEE float16 with these bits."""
    bits = byte[..., offset] + 256 * byte[..., offset + 1]
    exponent, fraction = (bits >> 10) % 32, (bits % 1024).double()
    normal = torch.ldexp(1 + fraction / 1024, exponent - 15)
    value = torch.where(exponent == 0, fraction * 2.0**-24, normal)
    special = torch.where(fraction == 0, float("inf"), float("nan")).double()
    return torch.where(exponent == 31, special, value) * torch.where(bits >= 0x8000, -1.0, 1.0)


@torch.no_grad()
def dequantize(q: torch.Tensor, fmt: str) -> torch.Tensor:
    """float64 [..., K]: d * (q - zero), or d * q + m."""
    levels, d, second = fields(q, fmt)
    value = d.unsqueeze(-1) * (levels - _LAYOUTS[fmt].zero)
    return (value if _LAYOUTS[fmt].minimum is None else value + second.unsqueeze(-1)).flatten(-2)


@torch.no_grad()
def rounded(weight_q: torch.Tensor, fmt: str, dtype: torch.dtype) -> torch.Tensor:
    """float64 [N, K]: a weight, uint8 [N, K/32, bytes of a block], as mode w16a16 rounds it for activations of dtype, float16 or bfloat16. The
    formula is in docs/design/gguf-formats.md."""
    layout = _LAYOUTS[fmt]
    stored, d, m = fields(weight_q, fmt)
    if dtype is torch.bfloat16 and m is None:
        return _bfloat16(_bfloat16(d).unsqueeze(-1) * (stored - layout.zero)).flatten(-2)
    zero = 128 if layout.bits == 8 else layout.zero
    levels = stored + 128 if layout.bits == 8 else stored
    exponent = (-8 - _exponent(d, -14)).clamp(max=6)
    if m is not None:
        exponent = torch.minimum(exponent, 7 - _exponent(m, 1))
    row = 2.0 ** exponent.double()[:, None]
    d = _float16(d * row * 2.0**9)
    of_zero = _float16(d * -zero * 2.0**-9 if m is None else _float16(m * row * 2.0**9) * 2.0**-9)
    # Exact in float64. torch rounds through float32, which differs next to ties only.
    value = _float16(levels * (d * 2.0**-9).unsqueeze(-1) + of_zero.unsqueeze(-1)).flatten(-2)
    return (_bfloat16(value) if dtype is torch.bfloat16 else value) / row


def _bfloat16(exact: torch.Tensor) -> torch.Tensor:
    return exact.bfloat16().double()


def _float16(exact: torch.Tensor) -> torch.Tensor:
    return exact.half().double()


def _exponent(of: torch.Tensor, of_zeros: int) -> torch.Tensor:
    """int32 [N]: the least n for which the finite values of a row of [N, K/32] are below 2^n. of_zeros: the n of a row that has none but zeros."""
    largest = of.abs().nan_to_num(0.0, 0.0).amax(1) if of.shape[1] else of.new_zeros(of.shape[0])
    return torch.where(largest > 0, torch.frexp(largest).exponent, of_zeros)


@torch.no_grad()
def gemm_q8_1(weight_q: torch.Tensor, activation_q: torch.Tensor, fmt: str) -> torch.Tensor:
    """float64 [N, M]: the product of a weight, uint8 [N, K/32, bytes of a block], and q8_1 activations, uint8 [M, K/32, 36]."""
    q_w, d_w, m_w = fields(weight_q, fmt)
    q_a, d_a, s_a = fields(activation_q, "q8_1")
    zero = _LAYOUTS[fmt].zero
    total = torch.zeros((weight_q.shape[0], activation_q.shape[0]), dtype=torch.float64, device=weight_q.device)
    for block in range(weight_q.shape[1]):
        acc = q_w[:, block] @ q_a[:, block].t()
        if zero:
            total += d_w[:, block, None] * (d_a[:, block] * acc - zero * s_a[:, block])
        elif m_w is not None:
            total += d_w[:, block, None] * d_a[:, block] * acc + m_w[:, block, None] * s_a[:, block]
        else:
            total += d_w[:, block, None] * d_a[:, block] * acc
    return total


@torch.no_grad()
def gemm(weight_q: torch.Tensor, activation: torch.Tensor, fmt: str) -> torch.Tensor:
    """float64 [N, M]: the product of the dequantized weight and float activations [M, K]."""
    return dequantize(weight_q, fmt) @ activation.double().t()
