"""Products of a quantized weight with quantized or float activations, one pair of functions a format."""

from __future__ import annotations

from collections.abc import Callable

import torch

from scaled_mm.block import layout, product
from scaled_mm.block.formats import BLOCK, BlockFormat, lookup
from scaled_mm.block.pack import check_matrix
from scaled_mm.checks import check_strided
from scaled_mm.errors import (
    BadParamError,
    BadTensorDeviceError,
    BadTensorDtypeError,
    BadTensorShapeError,
    DeviceNotSupportedError,
)

FLOAT_ACTIVATIONS = (torch.float16, torch.bfloat16)


def check_devices(name: str, device: torch.device, **others: torch.Tensor | None) -> None:
    """BadTensorDeviceError unless all are on `device`, that of `name`; DeviceNotSupportedError unless that is a CPU."""
    for other, tensor in others.items():
        if tensor is not None and tensor.device != device:
            raise BadTensorDeviceError(f"{other}: expected a tensor on {device}, as {name}, got one on {tensor.device}")
    if device.type != "cpu":
        reason = "block products have no kernels for it yet"
        raise DeviceNotSupportedError(f"{name}: expected a tensor on the CPU, got one on {device}: {reason}")


def activation_of(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, excess) as `product.multiply` takes them, of q8_1 blocks: uint8 [N, K/32, 36].

    x = d * q is exact (11 bits times 7), so is d * sum(q) (11 times 12): excess = s - d * sum(q) rounds once.
    """
    d, s, _, levels = layout.take_apart(q, lookup("q8_1"))
    d, levels = d.to(torch.float32).unsqueeze(-1), levels.to(torch.float32)
    excess = s.to(torch.float32) - levels.sum(-1) * d.squeeze(-1)
    return levels.mul_(d).flatten(-2), excess


@torch.no_grad()
def _with_q8_1(description: BlockFormat, weight_q, activation_q, M, N, K) -> torch.Tensor:
    check_matrix("weight_q", weight_q, description.name)
    check_matrix("activation_q", activation_q, "q8_1")
    _check_sizes(weight_q, activation_q.shape[0], activation_q.shape[1] * BLOCK, "activation_q", M, N, K)
    check_devices("weight_q", weight_q.device, activation_q=activation_q)
    out = torch.empty((weight_q.shape[0], activation_q.shape[0]), dtype=torch.float32, device="cpu")
    product.multiply(out, layout.take_apart(weight_q, description), description, *activation_of(activation_q))
    return out


@torch.no_grad()
def _with_floats(description: BlockFormat, weight_q, activation, M, N, K) -> torch.Tensor:
    check_matrix("weight_q", weight_q, description.name)
    check_strided("activation", activation)
    if activation.dtype not in FLOAT_ACTIVATIONS:
        raise BadTensorDtypeError(f"activation: expected float16 or bfloat16, got {activation.dtype}")
    if activation.dim() != 2:
        raise BadTensorShapeError(f"activation: expected 2 dimensions [N, K], got {list(activation.shape)}")
    _check_sizes(weight_q, *activation.shape, "activation", M, N, K)
    check_devices("weight_q", weight_q.device, activation=activation)
    out = torch.empty((weight_q.shape[0], activation.shape[0]), dtype=torch.float32, device="cpu")
    x = activation.to(torch.float32, memory_format=torch.contiguous_format)
    product.multiply(out, layout.take_apart(weight_q, description), description, x)
    return out


def _check_sizes(weight_q: torch.Tensor, n: int, k: int, name: str, *given: int | None) -> None:
    m, weight_k = weight_q.shape[0], weight_q.shape[1] * BLOCK
    if k != weight_k:
        raise BadTensorShapeError(f"{name}: expected K = {weight_k} as in weight_q {list(weight_q.shape)}, got K = {k}")
    for letter, size, actual in zip("MNK", given, (m, n, k)):
        if size is None:
            continue
        if isinstance(size, bool) or not isinstance(size, int):
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

    {stored}docs/BLOCK_FORMATS.md has the bound on the error. A scale, minimum or sum (where it is read) that is not finite makes its
    row or column of C not finite, nothing else.

    weight_q: uint8 [M, K/32, {description.block_bytes}]. activation_q: uint8 [N, K/32, 36]. In both the blocks of a row lie one after the
    other; other strides are taken. M, N, K: None, or what the operands have. CPU only so far.
    Raises a ScaledMMError subclass that names the argument, what was expected and what came. Source: ggml's `vec_dot_{fmt}_q8_1`.
    """
    return gemm


def _float(fmt: str) -> Callable[..., torch.Tensor]:
    description = lookup(fmt)

    def gemm(weight_q, activation, M: int | None = None, N: int | None = None, K: int | None = None) -> torch.Tensor:
        return _with_floats(description, weight_q, activation, M, N, K)

    gemm.__name__ = gemm.__qualname__ = f"gemm_{fmt}"
    gemm.__doc__ = f"""C = W A^T of a {fmt} weight, dequantized, and float activations, float32 [M, N], contiguous.

    weight_q: uint8 [M, K/32, {description.block_bytes}]; the blocks of a row lie one after the other, other strides are taken.
    activation: float16 or bfloat16 [N, K], any strides. M, N, K: None, or what the operands have. The activations are not rounded; sums
    are float32. docs/BLOCK_FORMATS.md has the bound on the error. CPU only so far.
    Raises a ScaledMMError subclass that names the argument, what was expected and what came.
    """
    return gemm


_WEIGHTS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
gemm_q4_0_q8_1, gemm_q4_1_q8_1, gemm_q5_0_q8_1, gemm_q5_1_q8_1, gemm_q8_0_q8_1 = map(_quantized, _WEIGHTS)
gemm_q4_0, gemm_q4_1, gemm_q5_0, gemm_q5_1, gemm_q8_0 = map(_float, _WEIGHTS)
