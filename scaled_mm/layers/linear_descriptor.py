"""`LinearDescriptor`: `int8_linear` for one shape, validated once and calculated often."""

from __future__ import annotations

import torch

from scaled_mm.core import fast
from scaled_mm.core.checks import has_address, overlap
from scaled_mm.core.handle import Handle
from scaled_mm.core.plan import KernelChoice, stream_address
from scaled_mm.core.tensor_desc import TensorDesc
from scaled_mm.errors import BadParamError, BadTensorDtypeError, BadTensorShapeError
from scaled_mm.layers.workspace import renamed, whole, workspace_bytes
from scaled_mm.products.gemm import Descriptor, create_descriptor
from scaled_mm.products.prepared_weight import PreparedWeight
from scaled_mm.rowwise.descriptor import RowwiseDescriptor, create_rowwise_descriptor

_OF_QUANTIZER = {"factor": "smooth_scale", "scale": "input_scale", "zero_point": "input_zero_point"}
_OF_PRODUCT = {"a": "x", "b": "weight^T", "a_scale": "input_scale", "b_scale": "weight_scale", "a_zero_point": "input_zero_point"}
"""The names of operands in the messages of the two, and here."""


class LinearDescriptor:
    """A quantizer and a product that share a workspace; made by `create_linear_descriptor`. A context manager: leaving it destroys it.

    workspace_size: bytes that `calculate` needs: M * K for q and, unless static, 4 * M for its scales, each rounded up to 16, and what the product
        needs.
    """

    def __init__(self, quantizer: RowwiseDescriptor, product: Descriptor, rows: int, k: int, static: bool):
        self._quantizer, self._product, self._static = quantizer, product, static
        self.device = product.device
        self._rows, self._k = rows, k
        self._q_bytes = whole(rows * k)
        self._before = self._q_bytes + (0 if static else whole(4 * rows))
        self.workspace_size: int = self._before + product.workspace_size
        self._owners = quantizer._destroy, product._destroy

    @property
    def kernel(self) -> KernelChoice:
        """That of the product."""
        return self._product.kernel

    def calculate(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | PreparedWeight,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        input_scale: torch.Tensor | None = None,
        input_zero_point: torch.Tensor | None = None,
        smooth_scale: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
        stream=None,
    ) -> None:
        """Computes into `out`. Tensors must have the dtype, shape and strides that the descriptor was created with.

        weight: a PreparedWeight if the descriptor was created with one. workspace: at least `workspace_size` bytes on the device (any contiguous
        dtype, aligned to 16 bytes); two concurrent calls each need their own. stream: see `Descriptor.calculate`.
        Allocates nothing on a GPU and never synchronizes; may be captured in a CUDA graph.
        Raises a ScaledMMError that names the tensor that differs; InsufficientWorkspaceError.
        """
        prepared = isinstance(weight, PreparedWeight)
        quantizer, product = self._owners
        device = self._product._device_index
        if device >= 0 and fast.module is not None and quantizer.address and product.address:
            b = weight.b if prepared else weight
            if prepared and weight.zero_point is not None:
                b = None  # the extension takes no zero point of the weight: `_apart` computes
            sums = weight.column_sums if prepared and self._product._needs_sums else None
            constant = prepared and weight.constant
            if constant or not self._product._constant_b:
                address = None if stream is None else stream_address(stream)
                operands = (out, x, b, weight_scale, bias, smooth_scale, input_scale, input_zero_point, sums)
                plans = quantizer.address, product.address
                status = fast.module.calculate_linear(*plans, device, constant, not prepared, address, workspace, *operands)
                if status is None:
                    return
                if status is not NotImplemented:
                    fast.raise_fault(status)
        self._apart(out, x, weight, weight_scale, bias, input_scale, input_zero_point, smooth_scale, workspace, stream)

    def _apart(self, out, x, weight, weight_scale, bias, input_scale, input_zero_point, smooth_scale, workspace, stream) -> None:
        """The two descriptors, one after the other: on a CPU, without the extension, and to say what is wrong."""
        self._product._check_alive()
        b = as_b(weight)
        given = dict(out=out, x=x, weight=b.b if isinstance(b, PreparedWeight) else b, weight_scale=weight_scale, bias=bias)
        given |= dict(input_scale=input_scale, input_zero_point=input_zero_point, smooth_scale=smooth_scale)
        if has_address(out) and has_address(smooth_scale) and overlap(out, smooth_scale):
            raise BadParamError("out: expected memory apart from smooth_scale, got an overlap")
        memory = workspace_bytes(workspace, self.workspace_size, self.device, given)
        q = memory[: self._rows * self._k].view(torch.int8).view(self._rows, self._k)
        scales = None if self._static else memory[self._q_bytes : self._q_bytes + 4 * self._rows].view(torch.float32)
        rest = memory[self._before :] if self._product.workspace_size else None
        scale = input_scale if self._static else scales
        operands = dict(out=q, x=x, factor=smooth_scale, scale=input_scale, zero_point=input_zero_point, out_scale=scales)
        with renamed(_OF_QUANTIZER):
            self._quantizer.calculate(**operands, stream=stream)
        with renamed(_OF_PRODUCT):
            self._product.calculate(out, q, b, scale, weight_scale, bias, a_zero_point=input_zero_point, workspace=rest, stream=stream)

    def destroy(self) -> None:
        """Frees the descriptor. A second call does nothing."""
        self._quantizer.destroy()
        self._product.destroy()

    def __enter__(self) -> LinearDescriptor:
        return self

    def __exit__(self, *_) -> None:
        self.destroy()

    def __repr__(self) -> str:
        return f"LinearDescriptor({self._rows}x{self._k}, {self._product!r})"


