"""Implementations of the INT8 product: ours, torch's, vLLM's and SGLang's."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from scaled_mm.bench.int8.cublaslt import CublasLt
from scaled_mm.bench.int8.inputs import FP8_STRETCH, OUT_DTYPE, Inputs, epilogue
from scaled_mm.bench.int8.libraries import SGL_LIB_VARIABLE, VLLM_LIB_VARIABLE, Sgl, Vllm
from scaled_mm.bench.ours import OurPeer, our_handle
from scaled_mm.measure.peer import Peer, TensorCall

OURS_WITH_TENSORS = "ours_tensor"
#: Other libraries' INT8 kernels with the same fused epilogue: the speed-up is over the better of these.
RIVALS = (Vllm.name, Sgl.name)


class Ours(OurPeer):
    """scaled_mm with prepared weights. With a forced tile configuration `name` is that one's."""

    label = "scaled_mm (this project), weights of sm.prepare_weight"
    int8 = True

    def weight(self, b: torch.Tensor):
        """What a call gets as b; on a CPU a prepared weight is nothing but sums that nobody reads here."""
        from scaled_mm import prepare_weight

        return prepare_weight(b) if b.is_cuda else b

    def create(self, inputs: Inputs):
        from scaled_mm import create_descriptor

        return create_descriptor(
            our_handle(inputs.device),
            out=inputs.out(0),
            a=inputs.a,
            b=self.weight(inputs.b(0)),
            a_scale=inputs.a_scale,
            b_scale=inputs.b_scale(0),
            kernel=self._kernel,
        )

    def call(self, descriptor, workspace: torch.Tensor | None, inputs: Inputs, i: int) -> TensorCall:
        a, a_scale = inputs.a, inputs.a_scale
        out, b, b_scale = inputs.out(i), self.weight(inputs.b(i)), inputs.b_scale(i)

        def call() -> torch.Tensor:
            descriptor.calculate(out, a, b, a_scale, b_scale, workspace=workspace)
            return out

        return call

    def overhead_calls(self, inputs: Inputs) -> dict[str, TensorCall]:
        from scaled_mm import scaled_mm

        out, a, b = inputs.out(0), inputs.a, self.weight(inputs.b(0))
        a_scale, b_scale = inputs.a_scale, inputs.b_scale(0)
        return {
            f"{self.name}: desc.calculate": self.prepare(inputs)[0],
            f"{self.name}: scaled_mm(out=)": lambda: scaled_mm(a, b, a_scale, b_scale, out_dtype=OUT_DTYPE, out=out),
            f"{self.name}: scaled_mm": lambda: scaled_mm(a, b, a_scale, b_scale, out_dtype=OUT_DTYPE),
        }


class OursWithTensors(Ours):
    """The same with ordinary tensors as weights: a kernel waits for the preceding one before it reads them."""

    label = "scaled_mm (this project), weights as ordinary tensors"
    devices = ("cuda",)

    def __init__(self):
        super().__init__(None, OURS_WITH_TENSORS)

    def weight(self, b: torch.Tensor):
        return b


class Bf16(Peer):
    """`torch.mm` of the dequantized matrices."""

    name, label, devices = "bf16", "torch.mm, bfloat16", ("cuda", "cpu")

    def prepare(self, inputs: Inputs) -> list[TensorCall]:
        a, weights = inputs.a_bf16, inputs.weights.bf16
        return inputs.calls(lambda i: _bind_out(torch.mm, a, weights[i].t(), out=inputs.out(i)))


