"""This project's kernels as a peer: what every kind of product has in common."""

from __future__ import annotations

import functools
from typing import Any

import torch

from scaled_mm.errors import BadParamError, KernelNotFoundError, ScaledMMError
from scaled_mm.measure.environment import version_of
from scaled_mm.measure.peer import OURS, Peer, TensorCall
from scaled_mm.measure.rotation import RotatedOutputs


@functools.cache
def our_handle(device: torch.device):
    """The `scaled_mm.Handle` of a device, made once for all cases."""
    from scaled_mm import Handle

    return Handle(str(device))


def table_of(device: torch.device):
    """The `TileTable` that serves a GPU."""
    from scaled_mm.jit.dispatch import callable_table

    return callable_table(our_handle(device).arch)


def refuse_kernel(option: str, kernel: str, known: list[str]) -> None:
    """KernelNotFoundError for a tile configuration that is not in a table."""
    if kernel not in known:
        raise KernelNotFoundError(f"{option}: expected one of {', '.join(known)}, got {kernel!r}")


def refuse_cpu(option: str, device: torch.device) -> None:
    """BadParamError for an option that names tile configurations, on a CPU."""
    if device.type == "cpu":
        raise BadParamError(f"{option}: rows of a tile table are kernels for a GPU, the device is a CPU")


class OurPeer(Peer):
    """scaled_mm through a descriptor: one descriptor and one workspace a case, created before timing.

    kernel: None for the tile table's choice, or the tile configuration to force.
    """

    devices: tuple[str, ...] = ("cuda", "cpu")

    def __init__(self, kernel: str | None = None, name: str = OURS):
        self.name = name
        self._kernel = kernel
        self._descriptor = None

    def create(self, inputs: RotatedOutputs) -> Any:
        """The descriptor of a case."""
        raise NotImplementedError

    def call(self, descriptor: Any, workspace: torch.Tensor | None, inputs: RotatedOutputs, i: int) -> TensorCall:
        """A callable that calculates the product with weight set i."""
        raise NotImplementedError

    def available(self, device: torch.device) -> str | None:
        try:
            our_handle(device)
        except ScaledMMError as error:
            return f"{type(error).__name__}: {error}"
        return None

    def prepare(self, inputs: RotatedOutputs) -> list[TensorCall]:
        self.release()
        self._descriptor = descriptor = self.create(inputs)
        workspace = None
        if descriptor.workspace_size:
            workspace = torch.empty(descriptor.workspace_size, dtype=torch.uint8, device=inputs.device)
        return inputs.calls(lambda i: self.call(descriptor, workspace, inputs, i))

    def details(self, inputs: RotatedOutputs) -> dict[str, str]:
        choice = self._descriptor.kernel
        return {"kernel": str(choice.row), "reason": str(choice.reason)}

    def release(self) -> None:
        if self._descriptor is not None:
            self._descriptor.destroy()
            self._descriptor = None

    def version(self) -> str | None:
        return version_of("scaled_mm")  # None in a checkout that is not installed: the environment has the commit
