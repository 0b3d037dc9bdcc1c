"""The descriptor of a product with a GGUF format: validate once, calculate often."""

from __future__ import annotations

import torch

from scaled_mm.core import binding, checks
from scaled_mm.core import operators as plain_ops
from scaled_mm.core.descriptor import Handle, Plan, TensorDesc, _stream_address, strided_desc
from scaled_mm.errors import BadParamError, BadTensorDtypeError, BadTensorShapeError
from scaled_mm.gguf import cpu, layout, ops
from scaled_mm.gguf.pack import PackedBlockWeight
from scaled_mm.gguf_formats import BLOCK, FORMATS, BlockFormat, lookup

_OPERANDS = ("out", "weight", "activation", "bias")
_BY_BYTES = {description.block_bytes: description for description in FORMATS.values()}  # each format has its own size


def _format_of(name: str, q: torch.Tensor) -> BlockFormat:
    if q.dim() != 3 or q.shape[2] not in _BY_BYTES:
        sizes = ", ".join(f"{size} for {description.name}" for size, description in _BY_BYTES.items())
        raise BadTensorShapeError(f"{name}: expected blocks [rows, K/32, bytes of a block: {sizes}], got {list(q.shape)}")
    return _BY_BYTES[q.shape[2]]


def _described(name: str, value: torch.Tensor | TensorDesc | PackedBlockWeight | None, device: torch.device) -> TensorDesc | None:
    """A tensor of blocks, or a packed weight, as the C interface sees it; what else there is as ever."""
    if isinstance(value, PackedBlockWeight):
        if name != "weight":
            raise BadParamError(f"{name}: expected a tensor or a TensorDesc, got a PackedBlockWeight")
        kept = value.tiles if value.tiles is not None else value.fields.d
        plain_ops.check_device(name, kept, device)
        return TensorDesc(value.shape, value.fmt, constant=value.constant, packed=True)
    layout.check_no_quantized_tensor(name, value, "a tensor, a TensorDesc or a PackedBlockWeight")
    if name == "weight" and not isinstance(value, (torch.Tensor, TensorDesc)):
        raise BadParamError(f"weight: expected a tensor, a TensorDesc or a PackedBlockWeight, got {type(value).__name__}")
    desc = strided_desc(name, value, device)
    if not isinstance(value, torch.Tensor) or name not in ("weight", "activation"):
        return desc
    if value.dtype is torch.uint8:
        description = _format_of(name, value)
        layout.check_blocks(name, value, description)
        shape = (value.shape[0], value.shape[1] * BLOCK)
        return TensorDesc(shape, description.name, (value.stride(0), 1), desc.alignment)
    if name == "weight":
        got = f"{str(value.dtype).removeprefix('torch.')}{layout.quantizer_hint(value.dtype)}"
        raise BadTensorDtypeError(f"weight: expected blocks, uint8, or a PackedBlockWeight, got {got}")
    return desc