def create_linear_descriptor(
    handle: Handle,
    *,
    out: torch.Tensor | TensorDesc,
    x: torch.Tensor | TensorDesc,
    weight: torch.Tensor | TensorDesc | PreparedWeight,
    weight_scale: torch.Tensor | TensorDesc,
    bias: torch.Tensor | TensorDesc | None = None,
    input_scale: torch.Tensor | TensorDesc | None = None,
    input_zero_point: torch.Tensor | TensorDesc | None = None,
    smooth_scale: torch.Tensor | TensorDesc | None = None,
    kernel: str | None = None,
) -> LinearDescriptor:
    """Validates an `int8_linear` once, for x [M, K] and out [M, N], and selects the kernel of its product.

    Each argument is a tensor or a TensorDesc, as in `int8_linear`; out determines the dtype. weight: int8 [N, K], or a PreparedWeight, which
    `calculate` then requires too. kernel: forces a kernel config of the product by its name.
    Raises a ScaledMMError that names the argument, what was expected and what was given.
    """
    for name, operand in (("x", x), ("out", out)):
        if not isinstance(operand, (torch.Tensor, TensorDesc)):
            raise BadParamError(f"{name}: expected a tensor or a TensorDesc, got {type(operand).__name__}")
        if len(operand.shape) != 2:
            raise BadTensorShapeError(f"{name}: expected [M, {'K' if name == 'x' else 'N'}], got {list(operand.shape)}")
    rows, k = x.shape
    static = input_scale is not None
    if input_zero_point is not None and not static:
        raise BadParamError("input_zero_point: expected None without input_scale, got a zero point")
    q, scales = TensorDesc((rows, k), torch.int8), None if static else TensorDesc((rows,), torch.float32)
    operands = dict(out=q, x=x, factor=smooth_scale, scale=input_scale, zero_point=input_zero_point, out_scale=scales)
    with renamed(_OF_QUANTIZER):
        quantizer = create_rowwise_descriptor(handle, "quantize_int8", **operands)
    scale = input_scale if static else scales
    rest = dict(a_scale=scale, b_scale=weight_scale, bias=bias, a_zero_point=input_zero_point, kernel=kernel)
    try:
        b = as_b(weight)
        with renamed(_OF_PRODUCT):
            product = create_descriptor(handle, out=out, a=q, b=b, **rest)
    except BaseException:
        quantizer.destroy()
        raise
    return LinearDescriptor(quantizer, product, rows, k, static)


def as_b(weight, name: str = "weight") -> torch.Tensor | TensorDesc | PreparedWeight:
    """b [K, N] of a weight [N, K], the argument `name`."""
    if isinstance(weight, PreparedWeight):
        return weight
    if not isinstance(weight, (torch.Tensor, TensorDesc)):
        raise BadParamError(f"{name}: expected a tensor, a TensorDesc or a PreparedWeight, got {type(weight).__name__}")
    if weight.dtype is not torch.int8:
        raise BadTensorDtypeError(f"{name}: expected int8, or the result of prepare_weight, got {weight.dtype}")
    if len(weight.shape) != 2:
        raise BadTensorShapeError(f"{name}: expected [N, K], got {list(weight.shape)}")
    if isinstance(weight, torch.Tensor):
        return weight.t()
    (n, k), (stride_n, stride_k) = weight.shape, weight.strides
    return TensorDesc((k, n), weight.dtype, (stride_k, stride_n), weight.alignment)


__all__ = ["LinearDescriptor", "create_linear_descriptor"]
