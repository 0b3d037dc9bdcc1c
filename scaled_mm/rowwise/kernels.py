"""The CUDA kernels of the row-wise operators (csrc/rowwise). Each function returns None where torch operations have to serve: they give the same
bits, more slowly.

That is so for tensor subclasses, while something intercepts operators or traces them, where the fast path to the core is missing, where a
kernel is neither built nor to be built (`SCALED_MM_JIT=off`, no nvcc), and on a GPU that no kernels are for. A warning tells of the last two once.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable

import torch

from scaled_mm.core import fast
from scaled_mm.errors import ArchitectureNotSupportedError, CudaError, InternalError, KernelNotBuiltError, ScaledMMError
from scaled_mm.jit import mode
from scaled_mm.rowwise.operands import MAX_DIMS, has_memory


class Kind(enum.IntEnum):
    """The scaledMMProduct_t."""

    QUANTIZE = 5
    NORM = 6
    ACTIVATION = 7
    ROPE = 8
    INT8_BLOCK = 9
    GGUF_QUANTIZE = 10
    MOE_SORT = 11
    MOE_QUANTIZE = 12
    MOE_COMBINE = 13
    TOPK_SOFTMAX = 14


_READ = {Kind.NORM: 2, Kind.ROPE: 4, Kind.MOE_COMBINE: 2}
"""How many operands after out are copied if their rows have no single stride. 1 for kinds not listed."""


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
    STATIC_COLUMNS = 5


def serve(x: torch.Tensor) -> bool:
    """Whether kernels may serve x: a plain CUDA tensor, with nothing that intercepts operators."""
    if not x.is_cuda or torch.compiler.is_compiling() or not has_memory(x) or x.dim() == 0:
        return False
    return fast.loaded() is not None and not fast.intercepted()


def first(x: object, results: Callable[[], tuple[torch.Tensor, ...] | None]) -> tuple[torch.Tensor, ...] | None:
    """What the kernels give if they serve x as it is, with the core's checks alone. None: the caller checks, and serves or says what is wrong."""
    if not isinstance(x, torch.Tensor) or not serve(x) or x.dim() > MAX_DIMS or x.shape[-1] == 0:
        return None
    try:
        return results()
    except (CudaError, InternalError):
        raise
    except (AttributeError, IndexError, TypeError, ValueError, ScaledMMError):
        return None


def launch(kind: Kind, function: int, output: int, epsilon: float, out: torch.Tensor, x: torch.Tensor, *rest: torch.Tensor | None) -> bool:
    """Computes rows of x into out, and what else of `rest` is written: the operands of the kind in the order of scaled_mm.h, each with any number of
    leading dimensions. function: a `Function`, or the option of the kind. output: an `Output`, or the format of GGUF blocks.
    False: torch operations must serve."""
    device = x.get_device()
    if (kind, device) in _not_built:
        return False
    try:
        handle = fast.handle_address(device)
    except ArchitectureNotSupportedError as error:
        _give_up(kind, device, str(error))
        return False
    status = fast.module.rowwise(handle, kind, function, output, epsilon, device, (out, x, *rest))
    read = (x, *rest)[: _READ.get(kind, 1)]
    if status is NotImplemented and not all(t is None or t.is_contiguous() for t in read):  # rows that do not lie at one stride
        copies = (*(t if t is None else t.contiguous() for t in read), *rest[len(read) - 1 :])
        status = fast.module.rowwise(handle, kind, function, output, epsilon, device, (out, *copies))
    if status is None:
        return True
    if status is NotImplemented:
        return False
    error = fast.failed(status)
    if not isinstance(error, (KernelNotBuiltError, ArchitectureNotSupportedError)):
        raise error
    if isinstance(error, ArchitectureNotSupportedError) or mode.current() != "background":  # else the kernel is being built
        _give_up(kind, device, str(error))
    return False


_not_built: set[tuple[Kind, int]] = set()  # kinds and devices that torch operations serve in this process


def _give_up(kind: Kind, device: int, why: str) -> None:
    _not_built.add((kind, device))
    warnings.warn(f"row-wise operators run as torch operations, several times slower: {why}", stacklevel=5)


def empty(x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor on x's device."""
    return fast.empty(shape, dtype, x.get_device())


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
    q = empty(x, x.shape, torch.int8) if out is None else out
    asymmetric = output is Output.TOKEN_ASYMMETRIC
    scales = empty(x, shape, torch.float32) if output is Output.TOKEN or asymmetric else None
    points = empty(x, shape, torch.int32) if asymmetric else None
    sums = empty(x, shape, torch.int32) if asymmetric or (output is Output.STATIC and zero_point is not None) else None
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
        output, dtype, scale, scales = Output.TOKEN, torch.int8, None, empty(x, (*x.shape[:-1], 1), torch.float32)
    out = empty(x, shape, dtype)
    if not launch(kind, function, output, epsilon, out, x, *before, scale, zero_point, scales, *after):
        return None
    return (out,) if scales is None else (out, scales)


def normalized(x, residual, weight, epsilon: float, quantize, zero_point, total: torch.Tensor | None):
    """The norm of x, or of total = x + residual, which is written too."""
    function = Function.RMS_NORM if residual is None else Function.ADD_RMS_NORM
    return _finished(Kind.NORM, function, float(epsilon), x, x.shape[-1], quantize, zero_point, (residual, weight), (total,))


def activated(x, function: Function, quantize, zero_point, expert_offsets: torch.Tensor | None = None):
    """The gated activation of x. expert_offsets: int32 [E]; rows from its last value on are not computed."""
    return _finished(Kind.ACTIVATION, function, 0.0, x, x.shape[-1] // 2, quantize, zero_point, (), (expert_offsets,))


def rotated(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool):
    """(query, key), rotated in one launch."""
    out, out_key = (empty(t, tuple(t.shape), t.dtype) for t in (query, key))
    return (out, out_key) if launch(Kind.ROPE, int(interleaved), 0, 0.0, out, query, key, cos, sin, out_key) else None


def quantized_by_block(x: torch.Tensor, is_weight: bool, truncates: bool, block_size: int, expert_offsets: torch.Tensor | None = None):
    """(q, scale) of blocks of a row, or of square blocks of a weight. block_size: 128 or 64. truncates: quotients are rounded toward zero.
    expert_offsets: as in `activated`, not of a weight."""
    *leading, k = x.shape
    if is_weight:
        leading[-1] = -(-leading[-1] // block_size)
    q, scale = empty(x, tuple(x.shape), torch.int8), empty(x, (*leading, -(-k // block_size)), torch.float32)
    function = int(is_weight) + 2 * int(truncates) + 4 * int(block_size == 64)
    return (q, scale) if launch(Kind.INT8_BLOCK, function, 0, 0.0, q, x, scale, expert_offsets) else None


def gguf_quantized(x: torch.Tensor, out: torch.Tensor, code: int, rule: int) -> torch.Tensor | None:
    """out, the GGUF blocks of x. code: of their format, in the C interface."""
    return out if launch(Kind.GGUF_QUANTIZE, rule, code, 0.0, out, x) else None
