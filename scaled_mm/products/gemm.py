"""`scaled_mm`: the INT8 product, or a batch of products, with scales, bias and zero points."""

from __future__ import annotations

import torch

from scaled_mm.core.checks import check_size
from scaled_mm.core.handle import Handle
from scaled_mm.core.operators import Product
from scaled_mm.core.plan import Plan
from scaled_mm.core.spec import Operand, ProductSpec, lazily
from scaled_mm.errors import BadParamError, BadTensorShapeError
from scaled_mm.products import codes
from scaled_mm.products.prepared_weight import PreparedWeight
from scaled_mm.products.requantize import int8_product, refuse


def _out_shape(a: torch.Tensor, b: torch.Tensor, *_) -> tuple[int, ...]:
    """(M, N), or (B, M, N) if a or b has a batch."""
    a_shape, b_shape = a.shape, b.shape
    if len(a_shape) == 2 == len(b_shape):
        return a_shape[0], b_shape[1]
    for name, tensor, shape in (("a", a, "M, K"), ("b", b, "K, N")):
        if tensor.dim() not in (2, 3):
            got = f"{tensor.dim()}: {list(tensor.shape)}"
            raise BadTensorShapeError(f"{name}: expected 2 dimensions [{shape}] or 3 [B, {shape}], got {got}")
    shares_a = a.dim() == 2 or (b.dim() == 3 and a.shape[0] == 1)
    return (b if shares_a else a).shape[0], a.shape[-2], b.shape[-1]


def _check_sizes(a: torch.Tensor, b: torch.Tensor, *_) -> None:
    check_size(a.shape[-1] == b.shape[-2], lambda: f"b: expected [K, N] with K = {a.shape[-1]} as in a [M, K], got {list(b.shape)}")
    if b.dim() == 3:
        batch = _out_shape(a, b)[0]
        fits = b.shape[0] == 1 or b.shape[0] == batch
        check_size(fits, lambda: f"b: expected [B, K, N] with B = {batch} as in a [B, M, K], or 1, got {list(b.shape)}")


_OPTIONAL = ("a_scale", "b_scale", "bias", "a_zero_point", "b_zero_point", "a_row_sums", "b_column_sums")

GEMM = Product(
    ProductSpec(
        name="scaled_mm",
        code=codes.GEMM,
        inputs=(*(Operand(name, required=True) for name in ("a", "b")), *map(Operand, _OPTIONAL)),
        out_dtypes=(torch.bfloat16, torch.float16, torch.float32, torch.int32),
        out_shape=_out_shape,
        check_sizes=_check_sizes,
        compute=lazily("scaled_mm.cpu.gemm", "gemm"),
        cpu_kernel=lazily("scaled_mm.cpu.gemm", "kernel"),
        describe_sizes=lambda out, a, *_: "x".join(map(str, (*out.shape, a.shape[-1]))),
        constant="b",
    )
)


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
    out_scale: torch.Tensor | None = None,
    out_zero_point: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """INT8 matrix product with scales, bias and zero points fused; the same bits on every kernel, GPU and CPU.

        acc[m,n] = sum_k (a[m,k] - a_zero_point[m]) * (b[k,n] - b_zero_point[n])
        out[m,n] = cast( (f32(acc) * b_scale[n]) * a_scale[m] + bias[n] )

    Each float32 operation rounds separately (docs/design/numerics.md).

    a: int8 [M, K]. b: int8 [K, N]; fastest as `weight.t()` of a contiguous [N, K] weight. Any strides.
    a_scale: float32, one value, [M] or [M, 1]. b_scale: float32, one value, [N], [1, N] or [N, 1], as checkpoints store it.
    bias: [N] or [1, N], in out_dtype or float32.
    out_dtype: float16, bfloat16, float32, int32 for the raw accumulators (without scales and bias), or int8, which needs out_scale.
    out_scale, out_zero_point: of an int8 output, float32, and int32 or int8 or None: one value, [N] or [1, N]. With the y that a float32 output
        would have, out = clamp(round half to even(y / out_scale) + out_zero_point, -128, 127), and NaN counts as 0. y is written to memory first.
    a_zero_point, b_zero_point: int32 or int8: one value, [M] or [M, 1]; one value, [N] or [1, N]. The bound on K
    assumes values from -128 to 127. With other values K * max|a - a_zero_point| * max|b - b_zero_point| must be below 2^31, which is not checked.
    a_row_sums: int32 [M] or [M, 1], the sums of a over K from `quantize_int8(..., symmetric=False)`. They are not checked, and used only if
    b has zero points; without them a is read once more. b_column_sums: int32 [N] or [1, N], the sums of b over K, used only if a has zero
    points. `prepare_weight` computes them once; pass its result as b, with its zero points.
    out: [M, N] to write to. It determines the dtype, and out_dtype is ignored. It must not alias an input.

    Batch: a [B, M, K], b [B, K, N], out [B, M, N], in one launch. All products share an a or b with two dimensions or a batch size of 1. Any
    batch stride is allowed, including 0. Scales, zero points and sums of a may be [B, M, 1], those of b and the bias [B, 1, N] (b_scale also
    [B, N, 1]). B may be 1 if all products share them; M and N may be 1 for scales and zero points. Arguments with one or two dimensions are
    shared.

    The output never requires a gradient: there is no backward pass.

    Runs on the current stream of a's device and never synchronizes. Allocates the output, with zero points also 8 * B * (M + N) bytes, and
    partial sums if the kernel splits K. The first call for a kernel that was not built ahead of time compiles it and reports that on
    stderr.
    Raises a ScaledMMError subclass that names the argument, what was expected and what was given.
    """
    constant_b = False
    if isinstance(b, PreparedWeight):
        constant_b = b.constant
        b, b_zero_point, b_column_sums = b.operands(b_zero_point, b_column_sums, a_zero_point is not None)
    inputs = (a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums)
    if out_scale is not None or out_zero_point is not None:
        if (out_dtype if out is None else getattr(out, "dtype", None)) is torch.int8:
            return int8_product(GEMM, inputs, out, constant_b, out_scale, out_zero_point)
        refuse(out_scale, out_zero_point)
    return GEMM.call(inputs, out_dtype, out, constant_b)


