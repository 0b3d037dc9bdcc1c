"""`scaled_mm`: the product in one call."""

from __future__ import annotations

import torch

from scaled_mm.core import checks, fast, operators
from scaled_mm.errors import BadTensorDtypeError
from scaled_mm.products.prepared_weight import PreparedWeight

_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int32)


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor | PreparedWeight,
    a_scale: torch.Tensor | None = None,
    b_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    a_zero_point: torch.Tensor | None = None,
    b_zero_point: torch.Tensor | None = None,
    a_row_sums: torch.Tensor | None = None,
    b_column_sums: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """INT8 matrix product with scales, bias and zero points fused; the same bits on every kernel, GPU and CPU.

        acc[m,n] = sum_k (a[m,k] - a_zero_point[m]) * (b[k,n] - b_zero_point[n])
        out[m,n] = cast( (f32(acc) * b_scale[n]) * a_scale[m] + bias[n] )

    each float32 operation rounded by itself (docs/design/numerics.md).

    a: int8 [M, K]. b: int8 [K, N]; fastest as `weight.t()` of a contiguous [N, K] weight. Any strides are taken.
    a_scale: float32, one value, [M] or [M, 1]. b_scale: float32, one value, [N], [1, N] or [N, 1], as checkpoints store it.
    bias: [N] or [1, N], in out_dtype or float32.
    out_dtype: float16, bfloat16, float32, or int32 for the raw accumulators (no scales, no bias then).
    a_zero_point, b_zero_point: int32 or int8: one value, [M] or [M, 1]; one value, [N] or [1, N]. K is bounded for values from -128 to 127;
    with others K * max|a - a_zero_point| * max|b - b_zero_point| must stay below 2^31, which is not checked.
    a_row_sums: int32 [M] or [M, 1], the sums of a over K, as `quantize_int8(..., symmetric=False)` returns them. They are believed,
    and read only where b has zero points, for which a is otherwise read once more. b_column_sums: [N] or [1, N], the same for b
    where a has zero points; `prepare_weight` computes them once, and b may be what it returns (with its own zero points).
    out: [M, N] to write to; decides the dtype (out_dtype is not looked at). It may not share memory with an input.

    A batch: a [B, M, K], b [B, K, N], out [B, M, N], one launch. An a or b of two dimensions, or with a batch of 1, serves every
    product; batch strides may be anything, also 0. What goes with a may then be [B, M, 1], what goes with b [B, 1, N] (b_scale also [B, N, 1]), with
    1 for
    B where all products share it, and for M and N of scales and zero points; vectors of one or two dimensions are shared.

    The output never requires a gradient, whatever the inputs do: nothing is differentiated.

    Runs on the current stream of a's device, allocates the output (with zero points also 8 * B * (M + N) bytes, and partial
    sums where a row splits K), never synchronises. The first call for a kernel that was not built ahead of time compiles it,
    with a line on stderr.
    Raises a ScaledMMError subclass that names the argument, what was expected and what came.
    """
    if out is None and (not isinstance(out_dtype, torch.dtype) or out_dtype not in _OUT_DTYPES):
        raise BadTensorDtypeError(f"out_dtype: expected {', '.join(map(str, _OUT_DTYPES))}, got {out_dtype!r}")
    if out is not None:
        checks.check_out(out)
    constant_b = isinstance(b, PreparedWeight) and b.constant
    if isinstance(b, PreparedWeight):
        b, b_zero_point, b_column_sums = b.operands(b_zero_point, b_column_sums, needs_sums=a_zero_point is not None)
    try:
        if a_zero_point is None and b_zero_point is None and a_row_sums is None and b_column_sums is None:
            result = fast.scaled_mm(a, b, constant_b, a_scale, b_scale, bias, out_dtype, out)
            if result is not NotImplemented:
                return result
        if out is None:
            return operators.scaled_mm(a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, out_dtype, a_row_sums, b_column_sums, constant_b)
        operators.scaled_mm_out(out, a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums, constant_b)
        if not torch.compiler.is_compiling():
            checks.mark_written(out)
        return out
    except (RuntimeError, TypeError) as error:
        raise operators.name_dtype(
            operators.typed_error(error),
            out=out,
            a=a,
            b=b,
            a_scale=a_scale,
            b_scale=b_scale,
            bias=bias,
            a_zero_point=a_zero_point,
            b_zero_point=b_zero_point,
            a_row_sums=a_row_sums,
            b_column_sums=b_column_sums,
        ) from None
