"""What test_core_rowwise.py runs in processes of their own, where libcuda.so.1 is the fake driver.

fake_gpu_rowwise.py FUNCTION ARGUMENTS...     prints one JSON document
"""

from __future__ import annotations

import ctypes
import itertools
import json
import random
import sys

import torch
from fake_gpu_core import STREAM, Core, status_of

import scaled_mm as sm
from scaled_mm import TensorDesc, reference
from scaled_mm.core import binding
from scaled_mm.kernels.sections import SECTIONS
from scaled_mm.rowwise.activation import _gelu_and_mul, _silu_and_mul
from scaled_mm.rowwise.kernels import Function, Kind, Output
from scaled_mm.rowwise.norm import _added, _normalized

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
GATED = {  # the float32 results
    Function.SILU_AND_MUL: _silu_and_mul,
    Function.GELU_AND_MUL: lambda x: _gelu_and_mul(x, "none"),
    Function.GELU_TANH_AND_MUL: lambda x: _gelu_and_mul(x, "tanh"),
}
LAYOUTS = ("contiguous", "padded", "transposed", "columns apart", "unaligned")
Operands = dict[str, torch.Tensor | None]

KINDS = (Kind.QUANTIZE, Kind.NORM, Kind.ACTIVATION)  # those of problems/rowwise.cpp


class RowwiseCore(Core):
    """The C core's row-wise operators, on a fake GPU. kernels: of products, with the tables; rowwise: those of row-wise operators."""

    def __init__(self, kernels: str, *rowwise: str, cpu: bool = False):
        super().__init__(kernels, *rowwise)
        if cpu:
            binding.call("scaledMMCreateHandle", ctypes.byref(self.handle), binding.DEVICE_CPU, 0, None)
        self.lib.scaledMMCreateRowwiseDescriptor.argtypes = [
            ctypes.c_void_p,
            ctypes.POINTER(ctypes.c_void_p),
            *[ctypes.c_int32] * 3,
            ctypes.c_double,
            ctypes.c_void_p,
            ctypes.c_int32,
        ]
        for library in map(ctypes.CDLL, rowwise):
            self.stream, self.launches = ctypes.c_void_p.in_dll(library, "rowwise_last_stream"), ctypes.c_int.in_dll(library, "rowwise_launches")

    def plan(self, kind: Kind, function: int, output: int, epsilon: float, operands: Operands, count: int | None = None) -> ctypes.c_void_p:
        """operands: tensors or TensorDescs by name."""
        descs = [operands.get(name) for name in binding.operand_names(kind)]
        assert operands.keys() <= set(binding.operand_names(kind)), operands.keys()
        return self.plan_descs(kind, function, output, epsilon, [TensorDesc.of(t) if isinstance(t, torch.Tensor) else t for t in descs], count)

    def plan_descs(self, kind, function, output, epsilon, descs, count=None) -> ctypes.c_void_p:
        descriptor, structs = ctypes.c_void_p(), [None if desc is None else desc._c() for desc in descs]
        for struct in structs:
            if struct is not None:  # what lies past the last dimension means nothing
                struct.shape[struct.ndim :] = [random.randrange(1 << 40) for _ in struct.shape[struct.ndim :]]
                struct.strides[struct.ndim :] = [random.randrange(1 << 40) for _ in struct.strides[struct.ndim :]]
        array, number = binding.operands(structs)
        binding.call(
            "scaledMMCreateRowwiseDescriptor", self.handle, ctypes.byref(descriptor), kind, function, output, epsilon, array, count or number
        )
        return descriptor

    def calculate_kind(self, descriptor, kind: Kind, operands: Operands, count: int | None = None) -> None:
        tensors = [operands.get(name) for name in binding.operand_names(kind)]
        pointers = (ctypes.c_void_p * len(tensors))(*(None if tensor is None else tensor.data_ptr() for tensor in tensors))
        binding.call("scaledMMCalculate", descriptor, kind, None, 0, pointers, count or len(tensors), STREAM)

    def run(self, kind: Kind, function: int, output: int, epsilon: float, operands: Operands) -> None:
        descriptor = self.plan(kind, function, output, epsilon, operands)
        try:
            assert self.workspace_size(descriptor) == 0
            self.calculate_kind(descriptor, kind, operands)
        finally:
            self.destroy(descriptor)


