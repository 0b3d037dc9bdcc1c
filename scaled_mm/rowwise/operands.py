"""Checks of the operands of row-wise operators. Each raises a typed error that names the argument, what was expected and what was given."""

from __future__ import annotations

import torch

from scaled_mm.core.checks import PLAIN, check_device, check_out, check_strided, has_address, overlap
from scaled_mm.errors import BadParamError, BadTensorDtypeError, BadTensorShapeError, BadTensorStridesError, DeviceNotSupportedError
from scaled_mm.rowwise.arithmetic import FLOATS

MAX_DIMS = 8
SCALE_DTYPES, ZERO_POINT_DTYPES = (torch.float32,), (torch.int8, torch.int32)
_LARGEST = torch.finfo(torch.float32).max


def check_float(name: str, tensor: object, dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
    """A strided tensor in float16, bfloat16 or float32."""
    check_strided(name, tensor)
    if tensor.dtype not in dtypes:
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise BadTensorDtypeError(f"{name}: expected {expected.replace(', float32', ' or float32')}, got {tensor.dtype}")


def check_rows(name: str, x: object, least: int = 1) -> None:
    """A float tensor of `least` to 8 dimensions on a CPU or a CUDA device; its last dimension is a row."""
    check_float(name, x)
    if x.device.type not in ("cpu", "cuda", "meta"):
        raise DeviceNotSupportedError(f"{name}: expected a CUDA or CPU tensor, got one on {x.device}")
    if not least <= x.dim() <= MAX_DIMS:
        raise BadTensorShapeError(f"{name}: expected {least} to {MAX_DIMS} dimensions, got {x.dim()}: {list(x.shape)}")


def check_like(name: str, tensor: object, x: torch.Tensor) -> None:
    """A tensor with x's dtype, shape and device."""
    check_float(name, tensor)
    check_device(name, tensor, x.device)
    if tensor.dtype != x.dtype:
        raise BadTensorDtypeError(f"{name}: expected {x.dtype} as x, got {tensor.dtype}")
    if tensor.shape != x.shape:
        raise BadTensorShapeError(f"{name}: expected {list(x.shape)} as x, got {list(tensor.shape)}")


def check_vector(name: str, tensor: object, x: torch.Tensor, width: int, one: bool = False) -> None:
    """A float tensor [width] on x's device; one: or one value."""
    check_float(name, tensor)
    check_device(name, tensor, x.device)
    if tuple(tensor.shape) != (width,) and not (one and tensor.numel() == 1 and tensor.dim() <= 1):
        raise BadTensorShapeError(f"{name}: expected {'one value or ' if one else ''}[{width}], got {list(tensor.shape)}")


def check_parameter(name: str, tensor: object, x: torch.Tensor, *dtypes: torch.dtype) -> None:
    """A strided tensor on x's device in one of these dtypes: a scale or a zero point."""
    check_strided(name, tensor)
    check_device(name, tensor, x.device)
    if tensor.dtype not in dtypes:
        raise BadTensorDtypeError(f"{name}: expected {' or '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}, got {tensor.dtype}")


def check_static(scale: object, zero_point: object, x: torch.Tensor, name: str = "quantize", zero_point_name: str = "zero_point") -> None:
    """A static scale, float32 with one value, and its zero point: None, or int8 or int32 with one value."""
    for of, tensor, dtypes in ((name, scale, SCALE_DTYPES), (zero_point_name, zero_point, ZERO_POINT_DTYPES)):
        if tensor is None:
            continue
        check_parameter(of, tensor, x, *dtypes)
        if tensor.numel() != 1:
            raise BadTensorShapeError(f"{of}: expected one value, got {list(tensor.shape)}")


def without_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a view of it that requires no gradient: no output does."""
    return tensor.detach() if tensor.requires_grad else tensor


def check_quantize(quantize: object, zero_point: object, x: torch.Tensor) -> None:
    """`quantize` of a fused operator: None, "token" or a static scale; a zero point goes with a static scale only."""
    if isinstance(quantize, torch.Tensor):
        return check_static(quantize, zero_point, x)
    if quantize is not None and not (isinstance(quantize, str) and quantize == "token"):
        raise BadParamError(f'quantize: expected None, "token" or a scale tensor, got {quantize!r}')
    if zero_point is not None:
        raise BadParamError("zero_point: expected None without a static scale in quantize, got a zero point")


def check_epsilon(epsilon: object) -> None:
    if isinstance(epsilon, bool) or not isinstance(epsilon, (int, float)) or not 0 <= epsilon <= _LARGEST:
        raise BadParamError(f"epsilon: expected a number from 0 to the largest float32, got {epsilon!r}")


def check_written(name: str, out: object, dtype: torch.dtype, shape: torch.Size, device: torch.device, **apart: torch.Tensor | None) -> None:
    """A tensor to write to. apart: operands that it must not alias."""
    check_strided(name, out)
    check_out(out, name)
    check_device(name, out, device)
    if out.dtype is not dtype:
        raise BadTensorDtypeError(f"{name}: expected {dtype}, got {out.dtype}")
    if out.shape != shape:
        raise BadTensorShapeError(f"{name}: expected {list(shape)}, got {list(out.shape)}")
    if _overlaps_itself(out):
        raise BadTensorStridesError(f"{name}: expected memory of its own for each element, got strides {list(out.stride())} of shape {list(shape)}")
    for other, tensor in apart.items():
        if tensor is not None:
            check_strided(other, tensor)
    if torch.compiler.is_compiling() or not has_address(out):
        return
    for other, tensor in apart.items():
        if has_address(tensor) and overlap(out, tensor):
            raise BadParamError(f"{name}: expected memory apart from {other}, got an overlap")


def has_memory(tensor: object) -> bool:
    """Whether it is a tensor with an address: no wrapper of others, and none of torch.func."""
    return type(tensor) in PLAIN and not tensor.is_meta and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _overlaps_itself(out: torch.Tensor) -> bool:
    """The rule of the products: each stride is larger than all that the smaller ones reach."""
    if out.numel() == 0 or out.is_contiguous():
        return False
    dims = [(stride, (size - 1) * stride) for size, stride in zip(out.shape, out.stride()) if size > 1]  # not sorted: Dynamo cannot sort symbols
    return any(stride <= sum(reach for j, (smaller, reach) in enumerate(dims) if j != i and smaller <= stride) for i, (stride, _) in enumerate(dims))
