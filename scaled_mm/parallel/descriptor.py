"""`ReduceScatterLinearDescriptor`: `reduce_scatter_linear` for one shape, validated once on all ranks and calculated often."""

from __future__ import annotations

import contextlib
import math

import torch

from scaled_mm.core.checks import check_device, has_address, overlap
from scaled_mm.core.handle import Handle
from scaled_mm.core.tensor_desc import TensorDesc, describe
from scaled_mm.errors import BadParamError, BadTensorDtypeError, BadTensorShapeError, BadTensorStridesError
from scaled_mm.layers.linear_descriptor import as_b
from scaled_mm.layers.workspace import renamed, whole, workspace_bytes
from scaled_mm.parallel import choice, collectives
from scaled_mm.parallel.functional import check_k, kind_of, scaled_into
from scaled_mm.parallel.overlap import chunk_slices
from scaled_mm.parallel.ranks import Ranks, part_of
from scaled_mm.products.gemm import create_descriptor
from scaled_mm.products.prepared_weight import PreparedWeight
from scaled_mm.rowwise.arithmetic import FLOATS
from scaled_mm.rowwise.descriptor import create_rowwise_descriptor

Given = torch.Tensor | TensorDesc
_OF_QUANTIZER = {"x": "x_shard", "scale": "input_scale", "zero_point": "input_zero_point"}
_OF_PRODUCT = {"a": "x_shard", "b": "weight_shard^T", "a_zero_point": "input_zero_point"}


