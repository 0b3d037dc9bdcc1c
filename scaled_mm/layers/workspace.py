"""What descriptors of several steps share: one workspace, and errors by the names of their own arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from scaled_mm.core import checks
from scaled_mm.errors import BadParamError, InsufficientWorkspaceError, ScaledMMError


def whole(size: int) -> int:
    """size, rounded up to what every operand may be aligned to."""
    return (size + 15) // 16 * 16


@contextlib.contextmanager
def renamed(names: dict[str, str]) -> Iterator[None]:
    """Errors that a step raises name the caller's arguments, also as the last word. `weight^T`: shapes in the message are those of the transpose."""
    try:
        yield
    except ScaledMMError as error:
        name, colon, rest = str(error).partition(":")
        before, overlap, other = rest.rpartition("got an overlap with ")
        if not colon or (name not in names and not (overlap and other in names)):
            raise
        rest = f"{before}{overlap}{names.get(other, other)}" if overlap else rest
        raise type(error)(f"{names.get(name, name)}:{rest}") from None


def workspace_bytes(workspace: torch.Tensor | None, size: int, device: torch.device, apart: dict[str, torch.Tensor | None]) -> torch.Tensor:
    """The workspace as bytes, at least `size`. apart: what it may not share memory with. None on a CPU: new memory."""
    if workspace is None and device.type == "cpu":
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    if not isinstance(workspace, torch.Tensor):
        raise BadParamError(f"workspace: expected a tensor of {size} bytes, got {type(workspace).__name__}")
    checks.check_device("workspace", workspace, device)
    if not checks.has_address(workspace) or workspace.is_quantized or workspace.is_neg() or workspace.is_conj():
        raise BadParamError(f"workspace: expected a tensor with plain memory, got a {type(workspace).__name__} of dtype {workspace.dtype}")
    if workspace.nbytes < size:
        raise InsufficientWorkspaceError(f"workspace: expected {size} bytes, got {workspace.nbytes}")
    if not workspace.is_contiguous() or workspace.data_ptr() % 16:
        raise BadParamError("workspace: expected a contiguous tensor aligned to 16 bytes, got another")
    for name, tensor in apart.items():
        if checks.has_address(tensor) and checks.overlap(workspace, tensor):
            raise BadParamError(f"workspace: expected memory apart from every tensor, got an overlap with {name}")
    return workspace.view(-1).view(torch.uint8)
