"""What the tests of GGUF formats share: inputs of every kind, blocks, and the `gguf` package as an oracle."""

from __future__ import annotations

import platform
from typing import NamedTuple

import gguf
import numpy as np
import torch

import scaled_mm as sm
from scaled_mm.gguf_formats import FORMATS


class Layout(NamedTuple):
    """A format, described again. Offsets in bytes from the start of a block, where d is; None: the format has no such field.

    oracle: the gguf package quantizes and dequantizes this format. Without it rule "ggml" and dequantizing have the tests by hand alone.
    """

    bytes: int
    bits: int
    levels: int
    zero: int | None = None
    fifth_bits: int | None = None
    minimum: int | None = None
    sum: int | None = None
    oracle: bool = True

    @property
    def halves(self) -> tuple[int, ...]:
        """Where float16 fields are: d, and m or s."""
        return (0, *(offset for offset in (self.minimum, self.sum) if offset is not None))


# Written without scaled_mm/gguf_formats.py. A name has no meaning here.
LAYOUTS = {
    "q4_0": Layout(18, bits=4, levels=2, zero=8),
    "q4_1": Layout(20, bits=4, levels=4, minimum=2),
    "q5_0": Layout(22, bits=5, levels=6, zero=16, fifth_bits=2),
    "q5_1": Layout(24, bits=5, levels=8, minimum=2, fifth_bits=4),
    "q8_0": Layout(34, bits=8, levels=2),
    "q8_1": Layout(36, bits=8, levels=4, sum=2, oracle=False),
}
ALL = tuple(FORMATS)
WEIGHTS = tuple(name for name in ALL if LAYOUTS[name].sum is None)
ORACLE_KNOWS = tuple(name for name in ALL if LAYOUTS[name].oracle)
WITH_ZERO = tuple(name for name in ALL if LAYOUTS[name].zero is not None)
WITH_MINIMUM = tuple(name for name in ALL if LAYOUTS[name].minimum is not None)
BLOCK_BYTES = {name: layout.bytes for name, layout in LAYOUTS.items()}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def exponents(shape: tuple[int, ...], low: int, high: int, generator: torch.Generator) -> torch.Tensor:
    """Powers of two, float64, so that the smallest are not lost before they are multiplied."""
    return torch.ldexp(torch.ones(shape, dtype=torch.float64), torch.randint(low, high, shape, generator=generator))