def laid_out(t: torch.Tensor, layout: str) -> torch.Tensor:
    """t in memory of this layout. What lies between its elements is 99."""
    m, k = t.shape
    if layout == "contiguous":
        return t.contiguous()
    if layout == "transposed":
        view = torch.full((k, m), 99, dtype=t.dtype).t()
    elif layout == "columns apart":
        view = torch.full((m, 2 * k + 1), 99, dtype=t.dtype)[:, : 2 * k : 2]
    elif layout == "unaligned":
        view = torch.full((m, k + 1), 99, dtype=t.dtype)[:, 1:]
    else:
        view = torch.full((m, k + 16), 99, dtype=t.dtype)[:, :k]
    return view.copy_(t)


def whole(t: torch.Tensor) -> torch.Tensor:
    """All of the memory of t, byte by byte."""
    return torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).clone()


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    expected = expected.reshape(got.shape)
    return reference.same_bits(got.contiguous(), expected) if got.is_floating_point() else torch.equal(got, expected)


class Draw:
    """Random operands of one calculation, and what the CPU operators make of them."""

    def __init__(self, seed: int):
        self.pick, self.generator = random.Random(seed).choice, torch.Generator().manual_seed(seed)
        self.m, self.k = self.pick([0, 1, 2, 5, 9]), self.pick([0, 1, 7, 8, 24, 65, 136, 1032])
        self.dtype, self.kind = self.pick(FLOATS), self.pick(KINDS)

    def floats(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def matrix(self, k: int) -> torch.Tensor:
        return laid_out((self.floats(self.m, k) * self.pick([0.01, 1.0, 50.0])).to(self.dtype), self.pick(LAYOUTS))

    def vector(self, dtype: torch.dtype) -> torch.Tensor:
        if self.pick([False, False, True]):
            return self.floats(1).to(dtype).expand(self.k)
        return laid_out(self.floats(1, self.k).to(dtype), self.pick(["contiguous", "columns apart", "unaligned"]))[0]

    def of_rows(self, values: torch.Tensor) -> torch.Tensor:
        """values, [M], in a form of a scale."""
        if self.pick([True, False]):
            return self.pick([lambda v: v[0], lambda v: v[:1], lambda v: v[:1, None]])(torch.cat((values, torch.ones(1, dtype=values.dtype))))
        apart = torch.full((self.m, 3), 99, dtype=values.dtype)[:, 1:2].copy_(values[:, None])
        return self.pick([values, values[:, None], apart, apart[:, 0]])

    def written(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(self.pick([(self.m,), (self.m, 1)]), -7, dtype=dtype)

    def output(self, outputs: tuple[Output, ...]) -> tuple[Output, Operands]:
        output, operands = self.pick(outputs), {}
        if output is Output.STATIC:
            operands["scale"] = self.of_rows(self.floats(self.m).abs() / 20 + 0.001)
            of = self.pick([None, torch.int8, torch.int32])
            if of is not None:
                operands["zero_point"] = self.of_rows(torch.randint(-128, 128, (self.m,), generator=self.generator).to(of))
        if output in (Output.TOKEN, Output.TOKEN_ASYMMETRIC):
            operands["out_scale"] = self.written(torch.float32)
        operands["out"] = laid_out(torch.full((self.m, self.k), 77, dtype=self.dtype if output is Output.CAST else torch.int8), self.pick(LAYOUTS))
        return output, operands


def row_values(t: torch.Tensor | None) -> torch.Tensor | None:
    """A static scale as an operator takes it: one value, or [M, 1]."""
    return t if t is None or t.numel() == 1 else t.reshape(-1, 1)


def quantizer(draw: Draw) -> tuple[Function, Output, float, Operands, Operands]:
    """(function, output, epsilon, operands, the expected outputs)."""
    output, operands = draw.output((Output.TOKEN, Output.TOKEN_ASYMMETRIC, Output.STATIC, Output.ROUND))
    x = operands["x"] = draw.matrix(draw.k)
    of = draw.pick([None, *FLOATS])
    if of is not None:
        operands["factor"] = draw.vector(of)
        if draw.pick([True, False]):
            operands["offset"] = draw.vector(of)
    if output is Output.TOKEN_ASYMMETRIC or (output is Output.STATIC and draw.pick([True, False])):
        operands["out_row_sums"] = draw.written(torch.int32)
    if output is Output.TOKEN_ASYMMETRIC:
        operands["out_zero_point"] = draw.written(torch.int32)
    y = x.float()
    if of is not None:
        y = y * operands["factor"].float()
        if "offset" in operands:
            y = y + operands["offset"].float()
    if output is Output.ROUND:
        return Function.QUANTIZE_INT8, output, 0.0, operands, {"out": sm.quantize(y, torch.ones(1))}
    point = operands.get("zero_point")
    made = sm.quantize_int8(y, symmetric=output is not Output.TOKEN_ASYMMETRIC, scale=row_values(operands.get("scale")), zero_point=row_values(point))
    expected = {"out": made[0], "out_scale": made[1], "out_row_sums": made[0].sum(-1, dtype=torch.int32)}
    if output is Output.TOKEN_ASYMMETRIC:
        expected["out_zero_point"] = made[2]
    return Function.QUANTIZE_INT8, output, 0.0, operands, expected


FUSED = (Output.CAST, Output.TOKEN, Output.STATIC)


def finished(y32: torch.Tensor, dtype: torch.dtype, output: Output, operands: Operands) -> Operands:
    """The outputs of an operator with the float32 result y32."""
    if output is Output.CAST:
        return {"out": y32.to(dtype)}
    made = sm.quantize_int8(y32, scale=row_values(operands.get("scale")), zero_point=row_values(operands.get("zero_point")))
    return {"out": made[0], "out_scale": made[1]}


def norm(draw: Draw):
    draw.k = max(draw.k, 1)
    output, operands = draw.output(FUSED)
    operands |= {"x": draw.matrix(draw.k), "weight": draw.vector(draw.pick(FLOATS))}
    function, epsilon = draw.pick([Function.RMS_NORM, Function.ADD_RMS_NORM]), draw.pick([0.0, 1e-6, 0.5])
    if function is Function.RMS_NORM:
        return function, output, epsilon, operands, finished(_normalized(operands["x"], operands["weight"], epsilon), draw.dtype, output, operands)
    residual = operands["residual"] = draw.matrix(draw.k)
    place = draw.pick(["x", "residual", "own"])
    y32, total = _added(operands["x"], residual, operands["weight"], epsilon)
    operands["total"] = laid_out(torch.full_like(residual, 77), draw.pick(LAYOUTS)) if place == "own" else operands[place]
    return function, output, epsilon, operands, {**finished(y32, draw.dtype, output, operands), "total": total}


def activation(draw: Draw):
    output, operands = draw.output(FUSED)
    x = operands["x"] = draw.matrix(2 * draw.k)
    function = draw.pick(list(GATED))
    expected = finished(GATED[function](x), draw.dtype, output, operands)
    if draw.pick([False, True]):  # rows from the last end on keep what they are
        end = draw.pick([0, draw.m // 2, draw.m, draw.m + 3])
        operands["expert_offsets"] = torch.tensor([*[0] * draw.pick([0, 5]), end], dtype=torch.int32)
        for name in expected.keys() & {"out", "out_scale"} & operands.keys():
            before = operands[name]
            expected[name] = torch.cat((expected[name].reshape(before.shape)[:end], before[end:]))
    return function, output, 0.0, operands, expected


def operators(kernels: str, rowwise: str, count: str, first: str = "0") -> dict:
    """Random operators through create and calculate, bit for bit against the CPU operators."""
    core, met = RowwiseCore(kernels, rowwise), {}
    for seed in range(int(first), int(first) + int(count)):
        draw = Draw(seed)
        function, output, epsilon, operands, expected = {Kind.QUANTIZE: quantizer, Kind.NORM: norm, Kind.ACTIVATION: activation}[draw.kind](draw)
        what = f"seed {seed}: {function.name} {output.name} {draw.dtype} {draw.m} x {draw.k} " + ", ".join(
            f"{name} {t.dtype} {list(t.shape)} {list(t.stride())}" for name, t in operands.items()
        )
        outputs = {name for name in operands if name in ("out", "total") or name.startswith("out_")}
        storages = {name: (t, whole(t), t.clone()) for name, t in operands.items()}
        core.stream.value, launches = 0, core.launches.value
        try:
            core.run(draw.kind, function, output, epsilon, operands)
        except Exception as error:
            raise AssertionError(what) from error
        for name in outputs:
            assert same(operands[name], expected[name]), f"{name} of {what}"
        nothing = draw.m == 0 or (draw.k == 0 and output in (Output.CAST, Output.ROUND))
        assert core.launches.value - launches == (not nothing), what
        assert nothing or core.stream.value == STREAM, f"launched on another stream: {what}"
        for name, (t, before, values) in storages.items():  # nothing but the elements of outputs was written
            if name not in outputs and not any(t is operands[one] for one in outputs):
                assert torch.equal(whole(t), before), f"{name} was written: {what}"
            elif name in outputs:
                t.copy_(values)
                assert torch.equal(whole(t), before), f"wrote between the elements of {name}: {what}"
        met[f"{function.name} {output.name}"] = met.get(f"{function.name} {output.name}", 0) + 1
    assert core.asked == [], core.asked
    return met


def names(kernels: str, rowwise: str) -> dict:
    """The kernel of every kind, with rows and without, on a GPU and on a CPU."""
    answer = {}
    for cpu, kind, m in itertools.product((False, True), KINDS, (4, 0)):
        core = RowwiseCore(kernels, rowwise, cpu=cpu)
        operands = fine(kind, m=m)
        descriptor = core.plan(kind, *MODES[kind], operands)
        choice = core.choice(descriptor)
        answer[f"{kind.name}, {m} rows, {'CPU' if cpu else 'GPU'}"] = [choice.row.decode(), choice.reason.decode(), choice.bucket, choice.tuned]
        assert choice.better is None and core.workspace_size(descriptor) == 0
        descs = [None if (t := operands.get(name)) is None else TensorDesc.of(t) for name in binding.operand_names(kind)]
        array = binding.operands([None if desc is None else desc._c() for desc in descs])
        binding.call("scaledMMCheckTensors", descriptor, kind, *array)
        if cpu:
            answer[f"calculate {kind.name}, {m} rows"] = status_of(lambda: core.calculate_kind(descriptor, kind, operands))[0]  # noqa: B023
    return answer


def missing(kernels: str) -> dict:
    """Without a library of row-wise kernels: the error, and which kernel the provider is asked for."""
    core = RowwiseCore(kernels)
    return {"answer": status_of(lambda: core.plan(Kind.NORM, *MODES[Kind.NORM], fine(Kind.NORM, torch.float16))), "asked": core.asked}


MODES = {
    Kind.QUANTIZE: (Function.QUANTIZE_INT8, Output.TOKEN, 0.0),
    Kind.NORM: (Function.ADD_RMS_NORM, Output.TOKEN, 1e-6),
    Kind.ACTIVATION: (Function.SILU_AND_MUL, Output.TOKEN, 0.0),
}


def fine(kind: Kind, dtype: torch.dtype = torch.float32, m: int = 4, k: int = 16) -> Operands:
    """Operands for MODES."""
    operands = {"out": torch.zeros(m, k, dtype=torch.int8), "x": torch.randn(m, k).to(dtype), "out_scale": torch.zeros(m)}
    if kind is Kind.ACTIVATION:
        operands["x"] = torch.randn(m, 2 * k).to(dtype)
    if kind is Kind.NORM:
        operands |= {"residual": torch.randn(m, k).to(dtype), "weight": torch.randn(k), "total": torch.zeros(m, k, dtype=dtype)}
    return operands


def create_refusals(kernels: str, rowwise: str, device: str) -> dict:
    """[expected status and argument, status, message] of what create refuses, by what differs from `fine` operands in MODES."""
    core, answer = RowwiseCore(kernels, rowwise, cpu=device == "cpu"), {}
    nan = float("nan")

    def refuse(expected: str, what: str, kind: Kind, *mode, count: int | None = None, **changed) -> None:
        mode = (*mode, *MODES[kind][len(mode) :])
        answer[what] = [expected, *status_of(lambda: core.plan(kind, *mode, {**fine(kind), **changed}, count))]

    one, rows, bytes_ = torch.ones(1), torch.zeros(4), torch.zeros(4, 16, dtype=torch.int8)
    integers = torch.zeros(4, dtype=torch.int32)
    quantizes = (Function.QUANTIZE_INT8, Output.STATIC)
    asymmetric = (Function.QUANTIZE_INT8, Output.TOKEN_ASYMMETRIC)
    norms, quantizer = Kind.NORM, Kind.QUANTIZE
    for value in (-1, 6, 1):
        refuse("BAD_PARAM function", f"function {value} of a quantizer", quantizer, value)
    refuse("BAD_PARAM function", "function of a quantizer, of a norm", norms, Function.QUANTIZE_INT8)
    refuse("BAD_PARAM function", "function of an activation, of a norm", norms, Function.SILU_AND_MUL)
    refuse("BAD_PARAM function", "function of a norm, of an activation", Kind.ACTIVATION, Function.RMS_NORM)
    refuse("BAD_PARAM function", "function 6 of an activation", Kind.ACTIVATION, 6)
    refuse("BAD_PARAM output", "CAST of a quantizer", quantizer, Function.QUANTIZE_INT8, Output.CAST)
    refuse("BAD_PARAM output", "ROUND of a norm", norms, Function.ADD_RMS_NORM, Output.ROUND)
    refuse("BAD_PARAM output", "ASYMMETRIC of an activation", Kind.ACTIVATION, Function.SILU_AND_MUL, Output.TOKEN_ASYMMETRIC)
    refuse("BAD_PARAM output", "output 6", quantizer, Function.QUANTIZE_INT8, 6)
    refuse("BAD_PARAM output", "output -1", norms, Function.ADD_RMS_NORM, -1)
    for value in (-1e-9, nan, float("inf"), -float("inf"), 1e39):
        refuse("BAD_PARAM epsilon", f"epsilon {value}", norms, Function.ADD_RMS_NORM, Output.TOKEN, value)
    refuse("BAD_PARAM epsilon", "epsilon of a quantizer", quantizer, Function.QUANTIZE_INT8, Output.TOKEN, 1e-6)
    refuse("BAD_PARAM epsilon", "epsilon of an activation", Kind.ACTIVATION, Function.SILU_AND_MUL, Output.TOKEN, nan)
    for name in ("out", "x", "out_scale"):
        refuse(f"NULL_POINTER {name}", f"no {name}", quantizer, **{name: None})
    for name in ("residual", "weight", "total"):
        refuse(f"NULL_POINTER {name}", f"no {name}", norms, **{name: None})
    refuse("NULL_POINTER scale", "no scale", quantizer, *quantizes, out_scale=None)
    refuse("NULL_POINTER out_zero_point", "no out_zero_point", quantizer, *asymmetric, out_row_sums=integers)
    refuse("NULL_POINTER out_row_sums", "no out_row_sums", quantizer, *asymmetric, out_zero_point=integers)
    refuse("BAD_PARAM scale", "scale with TOKEN", quantizer, scale=one)
    refuse("BAD_PARAM zero_point", "zero_point with TOKEN", quantizer, zero_point=integers)
    refuse("BAD_PARAM out_scale", "out_scale with STATIC", quantizer, *quantizes, scale=one)
    refuse("BAD_PARAM out_zero_point", "out_zero_point with TOKEN", quantizer, out_zero_point=integers)
    refuse("BAD_PARAM out_row_sums", "out_row_sums with TOKEN", quantizer, out_row_sums=integers)
    refuse(
        "BAD_PARAM out_row_sums", "out_row_sums with ROUND", quantizer, Function.QUANTIZE_INT8, Output.ROUND, out_scale=None, out_row_sums=integers
    )
    refuse("BAD_PARAM out_scale", "out_scale with CAST", norms, Function.ADD_RMS_NORM, Output.CAST, out=torch.zeros(4, 16))
    refuse("BAD_PARAM residual", "residual with RMS_NORM", norms, Function.RMS_NORM, total=None)
    refuse("BAD_PARAM total", "total with RMS_NORM", norms, Function.RMS_NORM, residual=None)
    refuse("BAD_PARAM offset", "offset without factor", quantizer, offset=torch.zeros(16))
    refuse("BAD_TENSOR_DTYPE x", "x int8", quantizer, x=bytes_)
    refuse("BAD_TENSOR_SHAPE x", "x of one dimension", quantizer, x=torch.zeros(16))
    refuse("BAD_TENSOR_SHAPE x", "x of three dimensions", quantizer, x=torch.zeros(1, 4, 16))
    refuse("BAD_TENSOR_SHAPE x", "x of an odd number of columns", Kind.ACTIVATION, x=torch.zeros(4, 31))
    refuse(
        "BAD_TENSOR_SHAPE x",
        "x too long",
        quantizer,
        x=TensorDesc((1, 2**31 - 1), torch.float16),
        out=TensorDesc((1, 2**31 - 1), torch.int8),
        out_scale=one,
    )
    refuse("BAD_TENSOR_SHAPE x", "x longer than 2^31", quantizer, x=TensorDesc((1, 2**31), torch.float16))
    refuse("BAD_TENSOR_STRIDES x", "x with a stride of -1", quantizer, x=TensorDesc((4, 16), torch.float32, (16, -1)))
    refuse("BAD_TENSOR_DTYPE out", "out float", quantizer, out=torch.zeros(4, 16))
    refuse("BAD_TENSOR_DTYPE out", "out int8 with CAST", norms, Function.ADD_RMS_NORM, Output.CAST, out_scale=None)
    refuse("BAD_TENSOR_DTYPE out", "out float16 for float32", norms, 2, Output.CAST, out_scale=None, out=torch.zeros(4, 16).half())
    refuse("BAD_TENSOR_SHAPE out", "out too short", quantizer, out=bytes_[:3])
    refuse("BAD_TENSOR_SHAPE out", "out too wide", Kind.ACTIVATION, out=torch.zeros(4, 32, dtype=torch.int8))
    refuse("BAD_TENSOR_STRIDES out", "out expanded", quantizer, out=bytes_[:1].expand(4, 16))
    refuse("BAD_TENSOR_STRIDES total", "total expanded", norms, total=torch.zeros(1, 16).expand(4, 16))
    refuse("BAD_TENSOR_DTYPE total", "total int8", norms, total=bytes_)
    refuse("BAD_TENSOR_SHAPE total", "total too narrow", norms, total=torch.zeros(4, 15))
    refuse("BAD_TENSOR_DTYPE residual", "residual bfloat16 for float32", norms, residual=torch.zeros(4, 16).bfloat16())
    refuse("BAD_TENSOR_SHAPE residual", "residual of one row", norms, residual=torch.zeros(1, 16))
    refuse("BAD_TENSOR_DTYPE weight", "weight int8", norms, weight=bytes_[0])
    refuse("BAD_TENSOR_SHAPE weight", "weight [1, N]", norms, weight=torch.zeros(1, 16))
    refuse("BAD_TENSOR_SHAPE weight", "weight too long", norms, weight=torch.zeros(17))
    experts = torch.zeros(6, dtype=torch.int32)
    refuse("BAD_TENSOR_DTYPE expert_offsets", "expert_offsets float32", Kind.ACTIVATION, expert_offsets=torch.zeros(6))
    refuse("BAD_TENSOR_SHAPE expert_offsets", "expert_offsets of two dimensions", Kind.ACTIVATION, expert_offsets=experts.view(2, 3))
    refuse("BAD_TENSOR_SHAPE expert_offsets", "expert_offsets of no expert", Kind.ACTIVATION, expert_offsets=experts[:0])
    refuse("BAD_TENSOR_STRIDES expert_offsets", "expert_offsets with a stride of 2", Kind.ACTIVATION, expert_offsets=experts[::2])
    for flag in (1, 2):
        refuse("BAD_PARAM weight", f"weight with flag {flag}", norms, weight=Flagged((16,), flag))
    refuse("BAD_PARAM x", "x with flag 2", norms, x=Flagged((4, 16), 2))
    refuse("BAD_TENSOR_SHAPE factor", "factor [1]", quantizer, factor=one)
    refuse("BAD_TENSOR_DTYPE offset", "offset of another dtype", quantizer, factor=torch.zeros(16), offset=torch.zeros(16).half())
    refuse("BAD_TENSOR_SHAPE offset", "offset too long", quantizer, factor=torch.zeros(16), offset=torch.zeros(17))
    refuse("BAD_TENSOR_DTYPE scale", "scale float16", quantizer, *quantizes, out_scale=None, scale=one.half())
    refuse("BAD_TENSOR_SHAPE scale", "scale [1, M]", quantizer, *quantizes, out_scale=None, scale=rows[None])
    refuse("BAD_TENSOR_SHAPE scale", "scale [M, 2]", quantizer, *quantizes, out_scale=None, scale=torch.ones(4, 2))
    refuse("BAD_TENSOR_SHAPE scale", "scale [3]", quantizer, *quantizes, out_scale=None, scale=rows[:3])
    refuse("BAD_TENSOR_DTYPE zero_point", "zero_point float32", quantizer, *quantizes, out_scale=None, scale=one, zero_point=one)
    refuse("BAD_TENSOR_SHAPE zero_point", "zero_point [3]", quantizer, *quantizes, out_scale=None, scale=one, zero_point=integers[:3])
    refuse("BAD_TENSOR_SHAPE out_scale", "out_scale one value", quantizer, out_scale=one)
    refuse("BAD_TENSOR_DTYPE out_scale", "out_scale float16", quantizer, out_scale=rows.half())
    refuse("BAD_TENSOR_STRIDES out_scale", "out_scale apart", quantizer, out_scale=torch.zeros(8)[::2])
    refuse("BAD_TENSOR_STRIDES out_scale", "out_scale expanded", quantizer, out_scale=one.expand(4))
    refuse("BAD_TENSOR_DTYPE out_zero_point", "out_zero_point int8", quantizer, *asymmetric, out_zero_point=bytes_[:, 0], out_row_sums=integers)
    refuse("BAD_TENSOR_SHAPE out_row_sums", "out_row_sums [3]", quantizer, *asymmetric, out_zero_point=integers, out_row_sums=integers[:3])
    refuse("BAD_PARAM operands", "count", quantizer, count=8)
    refuse("BAD_PARAM operands", "count of another kind", norms, count=9)
    answer["kind 0"] = ["BAD_PARAM product", *status_of(lambda: core.plan_descs(0, 0, 0, 0.0, [None] * 10))]
    answer["kind 99"] = ["BAD_PARAM product", *status_of(lambda: core.plan_descs(99, 0, 0, 0.0, [None] * 8))]
    for kind, forced in itertools.product(KINDS, (None, "rowwise_norm")):
        core.PRODUCT = kind
        descs = {name: TensorDesc.of(t) for name, t in fine(kind).items()}
        answer[f"scaledMMCreateDescriptor {kind.name} {forced}"] = ["BAD_PARAM product", *status_of(lambda: core.create(forced, **descs))]  # noqa: B023
    answer["no operands"] = [
        "NULL_POINTER operands",
        *status_of(
            lambda: binding.call(
                "scaledMMCreateRowwiseDescriptor", core.handle, ctypes.byref(ctypes.c_void_p()), int(Kind.QUANTIZE), 0, 1, 0.0, None, 9
            )
        ),
    ]
    answer["no descriptor"] = [
        "NULL_POINTER descriptor",
        *status_of(lambda: binding.call("scaledMMCreateRowwiseDescriptor", core.handle, None, int(Kind.QUANTIZE), 0, 1, 0.0, None, 9)),
    ]
    answer["no handle"] = [
        "NULL_POINTER handle",
        *status_of(
            lambda: binding.call("scaledMMCreateRowwiseDescriptor", None, ctypes.byref(ctypes.c_void_p()), int(Kind.QUANTIZE), 0, 1, 0.0, None, 9)
        ),
    ]
    answer["table"] = ["BAD_PARAM table here", *status_of(lambda: register_table_of_kind(len(SECTIONS)))]  # the number after the last one
    return answer


class Flagged:
    """A float32 descriptor with flags, which TensorDesc has for no such operand."""

    def __init__(self, shape: tuple[int, ...], flags: int):
        self.shape, self.flags = shape, flags

    def _c(self):
        struct = TensorDesc(self.shape, torch.float32)._c()
        struct.flags = self.flags
        return struct


def register_table_of_kind(kind: int) -> None:
    row, bucket = binding._TableRowC(b"row", 1, 1, 1, 1), binding._TableBucketC(*[2**63 - 1] * 3, 0, 0, 0, 0, 0)
    table = binding._TableC(b"sm90", b"here", ctypes.pointer(row), 1, ctypes.pointer(bucket), 1, 0, 0, kind, 0, None, 0)
    binding.call("scaledMMRegisterTable", ctypes.byref(table))


def calculate_refusals(kernels: str, rowwise: str) -> dict:
    """[expected status and argument, status, message] of what calculate refuses, and of what it takes."""
    core, answer = RowwiseCore(kernels, rowwise), {}
    operands = fine(Kind.NORM)
    descriptor = core.plan(Kind.NORM, *MODES[Kind.NORM], operands)
    memory = torch.zeros(9, 16)  # room for x, and total a row further

    def ask(expected: str, what: str, count: int | None = None, **changed) -> None:
        answer[what] = [expected, *status_of(lambda: core.calculate_kind(descriptor, Kind.NORM, {**operands, **changed}, count))]

    ask("SUCCESS", "fine")
    for name in ("out", "x", "residual", "weight", "out_scale", "total"):
        ask(f"NULL_POINTER {name}", f"no {name}", **{name: None})
    ask("BAD_PARAM scale", "a scale", scale=torch.ones(1))
    ask("BAD_PARAM zero_point", "a zero point", zero_point=torch.ones(1))
    ask("SUCCESS", "total is x", total=operands["x"])
    ask("SUCCESS", "total is residual", total=operands["residual"])
    ask("BAD_PARAM total", "total a row after x", x=memory[:4], total=memory[1:5])
    ask("BAD_PARAM total", "total a row before x", x=memory[1:5], total=memory[:4])
    ask("BAD_PARAM total", "total a row after residual", residual=memory[:4], total=memory[1:5])
    ask("BAD_PARAM total", "total is x, a row after residual", x=memory[1:5], total=memory[1:5], residual=memory[:4])
    ask("SUCCESS", "total is x and residual", x=memory[:4], total=memory[:4], residual=memory[:4])
    ask("BAD_PARAM total", "total over weight", weight=memory[3], total=memory[:4])
    ask("BAD_PARAM out_scale", "total over out_scale", out_scale=memory[3], total=memory[:4])
    ask("BAD_PARAM out", "out over x", out=operands["x"])
    ask("BAD_PARAM out", "out over weight", out=memory[:4], weight=memory[0])
    ask("BAD_PARAM out", "out over out_scale", out=memory[:4], out_scale=memory[0])
    ask("BAD_PARAM out", "out over total", out=memory[:4], total=memory[:4])
    ask("BAD_PARAM out_scale", "out_scale over x", out_scale=operands["x"])
    ask("BAD_PARAM out_scale", "out_scale over weight", out_scale=operands["weight"])
    ask("BAD_PARAM out_scale", "out_scale over total", out_scale=operands["total"])
    ask("BAD_TENSOR_ALIGNMENT x", "x not aligned", x=memory.view(torch.uint8).view(-1)[2:])
    ask("BAD_PARAM operands", "count", count=7)
    other = core.plan(Kind.QUANTIZE, *MODES[Kind.QUANTIZE], fine(Kind.QUANTIZE))
    answer["another kind"] = ["BAD_PARAM descriptor", *status_of(lambda: core.calculate_kind(other, Kind.NORM, operands))]
    # total may be x only if its rows lie where those of x do.
    strided = {**operands, "x": torch.zeros(4, 32)[:, :16]}
    apart = core.plan(Kind.NORM, *MODES[Kind.NORM], strided)
    total = {"total": strided["x"]}
    answer["total begins where x does"] = ["BAD_PARAM total", *status_of(lambda: core.calculate_kind(apart, Kind.NORM, strided | total))]
    row = {**fine(Kind.NORM, m=1), "x": torch.zeros(4, 16)[::2][:1]}  # the stride of one row means nothing
    one = core.plan(Kind.NORM, *MODES[Kind.NORM], row)
    answer["one row in place"] = ["SUCCESS", *status_of(lambda: core.calculate_kind(one, Kind.NORM, {**row, "total": row["x"]}))]
    nothing = {**fine(Kind.NORM, m=0), "weight": memory[0]}
    empty = core.plan(Kind.NORM, *MODES[Kind.NORM], nothing)
    answer["nothing within the weight"] = ["SUCCESS", *status_of(lambda: core.calculate_kind(empty, Kind.NORM, {**nothing, "total": memory[0, 4:]}))]
    three = fine(Kind.QUANTIZE) | {"out_zero_point": torch.zeros(4, dtype=torch.int32), "out_row_sums": torch.zeros(4, dtype=torch.int32)}
    asymmetric = core.plan(Kind.QUANTIZE, Function.QUANTIZE_INT8, Output.TOKEN_ASYMMETRIC, 0.0, three)
    for one, other in itertools.permutations(("out_scale", "out_zero_point", "out_row_sums"), 2):
        first, same_memory = min(one, other, key=list(three).index), {**three, one: three[other]}
        status = status_of(lambda: core.calculate_kind(asymmetric, Kind.QUANTIZE, same_memory))  # noqa: B023
        answer[f"{one} is {other}"] = [f"BAD_PARAM {first}", *status]
    return answer


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
