"""What every entry point asks of a tensor by itself, before anything is computed, and what it tells autograd afterwards."""

from __future__ import annotations

import torch

from scaled_mm.errors import BadParamError

PLAIN = (torch.Tensor, torch.nn.Parameter)  # types of tensors that do not act for others


def is_strided(tensor: torch.Tensor) -> bool:
    """Whether it is plain memory with strides: not sparse, not nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def not_strided(name: str, tensor: torch.Tensor) -> BadParamError:
    got = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
    return BadParamError(f"{name}: expected a strided tensor, got {got}")


def check_strided(name: str, tensor: object) -> None:
    """BadParamError unless it is a tensor, and a strided one."""
    if not isinstance(tensor, torch.Tensor):
        raise BadParamError(f"{name}: expected a tensor, got {'None' if tensor is None else type(tensor).__name__}")
    if not is_strided(tensor):
        raise not_strided(name, tensor)


def device(name: object) -> torch.device:
    """The torch.device of an argument `device`; BadParamError for what names none."""
    try:
        return torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise BadParamError(f"device: expected a device such as cuda:0 or cpu, got {name!r}") from error


def check_out(out: torch.Tensor) -> None:
    """BadParamError for an output that torch would not write to either: one that autograd watches, of inference mode, lazily negated."""
    if not isinstance(out, torch.Tensor):
        return  # refused where its dtype and shape are looked at
    if out.requires_grad:
        raise BadParamError("out: expected a tensor that requires no gradient, got one that does")
    if torch.compiler.is_compiling():
        return  # the compiler has no tensors of inference mode, and cannot ask for them
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise BadParamError("out: expected a tensor made outside of inference mode, got one made inside, which is not written outside of it")
    if out.is_neg():
        raise BadParamError("out: expected a tensor that is not lazily negated, got one whose is_neg() is true")


def mark_written(out: torch.Tensor) -> None:
    """Tell autograd that a tensor it may have kept has changed: operators below torch do not. One of inference mode it never keeps."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
