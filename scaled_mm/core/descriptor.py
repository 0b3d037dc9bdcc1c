"""Handle, TensorDesc and Descriptor: create once, calculate often."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import operator
import weakref
from collections.abc import Sequence

import torch

from scaled_mm.core import binding, checks, fast, operators
from scaled_mm.errors import (
    BadParamError,
    BadTensorDeviceError,
    BadTensorDtypeError,
    BadTensorStridesError,
    DeviceNotSupportedError,
)
from scaled_mm.gguf import tiles
from scaled_mm.gguf_formats import BLOCK, FORMATS, spelling_hint
from scaled_mm.products.prepared_weight import PreparedWeight

_OPERANDS = ("out", *operators.INPUTS)


class _Owner:
    """Shared by the copies of an object of the C library, which is freed once: when called, or when the last copy is collected.

    Not at exit: the process takes it along.
    """

    def __init__(self, function: str, pointer: ctypes.c_void_p):
        self._pointer = pointer
        self._free = weakref.finalize(self, binding.call, function, ctypes.c_void_p(pointer.value))
        self._free.atexit = False

    def __call__(self) -> None:
        self._pointer.value = None
        self._free()


class _CObject:
    """Owns an object of the C library: `copy.copy` shares it, and it cannot leave the process or be doubled."""

    def __copy__(self):
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __reduce_ex__(self, protocol):  # asked by pickle and copy.deepcopy
        name = type(self).__name__
        raise BadParamError(f"{name}: expected to stay as it is in its process, got a pickle or a deep copy to make; create another {name} instead")


class Handle(_CObject):
    """One device.

    device: "cuda:0", "cuda" (the current one), "cpu", or a torch.device.
    arch: force another architecture's tile table and kernels, as "sm80"; default: SCALED_MM_ARCH, else the device's own.
    Raises DeviceNotSupportedError (no such device or no driver), ArchitectureNotSupportedError (below compute capability 7.5,
    or an arch that the device cannot run).
    """

    def __init__(self, device: str | torch.device = "cuda", arch: str | None = None):
        self.device = checks.device(device)
        if self.device.type == "cuda":
            if self.device.index is None:
                self.device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
            kind = binding.DEVICE_CUDA
        elif self.device.type == "cpu":
            self.device = torch.device("cpu")  # there is one, whatever its index
            kind = binding.DEVICE_CPU
        else:
            raise DeviceNotSupportedError(f"device: expected cuda or cpu, got {self.device.type}")
        self._pointer = ctypes.c_void_p()
        encoded = _encode("arch", arch)
        binding.call("scaledMMCreateHandle", ctypes.byref(self._pointer), kind, self.device.index or 0, encoded)
        self._destroy = _Owner("scaledMMDestroyHandle", self._pointer)
        info = binding.HandleInfoC()
        binding.call("scaledMMGetHandleInfo", self._pointer, ctypes.byref(info))
        self.arch: str = info.arch.decode()
        self.compute_capability: int = info.compute_capability
        self.multiprocessors: int = info.multiprocessors
        self.max_shared_memory: int = info.max_shared_memory

    @property
    def address(self) -> int:
        """The scaledMMHandle_t as an integer."""
        return self._pointer.value

    def destroy(self) -> None:
        """Free the handle. Descriptors made with it stay usable; a second call does nothing."""
        self._destroy()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_) -> None:
        self.destroy()

    def __repr__(self) -> str:
        state = "" if self._pointer else ", destroyed"
        return f"Handle(device={str(self.device)!r}, arch={self.arch!r}{state})"


def _alignment_of(address: int) -> int:
    return min(16, address & -address) if address else 16


@dataclasses.dataclass(frozen=True)
class TensorDesc:
    """A tensor without its data.

    shape: elements per dimension. strides: in elements; default: contiguous (the last dimension fastest).
    alignment: bytes that the data pointer will be a multiple of; what torch allocates is at least 16-byte aligned.
    A b [K, N] that is the transpose of a [N, K] weight has strides (1, K).
    constant: of a weight (b) alone: `calculate` will get a PreparedWeight, or a PackedBlockWeight, whose memory nothing in flight writes.

    Of a tensor of blocks (`create_block_descriptor`) dtype is the format's name, "q4_0", and shape is in values, [rows, K]; strides[0] is
    the bytes from row to row, by default those of K values, strides[1] is 1. packed: it is a PackedBlockWeight, which has no strides.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    strides: tuple[int, ...] | None = None
    alignment: int = 16
    constant: bool = False
    packed: bool = False

    def __post_init__(self):
        object.__setattr__(self, "shape", _integers("shape", self.shape))
        blocks = isinstance(self.dtype, str) and self.dtype in FORMATS
        if not blocks and not isinstance(self.dtype, torch.dtype):
            known = ", ".join(FORMATS)
            raise BadParamError(f"dtype: expected a torch.dtype or a block format ({known}), got {self.dtype!r}{spelling_hint(self.dtype)}")
        if blocks and len(self.shape) != 2:
            raise BadParamError(f"shape: expected [rows, K] of a tensor of {self.dtype} blocks, got {list(self.shape)}")
        if self.packed and not blocks:
            raise BadParamError(f"packed: expected a block format as dtype of a packed weight, got {self.dtype}")
        contiguous = [1] * len(self.shape)
        for i in reversed(range(len(self.shape) - 1)):
            contiguous[i] = contiguous[i + 1] * max(self.shape[i + 1], 1)
        if blocks:
            contiguous[0] = self.shape[1] // BLOCK * FORMATS[self.dtype].block_bytes
        object.__setattr__(self, "strides", tuple(contiguous) if self.strides is None else _integers("strides", self.strides))
        if self.packed and self.strides != tuple(contiguous):
            raise BadParamError(f"strides: expected None for a packed weight, which has none, got {self.strides}")
        if len(self.strides) != len(self.shape):
            raise BadParamError(f"strides: expected one per dimension of {self.shape}, got {self.strides}")
        object.__setattr__(self, "alignment", _integers("alignment", (self.alignment,))[0])
        if self.constant and self.alignment % 16:  # see prepare_weight
            raise BadParamError(f"alignment: expected a multiple of 16 bytes for a constant b, got {self.alignment}")

    @functools.cached_property
    def bytes(self) -> int:
        """From the data pointer to the end of the last element; 0 for a tensor without elements."""
        if 0 in self.shape:
            return 0
        if isinstance(self.dtype, str):
            rows, blocks, description = self.shape[0], self.shape[1] // BLOCK, FORMATS[self.dtype]
            if self.packed:
                return math.prod(tiles.shape(rows, blocks, description))
            return (rows - 1) * self.strides[0] + blocks * description.block_bytes
        return (sum((size - 1) * stride for size, stride in zip(self.shape, self.strides)) + 1) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorDesc:
        """What a tensor is: its shape, dtype, strides, and the alignment of its data pointer (at most 16)."""
        desc = object.__new__(cls)  # what a tensor says of itself needs none of the checks above
        desc.__dict__.update(
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            strides=tensor.stride(),
            alignment=_alignment_of(tensor.data_ptr()),
            constant=False,
            packed=False,
        )
        return desc

    def _c(self) -> binding.TensorDescC:
        flags = (binding.TENSOR_CONSTANT if self.constant else 0) | (binding.TENSOR_PACKED if self.packed else 0)
        return binding.tensor_desc(self.dtype, self.shape, self.strides, self.alignment, flags)


