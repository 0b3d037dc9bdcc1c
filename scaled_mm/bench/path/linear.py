"""Linear layers: bfloat16 activations, int8 weights that rotate, and the calls of every implementation on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch

import scaled_mm as sm
from scaled_mm.bench.int8.inputs import OUT_DTYPE, WeightSets
from scaled_mm.bench.int8.suite import reference_product
from scaled_mm.bench.ours import our_handle
from scaled_mm.bench.path.cases import PathCase
from scaled_mm.bench.path.inputs import PathInputs, activations
from scaled_mm.bench.path.operators import Tensors
from scaled_mm.measure.roofline import linear_bytes, linear_us
from scaled_mm.measure.run import Options
from scaled_mm.rowwise import reference

VLLM_QUANTIZER, VLLM_PRODUCT = "dynamic_scaled_int8_quant", "cutlass_scaled_mm"
_CHUNK = 1 << 22  # elements that the reference quantizes at once


class LinearWeights(WeightSets):
    """R weights of one layer, also as `prepare_weight` makes them."""

    @cached_property
    def prepared(self) -> list[sm.PreparedWeight]:
        return [sm.prepare_weight(weight.t()) for weight in self.int8]


class LinearInputs(PathInputs):
    """x: bfloat16 [M, K], one set: the operator before it wrote it. out(i): bfloat16 [M, N], for implementations that write to given tensors."""

    def __init__(self, case: PathCase, weights: LinearWeights, generator: torch.Generator):
        super().__init__(case, weights, OUT_DTYPE)
        self.x = activations(case.M, case.K, self.device, generator)

    def ours(self, name: str) -> list[Callable[[], Tensors]]:
        x, weights, scales = self.x, self.weights.prepared, self.weights.scale
        return self.keep(name, lambda i: (sm.int8_linear(x, weights[i], scales[i]),))

    def described(self) -> dict[str, Callable[[], Tensors]]:
        """A descriptor's `calculate`, over outputs that exist already."""
        out, weight, scale = self.out(0), self.weights.prepared[0], self.weights.scale[0]
        operands = dict(out=out, x=self.x, weight=weight, weight_scale=scale)
        descriptor = sm.create_linear_descriptor(our_handle(self.device), **operands)
        workspace = torch.empty(descriptor.workspace_size, dtype=torch.uint8, device=self.device)

        def call() -> Tensors:
            descriptor.calculate(out, self.x, weight, scale, workspace=workspace)
            return (out,)

        return {"descriptor": call}

    def apart(self, name: str) -> list[Callable[[], Tensors]]:
        """The two calls that `int8_linear` stands for."""
        x, weights, scales = self.x, self.weights.prepared, self.weights.scale

        def run(i: int) -> Tensors:
            q, scale = sm.quantize_int8(x)
            return (sm.scaled_mm(q, weights[i], scale, scales[i], out_dtype=OUT_DTYPE),)

        return self.keep(name, run)

    def torch(self) -> list[Callable[[], Tensors]]:
        x, weights = self.x, self.weights.bf16

        def make(i: int) -> Callable[[], Tensors]:
            out, b = self.out(i), weights[i].t()
            return lambda: (torch.mm(x, b, out=out),)

        return self.calls(make)

    def vllm(self, packet: Callable[[str], Callable]) -> list[Callable[[], Tensors]]:
        quantize, product, x = packet(VLLM_QUANTIZER), packet(VLLM_PRODUCT), self.x
        q = torch.empty(x.shape, dtype=torch.int8, device=self.device)
        scale = torch.empty(self.case.M, 1, device=self.device)

        def make(i: int) -> Callable[[], Tensors]:
            out, b, b_scale = self.out(i), self.b(i), self.b_scale(i)

            def call() -> Tensors:
                quantize(q, x, scale, None)
                product(out, q, b, scale, b_scale, None)
                return (out,)

            return call

        return self.calls(make)

    def expected(self, options: Options) -> tuple[Tensors | None, torch.Tensor | None, str]:
        product, status = reference_product(self, options)
        return None if product is None else (product,), None, status

    def kernel(self) -> dict[str, str]:
        q = torch.empty(self.x.shape, dtype=torch.int8, device=self.device)
        scale = torch.empty(self.case.M, 1, device=self.device)
        operands = dict(a=q, b=self.weights.prepared[0], a_scale=scale, b_scale=self.b_scale(0))
        descriptor = sm.create_descriptor(our_handle(self.device), out=self.out(0), **operands)
        try:
            return {"kernel": str(descriptor.kernel.row), "reason": str(descriptor.kernel.reason)}
        finally:
            descriptor.destroy()

    @property
    def traffic_bytes(self) -> int:
        return linear_bytes(self.case.M, self.case.N, self.case.K)

    def roof_us(self, gpu: str) -> float | None:
        return linear_us(self.case.M, self.case.N, self.case.K, gpu)

    # ---- the operands of the product, as `reference_product` takes them

    @cached_property
    def _quantized(self) -> Tensors:
        rows = max(1, _CHUNK // self.case.K)
        pieces = [reference.token(piece) for piece in self.x.cpu().split(rows)]
        return tuple(torch.cat(same).to(self.device) for same in zip(*pieces, strict=True))

    @property
    def a(self) -> torch.Tensor:
        return self._quantized[0]

    @property
    def a_scale(self) -> torch.Tensor:
        return self._quantized[1]

    def b(self, i: int) -> torch.Tensor:
        return self.weights.int8[i].t()

    def b_scale(self, i: int) -> torch.Tensor:
        return self.weights.scale[i]
