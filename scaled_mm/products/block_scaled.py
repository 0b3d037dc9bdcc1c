"""`block_scaled_mm`: products whose scales belong to blocks of 128 k, in one call, and a descriptor for them."""

from __future__ import annotations

import torch

from scaled_mm.core import binding, checks, operators
from scaled_mm.core.descriptor import Handle, Plan, _stream_address
from scaled_mm.errors import BadParamError
from scaled_mm.products import block_scaled_ops

_OPERANDS = ("out", *block_scaled_ops.INPUTS)


def block_scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """INT8 product with a scale for each 128 k of a row of a, and for each 128 x 128 block of b; the same bits on every kernel, GPU and CPU.

        sum[m,n] = 0;  for kb = 0, 1, ...:  sum[m,n] += f32(sum of a[m,k] * b[k,n] over block kb) * (a_scale[m,kb] * b_scale[kb,n//128])
        out[m,n] = cast( sum[m,n] + bias[n] )

    each float32 operation rounded by itself (docs/design/numerics.md). K and N need not be multiples of 128: the last blocks are smaller then.

    a: int8 [M, K]. b: int8 [K, N]; fastest as `weight.t()` of a contiguous [N, K] weight. Any strides are taken.
    a_scale: float32 [M, ceil(K/128)]. b_scale: float32 [ceil(K/128), ceil(N/128)]: the transpose of a checkpoint's
        `weight_scale_inv`. Any strides. `quantize_int8_block` makes both.
    bias: [N] or [1, N], in out_dtype or float32.
    out_dtype: float16, bfloat16 or float32.
    out: [M, N] to write to; decides the dtype (out_dtype is not looked at). It may not share memory with an input.

    Runs on the current stream of a's device, allocates the output and nothing else, never synchronises. K is not bounded. The output
    never requires a gradient. Raises a ScaledMMError subclass that names the argument, what was expected and what came.
    """
    if out is None:
        block_scaled_ops.check_out_dtype(out_dtype)
    else:
        checks.check_out(out)
    try:
        if out is None:
            return block_scaled_ops.block_scaled_mm(a, b, a_scale, b_scale, bias, out_dtype)
        block_scaled_ops.block_scaled_mm_out(out, a, b, a_scale, b_scale, bias)
        if not torch.compiler.is_compiling():
            checks.mark_written(out)
        return out
    except (RuntimeError, TypeError) as error:
        raise operators.name_dtype(operators.typed_error(error), out=out, a=a, b=b, a_scale=a_scale, b_scale=b_scale, bias=bias) from None


class BlockScaledDescriptor(Plan):
    """A plan for a block-scaled product; made by `create_block_scaled_descriptor`. A context manager: leaving it destroys it."""

    _PRODUCT = binding.BLOCK_SCALED_GEMM
    _OPERANDS = _OPERANDS

    def calculate(self, out, a, b, a_scale, b_scale, bias=None, *, stream=None) -> None:
        """Compute into `out`. Tensors must have the dtype, shape and strides that the descriptor was created with.

        stream: a torch.cuda.Stream, a cudaStream_t as an integer, or None for the current stream.
        Needs no workspace, allocates nothing and never synchronises; may be captured in a CUDA graph.
        """
        self._alive()
        checks.check_out(out)
        address = -1 if stream is None else _stream_address(stream)
        tensors = (out, a, b, a_scale, b_scale, bias)
        if self.device.type == "cpu":
            from scaled_mm.cpu import block_scaled as cpu_block_scaled

            self._check_on_cpu(tensors)
            return cpu_block_scaled.gemm(*tensors)
        self._check_data(out)
        try:
            block_scaled_ops.block_scaled_calculate(self._pointer.value, *tensors, address)
        except (RuntimeError, TypeError) as error:
            raise self._named(operators.typed_error(error), tensors) from None
        checks.mark_written(out)


def create_block_scaled_descriptor(handle: Handle, *, out, a, b, a_scale, b_scale, bias=None, kernel=None) -> BlockScaledDescriptor:
    """Validate a block-scaled product once and pick its kernel.

    Each argument is a TensorDesc or a tensor, as `block_scaled_mm` takes them; `out` [M, N] decides the output dtype.
    kernel: the name of a row of the block-scaled section of the device's tile table to force.
    Raises a ScaledMMError that names the argument, what was expected and what came.
    """
    tensors = dict(out=out, a=a, b=b, a_scale=a_scale, b_scale=b_scale, bias=bias)
    for name in _OPERANDS[:-1]:
        if tensors[name] is None:
            raise BadParamError(f"{name}: expected a tensor or a TensorDesc, got None")
    return BlockScaledDescriptor(handle, tensors, kernel)


__all__ = ["BlockScaledDescriptor", "block_scaled_mm", "create_block_scaled_descriptor"]
