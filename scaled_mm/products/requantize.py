"""int8 outputs of `scaled_mm`: the float32 product, quantized by a static scale."""

from __future__ import annotations

import torch

from scaled_mm.core.checks import check_device, check_strided, has_shape
from scaled_mm.core.operators import Product
from scaled_mm.errors import BadParamError, BadTensorDtypeError, BadTensorShapeError
from scaled_mm.rowwise.operands import SCALE_DTYPES, ZERO_POINT_DTYPES, check_written
from scaled_mm.rowwise.static import requantize


def int8_product(
    product: Product, inputs: tuple, out: torch.Tensor | None, constant_b: bool, scale: torch.Tensor | None, zero_point: torch.Tensor | None
) -> torch.Tensor:
    """q = clamp(round half to even(y / scale) + zero_point, -128, 127) of the product y in float32. inputs: of the product, with its bias third."""
    a, bias = inputs[0], inputs[4]
    if scale is None:
        raise BadParamError("out_scale: expected a scale for an int8 output, got None")
    if isinstance(bias, torch.Tensor) and bias.dtype in (torch.float16, torch.bfloat16):
        inputs = (*inputs[:4], bias.float(), *inputs[5:])
    check_strided("a", a)
    check_strided("b", inputs[1])
    shape = product.spec.out_shape(*inputs)
    for name, tensor, dtypes in (("out_scale", scale, SCALE_DTYPES), ("out_zero_point", zero_point, ZERO_POINT_DTYPES)):
        if tensor is not None:
            _check(name, tensor, dtypes, shape[-1], a)
    if out is not None:
        check_written("out", out, torch.int8, torch.Size(shape), a.device, out_scale=scale, out_zero_point=zero_point)
    y = product.call(inputs, torch.float32, None, constant_b)
    return requantize(y, scale.reshape(-1), None if zero_point is None else zero_point.reshape(-1), out)


def _check(name: str, tensor: object, dtypes: tuple[torch.dtype, ...], n: int, a: torch.Tensor) -> None:
    check_strided(name, tensor)
    check_device(name, tensor, a.device)
    if tensor.dtype not in dtypes:
        raise BadTensorDtypeError(f"{name}: expected {' or '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}, got {tensor.dtype}")
    if tensor.numel() != 1 and not has_shape(tensor, (n,), (1, n)):
        raise BadTensorShapeError(f"{name}: expected one value, [{n}] or [1, {n}], got {list(tensor.shape)}")


def refuse(out_scale: object, out_zero_point: object) -> None:
    """BadParamError for a scale or zero point of an output that is not int8."""
    for name, given in (("out_scale", out_scale), ("out_zero_point", out_zero_point)):
        if given is not None:
            raise BadParamError(f"{name}: expected None unless the output is int8, got a {type(given).__name__}")
