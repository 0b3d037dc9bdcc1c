"""Implementations: this package, Triton, torch in bfloat16."""

from __future__ import annotations

import importlib.util

import torch

import scaled_mm as sm
from scaled_mm.bench.block_scaled.inputs import BlockScaledInputs
from scaled_mm.bench.ours import OurPeer, our_handle
from scaled_mm.bench.triton.tiles import Config, align_one, configs
from scaled_mm.measure.device import multiprocessors
from scaled_mm.measure.environment import version_of
from scaled_mm.measure.peer import Peer, TensorCall

TRITON, BF16 = "triton", "bf16"


class Ours(OurPeer):
    """With a forced kernel config `name` is that one's."""

    label, int8 = "scaled_mm (this project): block_scaled_mm by a descriptor", True

    def create(self, inputs: BlockScaledInputs) -> sm.BlockScaledDescriptor:
        operands = dict(out=inputs.out(0), a=inputs.a, b=inputs.b(0), a_scale=inputs.a_scale, b_scale=inputs.b_scale(0))
        return sm.create_block_scaled_descriptor(our_handle(inputs.device), **operands, kernel=self._kernel)

    def call(self, descriptor: sm.BlockScaledDescriptor, workspace: torch.Tensor | None, inputs: BlockScaledInputs, i: int) -> TensorCall:
        out, operands = inputs.out(i), (inputs.a, inputs.b(i), inputs.a_scale, inputs.b_scale(i))

        def call() -> torch.Tensor:
            descriptor.calculate(out, *operands)
            return out

        return call


class Triton(Peer):
    """The best of its configurations, chosen by time before."""

    name, devices, int8, rival = TRITON, ("cuda",), True, True
    label = "a persistent block-scaled kernel in Triton, the best of its configurations"

    def available(self, device: torch.device) -> str | None:
        return None if importlib.util.find_spec("triton") else "triton is not installed"

    def prepare(self, inputs: BlockScaledInputs) -> list[TensorCall]:
        from scaled_mm.bench.triton import grouped

        sms, m, scale_of = multiprocessors(inputs.device), inputs.case.M, inputs.a_scale

        def call(config: Config, i: int) -> TensorCall:
            aligned, out = align_one(m, config.bm, inputs.device), inputs.out(i)
            weight, scale = inputs.weights.int8[i][None], inputs.weights.scale[i][None]
            return lambda compile_only=False: grouped.product(config, inputs.a, scale_of, weight, scale, aligned, out, 1, sms, compile_only)

        self._config = config = grouped.fastest(configs(m, True), lambda config: call(config, 0))
        return inputs.calls(lambda i: call(config, i))

    def details(self, inputs: BlockScaledInputs) -> dict[str, str]:
        return {"note": str(self._config)}

    def version(self) -> str | None:
        return version_of("triton")


class Bf16(Peer):
    """Of the dequantized matrices."""

    name, label, devices = BF16, "torch.mm, bfloat16", ("cuda", "cpu")

    def prepare(self, inputs: BlockScaledInputs) -> list[TensorCall]:
        weights = inputs.weights.bf16
        return inputs.calls(lambda i: _into(inputs.a_bf16, weights[i].t(), inputs.out(i)))


def _into(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> TensorCall:
    return lambda: torch.mm(a, b, out=out)


def every_peer() -> list[Peer]:
    """All but ours."""
    return [Triton(), Bf16()]
