"""The CUDA kernels of the row-wise operators (csrc/rowwise). Each function returns None where torch operations have to serve: they give the same
bits, more slowly.

That is so for tensor subclasses, while something intercepts operators or traces them, where the fast path to the core is missing, where a
kernel is neither built nor to be built (`SCALED_MM_JIT=off`, no nvcc), and on a GPU that no kernels are for. A warning tells of the last two once.
"""

from __future__ import annotations

import enum
import functools
import warnings

import torch

from scaled_mm.core import dispatcher, fast
from scaled_mm.errors import ArchitectureNotSupportedError, KernelNotBuiltError
from scaled_mm.rowwise.operands import has_memory


class Kind(enum.IntEnum):
    """The scaledMMProduct_t."""

    QUANTIZE = 4
    NORM = 5
    ACTIVATION = 6


class Function(enum.IntEnum):
    """`scaledMMRowwise_t`."""

    QUANTIZE_INT8 = 0
    RMS_NORM = 1
    ADD_RMS_NORM = 2
    SILU_AND_MUL = 3
    GELU_AND_MUL = 4
    GELU_TANH_AND_MUL = 5


class Output(enum.IntEnum):
    """`scaledMMRowwiseOutput_t`."""

    CAST = 0
    TOKEN = 1
    TOKEN_ASYMMETRIC = 2
    STATIC = 3
    ROUND = 4


def serve(x: torch.Tensor) -> bool:
    """Whether kernels may serve x: a plain CUDA tensor, with nothing that intercepts operators."""
    if not x.is_cuda or torch.compiler.is_compiling() or not has_memory(x) or x.dim() == 0:
        return False
    _load()
    return fast.module is not None and not fast.intercepted()


@functools.cache
def _load() -> None:
    dispatcher.load_cuda_operators()


def launch(kind: Kind, function: Function, output: Output, epsilon: float, out: torch.Tensor, x: torch.Tensor, *rest: torch.Tensor | None) -> bool:
    """Computes rows of x into out, and what else of `rest` is written: the operands of the kind in the order of scaled_mm.h, each with any number of
    leading dimensions. False: torch operations must serve."""
    device = x.get_device()
    try:
        handle = fast._handle_address(device)
    except ArchitectureNotSupportedError as error:
        _warn(str(error))
        return False
    status = fast.module.rowwise(handle, kind, function, output, epsilon, device, (out, x, *rest))
    second = rest[0]  # an input of every kind; of a norm the residual
    if status is NotImplemented and not (x.is_contiguous() and (second is None or second.is_contiguous())):  # perhaps no single stride between rows
        packed = (x.contiguous(), None if second is None else second.contiguous())
        status = fast.module.rowwise(handle, kind, function, output, epsilon, device, (out, *packed, *rest[1:]))
    if status is None:
        return True
    if status is NotImplemented:
        return False
    error = fast.failed(status)
    if isinstance(error, (KernelNotBuiltError, ArchitectureNotSupportedError)):
        _warn(str(error))
        return False
    raise error


@functools.cache
def _warn(why: str) -> None:
    warnings.warn(f"row-wise operators run as torch operations, several times slower: {why}", stacklevel=4)


def _empty(x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=x.device)


def quantized(
    x: torch.Tensor,
    output: Output,
    *,
    out: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    zero_point: torch.Tensor | None = None,
    shape: tuple[int, ...] | None = None,
) -> tuple[torch.Tensor, ...] | None:
    """(q,) and the scale, zero point and row sums that `output` has, in `shape`: those of the rows, [..., 1] by default.

    STATIC has row sums if there is a zero point. out: where q goes.
    """
    shape = (*x.shape[:-1], 1) if shape is None else shape
    q = _empty(x, x.shape, torch.int8) if out is None else out
    asymmetric = output is Output.TOKEN_ASYMMETRIC
    scales = _empty(x, shape, torch.float32) if output is Output.TOKEN or asymmetric else None
    points = _empty(x, shape, torch.int32) if asymmetric else None
    sums = _empty(x, shape, torch.int32) if asymmetric or zero_point is not None else None
    if not launch(Kind.QUANTIZE, Function.QUANTIZE_INT8, output, 0.0, q, x, factor, offset, scale, zero_point, scales, points, sums):
        return None
    return tuple(t for t in (q, scales, points, sums) if t is not None)


def _finished(kind: Kind, function: Function, epsilon: float, x, k: int, quantize, zero_point, before: tuple, after: tuple = ()):
    """(y,), (q, scale) or (q,) of a static scale."""
    shape = (*x.shape[:-1], k)
    if quantize is None:
        output, dtype, scale, scales = Output.CAST, x.dtype, None, None
    elif isinstance(quantize, torch.Tensor):
        output, dtype, scale, scales = Output.STATIC, torch.int8, quantize, None
    else:
        output, dtype, scale, scales = Output.TOKEN, torch.int8, None, _empty(x, (*x.shape[:-1], 1), torch.float32)
    out = _empty(x, shape, dtype)
    if not launch(kind, function, output, epsilon, out, x, *before, scale, zero_point, scales, *after):
        return None
    return (out,) if scales is None else (out, scales)


def normalized(x, residual, weight, epsilon: float, quantize, zero_point, total: torch.Tensor | None):
    """The norm of x, or of x + residual, which is written to total."""
    function = Function.RMS_NORM if residual is None else Function.ADD_RMS_NORM
    return _finished(Kind.NORM, function, float(epsilon), x, x.shape[-1], quantize, zero_point, (residual, weight), (total,))


def activated(x, function: Function, quantize, zero_point):
    """The gated activation of x."""
    return _finished(Kind.ACTIVATION, function, 0.0, x, x.shape[-1] // 2, quantize, zero_point, ())
