"""`torch.ops.scaled_mm.block_scaled_*`: schemas, fake implementations and the CPU registration, as `ops` has them for the plain product."""

from __future__ import annotations

import torch

from scaled_mm.core import operators
from scaled_mm.errors import BadTensorDtypeError, BadTensorShapeError, InternalError

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_INPUTS = "Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? bias"
_library = torch.library.Library("scaled_mm", "FRAGMENT")
_library.define(f"block_scaled_mm({_INPUTS}, ScalarType out_dtype) -> Tensor", tags=_TAGS)
_library.define(f"block_scaled_mm_out(Tensor(a!) out, {_INPUTS}) -> ()", tags=_TAGS)
_library.define(f"block_scaled_calculate(int descriptor, Tensor(a!) out, {_INPUTS}, int stream) -> ()")

block_scaled_mm = torch.ops.scaled_mm.block_scaled_mm.default
block_scaled_mm_out = torch.ops.scaled_mm.block_scaled_mm_out.default
block_scaled_calculate = torch.ops.scaled_mm.block_scaled_calculate.default

for _name in ("block_scaled_mm", "block_scaled_mm_out", "block_scaled_calculate"):  # nothing is differentiated
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")

# The tensors of a product besides its output, in the order of the C interface.
INPUTS = ("a", "b", "a_scale", "b_scale", "bias")
_NAMES = (*INPUTS, "out")
_REQUIRED = 4


def check_out_dtype(dtype: torch.dtype) -> None:
    """BadTensorDtypeError unless a block-scaled product can have this dtype."""
    if not isinstance(dtype, torch.dtype) or dtype not in OUT_DTYPES:
        raise BadTensorDtypeError(f"out_dtype: expected {', '.join(map(str, OUT_DTYPES))}, got {dtype!r}")


def _check_shapes(a: torch.Tensor, b: torch.Tensor) -> None:
    for name, tensor, shape in (("a", a, "[M, K]"), ("b", b, "[K, N]")):
        if tensor.dim() != 2:
            raise BadTensorShapeError(f"{name}: expected 2 dimensions {shape}, got {tensor.dim()}: {list(tensor.shape)}")


def _run_on_cpu(out, *inputs: torch.Tensor | None) -> None:
    from scaled_mm.products.block_scaled import create_block_scaled_descriptor

    tensors = dict(zip(INPUTS, inputs), out=out)
    with create_block_scaled_descriptor(operators._cpu_handle(), **tensors) as descriptor:
        descriptor.calculate(**tensors)


def _any(a, b, a_scale, b_scale, bias, out_dtype):
    inputs = (a, b, a_scale, b_scale, bias)
    if operators._runs_on_cuda(*inputs, names=_NAMES, required=_REQUIRED):
        return block_scaled_mm(*inputs, out_dtype)
    _check_shapes(a, b)
    check_out_dtype(out_dtype)
    out = torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype, device="cpu")
    _run_on_cpu(out, *inputs)
    return out


def _out_any(out, a, b, a_scale, b_scale, bias):
    inputs = (a, b, a_scale, b_scale, bias)
    if operators._runs_on_cuda(*inputs, out, names=_NAMES, required=_REQUIRED):
        return block_scaled_mm_out(out, *inputs)
    return _run_on_cpu(out, *inputs)


def _calculate_any(descriptor, out, a, b, a_scale, b_scale, bias, stream):
    operators._common_device(a, b, a_scale, b_scale, bias, out, names=_NAMES, required=_REQUIRED)
    raise InternalError("block_scaled_calculate: it takes CUDA tensors; use BlockScaledDescriptor.calculate")


_library.impl("block_scaled_mm", _any, "CompositeExplicitAutograd")
_library.impl("block_scaled_mm_out", _out_any, "CompositeExplicitAutograd")
_library.impl("block_scaled_calculate", _calculate_any, "CompositeExplicitAutograd")


# ---- fake implementations: shapes without data, for torch.compile -----------------------------------------------------------


def _check_fake(a, b, *others) -> None:
    device = operators._common_device(a, b, *others, names=_NAMES, required=_REQUIRED)
    if device.type == "cuda" and torch.version.cuda is not None:
        operators.load_cuda_operators()  # traced now, run later: the graph calls the operator without passing through here
    _check_shapes(a, b)
    operators.check_size(a.shape[1] == b.shape[0], lambda: f"b: expected [K, N] with K = {a.shape[1]} as in a [M, K], got {list(b.shape)}")


def _check_meta(out, *inputs) -> None:
    from scaled_mm.products.block_scaled import create_block_scaled_descriptor

    operators.check_meta(create_block_scaled_descriptor, out, dict(zip(INPUTS, inputs)))


@torch.library.register_fake("scaled_mm::block_scaled_mm")
def _fake(a, b, a_scale, b_scale, bias, out_dtype):
    _check_fake(a, b, a_scale, b_scale, bias)
    check_out_dtype(out_dtype)
    out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
    _check_meta(out, a, b, a_scale, b_scale, bias)
    return out


@torch.library.register_fake("scaled_mm::block_scaled_mm_out")
def _out_fake(out, a, b, a_scale, b_scale, bias):
    _check_fake(a, b, a_scale, b_scale, bias, out)
    _check_meta(out, a, b, a_scale, b_scale, bias)


@torch.library.register_fake("scaled_mm::block_scaled_calculate")
def _calculate_fake(descriptor, out, a, b, a_scale, b_scale, bias, stream):
    _check_fake(a, b, a_scale, b_scale, bias, out)
