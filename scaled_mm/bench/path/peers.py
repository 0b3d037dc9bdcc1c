"""Implementations of the path: ours, ours in two calls, torch's, vLLM's. The inputs know the calls; a peer says which parts it has."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from scaled_mm.bench.int8.libraries import VLLM_LIB_VARIABLE, VllmLibrary
from scaled_mm.bench.ours import our_handle
from scaled_mm.bench.path.cases import LINEARS
from scaled_mm.bench.path.inputs import PathInputs
from scaled_mm.bench.path.linear import VLLM_PRODUCT, VLLM_QUANTIZER, LinearInputs
from scaled_mm.bench.path.operators import OPERATORS
from scaled_mm.bench.path.record import Lacking
from scaled_mm.errors import ScaledMMError
from scaled_mm.measure.environment import version_of
from scaled_mm.measure.peer import OURS, Peer, TensorCall

APART, TORCH, VLLM = "apart", "torch", "vllm"
OURS_ALL = (OURS, APART)


class PathPeer(Peer):
    devices = ("cuda", "cpu")

    def lacks(self, part: str) -> str | None:
        """Why it does not run a part though it could; None where it runs. "" where there is nothing to run."""
        return None


class Ours(PathPeer):
    """`int8_linear`, or the row-wise operator, as users call it: outputs are allocated."""

    name, label, int8 = OURS, "scaled_mm (this project): int8_linear with sm.prepare_weight, or the row-wise operator", True

    def available(self, device: torch.device) -> str | None:
        try:
            our_handle(device)
        except ScaledMMError as error:
            return f"{type(error).__name__}: {error}"
        return None

    def prepare(self, inputs: PathInputs) -> list[TensorCall]:
        return inputs.ours(self.name)

    def overhead_calls(self, inputs: PathInputs) -> dict[str, TensorCall]:
        """Also the descriptor of a linear layer."""
        described = inputs.described() if self.name == OURS and isinstance(inputs, LinearInputs) else {}
        return super().overhead_calls(inputs) | described

    def details(self, inputs: PathInputs) -> dict[str, str]:
        return inputs.kernel()

    def version(self) -> str | None:
        return version_of("scaled_mm")


class Apart(Ours):
    """The two calls behind a linear layer."""

    name, label = APART, "scaled_mm (this project): quantize_int8, then scaled_mm"

    def lacks(self, part: str) -> str | None:
        return None if part in LINEARS else ""

    def prepare(self, inputs: PathInputs) -> list[TensorCall]:
        return inputs.apart(self.name)


class Torch(PathPeer):
    """torch.mm in bfloat16, or torch's plain operators, where it has some."""

    name, label = TORCH, "torch, bfloat16: torch.mm; x + residual and rms_norm; silu and a product"

    def lacks(self, part: str) -> str | None:
        return None if part in LINEARS or OPERATORS[part].torch is not None else ""

    def prepare(self, inputs: PathInputs) -> list[TensorCall]:
        return inputs.torch()


class Vllm(VllmLibrary, PathPeer):
    """vLLM's operators over outputs that exist already; a linear layer is its quantizer and its product."""

    devices = ("cuda",)
    label = f"vLLM: {VLLM_QUANTIZER} and {VLLM_PRODUCT}, or the row-wise operator, outputs preallocated"

    def lacks(self, part: str) -> str | None:
        names = (VLLM_QUANTIZER, VLLM_PRODUCT) if part in LINEARS else (OPERATORS[part].vllm,)
        missing = [name for name in names if not self.has(name)]
        return f"torch.ops.{self.namespace} has no {' and no '.join(missing)}" if missing else None

    def prepare(self, inputs: PathInputs) -> list[TensorCall]:
        return inputs.vllm(self.packet)


def every_peer(vllm_lib: str | None = None) -> list[PathPeer]:
    """All peers but ours; a library path falls back to its environment variable."""
    return [Apart(), Torch(), Vllm(vllm_lib or os.environ.get(VLLM_LIB_VARIABLE) or None)]


def serving(peers: Iterable[PathPeer], part: str) -> list[PathPeer]:
    """Those that run a part."""
    return [peer for peer in peers if peer.lacks(part) is None]


def lacking(peers: Iterable[PathPeer], parts: Iterable[str]) -> list[Lacking]:
    """What implementations that run lack, for the record."""
    found = [(peer.name, part, peer.lacks(part)) for peer in peers for part in parts]
    return [Lacking(implementation=name, part=part, why=why) for name, part, why in found if why]
