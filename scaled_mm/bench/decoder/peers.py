"""Implementations of a decoder layer: the modules of `scaled_mm.nn`, vLLM's operators, torch in bfloat16."""

from __future__ import annotations

import functools
import os

import torch

from scaled_mm.bench.decoder import plain
from scaled_mm.bench.decoder.inputs import DecoderInputs
from scaled_mm.bench.decoder.ours import DecoderLayer
from scaled_mm.bench.decoder.vllm import NAMES, OF_MIXTURES, VllmLayer
from scaled_mm.bench.int8.libraries import VLLM_LIB_VARIABLE, VllmLibrary
from scaled_mm.bench.ours import our_handle
from scaled_mm.errors import ScaledMMError
from scaled_mm.measure.environment import version_of
from scaled_mm.measure.peer import OURS, Peer, TensorCall

BF16, VLLM = "bf16", "vllm"


class Ours(Peer):
    """Outputs are allocated."""

    name, label, devices, int8 = OURS, "scaled_mm (this project): modules of scaled_mm.nn, sm.rope", ("cuda", "cpu"), True

    def available(self, device: torch.device) -> str | None:
        try:
            our_handle(device)
        except ScaledMMError as error:
            return f"{type(error).__name__}: {error}"
        return None

    def prepare(self, inputs: DecoderInputs) -> list[TensorCall]:
        layers = [DecoderLayer(inputs.case.model, weights) for weights in inputs.weights.layers]
        operands = inputs.x, inputs.residual, inputs.cos, inputs.sin
        for one in layers:
            one(*operands)  # prepares the weights, which no captured call can do
        return inputs.keep(lambda i: layers[i](*operands))

    def version(self) -> str | None:
        return version_of("scaled_mm")


class Vllm(VllmLibrary):
    label = "vLLM's operators (norm, quantizer, product, rope, activation), outputs preallocated; experts by a Triton kernel between them"

    def available(self, device: torch.device) -> str | None:
        reason = super().available(device)
        missing = [] if reason else [name for name in NAMES + OF_MIXTURES if not self.has(name)]
        return f"torch.ops.{self.namespace} has no {', no '.join(missing)}" if missing else reason

    def prepare(self, inputs: DecoderInputs) -> list[TensorCall]:
        return [VllmLayer(inputs, weights, self.packet).call for weights in inputs.weights.layers]


class Bf16(Peer):
    """Compiled anew for each case; on a CPU not compiled."""

    name, label, devices = BF16, "torch in bfloat16, torch.compile(fullgraph=True, dynamic=False)", ("cuda", "cpu")

    def prepare(self, inputs: DecoderInputs) -> list[TensorCall]:
        function = functools.partial(plain.layer, inputs.case.model)
        if inputs.device.type == "cuda":
            torch._dynamo.reset()  # or the cases count as recompilations of one function, whose number is limited
            function = torch.compile(function, fullgraph=True, dynamic=False)
        operands, weights = (inputs.x, inputs.residual, inputs.cos, inputs.sin), inputs.weights.bf16
        return inputs.keeping(lambda i: function(*operands, **weights[i]))


def every_peer(vllm_lib: str | None = None) -> list[Peer]:
    """All implementations but `Ours`; a library path falls back to its environment variable."""
    return [Vllm(vllm_lib or os.environ.get(VLLM_LIB_VARIABLE) or None), Bf16()]
