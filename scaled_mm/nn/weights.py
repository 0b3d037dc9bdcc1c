"""What the int8 modules share: scales that stay float32."""

from __future__ import annotations

import torch


def wrong_int8(values: torch.Tensor) -> str | None:
    """What is wrong with values that are to become int8: None for integers from -128 to 127. Those on the meta device have no values."""
    if values.is_meta or values.dtype is torch.int8:
        return None
    wrong = values[~((values >= -128) & (values <= 127) & (values == values.to(torch.int64)))]
    return f"expected a value from -128 to 127, an integer, got {wrong[0].item()}" if wrong.numel() else None


class Float32Scales(torch.nn.Module):
    """A module whose `scales` stay float32 in `to(dtype)`, `half()` and the like, where casting would round them, and float16 could overflow or
    underflow."""

    scales: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()  # int8 parameters
    zero_points: tuple[str, ...] = ()  # int8 parameters, which checkpoints may hold in other dtypes

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs):
        """Copying would truncate a float weight to int8, and wrap a zero point; assigning would keep a scale's dtype."""
        state_dict = dict(state_dict)
        for name in self.weights:
            given = state_dict.get(f"{prefix}{name}")
            if isinstance(given, torch.Tensor) and given.dtype is not torch.int8:
                error_msgs.append(f"{prefix}{name}: expected int8, got {given.dtype}")
                del state_dict[f"{prefix}{name}"]
        for name in self.zero_points:
            given = state_dict.get(f"{prefix}{name}")
            if isinstance(given, torch.Tensor) and (wrong := wrong_int8(given)):
                error_msgs.append(f"{prefix}{name}: {wrong}")
                del state_dict[f"{prefix}{name}"]
            elif isinstance(given, torch.Tensor):
                state_dict[f"{prefix}{name}"] = given.to(torch.int8)
        for name in self.scales:
            if isinstance(state_dict.get(f"{prefix}{name}"), torch.Tensor):
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