def _integers(name: str, values: Sequence[int]) -> tuple[int, ...]:
    try:
        result = tuple(operator.index(value) for value in values)
    except TypeError as error:
        raise BadParamError(f"{name}: expected a sequence of integers, got {values!r}") from error
    if any(abs(value) >= 2**63 for value in result):
        raise BadParamError(f"{name}: expected 64-bit integers, got {values!r}")
    return result


@dataclasses.dataclass(frozen=True)
class KernelChoice:
    """The row that a descriptor runs, and why: the bucket (-1: none was used) and table, or what kept faster rows out.

    tuned: the table was measured on one GPU model.
    """

    row: str
    reason: str
    bucket: int
    tuned: bool


def strided_desc(name: str, value: torch.Tensor | TensorDesc | None, device: torch.device) -> TensorDesc | None:
    if value is None or isinstance(value, TensorDesc):
        return value
    if not isinstance(value, torch.Tensor):
        raise BadParamError(f"{name}: expected a tensor or a TensorDesc, got {type(value).__name__}")
    operators.check_device(name, value, device)
    return TensorDesc.of(value)


def _stream_address(stream) -> int:
    address = getattr(stream, "cuda_stream", stream)
    if isinstance(address, bool) or not isinstance(address, int) or not 0 <= address < 2**63:
        raise BadParamError(f"stream: expected a torch.cuda.Stream, a cudaStream_t as an integer or None, got {stream!r}")
    return address


def _encode(name: str, value: str | None) -> bytes | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.isascii() or "\0" in value:
        raise BadParamError(f"{name}: expected an ASCII name, got {value!r}")
    return value.encode()


