"""Products of a quantized weight with quantized or float activations, one pair of functions a format."""

from __future__ import annotations

from collections.abc import Callable

import torch

from scaled_mm.core.checks import check_strided
from scaled_mm.core.dispatcher import typed_error
from scaled_mm.errors import BadParamError, BadTensorDeviceError, BadTensorDtypeError, BadTensorShapeError
from scaled_mm.gguf import operators
from scaled_mm.gguf.cpu import FLOAT_ACTIVATIONS
from scaled_mm.gguf.pack import PackedBlockWeight, check_matrix
from scaled_mm.gguf_formats import BLOCK, WEIGHT_FORMATS, BlockFormat, lookup


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
    check_matrix("weight_q", weight_q, fmt)
    return weight_q.shape[0], weight_q.shape[1] * BLOCK


@torch.no_grad()
def _with_q8_1(description: BlockFormat, weight_q, activation_q, M, N, K) -> torch.Tensor:
    shape = _check_weight(weight_q, description.name)
    check_matrix("activation_q", activation_q, "q8_1")
    _check_sizes(shape, activation_q.shape[0], activation_q.shape[1] * BLOCK, "activation_q", M, N, K)
    check_devices("weight_q", weight_q.device, activation_q=activation_q)
    return run(weight_q, description.name, activation_q, None, torch.float32, "w4a8", False)


@torch.no_grad()
def _with_floats(description: BlockFormat, weight_q, activation, M, N, K) -> torch.Tensor:
    shape = _check_weight(weight_q, description.name)
    check_strided("activation", activation)
    if activation.dtype not in FLOAT_ACTIVATIONS:
        hint = "; sm.block_linear takes float32" if activation.dtype is torch.float32 else ""
        raise BadTensorDtypeError(f"activation: expected float16 or bfloat16, got {activation.dtype}{hint}")
    if activation.dim() != 2:
        raise BadTensorShapeError(f"activation: expected 2 dimensions [N, K], got {list(activation.shape)}")
    _check_sizes(shape, *activation.shape, "activation", M, N, K)
    check_devices("weight_q", weight_q.device, activation=activation)
    return run(weight_q, description.name, activation, None, torch.float32, "w4a16", False)


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


_PRODUCT = {
    "m": "d_w * d_a * sum(q_w * q_a) + m_w * s_a",
    "zero": "d_w * (d_a * sum(q_w * q_a) - {zero} * s_a)",
    None: "d_w * d_a * sum(q_w * q_a)",
}


def _quantized(fmt: str) -> Callable[..., torch.Tensor]:
    description = lookup(fmt)

    def gemm(weight_q, activation_q, M: int | None = None, N: int | None = None, K: int | None = None) -> torch.Tensor:
        return _with_q8_1(description, weight_q, activation_q, M, N, K)

    formula = _PRODUCT["zero" if description.zero else description.second].format(zero=description.zero)
    stored = "s_a is the sum that is stored. " if "s_a" in formula else "The stored sums are not read. "
    gemm.__name__ = gemm.__qualname__ = f"gemm_{fmt}_q8_1"
    gemm.__doc__ = f"""C = W A^T of a {fmt} weight and q8_1 activations, float32 [M, N], contiguous.

    C[m,n] = sum over blocks of {formula}

    {stored}docs/design/gguf-formats.md has the bound on the error. A scale, minimum or sum (where it is read) that is not finite makes its
    row or column of C not finite, nothing else.

    weight_q: uint8 [M, K/32, {description.block_bytes}], or what `pack_block_weight` made of it. activation_q: uint8 [N, K/32, 36]. In both
    the blocks of a row lie one after the other; other strides are taken. M, N, K: None, or what the operands have.
    CPU or CUDA; there on the current stream, without synchronising.
    Raises a ScaledMMError subclass that names the argument, what was expected and what came. Source: ggml's `vec_dot_{fmt}_q8_1`.
    """
    return gemm


def _float(fmt: str) -> Callable[..., torch.Tensor]:
    description = lookup(fmt)

    def gemm(weight_q, activation, M: int | None = None, N: int | None = None, K: int | None = None) -> torch.Tensor:
        return _with_floats(description, weight_q, activation, M, N, K)

    gemm.__name__ = gemm.__qualname__ = f"gemm_{fmt}"
    gemm.__doc__ = f"""C = W A^T of a {fmt} weight, dequantized, and float activations, float32 [M, N], contiguous.

    weight_q: uint8 [M, K/32, {description.block_bytes}]; the blocks of a row lie one after the other, other strides are taken. Or what
    `pack_block_weight` made of it. activation: float16 or bfloat16 [N, K], any strides. M, N, K: None, or what the operands have.
    The activations are not rounded; sums are float32, on a GPU those of a block's activations, which minima are multiplied with,
    22 bits where the tensor cores add them. docs/design/gguf-formats.md has the bound on the error. CPU or CUDA; there on the
    current stream, without synchronising.
    Raises a ScaledMMError subclass that names the argument, what was expected and what came.
    """
    return gemm


gemm_q4_0_q8_1, gemm_q4_1_q8_1, gemm_q5_0_q8_1, gemm_q5_1_q8_1, gemm_q8_0_q8_1 = map(_quantized, WEIGHT_FORMATS)
gemm_q4_0, gemm_q4_1, gemm_q5_0, gemm_q5_1, gemm_q8_0 = map(_float, WEIGHT_FORMATS)