class Fp32(Peer):
    """`torch.mm` in float32: what a CPU without bfloat16 units would run."""

    name, label, devices = "fp32", "torch.mm, float32", ("cpu",)

    def prepare(self, inputs: Inputs) -> list[TensorCall]:
        a, weights = inputs.a_fp32, inputs.weights.fp32
        outs = inputs.make_outputs(inputs.case.M, torch.float32)
        return inputs.calls(lambda i: _bind_out(torch.mm, a, weights[i].t(), out=outs[inputs.slot(i)]))

    def finish(self, output: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        return output.to(OUT_DTYPE)


class IntMM(Peer):
    """`torch._int_mm`: raw int32 accumulators, no epilogue; on CUDA it refuses M <= 16, so a is padded with rows."""

    name, label = "intmm", "torch._int_mm, int32 out, no epilogue"
    int8 = True

    MIN_M = 17  # torch's own limit on CUDA
    PADDED_M = 32

    def rows(self, M: int) -> int:
        """Rows that are multiplied in place of M."""
        return M if M >= self.MIN_M else self.PADDED_M

    def prepare(self, inputs: Inputs) -> list[TensorCall]:
        rows = self.rows(inputs.case.M)
        a = inputs.a
        if rows != inputs.case.M:
            a = a.repeat(-(-rows // inputs.case.M), 1)[:rows].contiguous()
        outs = inputs.make_outputs(rows, torch.int32)
        return inputs.calls(lambda i: _bind_out(torch._int_mm, a, inputs.b(i), out=outs[inputs.slot(i)]))

    def finish(self, output: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        return epilogue(output[: inputs.case.M], inputs, 0)

    def details(self, inputs: Inputs) -> dict[str, str]:
        rows = self.rows(inputs.case.M)
        return {} if rows == inputs.case.M else {"note": f"M padded to {rows}: torch._int_mm refuses M <= 16 on CUDA"}


class IntMMEpilogue(Peer):
    """`torch._int_mm` and the scales in separate operations: INT8 on a CPU without this project."""

    name, label, devices = "intmm_epilogue", "torch._int_mm, then the scales", ("cpu",)
    int8 = True

    def prepare(self, inputs: Inputs) -> list[TensorCall]:
        return inputs.keeping(lambda i: epilogue(torch._int_mm(inputs.a, inputs.b(i)), inputs, i))

    def details(self, inputs: Inputs) -> dict[str, str]:
        from scaled_mm.cpu.integer_product import int_mm_is_exact

        return {} if int_mm_is_exact() else {"note": "torch._int_mm saturates on this CPU: its results are not exact"}


class Fp8Row(Peer):
    """`torch._scaled_mm`: float8_e4m3fn operands, one scale per row of a and per column of b."""

    name, label = "fp8row", "torch._scaled_mm, float8_e4m3fn, row-wise"

    def available(self, device: torch.device) -> str | None:
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            return f"FP8 needs compute capability 8.9, this GPU has {capability[0]}.{capability[1]}"
        return None

    def prepare(self, inputs: Inputs) -> list[TensorCall]:
        a, a_scale, weights = inputs.a_fp8, inputs.a_fp8_scale, inputs.weights
        return inputs.calls(
            lambda i: _bind_out(
                torch._scaled_mm,
                a,
                weights.fp8[i].t(),
                scale_a=a_scale,
                scale_b=weights.fp8_scale[i],
                out_dtype=OUT_DTYPE,
                use_fast_accum=True,
                out=inputs.out(i),
            )
        )


class Fp8(Fp8Row):
    """`torch._scaled_mm` with one scale for each operand, for which cuBLASLt has kernels of their own."""

    name, label = "fp8", "torch._scaled_mm, float8_e4m3fn, one scale"

    def prepare(self, inputs: Inputs) -> list[TensorCall]:
        a, weights, scale = inputs.a_fp8, inputs.weights, torch.full((), 1 / FP8_STRETCH, device=inputs.device)
        return inputs.calls(
            lambda i: _bind_out(
                torch._scaled_mm, a, weights.fp8[i].t(), scale_a=scale, scale_b=scale, out_dtype=OUT_DTYPE, use_fast_accum=True, out=inputs.out(i)
            )
        )

    def finish(self, output: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        return epilogue(output, inputs, 0)  # applied afterwards; not part of the timed call


def every_peer(vllm_lib: str | None = None, sgl_lib: str | None = None) -> list[Peer]:
    """All peers but ours, which has one column besides; a library path falls back to its environment variable."""
    return [
        OursWithTensors(),
        Bf16(),
        Fp32(),
        IntMM(),
        IntMMEpilogue(),
        CublasLt(),
        Fp8Row(),
        Fp8(),
        Vllm(vllm_lib or os.environ.get(VLLM_LIB_VARIABLE) or None),
        Sgl(sgl_lib or os.environ.get(SGL_LIB_VARIABLE) or None),
    ]


def _bind_out(function: Callable, *args: torch.Tensor, out: torch.Tensor, **kwargs: object) -> TensorCall:
    return lambda: function(*args, out=out, **kwargs)
