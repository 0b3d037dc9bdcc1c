"""Products of a quantized weight with q8_1 or float activations, for any format; by_format.py has a pair of functions for each."""

from __future__ import annotations

import torch

from scaled_mm.core.checks import check_strided
from scaled_mm.core.dispatcher import typed_error
from scaled_mm.errors import BadParamError, BadTensorDeviceError, BadTensorDtypeError, BadTensorShapeError
from scaled_mm.gguf import operators
from scaled_mm.gguf.cpu import FLOAT_ACTIVATIONS
from scaled_mm.gguf.pack import PackedBlockWeight, check_matrix
from scaled_mm.gguf_formats import BLOCK, lookup


def run(
    weight: torch.Tensor | PackedBlockWeight,
    fmt: str,
    activation: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    mode: str,
    transposed_out: bool,
) -> torch.Tensor:
    """The operator that a weight takes: blocks, tiles, or the fields of a CPU's packed one."""
    code, result = operators.format_code(fmt), (out_dtype, operators.mode_code(mode), transposed_out)
    try:
        if not isinstance(weight, PackedBlockWeight):
            rows, k = weight.shape[0], weight.shape[1] * BLOCK
            return operators.gguf_gemm(weight, activation, bias, code, rows, k, False, False, *result)
        if weight.tiles is not None:
            return operators.gguf_gemm(weight.tiles, activation, bias, code, weight.rows, weight.k, True, weight.constant, *result)
        d, m, high, levels = weight.fields
        return operators.gguf_gemm_fields(levels, high, d, m, activation, bias, code, *result)
    except (RuntimeError, TypeError) as error:
        raise typed_error(error) from None


def check_devices(name: str, device: torch.device, **others: torch.Tensor | None) -> None:
    """BadTensorDeviceError unless all are on `device`, that of `name`."""
    for other, tensor in others.items():
        if tensor is not None and tensor.device != device:
            raise BadTensorDeviceError(f"{other}: expected a tensor on {device}, as {name}, got one on {tensor.device}")


def _check_weight(weight_q: object, fmt: str) -> tuple[int, int]:
    """[M, K] of a weight, blocks or packed."""
    if isinstance(weight_q, PackedBlockWeight):
        if weight_q.fmt != fmt:
            raise BadParamError(f"weight_q: expected a packed weight of {fmt}, got one of {weight_q.fmt}")
        return weight_q.rows, weight_q.k
    check_matrix("weight_q", weight_q, lookup(fmt))
    return weight_q.shape[0], weight_q.shape[1] * BLOCK


@torch.no_grad()
def gemm_with_q8_1(
    fmt: str,
    weight_q: torch.Tensor | PackedBlockWeight,
    activation_q: torch.Tensor,
    M: int | None = None,
    N: int | None = None,
    K: int | None = None,
) -> torch.Tensor:
    """C = W A^T of a weight in format `fmt` and q8_1 activations: float32 [M, N], contiguous. `gemm_q4_0_q8_1` and so on call it.

        C[m,n] = sum over blocks of  d_w * (d_a * sum(q_w * q_a) - zero * s_a)      formats with a level for 0, as q4_0 (zero = 8)
                                     d_w * d_a * sum(q_w * q_a) + m_w * s_a         formats with a minimum, as q4_1
                                     d_w * d_a * sum(q_w * q_a)                     formats of signed levels, q8_0

    s_a is the stored sum; formats of signed levels do not read it. A non-finite scale, minimum or sum makes its row or column of C
    non-finite and nothing else. docs/design/gguf-formats.md has the error bound.

    weight_q: uint8 [M, K/32, bytes of a block] with the blocks of a row contiguous and any other strides, or packed by `pack_block_weight`.
    activation_q: uint8 [N, K/32, 36], strides as weight_q. M, N, K: None, or the sizes of the operands, which are checked.
    CPU or CUDA; on CUDA it runs on the current stream and does not synchronise.
    Raises a ScaledMMError subclass that names the argument, the expected value and the actual one. Source: ggml's `vec_dot_*_q8_1`.
    """
    shape = _check_weight(weight_q, fmt)
    check_matrix("activation_q", activation_q, lookup("q8_1"))
    _check_sizes(shape, activation_q.shape[0], activation_q.shape[1] * BLOCK, "activation_q", M, N, K)
    check_devices("weight_q", weight_q.device, activation_q=activation_q)
    return run(weight_q, fmt, activation_q, None, torch.float32, "w4a8", False)


@torch.no_grad()
def gemm_with_floats(
    fmt: str,
    weight_q: torch.Tensor | PackedBlockWeight,
    activation: torch.Tensor,
    M: int | None = None,
    N: int | None = None,
    K: int | None = None,
) -> torch.Tensor:
    """C = W A^T of a weight in format `fmt` and float activations: float32 [M, N], contiguous. `gemm_q4_0` and so on call it.

        C[m,n] = sum over k of  w[m,k] * a[n,k],  w as `dequantize_block` computes it

    The activations are not rounded; sums are float32. For formats with a minimum, a GPU multiplies the minimum by the sum of the block's
    activations; tensor cores keep 22 bits of these sums. docs/design/gguf-formats.md has the error bound.

    weight_q: uint8 [M, K/32, bytes of a block] with the blocks of a row contiguous and any other strides, or packed by `pack_block_weight`.
    activation: float16 or bfloat16 [N, K], any strides. M, N, K: None, or the sizes of the operands, which are checked.
    CPU or CUDA; on CUDA it runs on the current stream and does not synchronise.
    Raises a ScaledMMError subclass that names the argument, the expected value and the actual one.
    """
    shape = _check_weight(weight_q, fmt)
    check_strided("activation", activation)
    if activation.dtype not in FLOAT_ACTIVATIONS:
        hint = "; sm.block_linear takes float32" if activation.dtype is torch.float32 else ""
        raise BadTensorDtypeError(f"activation: expected float16 or bfloat16, got {activation.dtype}{hint}")
    if activation.dim() != 2:
        raise BadTensorShapeError(f"activation: expected 2 dimensions [N, K], got {list(activation.shape)}")
    _check_sizes(shape, *activation.shape, "activation", M, N, K)
    check_devices("weight_q", weight_q.device, activation=activation)
    return run(weight_q, fmt, activation, None, torch.float32, "w4a16", False)


def _check_sizes(weight: tuple[int, int], n: int, k: int, name: str, *given: int | None) -> None:
    m, weight_k = weight
    if k != weight_k:
        raise BadTensorShapeError(f"{name}: expected K = {weight_k} as in weight_q [M, K] = {[m, weight_k]}, got K = {k}")
    for letter, size, actual in zip("MNK", given, (m, n, k)):
        if size is None:
            continue
        if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt)):
            raise BadParamError(f"{letter}: expected an integer or None, got {size!r}")
        if size != actual:
            raise BadTensorShapeError(f"{letter}: expected {actual}, the one of the operands, got {size}")
