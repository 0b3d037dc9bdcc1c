"""The public functions of each GGUF format: short names for `quantize_block`, `dequantize_block` and the two products of gemm.py.

Written out, one section a format, so that type checkers, editors and the documentation see them. tests/gguf/test_gguf_formats.py compares the
sections with each other and with scaled_mm/gguf_formats.py.
"""

from __future__ import annotations

import torch

from scaled_mm.gguf.dequantize import dequantize_block
from scaled_mm.gguf.gemm import gemm_with_floats, gemm_with_q8_1
from scaled_mm.gguf.pack import PackedBlockWeight
from scaled_mm.gguf.quantize import quantize_block

__all__ = [
    "quantize_q4_0",
    "dequantize_q4_0",
    "gemm_q4_0",
    "gemm_q4_0_q8_1",
    "quantize_q4_1",
    "dequantize_q4_1",
    "gemm_q4_1",
    "gemm_q4_1_q8_1",
    "quantize_q5_0",
    "dequantize_q5_0",
    "gemm_q5_0",
    "gemm_q5_0_q8_1",
    "quantize_q5_1",
    "dequantize_q5_1",
    "gemm_q5_1",
    "gemm_q5_1_q8_1",
    "quantize_q8_0",
    "dequantize_q8_0",
    "gemm_q8_0",
    "gemm_q8_0_q8_1",
    "quantize_q8_1",
    "dequantize_q8_1",
]

# ---- q4_0 ----------------------------------------------------------------------------------------------------


def quantize_q4_0(x: torch.Tensor, rule: str = "absmax") -> torch.Tensor:
    """float [..., K] to q4_0, uint8 [..., K/32, 18]. `quantize_block(x, "q4_0", rule)` documents arguments, formula and errors."""
    return quantize_block(x, "q4_0", rule)


