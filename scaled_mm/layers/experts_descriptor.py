"""`FusedExpertsDescriptor`: `fused_experts` for one shape, validated once and calculated often."""

from __future__ import annotations

import contextlib
import math

import torch

from scaled_mm.core.checks import check_device, check_strided, has_address, overlap
from scaled_mm.core.handle import Handle
from scaled_mm.core.tensor_desc import TensorDesc, describe
from scaled_mm.errors import BadParamError, BadTensorDtypeError, BadTensorShapeError
from scaled_mm.layers.experts import check_depths, expected_rows
from scaled_mm.layers.workspace import renamed, whole, workspace_bytes
from scaled_mm.products.grouped import create_grouped_descriptor
from scaled_mm.products.grouped_block_scaled import create_grouped_block_scaled_descriptor
from scaled_mm.rowwise.descriptor import create_rowwise_descriptor
from scaled_mm.rowwise.moe import MOST_EXPERTS

_ACTIVATIONS = {"silu": "silu_and_mul", "gelu": "gelu_and_mul", "gelu_tanh": "gelu_tanh_and_mul"}
Given = torch.Tensor | TensorDesc


class FusedExpertsDescriptor:
    """The steps of `fused_experts`, which share a workspace; made by `create_fused_experts_descriptor`. A context manager: leaving it destroys it.

    workspace_size: bytes that `calculate` needs.
    """

    def __init__(self, handle: Handle, operands: dict[str, Given | None], activation: str, block_scales: bool):
        self.device, self._block = handle.device, block_scales
        self._planned = {name: describe(name, operand, handle.device) for name, operand in operands.items()}
        x, w13, ids = operands["x"], operands["w13"], operands["topk_ids"]
        (tokens, hidden), (experts, both, _), choices = x.shape, w13.shape, ids.shape[1]
        rows, inner = tokens * choices, both // 2
        self._expected_rows = expected_rows(tokens, choices, experts, operands["expert_map"])
        blocks = (lambda k: -(-k // 128)) if block_scales else (lambda _: 1)
        between = {  # what the steps leave to each other, in the workspace
            "order": TensorDesc((rows,), torch.int32),
            "ends": TensorDesc((experts,), torch.int32),
            "inverse": TensorDesc((tokens, choices), torch.int32),
            "q": TensorDesc((rows, hidden), torch.int8),
            "scale": TensorDesc((rows, blocks(hidden)), torch.float32),
            "h": TensorDesc((rows, both), x.dtype),
            **({"activated": TensorDesc((rows, inner), x.dtype)} if block_scales else {}),
            "q2": TensorDesc((rows, inner), torch.int8),
            "scale2": TensorDesc((rows, blocks(inner)), torch.float32),
            "y": TensorDesc((rows, hidden), x.dtype),
        }
        self._between, size = [], 0  # (name, first byte, one past the last, dtype, shape)
        for name, desc in between.items():
            end = size + math.prod(desc.shape) * desc.dtype.itemsize
            self._between.append((name, size, end, desc.dtype, desc.shape))
            size = whole(end)
        with contextlib.ExitStack() as made:
            t = {**operands, **between}

            def rowwise(operator: str, **of_step):
                return made.enter_context(create_rowwise_descriptor(handle, operator, **of_step))

            self._sort = rowwise("moe_sort", **self._of_sort(t))
            self._quantize = rowwise("moe_quantize_block" if block_scales else "moe_quantize", **self._of_quantize(t))
            self._first = made.enter_context(self._product(handle, t, "h", "q", "w13", "scale"))
            self._activation = rowwise(_ACTIVATIONS[activation], **self._of_activation(t))
            self._requantize = rowwise("quantize_int8_block", **self._of_requantize(t)) if block_scales else None
            self._second = made.enter_context(self._product(handle, t, "y", "q2", "w2", "scale2"))
            self._combine = rowwise("moe_combine", **self._of_combine(t))
            self._first_workspace, size = size, size + whole(self._first.workspace_size)
            self._second_workspace, self.workspace_size = size, size + whole(self._second.workspace_size)
            self._steps = made.pop_all()

    def _product(self, handle: Handle, t: dict, out: str, q: str, weight: str, scale: str):
        create = create_grouped_block_scaled_descriptor if self._block else create_grouped_descriptor
        with self._renamed(weight):
            operands = self._of_product(t, out, q, weight, scale)
            return create(handle, **operands, expected_rows=self._expected_rows, zero_unassigned=False)

    # ---- the operands of each step; t: tensors or descriptions by name -------------------------------------------------------

    @staticmethod
    def _of_sort(t: dict) -> dict:
        return dict(out=t["order"], topk_ids=t["topk_ids"], expert_map=t["expert_map"], ends=t["ends"], inverse=t["inverse"])

    @staticmethod
    def _of_quantize(t: dict) -> dict:
        return dict(out=t["q"], x=t["x"], rows=t["inverse"], out_scale=t["scale"])

    def _of_product(self, t: dict, out: str, q: str, weight: str, scale: str) -> dict:
        of_weight = t[f"{weight}_scale"]
        b_scale = _transposed(of_weight) if self._block else of_weight
        return dict(out=t[out], a=t[q], b=_transposed(t[weight]), a_scale=t[scale], b_scale=b_scale, expert_offsets=t["ends"])

    def _of_activation(self, t: dict) -> dict:
        written = dict(out=t["activated"]) if self._block else dict(out=t["q2"], out_scale=t["scale2"])
        return dict(x=t["h"], expert_offsets=t["ends"], **written)

    @staticmethod
    def _of_requantize(t: dict) -> dict:
        return dict(out=t["q2"], x=t["activated"], out_scale=t["scale2"], expert_offsets=t["ends"])

    @staticmethod
    def _of_combine(t: dict) -> dict:
        return dict(out=t["out"], y=t["y"], topk_weights=t["topk_weights"], rows=t["inverse"])

    # ---- one calculation ---------------------------------------------------------------------------------------------------------

    def calculate(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        w13: torch.Tensor,
        w13_scale: torch.Tensor,
        w2: torch.Tensor,
        w2_scale: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        expert_map: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
        stream=None,
    ) -> None:
        """Computes into `out`. Tensors must have the dtype, shape and strides that the descriptor was created with.

        workspace: at least `workspace_size` bytes on the device (any contiguous dtype, aligned to 16 bytes); two concurrent calls each need
        their own. On a CPU it may be None. stream: see `Descriptor.calculate`.
        Allocates nothing on a GPU and never synchronizes; may be captured in a CUDA graph.
        Raises a ScaledMMError that names the tensor that differs; InsufficientWorkspaceError.
        """
        t = dict(out=out, x=x, w13=w13, w13_scale=w13_scale, w2=w2, w2_scale=w2_scale, topk_weights=topk_weights, topk_ids=topk_ids)
        t["expert_map"] = expert_map
        self._sort._check_alive()
        self._check(t)
        memory = workspace_bytes(workspace, self.workspace_size, self.device, t)
        for name, begin, end, dtype, shape in self._between:
            t[name] = memory[begin:end].view(dtype).view(shape)
        self._sort.calculate(**self._of_sort(t), stream=stream)
        self._quantize.calculate(**self._of_quantize(t), stream=stream)
        self._calculate_product(self._first, memory, self._first_workspace, self._of_product(t, "h", "q", "w13", "scale"), "w13", stream)
        self._activation.calculate(**self._of_activation(t), stream=stream)
        if self._requantize is not None:
            self._requantize.calculate(**self._of_requantize(t), stream=stream)
        self._calculate_product(self._second, memory, self._second_workspace, self._of_product(t, "y", "q2", "w2", "scale2"), "w2", stream)
        self._combine.calculate(**self._of_combine(t), stream=stream)

    def _check(self, given: dict[str, torch.Tensor | None]) -> None:
        """Checks device, dtype and shape; the steps check strides. `out` may overlap x alone."""
        for name, planned in self._planned.items():
            tensor = given[name]
            if planned is None and tensor is None:
                continue
            if planned is None:
                raise BadParamError(f"{name}: expected None, as when the descriptor was created, got {type(tensor).__name__}")
            check_strided(name, tensor)
            check_device(name, tensor, self.device)
            if not has_address(tensor):
                raise BadParamError(f"{name}: expected a tensor with memory, got a {type(tensor).__name__}")
            if tensor.dtype is not planned.dtype:
                raise BadTensorDtypeError(f"{name}: expected {planned.dtype}, got {tensor.dtype}")
            if tensor.shape != planned.shape:
                raise BadTensorShapeError(f"{name}: expected {list(planned.shape)}, got {list(tensor.shape)}")
        out = given["out"]
        for name, tensor in given.items():
            if name not in ("out", "x") and tensor is not None and overlap(out, tensor):
                raise BadParamError(f"out: expected memory apart from {name}, got an overlap")

    def _renamed(self, weight: str):
        """Renames operands in the errors of a product to the arguments of `fused_experts`. Products take transposed weights and block scales."""
        return renamed({"b": f"{weight}^T", "b_scale": f"{weight}_scale^T" if self._block else f"{weight}_scale"})

    def _calculate_product(self, product, memory: torch.Tensor, begin: int, operands: dict, weight: str, stream) -> None:
        of_product = memory[begin : begin + product.workspace_size] if product.workspace_size else None
        with self._renamed(weight):
            product.calculate(**operands, workspace=of_product, stream=stream)

    def destroy(self) -> None:
        """Frees the descriptor. A second call does nothing."""
        self._steps.close()

    def __enter__(self) -> FusedExpertsDescriptor:
        return self

    def __exit__(self, *_) -> None:
        self.destroy()

    def __repr__(self) -> str:
        return f"FusedExpertsDescriptor({self._first!r}, {self._second!r})"


def create_fused_experts_descriptor(
    handle: Handle,
    *,
    out: Given,
    x: Given,
    w13: Given,
    w13_scale: Given,
    w2: Given,
    w2_scale: Given,
    topk_weights: Given,
    topk_ids: Given,
    expert_map: Given | None = None,
    activation: str = "silu",
    block_scales: bool = False,
) -> FusedExpertsDescriptor:
    """Validates `fused_experts` once and selects the kernels of its products.

    Each argument is a tensor or a TensorDesc, as in `fused_experts`; topk_ids int32 or int64, and E at most 1024.
    Raises a ScaledMMError that names the argument, what was expected and what was given.
    """
    operands = dict(out=out, x=x, w13=w13, w13_scale=w13_scale, w2=w2, w2_scale=w2_scale, topk_weights=topk_weights, topk_ids=topk_ids)
    if not isinstance(handle, Handle) or not handle._pointer:
        raise BadParamError(f"handle: expected a live Handle, got {handle!r}")
    dims = dict(out=2, x=2, w13=3, w2=3, topk_weights=2, topk_ids=2, **(dict(w13_scale=3, w2_scale=3) if block_scales is True else {}))
    for name, operand in operands.items():
        if not isinstance(operand, (torch.Tensor, TensorDesc)):
            raise BadParamError(f"{name}: expected a tensor or a TensorDesc, got {type(operand).__name__}")
        if isinstance(operand, torch.Tensor):
            check_strided(name, operand)
        if name in dims and len(operand.shape) != dims[name]:
            raise BadTensorShapeError(f"{name}: expected {dims[name]} dimensions, got {len(operand.shape)}: {list(operand.shape)}")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise BadParamError(f"activation: expected one of {', '.join(map(repr, _ACTIVATIONS))}, got {activation!r}")
    if not isinstance(block_scales, bool):
        raise BadParamError(f"block_scales: expected True or False, got {block_scales!r}")
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise BadTensorDtypeError(f"x: expected float16, bfloat16 or float32, got {x.dtype}")
    (tokens, hidden), (experts, both, k) = x.shape, w13.shape
    if k != hidden or both % 2:
        raise BadTensorShapeError(f"w13: expected [E, 2 I, H] with H = {hidden} as in x, got {list(w13.shape)}")
    shapes = {"w2": (experts, hidden, both // 2), "out": (tokens, hidden), "topk_weights": (tokens, topk_ids.shape[1])}
    if block_scales:  # the products would also take blocks of 64
        shapes |= {"w13_scale": (experts, -(-both // 128), -(-hidden // 128)), "w2_scale": (experts, -(-hidden // 128), -(-both // 2 // 128))}
    for name, expected in shapes.items():
        if tuple(operands[name].shape) != expected:
            raise BadTensorShapeError(f"{name}: expected {list(expected)}, got {list(operands[name].shape)}")
    if not 1 <= experts <= MOST_EXPERTS:
        raise BadTensorShapeError(f"w13: expected from 1 to {MOST_EXPERTS} experts, got {list(w13.shape)}")
    check_depths(hidden, both // 2, block_scales)
    if topk_ids.shape[0] != tokens:
        raise BadTensorShapeError(f"topk_ids: expected [tokens, choices] with {tokens} tokens as in x, got {list(topk_ids.shape)}")
    return FusedExpertsDescriptor(handle, {**operands, "expert_map": expert_map}, activation, block_scales)


def _transposed(matrices: Given) -> Given:
    """Transposes the last two dimensions."""
    if isinstance(matrices, torch.Tensor):
        return matrices.transpose(1, 2)
    (first, m, n), (stride, stride_m, stride_n) = matrices.shape, matrices.strides
    return TensorDesc((first, n, m), matrices.dtype, (stride, stride_n, stride_m), matrices.alignment, matrices.constant)


__all__ = ["FusedExpertsDescriptor", "create_fused_experts_descriptor"]