class Descriptor(Plan):
    """A plan for one product; made by `create_descriptor`. A context manager: leaving it destroys it."""

    def __init__(self, handle: Handle, operands: tuple, kernel: str | None, constant_b: bool):
        super().__init__(GEMM, handle, operands, kernel, constant_b)
        self._constant_b = self._planned[2].constant
        self._needs_sums = self._planned[-1] is not None

    def calculate(
        self,
        out,
        a,
        b,
        a_scale=None,
        b_scale=None,
        bias=None,
        *,
        a_zero_point=None,
        b_zero_point=None,
        a_row_sums=None,
        b_column_sums=None,
        workspace=None,
        stream=None,
    ) -> None:
        """Compute into `out`. Tensors must have the dtype, shape and strides that the descriptor was created with.

        b: a tensor or a PreparedWeight; a PreparedWeight if the descriptor was created with one.
        workspace: at least `workspace_size` bytes on the device (any contiguous dtype, aligned to 16 bytes), or None if that is 0.
            Two concurrent calls, on two streams or from two threads, each need their own.
        stream: a torch.cuda.Stream, a cudaStream_t as an integer, or None for the current stream.
        Allocates nothing and never synchronizes; may be captured in a CUDA graph.
        Raises a ScaledMMError that names the tensor that differs; InsufficientWorkspaceError.
        """
        prepared = isinstance(b, PreparedWeight)
        if self._constant_b and not (prepared and b.constant):
            got = f"a {type(b).__name__}{' that is not constant' if prepared else ''}"
            raise BadParamError(f"b: expected a constant PreparedWeight, for which the descriptor was created, got {got}")
        if prepared:
            b, b_zero_point, b_column_sums = b.operands(b_zero_point, b_column_sums, self._needs_sums)
        self._run((out, a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums), workspace, stream)


def create_descriptor(
    handle: Handle,
    *,
    out,
    a,
    b,
    a_scale=None,
    b_scale=None,
    bias=None,
    a_zero_point=None,
    b_zero_point=None,
    a_row_sums=None,
    b_column_sums=None,
    kernel=None,
) -> Descriptor:
    """Validates a product, or a batch of products, once and selects its kernel.

    Each argument is a TensorDesc or a tensor, as in `scaled_mm`. `out` [M, N] or [B, M, N] determines the output dtype.
    b may be a PreparedWeight, which includes b_zero_point and b_column_sums; `calculate` then requires one too.
    kernel: forces a kernel config by its name in the device's tile table.
    Raises a ScaledMMError that names the argument, what was expected and what was given.
    """
    constant_b = False
    if isinstance(b, PreparedWeight):
        constant_b = b.constant
        b, b_zero_point, b_column_sums = b.operands(b_zero_point, b_column_sums)
    operands = (out, a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums)
    return Descriptor(handle, operands, kernel, constant_b)


__all__ = ["Descriptor", "create_descriptor", "scaled_mm"]
