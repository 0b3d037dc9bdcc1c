"""What the int8 modules share: scales that stay float32."""

from __future__ import annotations

import torch


class Float32Scales(torch.nn.Module):
    """A module whose `scales` stay float32 in `to(dtype)`, `half()` and the like, which would round them, or overflow, in float16."""

    scales: tuple[str, ...] = ()

    def _apply(self, fn, recurse: bool = True):
        before = {name: scale.detach() for name in self.scales if (scale := getattr(self, name)) is not None}  # `_apply` writes to the parameter
        super()._apply(fn, recurse)
        for name, scale in before.items():
            after = getattr(self, name)
            if after.dtype is not torch.float32:
                setattr(self, name, torch.nn.Parameter(scale.to(after.device), requires_grad=False))
        return self
