"""`grouped_scaled_mm`: the products of a mixture of experts in one call, and a descriptor for them."""

from __future__ import annotations

import torch

from scaled_mm.core import binding, checks, operators
from scaled_mm.core.descriptor import Handle, Plan, TensorDesc, _stream_address
from scaled_mm.errors import BadParamError, BadTensorDtypeError
from scaled_mm.products import grouped_ops

_OPERANDS = ("out", "a", "b", "a_scale", "b_scale", "bias", "expert_offsets")
_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int32)


def grouped_scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    expert_offsets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """INT8 products of tokens sorted by expert with each expert's weight; the bits of `scaled_mm` expert by expert.

        end[e]   = max(end[e-1], min(expert_offsets[e], tokens)),  end[-1] = 0
        out[t]   = scaled_mm(a[t], b[e], a_scale[t], b_scale[e], bias[e])       for end[e-1] <= t < end[e]
        out[t]   = 0                                                             for t >= end[E-1]

    a: int8 [tokens, K]. b: int8 [E, K, N]; fastest as `weight.transpose(1, 2)` of a contiguous [E, N, K] weight. Any strides.
    a_scale: float32, one value, [tokens] or [tokens, 1].
    b_scale: float32, one value, [E], [E, 1, 1], [E, N], [E, 1, N] or [E, N, 1], as checkpoints store it.
    expert_offsets: int32 [E] on a's device: one past each expert's last row, as `torch._grouped_mm` takes its `offs`. The
        kernel reads them, so nothing waits for the GPU, and in a CUDA graph they may change between replays, though not while one runs. Offsets that
        decrease, are negative or exceed the tokens are clamped as above: experts come out empty or shorter.
    bias: [E, N], in out_dtype or float32.
    out_dtype: float16, bfloat16, float32, or int32 for the raw accumulators (a_scale and b_scale are None then).
    out: [tokens, N] to write to; decides the dtype (out_dtype is not looked at). It may not share memory with an input.

    Runs on the current stream of a's device. Raises a ScaledMMError subclass that names the argument, what was expected and
    what came; K is bounded as in `scaled_mm`. The output never requires a gradient.
    """
    if out is None and (not isinstance(out_dtype, torch.dtype) or out_dtype not in _OUT_DTYPES):
        raise BadTensorDtypeError(f"out_dtype: expected {', '.join(map(str, _OUT_DTYPES))}, got {out_dtype!r}")
    try:
        if out is None:
            return grouped_ops.grouped_scaled_mm(a, b, a_scale, b_scale, expert_offsets, bias, out_dtype)
        checks.check_out(out)
        grouped_ops.grouped_scaled_mm_out(out, a, b, a_scale, b_scale, expert_offsets, bias)
        if not torch.compiler.is_compiling():
            checks.mark_written(out)
        return out
    except (RuntimeError, TypeError) as error:
        raise operators.name_dtype(
            operators.typed_error(error), out=out, a=a, b=b, a_scale=a_scale, b_scale=b_scale, bias=bias, expert_offsets=expert_offsets
        ) from None


class GroupedDescriptor(Plan):
    """A plan for grouped products; made by `create_grouped_descriptor`. A context manager: leaving it destroys it."""

    _PRODUCT = binding.GROUPED_GEMM
    _OPERANDS = _OPERANDS

    def _sizes(self, described: dict[str, TensorDesc | None]) -> str:
        return f"{described['out'].shape[0]} tokens, {'x'.join(map(str, described['b'].shape))}"

    def calculate(self, out, a, b, a_scale=None, b_scale=None, expert_offsets=None, bias=None, *, workspace=None, stream=None) -> None:
        """Compute into `out`. Tensors must have the dtype, shape and strides that the descriptor was created with.

        workspace: at least `workspace_size` bytes on the device (any contiguous dtype), or None when that is 0.
        stream: a torch.cuda.Stream, a cudaStream_t as an integer, or None for the current stream.
        Allocates nothing and never synchronises; may be captured in a CUDA graph.
        """
        self._alive()
        address = -1 if stream is None else _stream_address(stream)
        checks.check_out(out)
        tensors = (out, a, b, a_scale, b_scale, bias, expert_offsets)
        if self.device.type == "cpu":
            from scaled_mm.cpu import grouped as cpu_grouped

            self._check_on_cpu(tensors, workspace)
            return cpu_grouped.grouped_gemm(*tensors)
        self._check_data(out)
        try:
            grouped_ops.grouped_calculate(self._pointer.value, out, a, b, a_scale, b_scale, expert_offsets, bias, workspace, address)
        except (RuntimeError, TypeError) as error:
            raise self._named(operators.typed_error(error), tensors) from None
        checks.mark_written(out)


def create_grouped_descriptor(handle: Handle, *, out, a, b, expert_offsets, a_scale=None, b_scale=None, bias=None, kernel=None) -> GroupedDescriptor:
    """Validate a grouped product once and pick its kernel.

    Each argument is a TensorDesc or a tensor, as `grouped_scaled_mm` takes them; `out` [tokens, N] decides the output dtype.
    kernel: the name of a row of the grouped section of the device's tile table to force.
    Raises a ScaledMMError that names the argument, what was expected and what came.
    """
    tensors = dict(out=out, a=a, b=b, a_scale=a_scale, b_scale=b_scale, bias=bias, expert_offsets=expert_offsets)
    for name in ("out", "a", "b", "expert_offsets"):
        if tensors[name] is None:
            raise BadParamError(f"{name}: expected a tensor or a TensorDesc, got None")
    return GroupedDescriptor(handle, tensors, kernel)


__all__ = ["GroupedDescriptor", "create_grouped_descriptor", "grouped_scaled_mm"]
