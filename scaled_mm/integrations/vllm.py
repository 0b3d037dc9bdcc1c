"""Functions with the signatures of vLLM's INT8 operators (`vllm._custom_ops`), computed by scaled_mm, and its linear kernel.

Importing this module does not import vLLM. `register` is the entry point of `vllm.general_plugins`.

Where the bits differ: with a bias vLLM's epilogue contracts scale_a * x + bias into one fused multiply-add, scaled_mm rounds the product and the
sum. vLLM's symmetric quantizer multiplies by 127 / max|x| and clamps to -128, ours divides by the scale and clamps to -127.
docs/guide/coming-from.md has the details.
"""

from __future__ import annotations

import warnings

import torch

from scaled_mm.errors import BadParamError
from scaled_mm.products.gemm import scaled_mm
from scaled_mm.rowwise.int8 import quantize_int8


def cutlass_scaled_mm(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`vllm._custom_ops.cutlass_scaled_mm` for int8. a: int8 [M, K]. b: int8 [K, N]. scale_a: float32, one value or [M, 1]. scale_b: float32, one
    value, [N], [1, N] or [N, 1]. out_dtype: bfloat16 or float16. bias: [N] in out_dtype. Returns [M, N]."""
    return scaled_mm(a, b, scale_a.reshape(-1, 1), scale_b.reshape(1, -1), bias, out_dtype=out_dtype)


def cutlass_scaled_mm_azp(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    azp_adj: torch.Tensor,
    azp: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`vllm._custom_ops.cutlass_scaled_mm_azp`: (a - azp) b, scaled. azp_adj: int32 [N] or [1, N]: the sums of b over K, times the zero point if azp
    is None. azp: int32 [M, 1], a zero point of each token, or None. The others as in `cutlass_scaled_mm`."""
    zero = torch.ones(1, dtype=torch.int32, device=a.device) if azp is None else azp.reshape(-1, 1)
    scales = scale_a.reshape(-1, 1), scale_b.reshape(1, -1)
    return scaled_mm(a, b, *scales, bias, out_dtype=out_dtype, a_zero_point=zero, b_column_sums=azp_adj.reshape(1, -1))


def scaled_int8_quant(
    input: torch.Tensor, scale: torch.Tensor | None = None, azp: torch.Tensor | None = None, symmetric: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`vllm._custom_ops.scaled_int8_quant`: (int8, scale, zero points or None). input: float [..., K]. scale: float32 [1]: static; None: of each
    row, [M, 1]. azp: int32 [1], with a static scale. symmetric: of dynamic scales; must agree with azp for static ones."""
    if scale is not None:
        if symmetric != (azp is None):
            raise BadParamError(f"azp: expected {'None' if symmetric else 'a zero point'} with symmetric={symmetric}, got {azp}")
        return quantize_int8(input, scale=scale, zero_point=azp)[0], scale, azp
    if azp is not None:
        raise BadParamError("azp: expected None without a static scale, got a zero point")
    if symmetric:
        q, scale = quantize_int8(input)
        return q, scale.reshape(-1, 1), None
    quantized = quantize_int8(input, symmetric=False)
    return quantized.q, quantized.scale.reshape(-1, 1), quantized.zero_point.reshape(-1, 1)


def register() -> None:
    """Makes vLLM choose scaled_mm for INT8 linear layers on CUDA: the entry point of `vllm.general_plugins`.

    vLLM tries kernels in the order of a list, and its CUTLASS kernel accepts every layer, so this kernel is moved to the front. A vLLM without
    this list (0.24 has it) keeps its own kernel, with a warning: an error would end vLLM.
    """
    try:
        from vllm.model_executor.kernels import linear
        from vllm.platforms import PlatformEnum

        kernels = linear._POSSIBLE_INT8_KERNELS.setdefault(PlatformEnum.CUDA, [])
        kernel = _kernel_class(linear.CutlassInt8ScaledMMLinearKernel)
        linear.register_linear_kernel(kernel, PlatformEnum.CUDA, "int8")
    except (ImportError, AttributeError) as error:
        warnings.warn(f"scaled_mm: no INT8 linear kernel for this vLLM, which has no registry like that of 0.24: {error}", stacklevel=2)
        return
    if kernel in kernels:
        kernels.insert(0, kernels.pop(kernels.index(kernel)))


def _kernel_class(cutlass: type) -> type:
    """cutlass: vLLM's kernel, whose preparation of weights stays: it transposes them and computes their sums."""

    class ScaledMMInt8LinearKernel(cutlass):
        """An INT8 linear layer of vLLM on scaled_mm."""

        def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None, **_) -> torch.Tensor:
            """[..., K] to [..., N]."""
            weight, weight_scale, input_scale, input_zero_point, sums = self._get_layer_params(layer)
            q, scale, zero = scaled_int8_quant(x.reshape(-1, x.shape[-1]), input_scale, input_zero_point, symmetric=sums is None)
            operands = q, weight, scale, weight_scale, x.dtype
            if sums is None:
                out = cutlass_scaled_mm(*operands, bias)
            else:  # with a static zero point vLLM has multiplied the sums by it
                out = cutlass_scaled_mm_azp(*operands, sums, None if input_zero_point is not None else zero, bias)
            return out.view(*x.shape[:-1], -1)

    return ScaledMMInt8LinearKernel
