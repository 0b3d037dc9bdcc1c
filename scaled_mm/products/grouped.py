"""`grouped_scaled_mm`: the products of a mixture of experts in one call, and a descriptor for them."""

from __future__ import annotations

import torch

from scaled_mm.core.checks import check_size
from scaled_mm.core.handle import Handle
from scaled_mm.core.operators import Product
from scaled_mm.core.plan import Plan
from scaled_mm.core.spec import Operand, ProductSpec, lazily
from scaled_mm.errors import BadParamError, BadTensorShapeError
from scaled_mm.products import codes


def out_shape(a: torch.Tensor, b: torch.Tensor, *_) -> tuple[int, int]:
    for name, tensor, ndim, shape in (("a", a, 2, "[tokens, K]"), ("b", b, 3, "[E, K, N]")):
        if tensor.dim() != ndim:
            raise BadTensorShapeError(f"{name}: expected {ndim} dimensions {shape}, got {tensor.dim()}: {list(tensor.shape)}")
    return a.shape[0], b.shape[2]


def check_sizes(a: torch.Tensor, b: torch.Tensor, *_) -> None:
    check_size(a.shape[1] == b.shape[1], lambda: f"b: expected [E, K, N] with K = {a.shape[1]} as in a [tokens, K], got {list(b.shape)}")


def describe_sizes(out, a, b, *_) -> str:
    return f"{out.shape[0]} tokens, {'x'.join(map(str, b.shape))}"


_UNASSIGNED_ROWS_ANY = 1 << 30  # SCALED_MM_UNASSIGNED_ROWS_ANY


def rows_option(expected_rows: int | None, zero_unassigned: bool) -> int:
    """The option of the C function for `expected_rows` and `zero_unassigned`. Raises BadParamError."""
    if not isinstance(zero_unassigned, bool):
        raise BadParamError(f"zero_unassigned: expected True or False, got {zero_unassigned!r}")
    any_values = 0 if zero_unassigned else _UNASSIGNED_ROWS_ANY
    if expected_rows is None or isinstance(expected_rows, torch.SymInt):  # a symbol while operators are traced, which have no option
        return any_values
    if isinstance(expected_rows, bool) or not isinstance(expected_rows, int) or not 1 <= expected_rows < 2**31:
        raise BadParamError(f"expected_rows: expected None or a number from 1 to 2147483647, got {expected_rows!r}")
    return any_values | min(expected_rows, _UNASSIGNED_ROWS_ANY - 1)


GROUPED = Product(
    ProductSpec(
        name="grouped_scaled_mm",
        code=codes.GROUPED_GEMM,
        inputs=(
            Operand("a", required=True),
            Operand("b", required=True),
            *map(Operand, ("a_scale", "b_scale", "bias")),
            Operand("expert_offsets", required=True),
            *map(Operand, ("a_zero_point", "b_zero_point", "a_row_sums", "b_column_sums")),
        ),
        out_dtypes=(torch.bfloat16, torch.float16, torch.float32, torch.int32),
        out_shape=out_shape,
        matrix_dimensions=3,
        check_sizes=check_sizes,
        compute=lazily("scaled_mm.cpu.grouped", "grouped_gemm"),
        cpu_kernel=lazily("scaled_mm.cpu.gemm", "kernel"),
        describe_sizes=describe_sizes,
    )
)


