"""Our GGUF products in each of their ways, and what one would do without them: dequantize, and a product of torch."""

from __future__ import annotations

import torch

from scaled_mm.bench import ours
from scaled_mm.bench.gguf.inputs import OUT_DTYPE, GgufInputs
from scaled_mm.bench.ours import OurPeer
from scaled_mm.gguf import dequantize_block
from scaled_mm.measure.peer import OURS, Peer, TensorCall

OURS_BF16 = "ours_bf16"
OURS_F32 = "ours_f32"
OURS_W4A8 = "ours_w4a8"
OURS_Q8_1 = "ours_q8_1"
BF16 = "bf16"

#: Of docs/design/gguf-formats.md: ||out - formula|| / ||formula|| where neither weights nor outputs round to 16 bits.
ERROR_BOUND = 2e-6
#: The bound where weights, activations or outputs round, by the dtype of the activations. They hold for normal data.
ROUNDED_BOUNDS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-11}


class OursGguf(OurPeer):
    """A descriptor of the product, a packed weight: what `block_linear` and `gemm_..._q8_1` run.

    activation: "float16", "bfloat16", "float32" or "q8_1", of `GgufInputs`; the outputs have its dtype, float32 for q8_1. mode: of the descriptor.
    bound: of the error.
    kernel: None for the tile table's choice, or the tile configuration of its section `gguf` to force.
    """

    def __init__(self, name: str, label: str, activation: str, mode: str, kernel: str | None = None):
        super().__init__(kernel, name)
        self.label, self._activation, self._mode = label, activation, mode
        self.out_dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(activation, OUT_DTYPE)
        self.bound = ROUNDED_BOUNDS[activation] if mode == "auto" else ERROR_BOUND

    def activation(self, inputs: GgufInputs) -> torch.Tensor:
        return getattr(inputs, self._activation)

    def quantizes(self, inputs: GgufInputs) -> bool:
        """Whether float activations are quantized to q8_1 in the call."""
        if self._activation == "q8_1":
            return False
        if self._mode == "auto" and self._activation != "float32":
            return auto_mode(inputs.device, inputs.case.M) == "w4a8"
        return self._mode == "w4a8"

    def out(self, inputs: GgufInputs, i: int) -> torch.Tensor:
        return inputs.out(i, self.out_dtype)

    def create(self, inputs: GgufInputs):
        from scaled_mm import create_block_descriptor

        return create_block_descriptor(
            ours.our_handle(inputs.device),
            out=self.out(inputs, 0).t(),
            weight=inputs.weights.packed[0],
            activation=self.activation(inputs),
            mode=self._mode,
            kernel=self._kernel,
        )

    def call(self, descriptor, workspace: torch.Tensor | None, inputs: GgufInputs, i: int) -> TensorCall:
        activation, out, weight = self.activation(inputs), self.out(inputs, i), inputs.weights.packed[i]
        turned = out.t()

        def call() -> torch.Tensor:
            descriptor.calculate(turned, weight, activation, workspace=workspace)
            return out

        return call


class Bf16(Peer):
    """A bfloat16 product with a weight that was dequantized once, and is kept: what a GPU would do without GGUF products."""

    name, label, rival = BF16, "torch.mm, bfloat16, of a weight that was dequantized once", True

    def prepare(self, inputs: GgufInputs) -> list[TensorCall]:
        x, weights = inputs.bfloat16, inputs.weights.bfloat16
        return inputs.calls(lambda i: lambda: torch.mm(x, weights[i].t(), out=inputs.out(i, torch.bfloat16)))


class Dequantized(Peer):
    """A float32 product with a weight that was dequantized once, and is kept."""

    name, label, devices = "mm", "torch.mm, float32, of a weight that was dequantized once", ("cpu",)

    def prepare(self, inputs: GgufInputs) -> list[TensorCall]:
        x, weights = inputs.float32, inputs.weights.dequantized
        return inputs.calls(lambda i: lambda: torch.mm(x, weights[i].t(), out=inputs.out(i)))


class DequantizeEachTime(Peer):
    """The same with the weight dequantized in every call."""

    name, label, devices = "dequantize_mm", "dequantize_block of the weight in every call, then torch.mm, float32", ("cpu",)

    def prepare(self, inputs: GgufInputs) -> list[TensorCall]:
        x, blocks, fmt = inputs.float32, inputs.weights.blocks, inputs.case.fmt
        return inputs.calls(lambda i: lambda: torch.mm(x, dequantize_block(blocks[i], fmt).t(), out=inputs.out(i)))


def every_peer(kernel: str | None = None) -> list[Peer]:
    """Ours in mode auto first, which always runs; then those that may be chosen by name."""
    return [
        OursGguf(OURS, "scaled_mm (this project), float16 activations and outputs, mode auto", "float16", "auto", kernel),
        OursGguf(OURS_BF16, "the same in bfloat16", "bfloat16", "auto", kernel),
        OursGguf(OURS_F32, "float32 activations and outputs, mode auto", "float32", "auto", kernel),
        OursGguf(OURS_W4A8, "float32 activations and outputs, quantized to q8_1 in the call", "float32", "w4a8", kernel),
        OursGguf(OURS_Q8_1, "q8_1 activations, quantized before, float32 outputs", "q8_1", "w4a8", kernel),
        Bf16(),
        Dequantized(),
        DequantizeEachTime(),
    ]


def auto_mode(device: torch.device, tokens: int) -> str:
    """What mode "auto" is for 16-bit activations and outputs: of the tile table on a GPU."""
    if device.type == "cpu":
        return "w4a16"
    rules = ours.table_of(device).gguf.auto
    return next(rule.mode for rule in rules if rule.m is None or tokens <= rule.m)
