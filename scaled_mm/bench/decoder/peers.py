"""Implementations of a decoder layer: the modules of `scaled_mm.nn`, vLLM's operators, torch in bfloat16."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import torch

from scaled_mm.bench.decoder import plain
from scaled_mm.bench.decoder.inputs import DecoderInputs
from scaled_mm.bench.decoder.ours import DecoderLayer
from scaled_mm.bench.decoder.vllm import NAMES, OF_MIXTURES, VllmLayer, configurations
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
        return inputs.keep(self.name, lambda i: layers[i](*operands))

    def version(self) -> str | None:
        return version_of("scaled_mm")


class Vllm(VllmLibrary):
    """Operators of vLLM's two libraries: that for experts lies beside the other."""

    label = "vLLM's operators (norm, quantizer, product, rope, activation, router), outputs preallocated; experts by a Triton kernel between them"
    of_experts = "_moe_C"

    def available(self, device: torch.device) -> str | None:
        reason = super().available(device)
        if reason is None and (path := self._beside()) is not None:
            torch.ops.load_library(str(path))
        missing = [] if reason else [name for name in NAMES if not self.has(name)]
        return f"torch.ops.{self.namespace} has no {', no '.join(missing)}" if missing else reason

    def _beside(self) -> Path | None:
        if self._path:
            found = [Path(self._path).with_name(Path(self._path).name.replace("_C", self.of_experts, 1))]
        else:
            spec = importlib.util.find_spec(self.package)
            found = sorted(Path(next(iter(spec.submodule_search_locations))).glob(f"{self.of_experts}*.so"))
        return next((path for path in found if path.is_file()), None)

    def prepare(self, inputs: DecoderInputs) -> list[TensorCall]:
        mixture = inputs.case.model.experts > 0
        op = {name: self._operator(name) for name in (NAMES + OF_MIXTURES if mixture else NAMES)}
        self._configs = configs = configurations(inputs) if mixture else None
        return [VllmLayer(inputs, i, op, configs).call for i in range(inputs.weights.sets)]

    def _operator(self, name: str) -> Callable:
        """RuntimeError without it."""
        for namespace in (self.namespace, self.of_experts):
            if (packet := getattr(getattr(torch.ops, namespace), name, None)) is not None:
                return packet.default
        raise RuntimeError(f"torch.ops.{self.namespace} and torch.ops.{self.of_experts} have no {name}")

    def details(self, inputs: DecoderInputs) -> dict[str, str]:
        return {} if self._configs is None else {"note": f"Triton: {self._configs[0]} and {self._configs[1]}"}


class Bf16(Peer):
    """Compiled anew for each case; on a CPU not compiled."""

    name, label, devices = BF16, "torch in bfloat16, on a GPU by torch.compile(fullgraph=True, dynamic=False) in its default mode", ("cuda", "cpu")

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