def dequantize_q4_0(q: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """q4_0, uint8 [..., K/32, 18], to `dtype` [..., K]. `dequantize_block(q, "q4_0", dtype)` documents arguments, formula and errors."""
    return dequantize_block(q, "q4_0", dtype)


def gemm_q4_0(
    weight_q: torch.Tensor | PackedBlockWeight, activation: torch.Tensor, M: int | None = None, N: int | None = None, K: int | None = None
) -> torch.Tensor:
    """C = W A^T of a q4_0 weight and float16 or bfloat16 activations: float32 [M, N], contiguous.

    weight_q: uint8 [M, K/32, 18], or packed by `pack_block_weight`. activation: [N, K], any strides. M, N, K: checked if given.
    Raises a ScaledMMError subclass. `gguf.gemm.gemm_with_floats` documents arguments and accuracy.
    """
    return gemm_with_floats("q4_0", weight_q, activation, M, N, K)


def gemm_q4_0_q8_1(
    weight_q: torch.Tensor | PackedBlockWeight, activation_q: torch.Tensor, M: int | None = None, N: int | None = None, K: int | None = None
) -> torch.Tensor:
    """C = W A^T of a q4_0 weight and q8_1 activations: float32 [M, N], contiguous.

    C[m,n] = sum over blocks of d_w * (d_a * sum(q_w * q_a) - 8 * s_a)
    weight_q: uint8 [M, K/32, 18], or packed by `pack_block_weight`. activation_q: uint8 [N, K/32, 36]. M, N, K: checked if given.
    Raises a ScaledMMError subclass. `gguf.gemm.gemm_with_q8_1` documents arguments and accuracy. Source: ggml's `vec_dot_q4_0_q8_1`.
    """
    return gemm_with_q8_1("q4_0", weight_q, activation_q, M, N, K)


# ---- q4_1 ----------------------------------------------------------------------------------------------------


def quantize_q4_1(x: torch.Tensor, rule: str = "absmax") -> torch.Tensor:
    """float [..., K] to q4_1, uint8 [..., K/32, 20]. `quantize_block(x, "q4_1", rule)` documents arguments, formula and errors."""
    return quantize_block(x, "q4_1", rule)


def dequantize_q4_1(q: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """q4_1, uint8 [..., K/32, 20], to `dtype` [..., K]. `dequantize_block(q, "q4_1", dtype)` documents arguments, formula and errors."""
    return dequantize_block(q, "q4_1", dtype)


def gemm_q4_1(
    weight_q: torch.Tensor | PackedBlockWeight, activation: torch.Tensor, M: int | None = None, N: int | None = None, K: int | None = None
) -> torch.Tensor:
    """C = W A^T of a q4_1 weight and float16 or bfloat16 activations: float32 [M, N], contiguous.

    weight_q: uint8 [M, K/32, 20], or packed by `pack_block_weight`. activation: [N, K], any strides. M, N, K: checked if given.
    Raises a ScaledMMError subclass. `gguf.gemm.gemm_with_floats` documents arguments and accuracy.
    """
    return gemm_with_floats("q4_1", weight_q, activation, M, N, K)


def gemm_q4_1_q8_1(
    weight_q: torch.Tensor | PackedBlockWeight, activation_q: torch.Tensor, M: int | None = None, N: int | None = None, K: int | None = None
) -> torch.Tensor:
    """C = W A^T of a q4_1 weight and q8_1 activations: float32 [M, N], contiguous.

    C[m,n] = sum over blocks of d_w * d_a * sum(q_w * q_a) + m_w * s_a
    weight_q: uint8 [M, K/32, 20], or packed by `pack_block_weight`. activation_q: uint8 [N, K/32, 36]. M, N, K: checked if given.
    Raises a ScaledMMError subclass. `gguf.gemm.gemm_with_q8_1` documents arguments and accuracy. Source: ggml's `vec_dot_q4_1_q8_1`.
    """
    return gemm_with_q8_1("q4_1", weight_q, activation_q, M, N, K)


# ---- q5_0 ----------------------------------------------------------------------------------------------------


def quantize_q5_0(x: torch.Tensor, rule: str = "absmax") -> torch.Tensor:
    """float [..., K] to q5_0, uint8 [..., K/32, 22]. `quantize_block(x, "q5_0", rule)` documents arguments, formula and errors."""
    return quantize_block(x, "q5_0", rule)


def dequantize_q5_0(q: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """q5_0, uint8 [..., K/32, 22], to `dtype` [..., K]. `dequantize_block(q, "q5_0", dtype)` documents arguments, formula and errors."""
    return dequantize_block(q, "q5_0", dtype)


def gemm_q5_0(
    weight_q: torch.Tensor | PackedBlockWeight, activation: torch.Tensor, M: int | None = None, N: int | None = None, K: int | None = None
) -> torch.Tensor:
    """C = W A^T of a q5_0 weight and float16 or bfloat16 activations: float32 [M, N], contiguous.

    weight_q: uint8 [M, K/32, 22], or packed by `pack_block_weight`. activation: [N, K], any strides. M, N, K: checked if given.
    Raises a ScaledMMError subclass. `gguf.gemm.gemm_with_floats` documents arguments and accuracy.
    """
    return gemm_with_floats("q5_0", weight_q, activation, M, N, K)


def gemm_q5_0_q8_1(
    weight_q: torch.Tensor | PackedBlockWeight, activation_q: torch.Tensor, M: int | None = None, N: int | None = None, K: int | None = None
) -> torch.Tensor:
    """C = W A^T of a q5_0 weight and q8_1 activations: float32 [M, N], contiguous.

    C[m,n] = sum over blocks of d_w * (d_a * sum(q_w * q_a) - 16 * s_a)
    weight_q: uint8 [M, K/32, 22], or packed by `pack_block_weight`. activation_q: uint8 [N, K/32, 36]. M, N, K: checked if given.
    Raises a ScaledMMError subclass. `gguf.gemm.gemm_with_q8_1` documents arguments and accuracy. Source: ggml's `vec_dot_q5_0_q8_1`.
    """
    return gemm_with_q8_1("q5_0", weight_q, activation_q, M, N, K)


# ---- q5_1 ----------------------------------------------------------------------------------------------------


def quantize_q5_1(x: torch.Tensor, rule: str = "absmax") -> torch.Tensor:
    """float [..., K] to q5_1, uint8 [..., K/32, 24]. `quantize_block(x, "q5_1", rule)` documents arguments, formula and errors."""
    return quantize_block(x, "q5_1", rule)


def dequantize_q5_1(q: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """q5_1, uint8 [..., K/32, 24], to `dtype` [..., K]. `dequantize_block(q, "q5_1", dtype)` documents arguments, formula and errors."""
    return dequantize_block(q, "q5_1", dtype)


def gemm_q5_1(
    weight_q: torch.Tensor | PackedBlockWeight, activation: torch.Tensor, M: int | None = None, N: int | None = None, K: int | None = None
) -> torch.Tensor:
    """C = W A^T of a q5_1 weight and float16 or bfloat16 activations: float32 [M, N], contiguous.

    weight_q: uint8 [M, K/32, 24], or packed by `pack_block_weight`. activation: [N, K], any strides. M, N, K: checked if given.
    Raises a ScaledMMError subclass. `gguf.gemm.gemm_with_floats` documents arguments and accuracy.
    """
    return gemm_with_floats("q5_1", weight_q, activation, M, N, K)


def gemm_q5_1_q8_1(
    weight_q: torch.Tensor | PackedBlockWeight, activation_q: torch.Tensor, M: int | None = None, N: int | None = None, K: int | None = None
) -> torch.Tensor:
    """C = W A^T of a q5_1 weight and q8_1 activations: float32 [M, N], contiguous.

    C[m,n] = sum over blocks of d_w * d_a * sum(q_w * q_a) + m_w * s_a
    weight_q: uint8 [M, K/32, 24], or packed by `pack_block_weight`. activation_q: uint8 [N, K/32, 36]. M, N, K: checked if given.
    Raises a ScaledMMError subclass. `gguf.gemm.gemm_with_q8_1` documents arguments and accuracy. Source: ggml's `vec_dot_q5_1_q8_1`.
    """
    return gemm_with_q8_1("q5_1", weight_q, activation_q, M, N, K)


# ---- q8_0 ----------------------------------------------------------------------------------------------------


def quantize_q8_0(x: torch.Tensor, rule: str = "absmax") -> torch.Tensor:
    """float [..., K] to q8_0, uint8 [..., K/32, 34]. `quantize_block(x, "q8_0", rule)` documents arguments, formula and errors."""
    return quantize_block(x, "q8_0", rule)


def dequantize_q8_0(q: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """q8_0, uint8 [..., K/32, 34], to `dtype` [..., K]. `dequantize_block(q, "q8_0", dtype)` documents arguments, formula and errors."""
    return dequantize_block(q, "q8_0", dtype)


def gemm_q8_0(
    weight_q: torch.Tensor | PackedBlockWeight, activation: torch.Tensor, M: int | None = None, N: int | None = None, K: int | None = None
) -> torch.Tensor:
    """C = W A^T of a q8_0 weight and float16 or bfloat16 activations: float32 [M, N], contiguous.

    weight_q: uint8 [M, K/32, 34], or packed by `pack_block_weight`. activation: [N, K], any strides. M, N, K: checked if given.
    Raises a ScaledMMError subclass. `gguf.gemm.gemm_with_floats` documents arguments and accuracy.
    """
    return gemm_with_floats("q8_0", weight_q, activation, M, N, K)


def gemm_q8_0_q8_1(
    weight_q: torch.Tensor | PackedBlockWeight, activation_q: torch.Tensor, M: int | None = None, N: int | None = None, K: int | None = None
) -> torch.Tensor:
    """C = W A^T of a q8_0 weight and q8_1 activations: float32 [M, N], contiguous.

    C[m,n] = sum over blocks of d_w * d_a * sum(q_w * q_a)
    weight_q: uint8 [M, K/32, 34], or packed by `pack_block_weight`. activation_q: uint8 [N, K/32, 36]. M, N, K: checked if given.
    Raises a ScaledMMError subclass. `gguf.gemm.gemm_with_q8_1` documents arguments and accuracy. Source: ggml's `vec_dot_q8_0_q8_1`.
    """
    return gemm_with_q8_1("q8_0", weight_q, activation_q, M, N, K)


# ---- q8_1 ----------------------------------------------------------------------------------------------------


def quantize_q8_1(x: torch.Tensor, rule: str = "absmax") -> torch.Tensor:
    """float [..., K] to q8_1, uint8 [..., K/32, 36]. `quantize_block(x, "q8_1", rule)` documents arguments, formula and errors."""
    return quantize_block(x, "q8_1", rule)


def dequantize_q8_1(q: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """q8_1, uint8 [..., K/32, 36], to `dtype` [..., K]. `dequantize_block(q, "q8_1", dtype)` documents arguments, formula and errors."""
    return dequantize_block(q, "q8_1", dtype)
