"""Functions with the signatures of SGLang's INT8 operators (`sgl_kernel`), computed by scaled_mm. Importing this module does not import SGLang.

Where the bits differ: SGLang's quantizer rounds half away from zero, ours half to even. docs/guide/coming-from.md has the details.
"""

from __future__ import annotations

import torch

from scaled_mm.errors import BadParamError
from scaled_mm.products.gemm import scaled_mm
from scaled_mm.rowwise.int8 import quantize_int8


def int8_scaled_mm(
    mat_a: torch.Tensor, mat_b: torch.Tensor, scales_a: torch.Tensor, scales_b: torch.Tensor, out_dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`sgl_kernel.int8_scaled_mm`. mat_a: int8 [M, K]. mat_b: int8 [K, N]. scales_a: float32 [M] or [M, 1]. scales_b: float32 [N], [1, N] or [N, 1].
    out_dtype: bfloat16 or float16. bias: [N] in out_dtype. Returns [M, N]."""
    for name, scales in (("scales_a", scales_a), ("scales_b", scales_b)):
        if not isinstance(scales, torch.Tensor):
            raise BadParamError(f"{name}: expected a tensor, got {type(scales).__name__}")
    return scaled_mm(mat_a, mat_b, scales_a.reshape(-1, 1), scales_b.reshape(1, -1), bias, out_dtype=out_dtype)


def per_token_quant_int8(
    x: torch.Tensor, scale_dtype: torch.dtype = torch.float32, cal_sum: bool = False
) -> tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`per_token_quant_int8` of SGLang: (int8, scales [..., 1] in scale_dtype), and with cal_sum the float32 sums of x over its last dimension,
    [...]. x: float [..., K]. scale_dtype: a float dtype; scales that it cannot hold are rounded. No gradient."""
    if not isinstance(scale_dtype, torch.dtype) or not scale_dtype.is_floating_point:
        raise BadParamError(f"scale_dtype: expected a float dtype, got {scale_dtype}")
    q, scale = quantize_int8(x)
    result = q, scale.to(scale_dtype)
    return (*result, x.detach().float().sum(-1)) if cal_sum else result
