"""An implementation that is timed, behind one small interface.

A peer says why it cannot run (`available`), turns a case's inputs into callables (`prepare`) and brings its output to
the product that all are compared by (`finish`). What it raises on a case belongs to the record of that case.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from scaled_mm.measure.record import Implementation
from scaled_mm.measure.rotation import RotatedOutputs

TensorCall = Callable[[], torch.Tensor]

OURS = "ours"


class Peer:
    """One implementation. devices: where it exists. int8: whether it reads the INT8 inputs themselves. rival: whether the speed-up is over it."""

    name: str
    label: str
    devices: tuple[str, ...] = ("cuda",)
    int8 = False
    rival = False

    def available(self, device: torch.device) -> str | None:
        """None when it can run on `device`, else the reason why not."""
        return None

    def prepare(self, inputs: RotatedOutputs) -> list[TensorCall]:
        """One zero-argument callable per weight set; each enqueues one product and returns its raw output tensor.

        Compiling, allocating and validating happen here, not in the callables.
        """
        raise NotImplementedError

    def finish(self, output: torch.Tensor, inputs: RotatedOutputs) -> torch.Tensor:
        """The product [M, N] of set 0, in the dtype of the shared outputs, from what its callable returned."""
        return output

    def overhead_calls(self, inputs: RotatedOutputs) -> dict[str, TensorCall]:
        """Label -> callable, for the host overhead of one call."""
        return {self.name: self.prepare(inputs)[0]}

    def details(self, inputs: RotatedOutputs) -> dict[str, str]:
        """What a reader of this case's result must know: `note`, `kernel`, `reason`."""
        return {}

    def release(self) -> None:
        """Frees what `prepare` made beyond the callables."""

    def version(self) -> str | None:
        """The version of the library behind it; None when it cannot be told."""
        return torch.__version__

    def library(self) -> str | None:
        """Name, size and digest of a library that was loaded from a given path."""
        return None


def implementations(peers: list[Peer], device: torch.device) -> list[Implementation]:
    """Asks every peer whether it can run here."""
    return [
        Implementation(
            name=peer.name,
            label=peer.label,
            int8=peer.int8,
            rival=peer.rival,
            unavailable=peer.available(device),
            version=peer.version(),
            library=peer.library(),
        )
        for peer in peers
    ]


def select(text: str, device: torch.device, peers: list[Peer]) -> list[Peer]:
    """`all`, `none` or a comma list of names -> the peers of this kind of device, in their own order.

    Raises ValueError for a name that is unknown or belongs to another kind of device.
    """
    here = [peer for peer in peers if device.type in peer.devices]
    if text in ("all", "none"):
        return here if text == "all" else []
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in {peer.name for peer in here}:
            known = ", ".join(peer.name for peer in here)
            raise ValueError(f"unknown peer {name!r} on {device.type}: expected all, none, or some of {known}")
    return [peer for peer in here if peer.name in names]
