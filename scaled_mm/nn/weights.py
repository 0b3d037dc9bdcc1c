"""What the int8 modules share: scales that stay float32."""

from __future__ import annotations

import torch


class Float32Scales(torch.nn.Module):
    """A module whose `scales` stay float32 in `to(dtype)`, `half()` and the like, where casting would round them, and float16 could overflow or
    underflow."""

    scales: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()  # int8 parameters

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs):
        """Copying would truncate a float weight to int8, and assigning would keep a scale's dtype."""
        state_dict = dict(state_dict)
        for name in self.weights:
            given = state_dict.get(f"{prefix}{name}")
            if given is not None and given.dtype is not torch.int8:
                error_msgs.append(f"{prefix}{name}: expected int8, got {given.dtype}")
                del state_dict[f"{prefix}{name}"]
        for name in self.scales:
            if f"{prefix}{name}" in state_dict:
                state_dict[f"{prefix}{name}"] = state_dict[f"{prefix}{name}"].float()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def _apply(self, fn, recurse: bool = True):
        before = {name: scale.detach() for name in self.scales if (scale := getattr(self, name)) is not None}  # `_apply` writes to the parameter
        super()._apply(fn, recurse)
        for name, scale in before.items():
            after = getattr(self, name)
            if after.dtype is not torch.float32:
                setattr(self, name, torch.nn.Parameter(scale.to(after.device), requires_grad=False))
        return self
