"""Products with a GGUF format: the spec, and a descriptor. The functions that compute in one call are in `scaled_mm.gguf`."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from scaled_mm.core import binding, checks, dispatcher
from scaled_mm.core.handle import Handle
from scaled_mm.core.plan import Plan, stream_address
from scaled_mm.core.spec import Operand, ProductSpec
from scaled_mm.core.tensor_desc import TensorDesc, describe
from scaled_mm.errors import BadParamError, BadTensorDtypeError, BadTensorShapeError
from scaled_mm.gguf import cpu, layout, operators
from scaled_mm.gguf.pack import PackedBlockWeight
from scaled_mm.gguf_formats import BLOCK, FORMATS, BlockFormat, lookup
from scaled_mm.gguf_k_quants import K_QUANTS
from scaled_mm.products import codes


def _format_of(name: str, q: torch.Tensor, planned: TensorDesc | None) -> BlockFormat:
    """The format of a plain tensor, from its bytes per block. Of several formats with that size it is the planned one; without a plan an error."""
    found = [description for description in FORMATS.values() if q.dim() == 3 and q.shape[2] == description.block_bytes]
    if name == "activation":
        found = [description for description in found if not description.is_weight] or found
    if not found:
        sizes = ", ".join(f"{description.block_bytes} for {description.name}" for description in FORMATS.values())
        k_quants = [description for description in K_QUANTS.values() if q.dim() == 3 and q.shape[2] == description.block_bytes]
        hint = f"; {k_quants[0].advice}" if k_quants else ""
        raise BadTensorShapeError(f"{name}: expected blocks [rows, K/32, bytes of a block: {sizes}], got {list(q.shape)}{hint}")
    if len(found) > 1 and planned is not None:
        found = [description for description in found if description.name == planned.dtype] or found[:1]
    if len(found) > 1:
        expected = "a TensorDesc or a PackedBlockWeight" if name == "weight" else "a TensorDesc"
        names = " and ".join(description.name for description in found)
        why = f"which names the format: blocks of {q.shape[2]} bytes are those of {names}"
        raise BadParamError(f"{name}: expected {expected}, {why}, got a tensor {list(q.shape)}")
    return found[0]


def _describe_operand(
    name: str, value: torch.Tensor | TensorDesc | PackedBlockWeight | None, device: torch.device, planned: TensorDesc | None
) -> TensorDesc | None:
    """The TensorDesc of an operand: a tensor in a GGUF format, a packed weight, or any other tensor. planned: see `_format_of`."""
    if isinstance(value, PackedBlockWeight):
        if name != "weight":
            raise BadParamError(f"{name}: expected a tensor or a TensorDesc, got a PackedBlockWeight")
        kept = value.tiles if value.tiles is not None else value.fields.d
        checks.check_device(name, kept, device)
        return TensorDesc(value.shape, value.fmt, constant=value.constant, packed=True)
    layout.check_no_quantized_tensor(name, value, "a tensor, a TensorDesc or a PackedBlockWeight")
    if name == "weight" and not isinstance(value, (torch.Tensor, TensorDesc)):
        raise BadParamError(f"weight: expected a tensor, a TensorDesc or a PackedBlockWeight, got {type(value).__name__}")
    desc = describe(name, value, device)
    if not isinstance(value, torch.Tensor) or name not in ("weight", "activation"):
        return desc
    if value.dtype is torch.uint8:
        description = _format_of(name, value, planned)
        layout.check_blocks(name, value, description)
        shape = (value.shape[0], value.shape[1] * BLOCK)
        return TensorDesc(shape, description.name, (value.stride(0), 1), desc.alignment)
    if name == "weight":
        got = f"{str(value.dtype).removeprefix('torch.')}{layout.quantizer_hint(value.dtype)}"
        raise BadTensorDtypeError(f"weight: expected blocks, uint8, or a PackedBlockWeight, got {got}")
    return desc


def _describe_sizes(out, weight, *_) -> str:
    return f"{'x'.join(map(str, (*out.shape, weight.shape[1])))} of {weight.dtype}"


SPEC = ProductSpec(
    name="gguf",
    code=codes.GGUF_GEMM,
    inputs=(Operand("weight", required=True), Operand("activation", required=True), Operand("bias")),
    out_dtypes=operators.OUT_DTYPES,
    out_shape=operators.out_shape,
    matrix_dimensions=0,
    check_sizes=lambda *_: None,
    compute=cpu.gemm,
    cpu_kernel=lambda: ("cpu_gguf_float32", "the device is a CPU"),
    describe_sizes=_describe_sizes,
    constant="weight",
)
# Not a `Product`, because its operators also take the weight's format and the mode.
_PRODUCT = SimpleNamespace(spec=SPEC, calculate=operators.gguf_calculate)


class BlockDescriptor(Plan):
    """A plan for a product with a weight in a GGUF format; made by `create_block_descriptor`. A context manager: leaving it destroys it."""

    _planned: tuple[TensorDesc | None, ...] = ()  # while the plan is being made

    def __init__(self, handle: Handle, operands: tuple, mode: str, kernel: str | None):
        self._mode = mode
        constant = isinstance(operands[1], PackedBlockWeight) and operands[1].constant
        super().__init__(_PRODUCT, handle, operands, kernel, constant, operators.mode_code(mode))

    def _describe(self, name: str, operand: object) -> TensorDesc | None:
        planned = dict(zip(SPEC.operand_names, self._planned)).get(name)
        return _describe_operand(name, operand, self.device, planned)

    def calculate(self, out, weight, activation, bias=None, *, workspace=None, stream=None) -> None:
        """Compute into `out`. Tensors must have the dtype, shape and strides that the descriptor was created with.

        weight: uint8 [N, K/32, bytes of a block] or a PackedBlockWeight, as when the descriptor was created. If that weight was constant
            (from `pack_block_weight` on CUDA), this one must be too.
        workspace: at least `workspace_size` bytes on the device (any contiguous dtype, aligned to 16 bytes), or None if that is 0.
            Two concurrent calls, on two streams or from two threads, each need their own.
        stream: a torch.cuda.Stream, a cudaStream_t as an integer, or None for the current stream.
        Allocates nothing on a GPU and never synchronizes; may be captured in a CUDA graph.
        Raises a ScaledMMError that names the tensor that differs; InsufficientWorkspaceError.
        """
        self._check_alive()
        checks.check_out(out)
        address = -1 if stream is None else stream_address(stream)
        packed, planned = isinstance(weight, PackedBlockWeight), self._planned[1]
        if planned.constant and not (packed and weight.constant):
            got = f"a {type(weight).__name__}{' that is not constant' if packed else ''}"
            raise BadParamError(f"weight: expected a constant PackedBlockWeight, for which the descriptor was created, got {got}")
        tensors = (out, weight, activation, bias)
        if self.device.type == "cpu":
            return self._run_on_cpu(tensors, workspace)
        self._check_data(out)
        if packed and (weight.fmt, weight.shape, True) != (planned.dtype, planned.shape, planned.packed):
            self._check_planned(tensors)  # which says how it differs
        memory = weight.tiles if packed else weight
        if packed and memory is None:
            raise BadParamError(f"weight: expected a weight packed on {self.device}, got one on {weight.device}")
        code, (rows, k) = operators.format_code(planned.dtype), planned.shape
        try:
            operators.gguf_calculate(self._address, out, memory, activation, bias, workspace, code, rows, k, packed, address)
        except (RuntimeError, TypeError) as error:
            raise SPEC.named(dispatcher.typed_error(error), (out, memory, activation, bias)) from None
        checks.mark_written(out)

    def _are_planned(self, tensors: tuple) -> bool:
        """Fast path: true if the operands match the plan exactly. `_check_planned` raises the error."""
        for planned, tensor in zip(self._planned, tensors):
            if planned is None or tensor is None:
                if planned is not tensor:
                    return False
            elif isinstance(tensor, PackedBlockWeight):
                if tensor.fields is None or (tensor.fmt, tuple(tensor.shape), True) != (planned.dtype, planned.shape, planned.packed):
                    return False
            elif type(tensor) not in checks.PLAIN or tensor.layout is not torch.strided or tensor.is_nested or not tensor.is_cpu or planned.packed:
                return False
            elif isinstance(planned.dtype, str):
                rows, blocks, size = planned.shape[0], planned.shape[1] // BLOCK, FORMATS[planned.dtype].block_bytes
                if tensor.dtype is not torch.uint8 or tuple(tensor.shape) != (rows, blocks, size) or tensor.stride() != (planned.strides[0], size, 1):
                    return False
            elif tensor.dtype is not planned.dtype or tensor.shape != planned.shape or tensor.stride() != planned.strides:
                return False
        return True

    def _run_on_cpu(self, tensors: tuple, workspace: torch.Tensor | None) -> None:
        self._check_workspace(workspace)
        if not self._are_planned(tensors):
            self._check_planned(tensors)
        out, weight, activation, bias = tensors
        packed = isinstance(weight, PackedBlockWeight)
        names, memory = (["weight"] * 4, weight.fields) if packed else (["weight"], (weight,))
        checks.check_overlap(out, (*names, "activation", "bias"), (*memory, activation, bias))
        description = lookup(self._planned[1].dtype)
        fields = weight.parts() if packed else layout.take_apart(weight, description)
        turned = out.stride(0) < out.stride(1)  # a layer's output [M, N] in memory: computed as in `block_linear`, for the same bits
        value = SPEC.compute(fields, description, activation, bias, out.dtype, self._mode, turned)
        out.copy_(value.t() if turned else value)


def create_block_descriptor(handle: Handle, *, out, weight, activation, bias=None, mode: str = "auto", kernel: str | None = None) -> BlockDescriptor:
    """Validates out = W A^T + bias once, with a weight in a GGUF format, and selects its kernel. M is the tokens, N the rows of the weight.

    out: [N, M], float32, float16 or bfloat16, any strides without overlap.
    weight: TensorDesc((N, K), "q4_0"), uint8 [N, K/32, bytes of a block], or a PackedBlockWeight; `calculate` requires the same kind.
        A tensor is refused if several formats have its bytes per block.
    activation: TensorDesc((M, K), "q8_1"), uint8 [M, K/32, 36], or float16, bfloat16 or float32 [M, K], any strides.
    bias: [N], float32 or out's dtype; added in float32.
    mode: "auto", "w4a8", "w4a16" or "w16a16", see `block_linear`; q8_1 activations take "auto" and "w4a8", float32 not "w4a16".
    kernel: forces a kernel config by its name in the section `gguf` of the device's tile table.
    Tensors may be TensorDescs. Raises a ScaledMMError that names the argument, what was expected and what was given.
    """
    if not isinstance(mode, str) or mode not in binding.GGUF_MODES:
        raise BadParamError(f"mode: expected one of {', '.join(map(repr, binding.GGUF_MODES))}, got {mode!r}")
    return BlockDescriptor(handle, (out, weight, activation, bias), mode, kernel)


__all__ = ["BlockDescriptor", "create_block_descriptor"]
