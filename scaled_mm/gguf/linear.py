"""`block_linear`: a linear layer with a packed weight in a GGUF format."""

from __future__ import annotations

import torch

from scaled_mm.core.binding import GGUF_MODES
from scaled_mm.core.checks import check_strided, has_shape
from scaled_mm.errors import BadParamError, BadTensorDtypeError, BadTensorShapeError
from scaled_mm.gguf.cpu import FLOAT_ACTIVATIONS
from scaled_mm.gguf.gemm import check_devices, run
from scaled_mm.gguf.layout import check_no_quantized_tensor
from scaled_mm.gguf.pack import PackedBlockWeight

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@torch.no_grad()
def block_linear(
    x: torch.Tensor,
    packed: PackedBlockWeight,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    mode: str = "auto",
) -> torch.Tensor:
    """y = cast( x W^T + bias ): [..., K] to [..., N], contiguous.

    x: float16, bfloat16 or float32 [..., K], at least 1-d, any strides. packed: the result of `pack_block_weight` for a weight [N, K].
    bias: [N] or [1, N], float32 or out_dtype; added in float32. out_dtype: float16, bfloat16 or float32; x's dtype by default.
    mode: the same names for all formats, whatever their bits:

    * "w4a8": x is quantized to q8_1, then multiplied as by `gemm_q4_0_q8_1`. Because float16 stores the sum of 32 values, a sum of 65520
      or more makes its row non-finite, except with q8_0 weights.
    * "w4a16": x, float16 or bfloat16, is multiplied as by `gemm_q4_0`.
    * "w16a16": a GPU's kernels may round the values of the weight to bfloat16 if x has that dtype, otherwise to float16, nearly as if the weight
      had been dequantized for a product of torch: on SM90 from 17 tokens on; q4_1 and q5_1 from 9. A GPU rounds float32 x to float16, with a power
      of two for each token, so that its range does not matter. docs/design/gguf-formats.md has the error bound. A CPU rounds nothing.
    * "auto": "w16a16" for float32 x. Otherwise on CUDA the tile table's mode for this number of tokens, but "w4a16" instead of "w16a16" if out_dtype
      is float32; on a CPU "w4a16".

    CPU or CUDA. On CUDA it uses the current stream, does not synchronize, and takes output and workspace from torch's allocator. The
    output never requires a gradient.
    Raises a ScaledMMError subclass that names the argument, what was expected and what was given.
    """
    if not isinstance(packed, PackedBlockWeight):
        expected = "what pack_block_weight returns"
        check_no_quantized_tensor("packed", packed, expected, "give its .q, and its .fmt, to pack_block_weight")
        raise BadParamError(f"packed: expected {expected}, got a {type(packed).__name__}")
    if not isinstance(mode, str) or mode not in GGUF_MODES:
        raise BadParamError(f"mode: expected one of {', '.join(map(repr, GGUF_MODES))}, got {mode!r}")
    check_strided("x", x)
    if x.dtype not in _DTYPES:
        raise BadTensorDtypeError(f"x: expected float16, bfloat16 or float32, got {x.dtype}")
    if mode == "w4a16" and x.dtype not in FLOAT_ACTIVATIONS:
        raise BadTensorDtypeError(f"x: expected float16 or bfloat16 in mode 'w4a16', got {x.dtype}")
    n, k = packed.shape
    if x.dim() < 1 or x.shape[-1] != k:
        raise BadTensorShapeError(f"x: expected [..., K] with K = {k} as packed has, got {list(x.shape)}")
    out_dtype = x.dtype if out_dtype is None else out_dtype
    if not isinstance(out_dtype, torch.dtype) or out_dtype not in _DTYPES:
        raise BadTensorDtypeError(f"out_dtype: expected {', '.join(map(str, _DTYPES))}, got {out_dtype!r}")
    if bias is not None:
        _check_bias(bias, n, out_dtype)
    check_devices("packed", packed.device, x=x, bias=bias)

    rows = x.reshape(-1, k) if k else x.new_empty((x.shape[:-1].numel(), 0))
    out = run(packed, packed.fmt, rows, None if bias is None else bias.reshape(n), out_dtype, mode, True)
    return out.view(*x.shape[:-1], n)


def _check_bias(bias: torch.Tensor, n: int, out_dtype: torch.dtype) -> None:
    check_strided("bias", bias)
    if bias.dtype not in (torch.float32, out_dtype):
        raise BadTensorDtypeError(f"bias: expected {out_dtype} as out_dtype, or torch.float32, got {bias.dtype}")
    if not has_shape(bias, (n,), (1, n)):
        raise BadTensorShapeError(f"bias: expected [{n}] or [1, {n}], got {list(bias.shape)}")
