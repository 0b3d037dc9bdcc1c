"""`torch.ops.scaled_mm.grouped_*`: schemas, fake implementations and the CPU registration, as `ops` has them for the plain product."""

from __future__ import annotations

import torch

from scaled_mm.core import operators
from scaled_mm.errors import BadTensorShapeError, InternalError

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_INPUTS = "Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor expert_offsets, Tensor? bias"
_library = torch.library.Library("scaled_mm", "FRAGMENT")
_library.define(f"grouped_scaled_mm({_INPUTS}, ScalarType out_dtype) -> Tensor", tags=_TAGS)
_library.define(f"grouped_scaled_mm_out(Tensor(a!) out, {_INPUTS}) -> ()", tags=_TAGS)
_library.define(f"grouped_calculate(int descriptor, Tensor(a!) out, {_INPUTS}, Tensor? workspace, int stream) -> ()")

grouped_scaled_mm = torch.ops.scaled_mm.grouped_scaled_mm.default
grouped_scaled_mm_out = torch.ops.scaled_mm.grouped_scaled_mm_out.default
grouped_calculate = torch.ops.scaled_mm.grouped_calculate.default

for _name in ("grouped_scaled_mm", "grouped_scaled_mm_out", "grouped_calculate"):  # nothing is differentiated
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")

_NAMES = ("a", "b", "expert_offsets", "a_scale", "b_scale", "bias", "out", "workspace")
_REQUIRED = 3


def _check_shapes(a: torch.Tensor, b: torch.Tensor) -> None:
    for name, tensor, ndim, shape in (("a", a, 2, "[tokens, K]"), ("b", b, 3, "[E, K, N]")):
        if tensor.dim() != ndim:
            raise BadTensorShapeError(f"{name}: expected {ndim} dimensions {shape}, got {tensor.dim()}: {list(tensor.shape)}")


def _run_on_cpu(out, a, b, a_scale, b_scale, expert_offsets, bias) -> None:
    from scaled_mm.products.grouped import create_grouped_descriptor

    tensors = dict(out=out, a=a, b=b, a_scale=a_scale, b_scale=b_scale, bias=bias, expert_offsets=expert_offsets)
    with create_grouped_descriptor(operators._cpu_handle(), **tensors) as descriptor:
        descriptor.calculate(**tensors)


def _grouped_any(a, b, a_scale, b_scale, expert_offsets, bias, out_dtype):
    if operators._runs_on_cuda(a, b, expert_offsets, a_scale, b_scale, bias, names=_NAMES, required=_REQUIRED):
        return grouped_scaled_mm(a, b, a_scale, b_scale, expert_offsets, bias, out_dtype)
    _check_shapes(a, b)
    out = torch.empty((a.shape[0], b.shape[2]), dtype=out_dtype, device="cpu")
    _run_on_cpu(out, a, b, a_scale, b_scale, expert_offsets, bias)
    return out


def _grouped_out_any(out, a, b, a_scale, b_scale, expert_offsets, bias):
    if operators._runs_on_cuda(a, b, expert_offsets, a_scale, b_scale, bias, out, names=_NAMES, required=_REQUIRED):
        return grouped_scaled_mm_out(out, a, b, a_scale, b_scale, expert_offsets, bias)
    return _run_on_cpu(out, a, b, a_scale, b_scale, expert_offsets, bias)


def _grouped_calculate_any(descriptor, out, a, b, a_scale, b_scale, expert_offsets, bias, workspace, stream):
    operators._common_device(a, b, expert_offsets, a_scale, b_scale, bias, out, workspace, names=_NAMES, required=_REQUIRED)
    raise InternalError("grouped_calculate: it takes CUDA tensors; use GroupedDescriptor.calculate")


_library.impl("grouped_scaled_mm", _grouped_any, "CompositeExplicitAutograd")
_library.impl("grouped_scaled_mm_out", _grouped_out_any, "CompositeExplicitAutograd")
_library.impl("grouped_calculate", _grouped_calculate_any, "CompositeExplicitAutograd")


# ---- fake implementations: shapes without data, for torch.compile -----------------------------------------------------------


def _check_fake(a, b, expert_offsets, *others) -> None:
    device = operators._common_device(a, b, expert_offsets, *others, names=_NAMES, required=_REQUIRED)
    if device.type == "cuda" and torch.version.cuda is not None:
        operators.load_cuda_operators()  # traced now, run later: the graph calls the operator without passing through here
    _check_shapes(a, b)
    operators.check_size(a.shape[1] == b.shape[1], lambda: f"b: expected [E, K, N] with K = {a.shape[1]} as in a [tokens, K], got {list(b.shape)}")


def _check_meta(out, a, b, a_scale, b_scale, expert_offsets, bias) -> None:
    from scaled_mm.products.grouped import create_grouped_descriptor

    operators.check_meta(create_grouped_descriptor, out, dict(a=a, b=b, a_scale=a_scale, b_scale=b_scale, expert_offsets=expert_offsets, bias=bias))


@torch.library.register_fake("scaled_mm::grouped_scaled_mm")
def _grouped_fake(a, b, a_scale, b_scale, expert_offsets, bias, out_dtype):
    _check_fake(a, b, expert_offsets, a_scale, b_scale, bias)
    out = a.new_empty((a.shape[0], b.shape[2]), dtype=out_dtype)
    _check_meta(out, a, b, a_scale, b_scale, expert_offsets, bias)
    return out


@torch.library.register_fake("scaled_mm::grouped_scaled_mm_out")
def _grouped_out_fake(out, a, b, a_scale, b_scale, expert_offsets, bias):
    _check_fake(a, b, expert_offsets, a_scale, b_scale, bias, out)
    _check_meta(out, a, b, a_scale, b_scale, expert_offsets, bias)


@torch.library.register_fake("scaled_mm::grouped_calculate")
def _grouped_calculate_fake(descriptor, out, a, b, a_scale, b_scale, expert_offsets, bias, workspace, stream):
    _check_fake(a, b, expert_offsets, a_scale, b_scale, bias, out, workspace)
