"""`block_scaled_mm`: products with one scale per 128 or 64 elements of K, in one call, and a descriptor for them."""

from __future__ import annotations

import torch

from scaled_mm.core.checks import check_size
from scaled_mm.core.handle import Handle
from scaled_mm.core.operators import Product
from scaled_mm.core.plan import Plan
from scaled_mm.core.spec import Operand, ProductSpec, lazily
from scaled_mm.errors import BadTensorShapeError
from scaled_mm.products import codes


def _out_shape(a: torch.Tensor, b: torch.Tensor, *_) -> tuple[int, int]:
    for name, tensor, shape in (("a", a, "[M, K]"), ("b", b, "[K, N]")):
        if tensor.dim() != 2:
            raise BadTensorShapeError(f"{name}: expected 2 dimensions {shape}, got {tensor.dim()}: {list(tensor.shape)}")
    return a.shape[0], b.shape[1]


def _check_sizes(a: torch.Tensor, b: torch.Tensor, *_) -> None:
    check_size(a.shape[1] == b.shape[0], lambda: f"b: expected [K, N] with K = {a.shape[1]} as in a [M, K], got {list(b.shape)}")


BLOCK_SCALED = Product(
    ProductSpec(
        name="block_scaled_mm",
        code=codes.BLOCK_SCALED_GEMM,
        inputs=(*(Operand(name, required=True) for name in ("a", "b", "a_scale", "b_scale")), Operand("bias")),
        out_dtypes=(torch.bfloat16, torch.float16, torch.float32),
        out_shape=_out_shape,
        check_sizes=_check_sizes,
        compute=lazily("scaled_mm.cpu.block_scaled", "gemm"),
        cpu_kernel=lazily("scaled_mm.cpu.gemm", "kernel"),
        describe_sizes=lambda out, a, *_: "x".join(map(str, (*out.shape, a.shape[-1]))),
    )
)


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
    """INT8 product with one scale per B elements of K of a row of a, and per B x B elements of b, with B = 128 or 64; the same bits on every kernel,
    GPU and CPU.

        sum[m,n] = 0;  for kb = 0, 1, ...:  sum[m,n] += f32(sum of a[m,k] * b[k,n] over block kb) * (a_scale[m,kb] * b_scale[kb,n//B])
        out[m,n] = cast( sum[m,n] + bias[n] )

    Each float32 operation rounds separately (docs/design/numerics.md). K and N need not be multiples of B: the last blocks may be smaller.
    The shapes of the scales determine B. With B = 64 there are twice as many scaled sums to add, so large products
    take longer.

    a: int8 [M, K]. b: int8 [K, N]; fastest as `weight.t()` of a contiguous [N, K] weight. Any strides.
    a_scale: float32 [M, ceil(K/B)]. b_scale: float32 [ceil(K/B), ceil(N/B)]: the transpose of a checkpoint's
        `weight_scale_inv`. Any strides. `quantize_int8_block` computes both.
    bias: [N] or [1, N], in out_dtype or float32.
    out_dtype: float16, bfloat16 or float32.
    out: [M, N] to write to. It determines the dtype, and out_dtype is ignored. It must not alias an input.

    Runs on the current stream of a's device, allocates only the output, and never synchronizes. K is not bounded. The output never requires
    a gradient. Raises a ScaledMMError subclass that names the argument, what was expected and what was given.
    """
    return BLOCK_SCALED.call((a, b, a_scale, b_scale, bias), out_dtype, out)


class BlockScaledDescriptor(Plan):
    """A plan for a block-scaled product; made by `create_block_scaled_descriptor`. A context manager: leaving it destroys it."""

    def calculate(self, out, a, b, a_scale, b_scale, bias=None, *, stream=None) -> None:
        """Compute into `out`. Tensors must have the dtype, shape and strides that the descriptor was created with.

        stream: a torch.cuda.Stream, a cudaStream_t as an integer, or None for the current stream.
        Needs no workspace, allocates nothing and never synchronizes; may be captured in a CUDA graph.
        """
        self._run((out, a, b, a_scale, b_scale, bias), None, stream)


def create_block_scaled_descriptor(handle: Handle, *, out, a, b, a_scale, b_scale, bias=None, kernel=None) -> BlockScaledDescriptor:
    """Validates a block-scaled product once and selects its kernel.

    Each argument is a TensorDesc or a tensor, as in `block_scaled_mm`. `out` [M, N] determines the output dtype.
    kernel: forces a kernel config by its name in the section `block_scaled` of the device's tile table.
    Raises a ScaledMMError that names the argument, what was expected and what was given.
    """
    return BlockScaledDescriptor(BLOCK_SCALED, handle, (out, a, b, a_scale, b_scale, bias), kernel)


__all__ = ["BlockScaledDescriptor", "block_scaled_mm", "create_block_scaled_descriptor"]
