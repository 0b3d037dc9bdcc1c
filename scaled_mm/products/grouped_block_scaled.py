"""`grouped_block_scaled_mm`: the products of a mixture of experts with one scale per 128 or 64 elements of K, and a descriptor for them."""

from __future__ import annotations

import torch

from scaled_mm.core.handle import Handle
from scaled_mm.core.operators import Product
from scaled_mm.core.plan import Plan
from scaled_mm.core.spec import Operand, ProductSpec, lazily
from scaled_mm.products import codes, grouped

GROUPED_BLOCK_SCALED = Product(
    ProductSpec(
        name="grouped_block_scaled_mm",
        code=codes.GROUPED_BLOCK_SCALED_GEMM,
        inputs=(
            *(Operand(name, required=True) for name in ("a", "b", "a_scale", "b_scale")),
            Operand("bias"),
            Operand("expert_offsets", required=True),
        ),
        out_dtypes=(torch.bfloat16, torch.float16, torch.float32),
        out_shape=grouped.out_shape,
        matrix_dimensions=3,
        check_sizes=grouped.check_sizes,
        compute=lazily("scaled_mm.cpu.grouped_block_scaled", "grouped_gemm"),
        cpu_kernel=lazily("scaled_mm.cpu.gemm", "kernel"),
        describe_sizes=grouped.describe_sizes,
    )
)


def grouped_block_scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    expert_offsets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    expected_rows: int | None = None,
    zero_unassigned: bool = True,
) -> torch.Tensor:
    """Block-scaled INT8 products of tokens, sorted by expert, with each expert's weight. The bits are those of `block_scaled_mm` for each expert.

        out[t] = block_scaled_mm(a[t], b[e], a_scale[t], b_scale[e], bias[e])       for the rows t of expert e, which expert_offsets gives
        out[t] = 0                                                                  past the last expert's rows

    a: int8 [tokens, K]. b: int8 [E, K, N]; fastest as `weight.transpose(1, 2)` of a contiguous [E, N, K] weight. Any strides.
    a_scale: float32 [tokens, ceil(K/B)]. b_scale: float32 [E, ceil(K/B), ceil(N/B)]: the transpose of a checkpoint's
        `weight_scale_inv` [E, ceil(N/B), ceil(K/B)]. B is 128 or 64, as in `block_scaled_mm`. Any strides. `quantize_int8_block` computes both.
    expert_offsets: int32 [E], contiguous, on a's device: one past each expert's last row; clamped as in `grouped_scaled_mm`, and may change between
        replays of a CUDA graph.
    bias: [E, N], in out_dtype or float32.
    out_dtype: float16, bfloat16 or float32.
    out: [tokens, N] to write to. It determines the dtype, and out_dtype is ignored. It must not alias an input.
    expected_rows, zero_unassigned: see `grouped_scaled_mm`.

    Runs on the current stream of a's device, and never synchronizes. K is not bounded. The output never requires a gradient.
    Raises a ScaledMMError subclass that names the argument, what was expected and what was given.
    """
    inputs = (a, b, a_scale, b_scale, bias, expert_offsets)
    return GROUPED_BLOCK_SCALED.call(inputs, out_dtype, out, option=grouped.rows_option(expected_rows, zero_unassigned))


class GroupedBlockScaledDescriptor(Plan):
    """A plan for grouped block-scaled products; made by `create_grouped_block_scaled_descriptor`. A context manager: leaving it destroys it."""

    def calculate(self, out, a, b, a_scale, b_scale, expert_offsets, bias=None, *, workspace=None, stream=None) -> None:
        """Compute into `out`. Tensors must have the dtype, shape and strides that the descriptor was created with.

        workspace: at least `workspace_size` bytes on the device (any contiguous dtype), or None if that is 0.
        stream: a torch.cuda.Stream, a cudaStream_t as an integer, or None for the current stream.
        Allocates nothing and never synchronizes; may be captured in a CUDA graph.
        """
        self._run((out, a, b, a_scale, b_scale, bias, expert_offsets), workspace, stream)


def create_grouped_block_scaled_descriptor(
    handle: Handle, *, out, a, b, a_scale, b_scale, expert_offsets, bias=None, kernel=None, expected_rows=None, zero_unassigned=True
) -> GroupedBlockScaledDescriptor:
    """Validates a grouped block-scaled product once and selects its kernel.

    Each argument is a TensorDesc or a tensor, as in `grouped_block_scaled_mm`. `out` [tokens, N] determines the output dtype.
    kernel: forces a kernel config by its name in the section `grouped_block_scaled` of the device's tile table.
    expected_rows, zero_unassigned: see `grouped_scaled_mm`.
    Raises a ScaledMMError that names the argument, what was expected and what was given.
    """
    operands = (out, a, b, a_scale, b_scale, bias, expert_offsets)
    return GroupedBlockScaledDescriptor(GROUPED_BLOCK_SCALED, handle, operands, kernel, option=grouped.rows_option(expected_rows, zero_unassigned))


__all__ = ["GroupedBlockScaledDescriptor", "create_grouped_block_scaled_descriptor", "grouped_block_scaled_mm"]
