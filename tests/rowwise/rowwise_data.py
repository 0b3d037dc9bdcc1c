"""Operands of the row-wise operators: difficult values in every memory layout; and the distance from a float64 result."""

from __future__ import annotations

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
WIDTHS = (1, 7, 8, 9, 255, 2047, 2048, 2049, 4096, 11008)
LEADING = [(), (3,), (2, 3), (2, 1, 2), (1, 2, 1, 2), (2, 1, 1, 2, 1), (1, 1, 2, 1, 2, 1), (2, 1, 1, 1, 1, 1, 2), (0,), (2, 0)]
LAYOUTS = ("contiguous", "transposed", "strided", "expanded", "unaligned")
KINDS = ("plain", "wide", "special")
SPECIAL = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, 6e-8, -1e-39, 1e-38, 65504.0, -3e38, 1.0)


def values(shape: tuple[int, ...], dtype: torch.dtype, kind: str = "plain", seed: int = 0) -> torch.Tensor:
    """plain: normal numbers. wide: over most exponents of the dtype. special: as plain, with a NaN, infinities, zeros, subnormals, huge values
    in some rows only."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if kind == "wide":
        low, high = (-20, 12) if dtype is torch.float16 else (-60, 50)
        x = x * torch.exp2(torch.empty(shape).uniform_(low, high, generator=generator))
    if kind == "special" and x.numel():
        rows = x.view(-1, x.shape[-1])
        for row in range(0, rows.shape[0], 2):
            rows[row, row % rows.shape[1]] = SPECIAL[(seed + row) % len(SPECIAL)]
            rows[row, -1] = SPECIAL[(seed + row // 2 + 3) % len(SPECIAL)]
    return x.to(dtype)


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """x's values (expanded: those of the first index) under other strides."""
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided":
        return torch.stack((x, torch.full_like(x, float("nan"))), -1).flatten(-2)[..., ::2]
    if layout == "expanded" and x.dim() > 1 and x.shape[0]:
        return x[:1].expand(x.shape)
    if layout == "unaligned":
        return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)
    return x


def beyond_one_unit(y: torch.Tensor, exact: torch.Tensor, slack: torch.Tensor | float = 0.0) -> torch.Tensor:
    """The float64 results that y is not within 1 unit in the last place of, plus slack. Results that y's dtype cannot hold are left out."""
    digits, smallest, largest = {
        torch.float16: (10, 2.0**-24, 65504.0),
        torch.bfloat16: (7, 2.0**-133, 3.38e38),
        torch.float32: (23, 2.0**-149, 3.4e38),
    }[y.dtype]
    unit = torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - 1 - digits).clamp_min(smallest)
    wrong = ~((y.cpu().double() - exact).abs() <= unit + slack) & (exact.abs() < largest)
    return exact[wrong]
