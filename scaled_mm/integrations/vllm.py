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
    """`vllm._custom_ops.cutlass_scaled_mm` for int8. a: int8 [..., K], M rows in all. b: int8 [K, N]. scale_a: float32, one value or M of any shape.
    scale_b: float32, one value, [N], [1, N] or [N, 1]. out_dtype: bfloat16 or float16. bias: [N] in out_dtype. Returns [..., N]."""
    out = scaled_mm(_rows(a), b, _vector("scale_a", scale_a, (-1, 1)), _vector("scale_b", scale_b, (1, -1)), bias, out_dtype=out_dtype)
    return out if a.dim() == 2 else out.view(*a.shape[:-1], out.shape[-1])


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
    is None. azp: int32, M values of any shape, a zero point of each token, or None. The others as in `cutlass_scaled_mm`."""
    rows, sums = _rows(a), _vector("azp_adj", azp_adj, (1, -1))
    zero = torch.ones(1, dtype=torch.int32, device=a.device) if azp is None else _vector("azp", azp, (-1, 1))
    scales = _vector("scale_a", scale_a, (-1, 1)), _vector("scale_b", scale_b, (1, -1))
    out = scaled_mm(rows, b, *scales, bias, out_dtype=out_dtype, a_zero_point=zero, b_column_sums=sums)
    return out if a.dim() == 2 else out.view(*a.shape[:-1], out.shape[-1])


def _rows(a: object) -> torch.Tensor:
    """a as [M, K]; what `scaled_mm` refuses stays as it is."""
    if not isinstance(a, torch.Tensor) or a.dim() in (0, 2):
        return a
    return a[None] if a.dim() == 1 else a.flatten(0, -2)


def _vector(name: str, value: object, shape: tuple[int, int]) -> torch.Tensor:
    """A tensor of any shape as a row or column. BadParamError for anything else."""
    if not isinstance(value, torch.Tensor):
        raise BadParamError(f"{name}: expected a tensor, got {type(value).__name__}")
    return value.reshape(shape)


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
            q, scale, zero = scaled_int8_quant(x, input_scale, input_zero_point, symmetric=sums is None)
            operands = q, weight, scale, weight_scale, x.dtype
            if sums is None:
                return cutlass_scaled_mm(*operands, bias)
            # With a static zero point vLLM has multiplied the sums by it.
            return cutlass_scaled_mm_azp(*operands, sums, None if input_zero_point is not None else zero, bias)

    return ScaledMMInt8LinearKernel