class ReduceScatterLinearDescriptor:
    """The steps of `reduce_scatter_linear`, which share a workspace; made by `create_reduce_scatter_linear_descriptor`. A context manager: leaving it
    destroys it.

    workspace_size: bytes that `calculate` needs. chunks: of rows; while one is reduced, the next is multiplied. rows: those of this rank.
    """

    def __init__(self, handle: Handle, operands: dict, ranks: Ranks, chunks: int, kernel: str | None):
        self.device, self._ranks = handle.device, ranks
        x, b = operands["x_shard"], as_b(operands["weight_shard"], "weight_shard")
        self._m, k = x.shape
        n = (b.b if isinstance(b, PreparedWeight) else b).shape[1]
        self._each = -(-self._m // ranks.size)
        self.chunks = chunks = len(chunk_slices(self._each, chunks))
        self.rows = part_of(self._m, ranks.rank, ranks.size)
        self._planned = {name: describe(name, one, handle.device) for name, one in operands.items() if not isinstance(one, PreparedWeight)}
        self._prepared = isinstance(b, PreparedWeight)
        self._prepared_form = (tuple(b.b.shape), tuple(b.b.stride())) if self._prepared else None
        static = operands["input_scale"] is not None
        padded = self._each * ranks.size
        between = {
            "q": ((padded, k), torch.int8),
            "scales": ((0 if static else self._m,), torch.float32),
            "of_chunks": ((padded if chunks > 1 else 0, k), torch.int8),  # q, by chunk and rank
            "acc": ((padded, n), torch.int32),
            "mine": ((self._each, n), torch.int32),
        }
        self._between, size = {}, 0
        for name, (shape, dtype) in between.items():
            end = size + math.prod(shape) * dtype.itemsize
            self._between[name] = (size, end, dtype, shape)
            size = whole(end)
        with contextlib.ExitStack() as made:
            q = TensorDesc((self._m, k), torch.int8)
            scales = operands["input_scale"] if static else TensorDesc((self._m,), torch.float32)
            with renamed(_OF_QUANTIZER):
                create = lambda **of_step: made.enter_context(create_rowwise_descriptor(handle, "quantize_int8", out=q, x=x, **of_step))  # noqa: E731
                self._maximum = None if static else create(out_scale=scales)
                self._quantize = create(scale=scales, zero_point=operands["input_zero_point"])
            self._products = {}
            rows = {self._m} if chunks == 1 else {ranks.size * (part.stop - part.start) for part in chunk_slices(self._each, chunks)}
            for count in sorted(rows):
                of_product = dict(out=TensorDesc((count, n), torch.int32), a=TensorDesc((count, k), torch.int8), b=b)
                with renamed(_OF_PRODUCT):
                    product = create_descriptor(handle, **of_product, a_zero_point=operands["input_zero_point"], kernel=kernel)
                self._products[count] = made.enter_context(product)
            self._product_begin = size
            self.workspace_size = size + whole(max(product.workspace_size for product in self._products.values()))
            self._steps, self._live = made.pop_all(), True

    def calculate(
        self,
        out: torch.Tensor,
        x_shard: torch.Tensor,
        weight_shard: torch.Tensor | PreparedWeight,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        input_scale: torch.Tensor | None = None,
        input_zero_point: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        """Computes this rank's rows into `out`, on torch's current stream. A collective: all ranks must call it.

        Tensors must have the dtype, shape and strides that the descriptor was created with. workspace: at least `workspace_size` bytes on the device,
        aligned to 16 bytes; None on a CPU: new memory. With NCCL it allocates nothing and never synchronizes; may be captured in a CUDA graph.
        Raises a ScaledMMError that names the tensor that differs; InsufficientWorkspaceError.
        """
        given = dict(out=out, x_shard=x_shard, weight_shard=weight_shard, weight_scale=weight_scale, bias=bias)
        given |= dict(input_scale=input_scale, input_zero_point=input_zero_point)
        memory = self._ranks.checked(self.device, lambda: self._checked(given, workspace), lambda _: {})
        t = {name: memory[begin:end].view(dtype).view(shape) for name, (begin, end, dtype, shape) in self._between.items()}
        q, scale = t["q"][: self._m], input_scale
        with renamed(_OF_QUANTIZER):
            if self._maximum is not None:
                scale = t["scales"]
                self._maximum.calculate(out=q, x=x_shard, out_scale=scale)
                collectives.all_reduce_max(scale, self._ranks)
            self._quantize.calculate(out=q, x=x_shard, scale=scale, zero_point=input_zero_point)
        sums = self._summed(t, as_b(weight_shard, "weight_shard"), input_zero_point, memory)[: self.rows.stop - self.rows.start]
        buffer = t["acc"].view(torch.float32)[: sums.shape[0]]  # acc has been reduced
        scaled_into(out, sums, scale.reshape(1, 1) if scale.numel() == 1 else scale[self.rows].view(-1, 1), weight_scale, bias, buffer)

    def _summed(self, t: dict[str, torch.Tensor], b, zero_point, memory: torch.Tensor) -> torch.Tensor:
        """int32 [rows of a rank, N]: the sums over all ranks."""
        q, acc, mine = t["q"], t["acc"], t["mine"]
        if self.chunks == 1:
            self._multiply(acc[: self._m], q[: self._m], b, zero_point, memory)
            acc[self._m :].zero_()
            collectives.begin_reduce_scatter(acc, self._ranks, mine).wait()
            return mine
        q[self._m :].zero_()
        by_rank, works, begin = q.view(self._ranks.size, self._each, q.shape[1]), [], 0
        for part in chunk_slices(self._each, self.chunks):
            end = begin + self._ranks.size * (part.stop - part.start)
            of_chunk = t["of_chunks"][begin:end]
            of_chunk.view(self._ranks.size, part.stop - part.start, q.shape[1]).copy_(by_rank[:, part])
            self._multiply(acc[begin:end], of_chunk, b, zero_point, memory)
            works.append(collectives.begin_reduce_scatter(acc[begin:end], self._ranks, mine[part]))
            begin = end
        for work in works:
            work.wait()
        return mine

    def _multiply(self, acc: torch.Tensor, q: torch.Tensor, b, zero_point, memory: torch.Tensor) -> None:
        product = self._products[acc.shape[0]]
        of_product = memory[self._product_begin : self._product_begin + product.workspace_size] if product.workspace_size else None
        with renamed(_OF_PRODUCT):
            product.calculate(acc, q, b, a_zero_point=zero_point, workspace=of_product)

    def _checked(self, given: dict, workspace: torch.Tensor | None) -> torch.Tensor:
        """The workspace as bytes. Raises a ScaledMMError that names what differs from the plan."""
        if not self._live:
            raise BadParamError("descriptor: expected a live one, got one that was destroyed")
        for name, tensor in given.items():
            planned = self._planned.get(name)
            if name == "weight_shard" and self._prepared:
                if not isinstance(tensor, PreparedWeight):
                    raise BadParamError(f"weight_shard: expected a prepared weight, as at creation, got a {type(tensor).__name__}")
                check_device(name, tensor.b, self.device)
                if (tuple(tensor.b.shape), tuple(tensor.b.stride())) != self._prepared_form:
                    raise BadTensorShapeError(f"weight_shard: expected the prepared weight of creation, got one of {list(tensor.b.t().shape)}")
                continue
            if planned is None:
                if tensor is not None:
                    raise BadParamError(f"{name}: expected None, as at creation, got a {type(tensor).__name__}")
                continue
            if not isinstance(tensor, torch.Tensor) or not has_address(tensor):
                raise BadParamError(f"{name}: expected a tensor with memory, got a {type(tensor).__name__}")
            check_device(name, tensor, self.device)
            if tensor.dtype is not planned.dtype:
                raise BadTensorDtypeError(f"{name}: expected {planned.dtype}, got {tensor.dtype}")
            if tuple(tensor.shape) != tuple(planned.shape):
                raise BadTensorShapeError(f"{name}: expected {list(planned.shape)}, got {list(tensor.shape)}")
            if tensor.numel() > 1 and tuple(tensor.stride()) != tuple(planned.strides):
                raise BadTensorStridesError(f"{name}: expected strides {list(planned.strides)}, as at creation, got {list(tensor.stride())}")
        for name in ("weight_scale", "bias", "input_scale"):
            if given[name] is not None and overlap(given["out"], given[name]):
                raise BadParamError(f"out: expected memory apart from {name}, got an overlap")
        apart = {name: one.b if isinstance(one, PreparedWeight) else one for name, one in given.items()}
        return workspace_bytes(workspace, self.workspace_size, self.device, apart)

    def destroy(self) -> None:
        """Frees the descriptor. A second call does nothing."""
        self._live = False
        self._steps.close()

    def __enter__(self) -> ReduceScatterLinearDescriptor:
        return self

    def __exit__(self, *_) -> None:
        self.destroy()

    def __repr__(self) -> str:
        product = next(iter(self._products.values()))
        return f"ReduceScatterLinearDescriptor(rank {self._ranks.rank} of {self._ranks.size}, {self.chunks} chunks, {product!r})"


def create_reduce_scatter_linear_descriptor(
    handle: Handle,
    *,
    out: Given,
    x_shard: Given,
    weight_shard: Given | PreparedWeight,
    weight_scale: Given,
    bias: Given | None = None,
    input_scale: Given | None = None,
    input_zero_point: Given | None = None,
    group=None,
    chunks: int | None = None,
    kernel: str | None = None,
) -> ReduceScatterLinearDescriptor:
    """Validates a `reduce_scatter_linear` once, for x_shard [M, K of this rank], and selects the kernels of its products. A collective.

    Each operand is a tensor or a TensorDesc, as in `reduce_scatter_linear`; out [rows of this rank (`part_of`), N] determines the dtype; x_shard has
    the same number of rows on all ranks. weight_shard: int8 [N, K of this rank], or a PreparedWeight, which `calculate` then requires too.
    chunks: None: as `RowParallelInt8Linear` chooses. kernel: forces a kernel config of the products by its name.
    Raises a ScaledMMError on all ranks that names the argument, what was expected and what was given, also if the sums over all K could overflow.
    """
    ranks = Ranks.of(group)
    operands = dict(out=out, x_shard=x_shard, weight_shard=weight_shard, weight_scale=weight_scale, bias=bias)
    operands |= dict(input_scale=input_scale, input_zero_point=input_zero_point)

    def facts() -> dict[str, object]:
        (m, k), n = _checked(handle, operands, ranks)
        choice.check("reduce_scatter", chunks, allow_none=True)
        kind = kind_of(input_scale, input_zero_point)
        return {"rows": m, "N": n, "K": k, "quantization": kind, "chunks": chunks, "gpu": choice.gpu_of(handle.device, ranks)}

    found = ranks.gather_facts(facts)
    ranks.require_same(found, rows="x_shard", N="weight_shard", quantization="input_scale", chunks="chunks")
    k = sum(of_rank["K"] for of_rank in found)
    check_k(k, input_zero_point is not None)
    sizes = found[0]["rows"], found[0]["N"], k, ranks.size, choice.common_gpu(found)
    chosen = choice.choose(*sizes, all_rows=False, static=input_scale is not None, via="reduce_scatter", chunks=chunks)
    made: list[ReduceScatterLinearDescriptor] = []

    def make() -> dict[str, object]:
        made.append(ReduceScatterLinearDescriptor(handle, operands, ranks, chosen.chunks, kernel))
        return {}

    try:
        ranks.gather_facts(make)
    except BaseException:
        for one in made:
            one.destroy()
        raise
    return made[0]


def _checked(handle: Handle, operands: dict, ranks: Ranks) -> tuple[tuple[int, int], int]:
    """((M, K of this rank), N). Raises a ScaledMMError that names the argument."""
    if not isinstance(handle, Handle) or not handle._pointer:
        raise BadParamError(f"handle: expected a live Handle, got {handle!r}")
    for name, operand in operands.items():
        if name == "weight_shard" and isinstance(operand, PreparedWeight) or operand is None and name in ("bias", "input_scale", "input_zero_point"):
            continue
        if not isinstance(operand, (torch.Tensor, TensorDesc)):
            raise BadParamError(f"{name}: expected a tensor or a TensorDesc, got {type(operand).__name__}")
    x, out = operands["x_shard"], operands["out"]
    b = as_b(operands["weight_shard"], "weight_shard")
    k, n = (b.b if isinstance(b, PreparedWeight) else b).shape
    if len(x.shape) != 2 or x.shape[1] != k:
        raise BadTensorShapeError(f"x_shard: expected [M, {k}] as weight_shard, got {list(x.shape)}")
    if x.dtype not in FLOATS or out.dtype not in FLOATS:
        name, dtype = ("x_shard", x.dtype) if x.dtype not in FLOATS else ("out", out.dtype)
        raise BadTensorDtypeError(f"{name}: expected float16, bfloat16 or float32, got {dtype}")
    rows = part_of(x.shape[0], ranks.rank, ranks.size)
    forms = {"out": [(rows.stop - rows.start, n)], "weight_scale": [(n,), (1, n), (n, 1), (1,), (1, 1)], "bias": [(n,), (1, n)]}
    forms |= {name: [(), (1,), (1, 1)] for name in ("input_scale", "input_zero_point")}
    dtypes = {"weight_scale": (torch.float32,), "bias": (out.dtype, torch.float32), "input_scale": (torch.float32,)}
    dtypes |= {"input_zero_point": (torch.int8, torch.int32)}
    for name, shapes in forms.items():
        operand = operands[name]
        if operand is None:
            continue
        if tuple(operand.shape) not in shapes:
            raise BadTensorShapeError(f"{name}: expected {' or '.join(str(list(shape)) for shape in shapes)}, got {list(operand.shape)}")
        if name in dtypes and operand.dtype not in dtypes[name]:
            raise BadTensorDtypeError(f"{name}: expected {' or '.join(map(str, dtypes[name]))}, got {operand.dtype}")
    if any(stride == 0 and size > 1 for stride, size in zip(out.strides if isinstance(out, TensorDesc) else out.stride(), out.shape)):
        raise BadTensorStridesError(f"out: expected memory of its own for each element, got a stride of 0 for {list(out.shape)}")
    if operands["input_zero_point"] is not None and operands["input_scale"] is None:
        raise BadParamError("input_zero_point: expected None without input_scale, got a zero point")
    return (x.shape[0], k), n


__all__ = ["ReduceScatterLinearDescriptor", "create_reduce_scatter_linear_descriptor"]
