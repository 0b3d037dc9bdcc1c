"""Int8 weights with scales that a checkpoint can hold."""

from __future__ import annotations

import torch

from scaled_mm.rowwise.int8 import quantize_int8


@torch.no_grad()
def quantize_weight(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 [..., N, K], float32 scales [..., N, 1]) of a float weight [..., N, K], one scale for each output channel.

    dtype: of the model. Checkpoints store scales in that dtype, so the scale max|w| / 127 is rounded to it before the weight is quantized.
    """
    _, scale = quantize_int8(weight, "channel")
    rounded = scale.to(dtype).float()
    if dtype is torch.float16:  # its subnormals have few bits: a scale rounded down by more than 2^-8 would clip the largest weights
        rounded = torch.where(rounded < scale * (1 - 2.0**-8), rounded + 2.0**-24, rounded)
    q, scale = quantize_int8(weight, "channel", scale=rounded)
    return q, scale.transpose(-1, -2).contiguous()