def distributions(seed: int = 0, rows: int = 48, k: int = 320) -> dict[str, torch.Tensor]:
    """float32 [rows, k] by name."""
    g = seeded(seed)
    normal = torch.randn(rows, k, generator=g)
    uniform = torch.rand(rows, k, generator=g)
    blocks = (rows, k // 32, 1)
    by_block = normal.double().view(rows, -1, 32)
    signs = torch.where(torch.rand(rows, k, generator=g) < 0.5, -1.0, 1.0)
    spikes = torch.where(torch.rand(rows, k, generator=g) < 0.02, 1000.0, 1.0)
    return {
        "normal": normal,
        "uniform": uniform,
        "negative": -uniform - 0.25,
        "outliers": normal * spikes,
        "cubed": normal**3,
        "integers": torch.randint(-20, 21, (rows, k), generator=g).float() + 0.0,
        "halves": torch.randint(-254, 255, (rows, k), generator=g).float() / 2 + 0.0,
        "two_values": signs * 3.0,
        "relu": torch.where(normal > 0, normal, 0.0),
        "one_value": (uniform[:, :1] - 0.5).expand(rows, k).contiguous(),
        "one_hot": torch.where(torch.arange(k) % 32 == 7, normal, 0.0) + 0.0,
        "zeros": torch.zeros(rows, k),
        "negative_zeros": -torch.zeros(rows, k),
        "every_magnitude": (by_block * exponents(blocks, -150, 127, g)).float().view(rows, k),
        "mixed_magnitudes": (normal.double() * exponents((rows, k), -40, 40, g)).float(),
        "denormals": (by_block * exponents(blocks, -150, -120, g)).float().view(rows, k),
        "denormal_scales_in_float16": (by_block * exponents(blocks, -32, -12, g)).float().view(rows, k),
        "overflow_of_float16": (by_block * exponents(blocks, 10, 26, g)).float().view(rows, k),
        "largest": signs * torch.finfo(torch.float32).max,
        "edges_of_float16": signs * (65500 + 0.25 * torch.arange(k)) * torch.tensor([7, 8, 15, 16, 31, 127.0])[torch.arange(rows) % 6, None],
    }


def not_finite(seed: int = 0, rows: int = 40, k: int = 320) -> torch.Tensor:
    """float32 [rows, k] with NaN and infinities of either sign in most blocks, and random bits in the last rows."""
    g = seeded(seed)
    x = torch.randn(rows, k, generator=g)
    for value, share in ((float("nan"), 0.01), (float("inf"), 0.02), (float("-inf"), 0.02)):
        x = torch.where(torch.rand(rows, k, generator=g) < share, value, x)
    bits = torch.randint(-(2**31), 2**31, (rows // 2, k), generator=g).to(torch.int32)
    return torch.cat((x[: rows // 2], bits.view(torch.float32)))


def gguf_type(fmt: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[fmt.upper()]


def gguf_quantize(x: torch.Tensor, fmt: str) -> torch.Tensor:
    """uint8 [..., K/32, bytes of a block]"""
    with np.errstate(all="ignore"):
        q = gguf.quants.quantize(x.float().numpy(), gguf_type(fmt))
    return torch.from_numpy(q).unflatten(-1, (-1, BLOCK_BYTES[fmt]))


def gguf_dequantize(q: torch.Tensor, fmt: str) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(q.flatten(-2).numpy(), gguf_type(fmt)))


# What becomes of an infinite level, C leaves open; on x86 the gguf package makes 0 of it, as the quantizers do everywhere.
ORACLE_KNOWS_INFINITE_LEVELS = platform.machine() in ("x86_64", "AMD64")


def differing_blocks(q: torch.Tensor, want: torch.Tensor, fmt: str) -> int:
    """How many blocks have other bytes. A NaN equals a NaN, whatever its bits."""
    assert q.shape == want.shape and q.dtype is want.dtype is torch.uint8
    q, want = q.cpu().clone(), want.clone()
    for offset in LAYOUTS[fmt].halves:
        for blocks in (q, want):
            half = blocks[..., offset : offset + 2].clone().view(torch.float16)
            blocks[..., offset : offset + 2] = torch.where(half.isnan(), torch.nan, half).view(torch.uint8)
    return int((q != want).any(-1).sum())


def random_blocks(rows: int, blocks: int, fmt: str, seed: int = 0, finite: bool = False) -> torch.Tensor:
    """Any bytes; with `finite`, halves between 2^-3 and 2 of either sign."""
    g = seeded(seed)
    q = torch.randint(0, 256, (rows, blocks, BLOCK_BYTES[fmt]), dtype=torch.uint8, generator=g)
    if finite:
        for offset in LAYOUTS[fmt].halves:
            half = (torch.rand(rows, blocks, 1, generator=g) + 0.125) * torch.where(torch.rand(rows, blocks, 1, generator=g) < 0.5, -1, 1)
            q[..., offset : offset + 2] = half.half().view(torch.uint8)
    return q


def planned_weight(weight: torch.Tensor | sm.PackedBlockWeight, fmt: str) -> sm.TensorDesc | sm.PackedBlockWeight:
    """What a descriptor is created with. Of blocks a TensorDesc that names their format: other formats may have as many bytes."""
    if isinstance(weight, sm.PackedBlockWeight):
        return weight
    return sm.TensorDesc((weight.shape[0], 32 * weight.shape[1]), fmt, (weight.stride(0), 1), sm.TensorDesc.of(weight).alignment)


def relative_error(out: torch.Tensor, want: torch.Tensor) -> float:
    """||out - want|| / ||want|| in float64."""
    assert out.shape == want.shape
    return ((out.double() - want).norm() / want.norm()).item()
