"""`QuantizedActivation`: an input that is quantized once for all layers that read it."""

from __future__ import annotations

import torch


class QuantizedActivation:
    """int8 values and their scales in place of a float tensor [..., K]. It has a shape, dtype and device like a tensor; `Int8Linear` takes it.

    q: int8 [..., K]. scale: float32, [..., 1] of each row, or one value. zero_point: int8 or int32, one value, or None. dtype: of the outputs of the
    layers that read it.
    """

    def __init__(self, q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, zero_point: torch.Tensor | None = None):
        self.q, self.scale, self.dtype, self.zero_point = q, scale, dtype, zero_point

    @property
    def shape(self) -> torch.Size:
        return self.q.shape

    @property
    def device(self) -> torch.device:
        return self.q.device
