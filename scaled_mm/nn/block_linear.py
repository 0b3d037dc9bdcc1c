"""`BlockLinear`: a linear layer with a weight in a GGUF format."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from scaled_mm.core.binding import GGUF_MODES
from scaled_mm.core.checks import check_device
from scaled_mm.errors import BadParamError, BadTensorDtypeError, BadTensorShapeError
from scaled_mm.gguf.layout import Parts
from scaled_mm.gguf.linear import block_linear
from scaled_mm.gguf.pack import PackedBlockWeight, pack_block_weight
from scaled_mm.gguf_formats import BLOCK, lookup_weight

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_BUFFERS = tuple(f"weight_{name}" for name in ("tiles", *Parts._fields))  # which of them a layer has depends on device and format


class BlockLinear(torch.nn.Module):
    """y = x W^T + bias with a packed weight in a GGUF format, in place of `torch.nn.Linear`.

    fmt: the format's name. bias: float [N], or None. mode: of `block_linear`; may be changed at any time.
    packed: the weight [N, K] as `block_linear` takes it. Its tensors are buffers, the only copy of the weight, in the layout of the layer's device:
        moving the layer packs the weight again. Casts (`half()`, `to(dtype)`) change the bias only.

    forward(x): x float16, bfloat16 or float32 [..., K], y [..., N] in x's dtype, bit-identical to `block_linear`. No gradient.
    state_dict: "weight" is the GGUF blocks, uint8 [N, K/32, bytes of a block], on any device; "bias" as in `torch.nn.Linear`. Both pickling and
    copying go through the blocks. `load_state_dict` makes new buffers, so a captured CUDA graph must be captured again.
    Raises a ScaledMMError subclass that names the argument.
    """

    def __init__(self, in_features: int, out_features: int, fmt: str, bias: bool = True, *, mode: str = "auto", device=None, dtype=torch.float32):
        """A weight of zero bytes, for `load_state_dict`. in_features: a multiple of 32. dtype: of the bias, which is uninitialized."""
        super().__init__()
        description = lookup_weight(fmt)
        if isinstance(in_features, bool) or not isinstance(in_features, int) or in_features < 0 or in_features % BLOCK:
            raise BadParamError(f"in_features: expected a multiple of {BLOCK}, got {in_features!r}")
        if isinstance(out_features, bool) or not isinstance(out_features, int) or out_features < 0:
            raise BadParamError(f"out_features: expected an integer of 0 or more, got {out_features!r}")
        if dtype not in _FLOATS:
            raise BadTensorDtypeError(f"dtype: expected float16, bfloat16 or float32, got {dtype}")
        if mode not in GGUF_MODES:
            raise BadParamError(f"mode: expected one of {', '.join(map(repr, GGUF_MODES))}, got {mode!r}")
        self.in_features, self.out_features, self.fmt, self.mode = in_features, out_features, fmt, mode
        self.bias = torch.nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), requires_grad=False) if bias else None
        shape = out_features, in_features // BLOCK, description.block_bytes
        self._hold(pack_block_weight(torch.zeros(shape, dtype=torch.uint8, device=device), fmt))

    @classmethod
    def from_blocks(cls, q: torch.Tensor, fmt: str, bias: torch.Tensor | None = None, *, mode: str = "auto") -> BlockLinear:
        """A layer of GGUF blocks, packed on their device.

        q: uint8 [N, K/32, bytes of a block], the blocks of a row contiguous; it is copied. fmt: a format of `pack_block_weight`. K-quants,
            [N, K/256, bytes of a super-block], are converted: the layer has the format of the result.
        bias: float16, bfloat16 or float32 [N] on q's device, not copied, or None.
        Raises BadParamError, BadTensorDtypeError, BadTensorShapeError, BadTensorStridesError or BadTensorDeviceError that names the argument.
        """
        packed = pack_block_weight(q, fmt)
        if bias is not None and (not isinstance(bias, torch.Tensor) or bias.dtype not in _FLOATS):
            got = bias.dtype if isinstance(bias, torch.Tensor) else type(bias).__name__
            raise BadTensorDtypeError(f"bias: expected float16, bfloat16 or float32, got {got}")
        if bias is not None:
            check_device("bias", bias, packed.device)
        if bias is not None and bias.shape != (packed.rows,):
            raise BadTensorShapeError(f"bias: expected [{packed.rows}], got {list(bias.shape)}")
        layer = cls(packed.k, packed.rows, packed.fmt, False, mode=mode, device="meta")
        layer._hold(packed)
        if bias is not None:
            layer.bias = torch.nn.Parameter(bias.detach(), requires_grad=False)
        return layer

    @property
    def packed(self) -> PackedBlockWeight:
        """The weight, for `block_linear`. After a write to the buffers it is not `constant`; a compiled layer does not notice such writes."""
        tiles = self._packed.tiles
        if self._packed.constant and _version(tiles) != self._packed_version:
            self._packed = dataclasses.replace(self._packed)
        return self._packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias if self.bias is None or self.bias.dtype in (x.dtype, torch.float32) else self.bias.float()
        return block_linear(x, self._packed if torch.compiler.is_compiling() else self.packed, bias, mode=self.mode)

    def _hold(self, packed: PackedBlockWeight) -> None:
        self._packed, self._packed_version = packed, _version(packed.tiles)
        parts = packed.fields._asdict() if packed.tiles is None else {"tiles": packed.tiles}
        for name in set(_BUFFERS) & set(self._buffers):
            delattr(self, name)
        for name, part in parts.items():
            if part is not None:
                self.register_buffer(f"weight_{name}", part, persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> BlockLinear:
        """Packs again on another device. On the same one, fn sees bytes, which it cannot cast."""
        packed = self._packed
        held = {name: self._buffers.pop(name) for name in _BUFFERS if name in self._buffers}
        try:
            super()._apply(fn, recurse)  # the bias
        finally:
            self._buffers.update(held)
        if fn(torch.empty(0, dtype=torch.uint8, device=packed.device)).device != packed.device:
            self._hold(pack_block_weight(fn(packed.unpack()), packed.fmt))
            return self
        moved = {name: _bytes_of(fn(part.view(torch.uint8)), part) for name, part in held.items()}
        if any(new.data_ptr() != part.data_ptr() for new, part in zip(moved.values(), held.values())):
            typed = {name.removeprefix("weight_"): new.view(held[name].dtype) for name, new in moved.items()}
            fields = None if packed.fields is None else packed.fields._replace(**typed)
            self._hold(PackedBlockWeight(packed.fmt, packed.rows, packed.k, typed.get("tiles"), fields))
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[f"{prefix}weight"] = self._packed.unpack()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs):
        state_dict, key, packed = dict(state_dict), f"{prefix}weight", self._packed
        blocks = state_dict.pop(key, None)
        expected = [packed.rows, packed.k // BLOCK, lookup_weight(self.fmt).block_bytes]
        if blocks is None:
            missing_keys.extend([key] if strict else [])
        elif not isinstance(blocks, torch.Tensor) or blocks.layout is not torch.strided:
            error_msgs.append(f"{key}: expected {self.fmt} blocks, uint8 {expected}, got a {type(blocks).__name__} that is no dense tensor")
        elif blocks.dtype is not torch.uint8 or list(blocks.shape) != expected:
            error_msgs.append(f"{key}: expected {self.fmt} blocks, uint8 {expected}, got {blocks.dtype} {list(blocks.shape)}")
        else:
            device = blocks.device if local_metadata.get("assign_to_params_buffers") else packed.device
            self._hold(pack_block_weight(blocks.detach().to(device).contiguous(), self.fmt))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def __getstate__(self) -> dict:
        buffers = {name: buffer for name, buffer in self._buffers.items() if name not in _BUFFERS}
        return {**self.__dict__, "_buffers": buffers, "_packed": self._packed.unpack(), "_packed_version": None}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._non_persistent_buffers_set = set(self._non_persistent_buffers_set)  # not shared with a module that copy.copy copied
        self._hold(pack_block_weight(state["_packed"], state["fmt"]))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, fmt={self.fmt}, bias={self.bias is not None}, mode={self.mode}"


def _bytes_of(new: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """What a function of modules made of a part's bytes; the bytes themselves if it made another dtype of them."""
    return new if new.dtype is torch.uint8 else part.view(torch.uint8)


def _version(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version