def grouped_scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    expert_offsets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    a_zero_point: torch.Tensor | None = None,
    b_zero_point: torch.Tensor | None = None,
    a_row_sums: torch.Tensor | None = None,
    b_column_sums: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    expected_rows: int | None = None,
    zero_unassigned: bool = True,
) -> torch.Tensor:
    """INT8 products of tokens, sorted by expert, with each expert's weight. The bits are those of `scaled_mm` for each expert.

        end[e]   = max(end[e-1], min(expert_offsets[e], tokens)),  end[-1] = 0
        out[t]   = scaled_mm(a[t], b[e], a_scale[t], b_scale[e], bias[e], ...)  for end[e-1] <= t < end[e], with the zero points of t and e
        out[t]   = 0                                                             for t >= end[E-1]

    a: int8 [tokens, K]. b: int8 [E, K, N]; fastest as `weight.transpose(1, 2)` of a contiguous [E, N, K] weight. Any strides.
    a_scale: float32, one value, [tokens] or [tokens, 1].
    b_scale: float32, one value, [E], [E, 1, 1], [E, N], [E, 1, N] or [E, N, 1], as checkpoints store it.
    expert_offsets: int32 [E], contiguous, on a's device: one past each expert's last row, like `offs` of `torch._grouped_mm`. Only the
        kernel reads them, so the host does not wait for the GPU. They may change between replays of a CUDA graph, but not during one. Offsets
        that decrease, are negative or exceed the number of tokens are clamped as above: such experts get fewer or no tokens.
    bias: [E, N], in out_dtype or float32.
    a_zero_point: int32 or int8; one value, [tokens] or [tokens, 1]. b_zero_point: int32 or int8, in the shapes of b_scale. The bound on K
        assumes values from -128 to 127, as in `scaled_mm`.
    a_row_sums: int32 [tokens] or [tokens, 1], the sums of a over K. They are not checked, and used only if b has zero points; without them a is
        read once more.
    b_column_sums: int32 [E, N] or [E, 1, N], the sums of b over K, used only if a has zero points. Compute them once, with
        the weights: `b.sum(1, dtype=torch.int32)`. Without them each call reads the weights of all experts once more.
    out_dtype: float16, bfloat16, float32, or int32 for the raw accumulators (a_scale and b_scale must be None).
    out: [tokens, N] to write to. It determines the dtype, and out_dtype is ignored. It must not alias an input.
    expected_rows: how many rows are expected to belong to experts, if many do not, as on an expert-parallel rank. None: all. The selection of the
        kernel config depends on it, the result does not.
    zero_unassigned: False: rows that belong to no expert may have any values. A GPU then does not write them.

    Under torch.compile and dispatch modes expected_rows and zero_unassigned are ignored, as if None and True: the operator has no such arguments.

    Runs on the current stream of a's device. K is bounded as in `scaled_mm`. With zero points the call also
    allocates 8 * (tokens + E * N) bytes.
    The output never requires a gradient.
    Raises a ScaledMMError subclass that names the argument, what was expected and what was given.
    """
    inputs = (a, b, a_scale, b_scale, bias, expert_offsets, a_zero_point, b_zero_point, a_row_sums, b_column_sums)
    return GROUPED.call(inputs, out_dtype, out, option=rows_option(expected_rows, zero_unassigned))


class GroupedDescriptor(Plan):
    """A plan for grouped products; made by `create_grouped_descriptor`. A context manager: leaving it destroys it."""

    def calculate(
        self,
        out,
        a,
        b,
        a_scale=None,
        b_scale=None,
        expert_offsets=None,
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

        workspace: at least `workspace_size` bytes on the device (any contiguous dtype), or None if that is 0.
        stream: a torch.cuda.Stream, a cudaStream_t as an integer, or None for the current stream.
        Allocates nothing and never synchronizes; may be captured in a CUDA graph.
        """
        self._run((out, a, b, a_scale, b_scale, bias, expert_offsets, a_zero_point, b_zero_point, a_row_sums, b_column_sums), workspace, stream)


def create_grouped_descriptor(
    handle: Handle,
    *,
    out,
    a,
    b,
    expert_offsets,
    a_scale=None,
    b_scale=None,
    bias=None,
    a_zero_point=None,
    b_zero_point=None,
    a_row_sums=None,
    b_column_sums=None,
    kernel=None,
    expected_rows=None,
    zero_unassigned=True,
) -> GroupedDescriptor:
    """Validates a grouped product once and selects its kernel.

    Each argument is a TensorDesc or a tensor, as in `grouped_scaled_mm`. `out` [tokens, N] determines the output dtype.
    kernel: forces a kernel config by its name in the section `grouped` of the device's tile table.
    expected_rows, zero_unassigned: see `grouped_scaled_mm`.
    Raises a ScaledMMError that names the argument, what was expected and what was given.
    """
    operands = (out, a, b, a_scale, b_scale, bias, expert_offsets, a_zero_point, b_zero_point, a_row_sums, b_column_sums)
    return GroupedDescriptor(GROUPED, handle, operands, kernel, option=rows_option(expected_rows, zero_unassigned))


__all__ = ["GroupedDescriptor", "create_grouped_descriptor", "grouped_scaled_mm"]
