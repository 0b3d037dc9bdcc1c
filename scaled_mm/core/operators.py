"""`Product`: the torch operators of a kind of product, made from its `ProductSpec`, and the function that calls them."""

from __future__ import annotations

import functools

import torch
from torch._subclasses.fake_tensor import FakeTensor

from scaled_mm.core import checks, fast
from scaled_mm.core.dispatcher import TAGS, common_device, define, load_cuda_operators, runs_on_cuda, trace_device, typed_error
from scaled_mm.core.handle import Handle
from scaled_mm.core.plan import Plan
from scaled_mm.core.spec import ProductSpec
from scaled_mm.core.tensor_desc import TensorDesc
from scaled_mm.errors import BadTensorDtypeError, InternalError

Tensors = tuple[torch.Tensor | None, ...]


class Product:
    """A kind of product, registered with torch. CUDA implementations come from csrc/torch, through the stable ABI, on first use.

    functional(*inputs, out_dtype, constant_b) -> out; out(out, *inputs, constant_b); calculate(descriptor, out, *inputs, workspace, stream).
    """

    def __init__(self, spec: ProductSpec):
        self.spec = spec
        inputs = ", ".join(f"Tensor{'' if operand.required else '?'} {operand.name}" for operand in spec.inputs)
        self._required = tuple(i for i, operand in enumerate(spec.inputs) if operand.required)
        self._optional = tuple(i for i, operand in enumerate(spec.inputs) if not operand.required)
        # No default values: torch drops arguments that equal them, and the functions below rely on the number of arguments.
        self.functional = define(f"{spec.name}({inputs}, ScalarType out_dtype, bool constant_b) -> Tensor", self._compute, self._fake, TAGS)
        self.out = define(f"{spec.name}_out(Tensor(a!) out, {inputs}, bool constant_b) -> ()", self._compute_out, self._fake_out, TAGS)
        self.calculate = define(
            f"{spec.name}_calculate(int descriptor, Tensor(a!) out, {inputs}, Tensor? workspace, int stream) -> ()",
            self._refuse_calculate,
            self._fake_calculate,
        )

    def call(self, inputs: Tensors, out_dtype: torch.dtype, out: torch.Tensor | None, constant_b: bool = False, option: int = 0) -> torch.Tensor:
        """The product of inputs, in the order of the spec. If out is given, it is written to and determines the dtype.

        option: of the C function that creates a plan. Operators have none, so it must not change results.
        Raises the typed error, which names the operand.
        """
        spec = self.spec
        if out is not None:
            checks.check_out(out)
        elif out_dtype not in spec.out_dtypes:
            spec.check_out_dtype(out_dtype)
        try:
            result = NotImplemented if fast.module is None else fast.run(spec, inputs, out_dtype, out, constant_b, option)
            if result is not NotImplemented:
                return result
            if out is None:
                return self.functional(*inputs, out_dtype, constant_b)
            self.out(out, *inputs, constant_b)
            if not torch.compiler.is_compiling():
                checks.mark_written(out)
            return out
        except (RuntimeError, TypeError) as error:
            raise self.spec.named(typed_error(error), (out, *inputs)) from None

    # ---- every device but CUDA, and CUDA until its implementation is loaded -----------------------------------------------

    def _compute(self, *arguments) -> torch.Tensor:
        *inputs, out_dtype, constant_b = arguments
        if self._runs_on_cuda(inputs):
            return self.functional(*inputs, out_dtype, constant_b)
        shape = self.spec.out_shape(*inputs)
        self.spec.check_out_dtype(out_dtype)
        out = torch.empty(shape, dtype=out_dtype, device="cpu")
        self._run_on_cpu(out, inputs)
        return out

    def _compute_out(self, *arguments) -> None:
        out, *inputs, constant_b = arguments
        if self._runs_on_cuda(inputs, out=out):
            return self.out(out, *inputs, constant_b)
        self._run_on_cpu(out, inputs)

    def _runs_on_cuda(self, inputs, **others: torch.Tensor) -> bool:
        given = [tensor for tensor in (*inputs, *others.values()) if tensor is not None]
        if all(map(checks.is_plain_cpu, given)) and all(inputs[i] is not None for i in self._required):
            return False
        return runs_on_cuda(*self._named(inputs, **others))

    def _run_on_cpu(self, out: torch.Tensor, inputs) -> None:
        tensors = (out, *inputs)
        try:
            _cpu_plan(self, *[None if t is None else (t.shape, t.dtype, t.stride()) for t in tensors])
        except BadTensorDtypeError as error:
            raise self.spec.named(error, tensors) from None
        checks.check_overlap(out, self.spec.input_names, inputs)
        self.spec.compute(*tensors)

    def _refuse_calculate(self, descriptor, out, *arguments) -> None:
        *inputs, workspace, _ = arguments
        common_device(*self._named(inputs, out=out, workspace=workspace))
        raise InternalError(f"{self.spec.name}_calculate: expected CUDA tensors; use the calculate method of a descriptor")

    def _named(self, inputs, **others) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor | None]]:
        """(required, optional) tensors by name."""
        names = self.spec.input_names
        return {names[i]: inputs[i] for i in self._required}, {names[i]: inputs[i] for i in self._optional} | others

    # ---- fake implementations: shapes without data, for torch.compile --------------------------------------------------------

    def _fake(self, *arguments) -> torch.Tensor:
        *inputs, out_dtype, _ = arguments
        shape = self._check_fake(inputs)
        self.spec.check_out_dtype(out_dtype)
        out = inputs[0].new_empty(shape, dtype=out_dtype)
        self._check_meta(out, inputs)
        return out

    def _fake_out(self, *arguments) -> None:
        out, *inputs, _ = arguments
        self._check_fake(inputs, out=out)
        self._check_meta(out, inputs)

    def _fake_calculate(self, descriptor, out, *arguments) -> None:
        *inputs, workspace, _ = arguments
        self._check_fake(inputs, out=out, workspace=workspace)

    def _check_fake(self, inputs, **others) -> tuple[int, ...]:
        trace_device(*self._named(inputs, **others))
        shape = self.spec.out_shape(*inputs)
        self.spec.check_sizes(*inputs)
        return shape

    def _check_meta(self, out: torch.Tensor, inputs) -> None:
        """Runs the core's validation for tensors on the meta device.

        Skipped while a compiler traces, because sizes may then be symbols and Dynamo hides errors raised here. The run raises them.
        """
        if out.device.type != "meta" or isinstance(out, FakeTensor):
            return
        tensors = (out, *inputs)
        described = tuple(t if t is None else TensorDesc(t.shape, t.dtype, t.stride()) for t in tensors)
        try:
            Plan(self, _cpu_handle(), described, None).destroy()
        except BadTensorDtypeError as error:
            raise self.spec.named(error, tensors) from None


@functools.cache
def _cpu_handle() -> Handle:
    return Handle("cpu")


@functools.lru_cache(maxsize=256)
def _cpu_plan(product: Product, *described: tuple | None) -> Plan:
    """The validated plan for tensors given by (shape, dtype, strides). Cached, because validation takes longer than a small product on a CPU."""
    return Plan(product, _cpu_handle(), tuple(None if one is None else TensorDesc(*one) for one in described), None)


__all__ = ["Product", "load_cuda_operators"]
