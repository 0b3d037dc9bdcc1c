"""`int8_linear`: a W8A8 linear layer, quantization of the activation included."""

from __future__ import annotations

import torch

from scaled_mm.core import fast
from scaled_mm.core.checks import check_device, check_strided, has_shape
from scaled_mm.errors import AccumulatorOverflowError, BadParamError, BadTensorDtypeError, BadTensorShapeError, ScaledMMError
from scaled_mm.products.gemm import scaled_mm
from scaled_mm.products.prepared_weight import PreparedWeight
from scaled_mm.rowwise.arithmetic import FLOATS
from scaled_mm.rowwise.int8 import quantize_int8
from scaled_mm.rowwise.operands import check_float, check_rows, check_static, check_written


def int8_linear(
    x: torch.Tensor,
    weight: torch.Tensor | PreparedWeight,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    input_scale: torch.Tensor | None = None,
    input_zero_point: torch.Tensor | None = None,
    smooth_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x W^T + bias with int8 operands: quantizes x, multiplies, scales. [..., K] to [..., N].

        q, a_scale = quantize_int8(x, "token", smooth_scale=smooth_scale)            each row of x, dynamically, or by input_scale
        y          = scaled_mm(q, W^T, a_scale, weight_scale, bias)

    x: float16, bfloat16 or float32 [..., K], 1 to 8 dimensions, any strides, CPU or CUDA.
    weight: int8 [N, K] as torch.nn.Linear stores it, or the result of `prepare_weight(weight.t())`, which is faster.
    weight_scale: float32, one value, [N], [1, N] or [N, 1], as checkpoints store it. bias: [N] or [1, N], in the output's dtype or float32.
    input_scale: float32, one value: a static scale. Without it each row has its own. input_zero_point: int8 or int32, one value, with input_scale.
    smooth_scale: [K], a float dtype: x is multiplied by it first. The weight must have been divided by it before it was quantized.
    out_dtype: float16, bfloat16 or float32; default: x's dtype. out: [..., N] to write to; it determines the dtype.
        It may be x, and must be apart from the other operands.

    The bits are those of the two calls: the same on a CPU, every GPU and for every batch. No gradient.
    Raises a ScaledMMError subclass that names the argument, what was expected and what was given.
    """
    if out is None:
        y = _short(x, weight, weight_scale, bias, input_scale, input_zero_point, smooth_scale, out_dtype)
        if y is not None:
            return y
    return _checked(x, weight, weight_scale, bias, input_scale, input_zero_point, smooth_scale, out_dtype, out)


def _short(x, weight, weight_scale, bias, input_scale, input_zero_point, smooth_scale, out_dtype) -> torch.Tensor | None:
    """The two launches in one call of the extension, with the core's checks alone. None: `_checked` must serve, or say what is wrong."""
    if torch.compiler.is_compiling() or not (out_dtype is None or isinstance(out_dtype, torch.dtype) and out_dtype in FLOATS):
        return None
    try:
        device = x.get_device()
        if not fast.is_current(device) or (module := fast.loaded()) is None:
            return None
        prepared = isinstance(weight, PreparedWeight)
        if not prepared:
            b, constant, sums = weight, False, None
        elif weight.zero_point is None:
            b, constant, sums = weight.b, weight.constant, None if input_zero_point is None else weight.column_sums
        else:
            return None
        handle = fast.handle_address(device)
        operands = (x, b, weight_scale, bias, smooth_scale, input_scale, input_zero_point, sums)
        y = module.linear(handle, device, constant, not prepared, out_dtype, *operands)
    except (AttributeError, TypeError, ValueError, ScaledMMError):
        return None
    if isinstance(y, int):
        fast.raise_fault(y)
        return None
    return None if y is NotImplemented else y


@torch.no_grad()
def _checked(x, weight, weight_scale, bias, input_scale, input_zero_point, smooth_scale, out_dtype, out) -> torch.Tensor:
    check_rows("x", x)
    b = weight if isinstance(weight, PreparedWeight) else transposed(weight)
    k, n = (b.b if isinstance(b, PreparedWeight) else b).shape[-2:]
    out_dtype = out.dtype if isinstance(out, torch.Tensor) else x.dtype if out_dtype is None else out_dtype
    check_linear(x, b, k, n, weight_scale, bias, input_scale, input_zero_point, out_dtype)
    shape = (*x.shape[:-1], n)
    if out is not None:
        operands = dict(weight=b.b if isinstance(b, PreparedWeight) else b, weight_scale=weight_scale, bias=bias)
        of_x = dict(input_scale=input_scale, input_zero_point=input_zero_point, smooth_scale=smooth_scale)
        check_written("out", out, out_dtype, shape, x.device, **operands, **of_x)
    rows = x.reshape(-1, k) if k else x.new_empty((x.shape[:-1].numel(), 0))
    quantized = quantize_int8(rows, smooth_scale=smooth_scale, scale=input_scale, zero_point=input_zero_point)
    zero_point = None if input_zero_point is None else quantized.zero_point.reshape(1)
    into = None if out is None else _as_rows(out, n)
    scales = quantized[1].reshape(-1, 1), weight_scale.reshape(-1)
    try:
        y = scaled_mm(quantized[0], b, *scales, bias, out_dtype=out_dtype, a_zero_point=zero_point, out=into)
    except AccumulatorOverflowError as error:
        raise AccumulatorOverflowError(str(error).replace("a: ", "x: ", 1)) from None
    if out is None:
        return y.view(shape)
    return out if into is not None else out.copy_(y.view(shape))


def transposed(weight: torch.Tensor) -> torch.Tensor:
    """b [K, N] of an int8 weight [N, K]. Raises a ScaledMMError that names `weight`."""
    check_strided("weight", weight)
    if weight.dtype is not torch.int8:
        raise BadTensorDtypeError(f"weight: expected int8, or the result of prepare_weight, got {weight.dtype}")
    if weight.dim() != 2:
        raise BadTensorShapeError(f"weight: expected [N, K], got {weight.dim()} dimensions: {list(weight.shape)}")
    return weight.t()


def check_linear(x, b, k, n, weight_scale, bias, input_scale, input_zero_point, out_dtype) -> None:
    """Checks operands of `int8_linear`. b: the weight as `scaled_mm` takes it, [K, N]."""
    stored = b.b if isinstance(b, PreparedWeight) else b
    check_device("weight", stored, x.device)
    if stored.dim() != 2:
        raise BadTensorShapeError(f"weight: expected a prepared weight [K, N], got {list(stored.shape)}")
    if x.shape[-1] != k:
        raise BadTensorShapeError(f"x: expected [..., K] with K = {k} as in weight, got {list(x.shape)}")
    if not isinstance(out_dtype, torch.dtype) or out_dtype not in FLOATS:
        raise BadTensorDtypeError(f"out_dtype: expected float16, bfloat16 or float32, got {out_dtype!r}")
    check_float("weight_scale", weight_scale, (torch.float32,))
    check_device("weight_scale", weight_scale, x.device)
    if weight_scale.numel() != 1 and not has_shape(weight_scale, (n,), (1, n), (n, 1)):
        raise BadTensorShapeError(f"weight_scale: expected one value, [{n}], [1, {n}] or [{n}, 1], got {list(weight_scale.shape)}")
    if bias is not None:
        check_float("bias", bias)
        check_device("bias", bias, x.device)
        if bias.dtype not in (out_dtype, torch.float32):
            raise BadTensorDtypeError(f"bias: expected {out_dtype} or torch.float32, got {bias.dtype}")
        if not has_shape(bias, (n,), (1, n)):
            raise BadTensorShapeError(f"bias: expected [{n}] or [1, {n}], got {list(bias.shape)}")
    if input_scale is not None:
        check_static(input_scale, input_zero_point, x, "input_scale", "input_zero_point")
    elif input_zero_point is not None:
        raise BadParamError("input_zero_point: expected None without input_scale, got a zero point")


def _as_rows(out: torch.Tensor, n: int) -> torch.Tensor | None:
    """out as [M, N] without a copy; None if its strides do not allow that."""
    try:
        return out.view(-1, n) if n else None
    except RuntimeError:
        return None