class Plan(_CObject):
    """What the plans for every kind of product have in common: made over the C interface, asked for their row, destroyed."""

    _PRODUCT = binding.GEMM  # scaledMMProduct_t
    _OPERANDS: Sequence[str] = _OPERANDS  # in the order of the C interface
    _TAKES_PREPARED = False  # whether `calculate` takes a PreparedWeight

    def __init__(
        self,
        handle: Handle,
        tensors: dict[str, torch.Tensor | TensorDesc | None],
        kernel: str | None,
        constant_b: bool = False,
        option: int = 0,
    ):
        """option: the C function's."""
        self._pointer = ctypes.c_void_p()
        if not isinstance(handle, Handle) or not handle._pointer:
            raise BadParamError(f"handle: expected a live Handle, got {handle!r}")
        forced = _encode("kernel", kernel)
        self.device = handle.device
        described = {name: strided_desc(name, tensors[name], self.device) for name in self._OPERANDS}
        if constant_b:
            described["b"] = dataclasses.replace(described["b"], constant=True)
        elif (b := described.get("b")) is not None and b.constant and not self._TAKES_PREPARED:
            raise BadParamError("b: expected a TensorDesc that is not constant, for this product takes no PreparedWeight, got one that is")
        self._planned = tuple(described.values())
        c_operands = binding.operands([desc and desc._c() for desc in self._planned])
        if self.device.type == "cuda":
            operators.load_cuda_operators()
        try:
            binding.call("scaledMMCreateDescriptor", handle._pointer, ctypes.byref(self._pointer), self._PRODUCT, *c_operands, option, forced)
        except BadTensorDtypeError as error:
            raise operators.name_dtype(error, **tensors) from None
        self._destroy = _Owner("scaledMMDestroyDescriptor", self._pointer)
        size = ctypes.c_size_t()
        binding.call("scaledMMGetWorkspaceSize", self._pointer, ctypes.byref(size))
        self.workspace_size: int = size.value
        self._product = f"{self._sizes(described)}, {str(described['out'].dtype).removeprefix('torch.')}"

    def _sizes(self, described: dict[str, TensorDesc | None]) -> str:
        """MxNxK, or BxMxNxK."""
        return "x".join(map(str, (*described["out"].shape, described["a"].shape[-1])))

    @property
    def kernel(self) -> KernelChoice:
        """The chosen row, and why."""
        self._alive()
        if self.device.type == "cpu":
            return KernelChoice(*self._cpu_kernel(), -1, False)
        choice = binding.KernelChoiceC()
        binding.call("scaledMMGetKernel", self._pointer, ctypes.byref(choice))
        return KernelChoice(choice.row.decode(), choice.reason.decode(), choice.bucket, bool(choice.tuned))

    def _cpu_kernel(self) -> tuple[str, str]:
        """(name, reason) of what computes the product on a CPU."""
        from scaled_mm.cpu import gemm as cpu_gemm
        from scaled_mm.cpu import integer_product

        return cpu_gemm.kernel_name(), f"the device is a CPU: {integer_product.choice().reason}"

    def _alive(self) -> None:
        if not self._pointer:
            raise BadParamError("descriptor: expected a live descriptor, got one that was destroyed")

    def _check_data(self, out: torch.Tensor) -> None:
        """BadTensorDeviceError for a meta tensor: its operator would return without a product."""
        if isinstance(out, torch.Tensor) and out.is_meta:
            raise BadTensorDeviceError(f"out: expected a tensor on {self.device}, got one on {out.device}")

    def _check_on_cpu(self, tensors: Sequence[torch.Tensor | None], workspace: torch.Tensor | None = None) -> None:
        """What the CUDA operators check before a launch: the tensors the plan was made for, apart from each other."""
        self._check_workspace(workspace)
        if self._are_planned(tensors):
            return
        described = [strided_desc(name, tensor, self.device) for name, tensor in zip(self._OPERANDS, tensors)]
        for name, tensor in zip(self._OPERANDS, tensors):
            if isinstance(tensor, TensorDesc):
                raise BadParamError(f"{name}: expected a tensor, got a TensorDesc")
        try:
            binding.call("scaledMMCheckTensors", self._pointer, self._PRODUCT, *binding.operands([desc and desc._c() for desc in described]))
        except BadTensorDtypeError as error:
            raise self._named(error, tensors) from None
        operators.check_overlap(tensors, self._OPERANDS[1:])

    def _check_workspace(self, workspace: torch.Tensor | None) -> None:
        """A CPU does not use it, but what is wrong here is wrong on a GPU."""
        if workspace is None:
            return
        if not isinstance(workspace, torch.Tensor):
            raise BadParamError(f"workspace: expected a tensor or None, got {type(workspace).__name__}")
        operators.check_device("workspace", workspace, self.device)
        if not workspace.is_contiguous():
            got = f"strides {list(workspace.stride())} for shape {list(workspace.shape)}"
            raise BadTensorStridesError(f"workspace: expected a contiguous tensor, got {got}")

    def _are_planned(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        """Whether CPU tensors are to the letter what was planned and `out` lies apart: a fifth of the time that it takes to say what is not."""
        out_begin = out_end = None
        for planned, tensor in zip(self._planned, tensors):
            if planned is None or tensor is None:
                if planned is not tensor:
                    return False
                continue
            if type(tensor) not in checks.PLAIN or tensor.layout is not torch.strided or tensor.is_nested or not tensor.is_cpu:
                return False
            if tensor.dtype is not planned.dtype or tensor.shape != planned.shape or tensor.stride() != planned.strides:
                return False
            begin = tensor.data_ptr()
            if out_begin is None:
                out_begin, out_end = begin, begin + planned.bytes
            elif begin < out_end and out_begin < begin + planned.bytes:
                return False
        return True

    def _named(self, error: BaseException, tensors: Sequence[torch.Tensor | None]) -> BaseException:
        return operators.name_dtype(error, **dict(zip(self._OPERANDS, tensors)))

    def destroy(self) -> None:
        """Free the plan; a second call does nothing."""
        self._destroy()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.destroy()

    def __repr__(self) -> str:
        state = f"kernel={self.kernel.row!r}" if self._pointer else "destroyed"
        return f"{type(self).__name__}({self._product}, device={str(self.device)!r}, {state})"


class Descriptor(Plan):
    """A plan for one product; made by `create_descriptor`. A context manager: leaving it destroys it."""

    _TAKES_PREPARED = True

    def __init__(self, handle: Handle, tensors: dict[str, torch.Tensor | TensorDesc | None], kernel: str | None, constant_b: bool = False):
        super().__init__(handle, tensors, kernel, constant_b)
        self._address = self._pointer.value
        self._device_index = self.device.index if self.device.type == "cuda" else -1
        self._needs_sums = self._planned[-1] is not None
        self._constant_b = self._planned[2].constant

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

        b: a tensor, or the PreparedWeight of one; only the latter if the descriptor was created with a PreparedWeight.
        workspace: at least `workspace_size` bytes on the device (any contiguous dtype, at a multiple of 16 bytes), or None when that is 0.
            Two calls in flight at once, on two streams or from two threads, each need their own.
        stream: a torch.cuda.Stream, a cudaStream_t as an integer, or None for the current stream.
        Allocates nothing and never synchronises; may be captured in a CUDA graph.
        Raises a ScaledMMError that names the tensor that differs; InsufficientWorkspaceError.
        """
        if self._pointer.value is None:
            self._alive()
        if stream is not None:
            stream = _stream_address(stream)
        prepared = isinstance(b, PreparedWeight)
        if self._constant_b and not (prepared and b.constant):
            got = f"a {type(b).__name__}{' that is not constant' if prepared else ''}"
            raise BadParamError(f"b: expected a constant PreparedWeight, for which the descriptor was created, got {got}")
        if prepared:
            b, b_zero_point, b_column_sums = b.operands(b_zero_point, b_column_sums, needs_sums=self._needs_sums)
        if self._device_index >= 0 and fast.module is not None and not fast.intercepted():
            status = fast.module.calculate(
                self._address,
                self._device_index,
                stream,
                workspace,
                out,
                a,
                b,
                a_scale,
                b_scale,
                bias,
                a_zero_point,
                b_zero_point,
                a_row_sums,
                b_column_sums,
            )
            if status is None:
                return
            if status is not NotImplemented:
                error = fast.failed(status)
                raise self._named(error, (out, a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums))
        checks.check_out(out)
        tensors = (out, a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums)
        if self._device_index < 0:
            from scaled_mm.cpu import gemm as cpu_gemm

            self._check_on_cpu(tensors, workspace)
            return cpu_gemm.gemm(*tensors)
        self._check_data(out)
        if stream is None:
            stream = -1
        try:
            operators.calculate(self._address, *tensors[:8], workspace, stream, a_row_sums, b_column_sums)
        except (RuntimeError, TypeError) as error:
            raise self._named(operators.typed_error(error), tensors) from None
        checks.mark_written(out)


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
    """Validate a product, or a batch of products, once and pick its kernel.

    Each argument is a TensorDesc or a tensor, as `scaled_mm` takes them; `out` [M, N] or [B, M, N] decides the output dtype.
    b may be a PreparedWeight, which brings b_zero_point and b_column_sums; `calculate` then wants one too.
    kernel: the name of a row of the device's tile table to force.
    Raises a ScaledMMError that names the argument, what was expected and what came.
    """
    constant_b = isinstance(b, PreparedWeight) and b.constant
    if isinstance(b, PreparedWeight):
        b, b_zero_point, b_column_sums = b.operands(b_zero_point, b_column_sums)
    inputs = (a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums)
    tensors = dict(zip(_OPERANDS, (out, *inputs)))
    for name in ("out", "a", "b"):
        if tensors[name] is None:
            raise BadParamError(f"{name}: expected a tensor or a TensorDesc, got None")
    return Descriptor(handle, tensors, kernel, constant_b)


__all__ = ["Descriptor", "Handle", "KernelChoice", "TensorDesc", "create_descriptor"]
