"""Descriptors of the row-wise operators: validated once, calculated often."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace

import torch

from scaled_mm.core import binding
from scaled_mm.core.checks import check_out, mark_written, overlap, same_place
from scaled_mm.core.handle import Handle
from scaled_mm.core.plan import Plan
from scaled_mm.core.spec import Operand, ProductSpec
from scaled_mm.core.tensor_desc import TensorDesc
from scaled_mm.errors import BadParamError, BadTensorShapeError
from scaled_mm.rowwise import moe
from scaled_mm.rowwise.activation import gelu_and_mul, silu_and_mul
from scaled_mm.rowwise.int8 import quantize_int8
from scaled_mm.rowwise.int8_block import quantize_int8_block
from scaled_mm.rowwise.kernels import Function, Kind, Output
from scaled_mm.rowwise.norm import add_rms_norm, rms_norm
from scaled_mm.rowwise.operands import check_epsilon
from scaled_mm.rowwise.router import topk_softmax
from scaled_mm.rowwise.static import quantize

_OPERANDS = {
    Kind.QUANTIZE: ("x", "factor", "offset", "scale", "zero_point", "out_scale", "out_zero_point", "out_row_sums"),
    Kind.NORM: ("x", "residual", "weight", "scale", "zero_point", "out_scale", "total"),
    Kind.ACTIVATION: ("x", "scale", "zero_point", "out_scale", "expert_offsets"),
    Kind.INT8_BLOCK: ("x", "out_scale", "expert_offsets"),
    Kind.MOE_SORT: ("topk_ids", "expert_map", "ends", "inverse"),
    Kind.MOE_QUANTIZE: ("x", "rows", "out_scale"),
    Kind.MOE_COMBINE: ("y", "topk_weights", "rows"),
    Kind.TOPK_SOFTMAX: ("logits", "ids"),
}
"""After out, in the order of scaled_mm.h. The first is required."""


_WRITTEN = ("out_scale", "out_zero_point", "out_row_sums", "total", "ends", "inverse", "ids")  # besides out


@dataclasses.dataclass(frozen=True)
class _Operator:
    """function: a `Function`, or the option of the kind. names: what `calculate` takes besides out.
    on_cpu(epsilon, **operands): the results, by the names of what is written."""

    kind: Kind
    function: int
    names: tuple[str, ...]
    on_cpu: Callable[..., dict[str, torch.Tensor]]


def _quantized(_, x, factor=None, scale=None, zero_point=None, out_scale=None, out_zero_point=None, out_row_sums=None) -> dict[str, torch.Tensor]:
    given = dict(smooth_scale=factor, symmetric=out_zero_point is None)
    found = quantize_int8(x, scale=_rows(scale), zero_point=_rows(zero_point), **given)
    if scale is not None:
        return {"out": found[0], **({} if out_row_sums is None else {"out_row_sums": _sums(found[0])})}
    return dict(zip(("out", "out_scale", "out_zero_point", "out_row_sums"), found))


def _rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.reshape(-1, 1) if tensor is not None and tensor.numel() != 1 else tensor


def _sums(q: torch.Tensor) -> torch.Tensor:
    return q.sum(dim=-1, keepdim=True, dtype=torch.int32)


def _finished(y, out_scale) -> dict[str, torch.Tensor]:
    return {"out": y} if isinstance(y, torch.Tensor) else {"out": y[0], **({} if out_scale is None else {"out_scale": y[1]})}


def _quantize_of(scale, out_scale) -> torch.Tensor | str | None:
    return scale if scale is not None else None if out_scale is None else "token"


def _normalized(epsilon, x, weight, scale=None, zero_point=None, out_scale=None) -> dict[str, torch.Tensor]:
    return _finished(rms_norm(x, weight, epsilon, quantize=_quantize_of(scale, out_scale), zero_point=zero_point), out_scale)


def _added(epsilon, x, residual, weight, total, scale=None, zero_point=None, out_scale=None) -> dict[str, torch.Tensor]:
    y, added = add_rms_norm(x, residual, weight, epsilon, quantize=_quantize_of(scale, out_scale), zero_point=zero_point)
    return {**_finished(y, out_scale), "total": added}


def _activation(operator: Callable, **options) -> Callable[..., dict[str, torch.Tensor]]:
    def activated(_, x, scale=None, zero_point=None, out_scale=None, expert_offsets=None) -> dict[str, torch.Tensor]:
        return _finished(operator(x, quantize=_quantize_of(scale, out_scale), zero_point=zero_point, **options), out_scale)

    return activated


def _sorted(_, topk_ids, ends, inverse, expert_map=None) -> dict[str, torch.Tensor]:
    return dict(zip(("out", "ends", "inverse"), moe.moe_sort(topk_ids, ends.shape[0], expert_map=expert_map)))


def _to_rows(block: bool) -> Callable[..., dict[str, torch.Tensor]]:
    return lambda _, x, rows, out_scale: dict(zip(("out", "out_scale"), moe.quantize_to_rows_on_cpu(out_scale.shape[0], x, rows, block)))


def _routed(renormalize: bool) -> Callable[..., dict[str, torch.Tensor]]:
    return lambda _, logits, ids: dict(zip(("out", "ids"), topk_softmax(logits, ids.shape[-1], renormalize=renormalize)))


_STATIC = ("scale", "zero_point", "out_scale")
_ACTIVATED = ("x", *_STATIC, "expert_offsets")
OPERATORS = {
    "quantize_int8": _Operator(Kind.QUANTIZE, Function.QUANTIZE_INT8, ("x", "factor", *_STATIC, "out_zero_point", "out_row_sums"), _quantized),
    "quantize": _Operator(
        Kind.QUANTIZE, Function.QUANTIZE_INT8, ("x", "factor", "offset"), lambda _, x, factor=None, offset=None: {"out": quantize(x, factor, offset)}
    ),
    "rms_norm": _Operator(Kind.NORM, Function.RMS_NORM, ("x", "weight", *_STATIC), _normalized),
    "add_rms_norm": _Operator(Kind.NORM, Function.ADD_RMS_NORM, ("x", "residual", "weight", "total", *_STATIC), _added),
    "silu_and_mul": _Operator(Kind.ACTIVATION, Function.SILU_AND_MUL, _ACTIVATED, _activation(silu_and_mul)),
    "gelu_and_mul": _Operator(Kind.ACTIVATION, Function.GELU_AND_MUL, _ACTIVATED, _activation(gelu_and_mul)),
    "gelu_tanh_and_mul": _Operator(Kind.ACTIVATION, Function.GELU_TANH_AND_MUL, _ACTIVATED, _activation(gelu_and_mul, approximate="tanh")),
    "quantize_int8_block": _Operator(
        Kind.INT8_BLOCK,
        0,
        ("x", "out_scale", "expert_offsets"),
        lambda _, x, out_scale, expert_offsets=None: dict(zip(("out", "out_scale"), quantize_int8_block(x))),
    ),
    "moe_sort": _Operator(Kind.MOE_SORT, 0, ("topk_ids", "expert_map", "ends", "inverse"), _sorted),
    "moe_quantize": _Operator(Kind.MOE_QUANTIZE, 0, ("x", "rows", "out_scale"), _to_rows(False)),
    "moe_quantize_block": _Operator(Kind.MOE_QUANTIZE, 1, ("x", "rows", "out_scale"), _to_rows(True)),
    "moe_combine": _Operator(
        Kind.MOE_COMBINE, 0, ("y", "topk_weights", "rows"), lambda _, y, topk_weights, rows: {"out": moe.combine_on_cpu(y, topk_weights, rows)}
    ),
    "topk_softmax": _Operator(Kind.TOPK_SOFTMAX, 0, ("logits", "ids"), _routed(False)),
    "topk_softmax_renormalized": _Operator(Kind.TOPK_SOFTMAX, 1, ("logits", "ids"), _routed(True)),
}
"""What `create_rowwise_descriptor` takes. One entry for each operator."""


class RowwiseDescriptor(Plan):
    """A row-wise operator for one shape; made by `create_rowwise_descriptor`. A context manager: leaving it destroys it."""

    def __init__(self, handle: Handle, operator: str, epsilon: float, operands: dict[str, torch.Tensor | TensorDesc | None]):
        self.operator = operator
        self._of, self._epsilon = OPERATORS[operator], float(epsilon)
        self._names = ("out", *_OPERANDS[self._of.kind])
        self._output = self._output_of(operands)
        self._check_forms(operands)
        names = tuple(Operand(name, required=i == 0) for i, name in enumerate(self._names[1:]))
        spec = ProductSpec(
            name=operator,
            code=int(self._of.kind),
            inputs=names,
            out_dtypes=(),
            out_shape=None,
            check_sizes=None,
            compute=self._on_cpu,
            cpu_kernel=lambda: ("cpu_torch", "the device is a CPU"),
            describe_sizes=lambda out, *_: "x".join(map(str, out.shape)),
        )
        super().__init__(SimpleNamespace(spec=spec, calculate=self._without_the_extension), handle, self._in_order(operands), None)

    def _output_of(self, operands: dict) -> Output:
        if self.operator == "quantize":
            return Output.ROUND
        if self._of.kind not in (Kind.QUANTIZE, Kind.NORM, Kind.ACTIVATION):
            return Output.CAST  # 0: the kind has none
        if operands.get("scale") is not None:
            return Output.STATIC
        if operands.get("out_zero_point") is not None:
            return Output.TOKEN_ASYMMETRIC
        is_token = operands.get("out_scale") is not None or self._of.kind is Kind.QUANTIZE
        return Output.TOKEN if is_token else Output.CAST

    def _in_order(self, operands: dict) -> tuple:
        for name in operands:
            if name != "out" and name not in self._of.names:
                raise BadParamError(f"{name}: expected an operand of {self.operator}: out, {', '.join(self._of.names)}")
        return tuple(operands.get(name) for name in self._names)

    def _check_forms(self, operands: dict) -> None:
        """What the core would take, and the functions do not."""
        if self.operator == "quantize" and operands.get("factor") is None:
            raise BadParamError("factor: expected a tensor or a TensorDesc, got None")
        for name in ("scale", "zero_point") if self._of.kind in (Kind.NORM, Kind.ACTIVATION) else ():
            shape = getattr(operands.get(name), "shape", ())
            if math.prod(shape) != 1:
                raise BadTensorShapeError(f"{name}: expected one value, got {list(shape)}")

    def _create(self, handle: Handle, c_operands: tuple, option: int, forced: bytes | None) -> None:
        epsilon = self._epsilon if self._of.kind is Kind.NORM else 0.0
        mode = int(self._of.kind), int(self._of.function), int(self._output), epsilon
        binding.call("scaledMMCreateRowwiseDescriptor", handle._pointer, ctypes.byref(self._pointer), *mode, *c_operands)

    def calculate(self, *, stream=None, **operands: torch.Tensor | None) -> None:
        """Computes into `out` and what else is written. Tensors must have the dtype, shape and strides that the descriptor was created with.

        operands: by the names that the descriptor was created with. stream: see `Descriptor.calculate`.
        Allocates nothing on a GPU and never synchronizes; may be captured in a CUDA graph.
        Raises a ScaledMMError that names the tensor that differs.
        """
        written = [(name, tensor) for name in _WRITTEN if (tensor := operands.get(name)) is not None]
        for name, tensor in written:
            check_out(tensor, name)
        self._run(self._in_order(operands), None, stream)
        if self._device_index >= 0:
            for _, tensor in written:
                mark_written(tensor)

    def _check_on_cpu(self, tensors: tuple, workspace: None) -> None:
        super()._check_on_cpu(tensors, workspace)
        for name, written in zip(self._names, tensors):
            if name in _WRITTEN and written is not None and written.numel():
                self._check_apart(name, written, tensors)

    def _check_apart(self, name: str, written: torch.Tensor, tensors: tuple) -> None:
        """The check of the core for a GPU: BadParamError if an output other than `out` overlaps another operand. `total` may be x or residual."""
        for other, tensor in zip(self._names[1:], tensors[1:]):
            if other == name or tensor is None or not tensor.numel() or not overlap(written, tensor):
                continue
            if not (name == "total" and other in ("x", "residual") and same_place(written, tensor)):
                raise BadParamError(f"{name}: expected memory apart from {other}, got an overlap")

    def _on_cpu(self, *tensors) -> None:
        given = {name: tensor for name, tensor in zip(self._names, tensors) if tensor is not None}
        results = self._of.on_cpu(self._epsilon, **{name: tensor for name, tensor in given.items() if name != "out"})
        for name, result in results.items():
            given[name].copy_(result.view(given[name].shape))

    def _without_the_extension(self, address: int, *arguments) -> None:
        *tensors, _, stream = arguments
        self._check_planned(tuple(tensors))
        data = (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))
        stream = torch.cuda.current_stream(self.device).cuda_stream if stream == -1 else stream
        binding.call("scaledMMCalculate", ctypes.c_void_p(address), self._code, None, 0, data, len(tensors), ctypes.c_void_p(stream))


def create_rowwise_descriptor(
    handle: Handle, operator: str, *, epsilon: float = 1e-6, **operands: torch.Tensor | TensorDesc | None
) -> RowwiseDescriptor:
    """Validates a row-wise operator once, for rows of a matrix x [M, K], and prepares its kernel.

    out and the first of the others are required. operator, and its other operands; each is a tensor or a TensorDesc:

        quantize_int8        out_scale; or also out_zero_point and out_row_sums (symmetric=False); or scale, zero_point, out_row_sums (static).
                             factor: the smooth_scale
        quantize             factor [K]: the scale; or also offset [K]
        rms_norm             weight
        add_rms_norm         residual, weight, total, which may be x or residual
        silu_and_mul, gelu_and_mul, gelu_tanh_and_mul        nothing: x is [M, 2 K]; or also expert_offsets
        quantize_int8_block  out_scale [M, ceil(K/128)]: dim="token"; or also expert_offsets
        moe_sort             for topk_ids: ends [num_experts], inverse; or also expert_map. out: the order
        moe_quantize         rows: the inverse of an order, out_scale [rows of out, 1]: each row of x, as `quantize_int8` quantizes it, to the
                             rows of out that `rows` names; the others hold any values afterwards
        moe_quantize_block   the same with out_scale [rows of out, ceil(K/128)], as `quantize_int8_block` quantizes
        moe_combine          for y: topk_weights, rows: out[t] = sum over j of topk_weights[t, j] * y[rows[t, j]], see `fused_experts`
        topk_softmax         for logits [M, E]: ids [M, k] int32. out [M, k] float32: the weights, without renormalize
        topk_softmax_renormalized    the same with renormalize

    expert_offsets: int32 [E], the `ends` of `moe_sort`. Rows of out and out_scale from its last value on may have any values afterwards; a GPU does
    not write them, a CPU does. Its other values are not read.
    Values of `rows` must be less than the number of rows of out, or of y. Larger ones are a BadParamError on a CPU; a GPU does not check them and
    accesses memory out of bounds.
    Norms and activations with a float out have x's dtype; with an int8 out they are quantized, by out_scale (each row's own, written) or by
    scale and zero_point (static, read). out [M, K], out_scale float32 and out_zero_point, out_row_sums int32: [M] or [M, 1].
    epsilon: of a norm. The bits are those of the functions of the same names; gelu_tanh_and_mul is
    `gelu_and_mul` with approximate="tanh".
    Raises a ScaledMMError that names the argument, what was expected and what was given.
    """
    if not isinstance(operator, str) or operator not in OPERATORS:
        raise BadParamError(f"operator: expected one of {', '.join(OPERATORS)}, got {operator!r}")
    check_epsilon(epsilon)
    return RowwiseDescriptor(handle, operator, epsilon, operands)