class BlockDescriptor(Plan):
    """A plan for a product with a weight in a GGUF format; made by `create_block_descriptor`. A context manager: leaving it destroys it."""

    _PRODUCT = binding.GGUF_GEMM
    _OPERANDS = _OPERANDS

    def __init__(self, handle: Handle, tensors: dict, mode: str, kernel: str | None):
        if not isinstance(handle, Handle):
            raise BadParamError(f"handle: expected a live Handle, got {handle!r}")
        described = {name: _described(name, value, handle.device) for name, value in tensors.items()}
        self._mode = mode
        super().__init__(handle, described, kernel, option=ops.mode_code(mode))

    def _sizes(self, described: dict[str, TensorDesc | None]) -> str:
        weight = described["weight"]
        return f"{'x'.join(map(str, (*described['out'].shape, weight.shape[1])))} of {weight.dtype}"

    def _cpu_kernel(self) -> tuple[str, str]:
        return "cpu_gguf_float32", "the device is a CPU"

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
        self._alive()
        checks.check_out(out)
        address = -1 if stream is None else _stream_address(stream)
        packed = isinstance(weight, PackedBlockWeight)
        if self._planned[1].constant and not (packed and weight.constant):
            got = f"a {type(weight).__name__}{' that is not constant' if packed else ''}"
            raise BadParamError(f"weight: expected a constant PackedBlockWeight, for which the descriptor was created, got {got}")
        tensors = (out, weight, activation, bias)
        if self.device.type == "cpu":
            return self._on_cpu(*tensors, workspace)
        self._check_data(out)
        planned = self._planned[1]
        if packed and (weight.fmt, weight.shape, True) != (planned.dtype, planned.shape, planned.packed):
            self._check_described(tensors)  # which says how it differs
        memory = weight.tiles if packed else weight
        if packed and memory is None:
            raise BadParamError(f"weight: expected a weight packed on {self.device}, got one on {weight.device}")
        rows, k = planned.shape
        code = ops.format_code(planned.dtype)
        try:
            ops.gguf_calculate(self._pointer.value, out, memory, activation, bias, workspace, code, rows, k, packed, address)
        except (RuntimeError, TypeError) as error:
            raise self._named(plain_ops.typed_error(error), (out, memory, activation, bias)) from None
        checks.mark_written(out)

    def _are_described(self, tensors: tuple) -> bool:
        """Whether tensors on the CPU are to the letter what was planned; what is not, `_check_described` says."""
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

    def _check_described(self, tensors: tuple) -> None:
        for name, tensor in zip(_OPERANDS, tensors):
            if isinstance(tensor, TensorDesc):
                raise BadParamError(f"{name}: expected a tensor, got a TensorDesc")
        described = [_described(name, tensor, self.device) for name, tensor in zip(_OPERANDS, tensors)]
        try:
            binding.call("scaledMMCheckTensors", self._pointer, self._PRODUCT, *binding.operands([desc and desc._c() for desc in described]))
        except BadTensorDtypeError as error:
            raise self._named(error, tensors) from None

    def _on_cpu(self, out, weight, activation, bias, workspace) -> None:
        self._check_workspace(workspace)
        if not self._are_described((out, weight, activation, bias)):
            self._check_described((out, weight, activation, bias))
        packed = isinstance(weight, PackedBlockWeight)
        plain_ops.check_overlap(
            (out, *(weight.fields if packed else (weight,)), activation, bias), (*(["weight"] * (4 if packed else 1)), "activation", "bias")
        )
        description = lookup(self._planned[1].dtype)
        fields = weight.parts() if packed else layout.take_apart(weight, description)
        turned = out.stride(0) < out.stride(1)  # as the output of a layer, whose bits are then the same
        value = cpu.gemm(fields, description, activation, bias, out.dtype, self._mode, turned)
        out.copy_(value.t() if turned else value)


def create_block_descriptor(handle: Handle, *, out, weight, activation, bias=None, mode: str = "auto", kernel: str | None = None) -> BlockDescriptor:
    """Validates out = W A^T + bias once, with a weight in a GGUF format, and selects its kernel. M is the tokens, N the rows of the weight.

    out: [N, M], float32, float16 or bfloat16, any strides without overlap.
    weight: TensorDesc((N, K), "q4_0"), uint8 [N, K/32, bytes of a block], or a PackedBlockWeight; `calculate` requires the same kind.
    activation: TensorDesc((M, K), "q8_1"), uint8 [M, K/32, 36], or float16, bfloat16 or float32 [M, K], any strides.
    bias: [N], float32 or out's dtype; added in float32.
    mode: "auto", "w4a8" or "w4a16", see `block_linear`; not "w4a16" for q8_1 and float32 activations.
    kernel: forces a kernel config by its name in the section `gguf` of the device's tile table.
    Tensors may be TensorDescs. Raises a ScaledMMError that names the argument, what was expected and what was given.
    """
    tensors = dict(out=out, weight=weight, activation=activation, bias=bias)
    for name in _OPERANDS[:-1]:
        if tensors[name] is None:
            raise BadParamError(f"{name}: expected a tensor or a TensorDesc, got None")
    if not isinstance(mode, str) or mode not in binding.GGUF_MODES:
        raise BadParamError(f"mode: expected one of {', '.join(map(repr, binding.GGUF_MODES))}, got {mode!r}")
    return BlockDescriptor(handle, tensors, mode, kernel)


__all__ = ["BlockDescriptor", "create_block_descriptor"]
