"""What the tests of K-quants share: super-blocks of random bytes and of normal weights, and their fields read again, one by one."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from gguf_data import seeded

# Described again, without scaled_mm/gguf_k_quants.py: bytes of a super-block, and the format to which it converts.
K_QUANTS = {"q4_k": (144, "q4_1"), "q5_k": (176, "q5_1"), "q6_k": (210, None)}
CONVERTIBLE = {name: target for name, (_, target) in K_QUANTS.items() if target}
HALVES = {"q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}  # offsets of float16 fields


def random_super_blocks(rows: int, blocks: int, fmt: str, seed: int = 0, finite: bool = False) -> torch.Tensor:
    """Any bytes; with `finite`, halves between 2^-3 and 2 of either sign."""
    g = seeded(seed)
    q = torch.randint(0, 256, (rows, blocks, K_QUANTS[fmt][0]), dtype=torch.uint8, generator=g)
    for offset in HALVES[fmt] if finite else ():
        half = (torch.rand(rows, blocks, 1, generator=g) + 0.125) * torch.where(torch.rand(rows, blocks, 1, generator=g) < 0.5, -1, 1)
        q[..., offset : offset + 2] = half.half().view(torch.uint8)
    return q


def gguf_dequantize(q: torch.Tensor, fmt: str) -> torch.Tensor:
    """The gguf package's values: float32 [..., K]."""
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(q.flatten(-2).numpy(), gguf.GGMLQuantizationType[fmt.upper()]))


def six_bits(packed: np.ndarray, j: int) -> tuple[int, int]:
    """(scale, minimum) number j = 0..7 of the 12 bytes of one super-block."""
    byte = [int(value) for value in packed]
    if j < 4:
        return byte[j] % 64, byte[j + 4] % 64
    return byte[j + 4] % 16 + 16 * (byte[j - 4] // 64), byte[j + 4] // 16 + 16 * (byte[j] // 64)


def fields(block: np.ndarray, fmt: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(d * scale, dmin * minimum, levels): float64 [8], float64 [8] and uint8 [8, 32], of one super-block of q4_k or q5_k."""
    d, dmin = block[:4].copy().view(np.float16).astype(np.float64)
    numbers = np.array([six_bits(block[4:16], j) for j in range(8)], dtype=np.float64)
    low, levels = block[-128:].reshape(4, 32), np.zeros((8, 32), dtype=np.uint8)
    for j in range(8):
        levels[j] = low[j // 2] // 16 if j % 2 else low[j // 2] % 16
        if fmt == "q5_k":
            levels[j] += 16 * (block[16:48] // 2**j % 2)
    return d * numbers[:, 0], dmin * numbers[:, 1], levels


def quantize(x: torch.Tensor, fmt: str) -> torch.Tensor:
    """float32 [..., K] to super-blocks, with the range of each 32 values (q6_k: 16), without llama.cpp's search for better scales.

    The gguf package does not quantize to K-quants. These have the distribution of a real file's levels, scales and minima.
    """
    if fmt == "q6_k":
        groups = x.unflatten(-1, (-1, 16, 16))
        scale = groups.abs().amax(-1) / 31
        d = (scale.amax(-1, keepdim=True) / 127).half()
        scales = (scale / d.float()).round()
        levels = (groups / (d.float() * scales).unsqueeze(-1)).round().clamp(-32, 31).to(torch.int64) + 32
        levels = levels.flatten(-2).unflatten(-1, (2, 4, 32))
        low = (levels[..., :2, :] % 16 + levels[..., 2:, :] % 16 * 16).flatten(-3)
        high = (levels // 16 * torch.tensor([1, 4, 16, 64]).unsqueeze(-1)).sum(-2).flatten(-2)
        return torch.cat((low.to(torch.uint8), high.to(torch.uint8), scales.to(torch.uint8), d.view(torch.uint8)), -1)
    bits = int(fmt[1])
    groups = x.unflatten(-1, (-1, 8, 32))
    least = groups.amin(-1).clamp(max=0)
    scale = (groups.amax(-1) - least) / (2**bits - 1)
    d, dmin = (scale.amax(-1, keepdim=True) / 63).half(), (-least.amin(-1, keepdim=True) / 63).half()
    scales, minima = ((part / factor.float()).nan_to_num(0.0).round().clamp(0, 63) for part, factor in ((scale, d), (-least, dmin)))
    levels = (groups + (dmin.float() * minima).unsqueeze(-1)) / (d.float() * scales).unsqueeze(-1)
    levels = levels.round().clamp(0, 2**bits - 1).to(torch.int64)
    s, m = scales.to(torch.int64), minima.to(torch.int64)
    numbers = torch.cat((s[..., :4] + s[..., 4:] // 16 * 64, m[..., :4] + m[..., 4:] // 16 * 64, s[..., 4:] % 16 + m[..., 4:] % 16 * 16), -1)
    pairs = (levels % 16).unflatten(-2, (4, 2))
    low = (pairs[..., 0, :] + pairs[..., 1, :] * 16).flatten(-2)
    fifth = (levels // 16 * (2 ** torch.arange(8)).unsqueeze(-1)).sum(-2)
    parts = (numbers, *((fifth,) if bits == 5 else ()), low)
    return torch.cat((d.view(torch.uint8), dmin.view(torch.uint8), *(part.to(torch.uint8) for part in parts)), -1)
