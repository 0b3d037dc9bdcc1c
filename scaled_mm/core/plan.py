"""`Plan`: a product of any kind, validated once and calculated often. The descriptors of `scaled_mm.products` are its subclasses."""

from __future__ import annotations

import ctypes
import dataclasses

import torch

from scaled_mm.core import binding, checks, dispatcher, fast
from scaled_mm.core.handle import CObject, Handle, Owner, encode
from scaled_mm.core.tensor_desc import TensorDesc, describe
from scaled_mm.errors import BadParamError, BadTensorDeviceError, BadTensorDtypeError, BadTensorStridesError

Tensors = tuple[torch.Tensor | None, ...]


@dataclasses.dataclass(frozen=True)
class KernelChoice:
    """The kernel config that a descriptor's next call runs (`row`), and the reason: the table and the bucket (-1: none was used), or what
    excluded faster kernel configs.

    tuned: the table was measured on one GPU model.
    better: the kernel config that takes over once it is built; None: none does.
    """

    row: str
    reason: str
    bucket: int
    tuned: bool
    better: str | None = None


def stream_address(stream) -> int:
    """The cudaStream_t of a torch.cuda.Stream or of an integer; BadParamError for anything else."""
    address = getattr(stream, "cuda_stream", stream)
    if isinstance(address, bool) or not isinstance(address, int) or not 0 <= address < 2**63:
        raise BadParamError(f"stream: expected a torch.cuda.Stream, a cudaStream_t as an integer or None, got {stream!r}")
    return address


class Plan(CObject):
    """A product that the core has validated, and its selected kernel.

    A context manager: leaving it destroys the plan. Subclasses add `calculate` with named operands.
    """

    def __init__(
        self,
        product,
        handle: Handle,
        operands: tuple[torch.Tensor | TensorDesc | None, ...],
        kernel: str | None,
        constant: bool = False,
        option: int = 0,
    ):
        """product: the `Product`, operators and spec. operands: out, then the inputs, in the order of the spec.

        kernel: the name of a kernel config to force. constant: the operand `spec.constant` will be a prepared weight. option: of the C function.
        """
        self._pointer = ctypes.c_void_p()
        self.product, spec = product, product.spec
        for required, name, operand in zip((True, *(given.required for given in spec.inputs)), spec.operand_names, operands):
            if required and operand is None:
                raise BadParamError(f"{name}: expected a tensor or a TensorDesc, got None")
        if not isinstance(handle, Handle) or not handle._pointer:
            raise BadParamError(f"handle: expected a live Handle, got {handle!r}")
        forced = encode("kernel", kernel)
        self.device, self._arch = handle.device, handle.arch
        described = [self._describe(name, operand) for name, operand in zip(spec.operand_names, operands)]
        for i, (name, desc) in enumerate(zip(spec.operand_names, described)):
            if name == spec.constant:
                described[i] = dataclasses.replace(desc, constant=True) if constant else desc
            elif spec.constant is None and desc is not None and desc.constant:
                expected = "a TensorDesc that is not constant, for this product takes no PreparedWeight"
                raise BadParamError(f"{name}: expected {expected}, got one that is")
        self._planned = tuple(described)
        if self.device.type == "cuda":
            dispatcher.load_cuda_operators()
        c_operands = binding.operands([desc and desc._c() for desc in self._planned])
        try:
            self._create(handle, c_operands, option, forced)
        except BadTensorDtypeError as error:
            raise spec.named(error, operands) from None
        self._destroy = Owner("scaledMMDestroyDescriptor", self._pointer)
        self._address, self._code = self._pointer.value, spec.code
        self._device_index = self.device.index if self.device.type == "cuda" else -1
        size = ctypes.c_size_t()
        binding.call("scaledMMGetWorkspaceSize", self._pointer, ctypes.byref(size))
        self.workspace_size: int = size.value

    def _create(self, handle: Handle, c_operands: tuple, option: int, forced: bytes | None) -> None:
        binding.call("scaledMMCreateDescriptor", handle._pointer, ctypes.byref(self._pointer), self.product.spec.code, *c_operands, option, forced)

    def _describe(self, name: str, operand: object) -> TensorDesc | None:
        """The TensorDesc of an operand, as the C interface receives it."""
        return describe(name, operand, self.device)

    @property
    def kernel(self) -> KernelChoice:
        """The selected kernel config, and the reason."""
        self._check_alive()
        if self._device_index < 0:
            return KernelChoice(*self.product.spec.cpu_kernel(), -1, False)
        choice = binding.KernelChoiceC()
        binding.call("scaledMMGetKernel", self._pointer, ctypes.byref(choice))
        better, reason = choice.better.decode() if choice.better else None, choice.reason.decode()
        if better:
            from scaled_mm.jit import background

            state = background.state(self._arch, better)
            reason += f"; {better} {state}" if state else ""
        return KernelChoice(choice.row.decode(), reason, choice.bucket, bool(choice.tuned), better)

    def _check_alive(self) -> None:
        if not self._pointer:
            raise BadParamError("descriptor: expected a live descriptor, got one that was destroyed")

    # ---- one calculation --------------------------------------------------------------------------------------------------

    def _run(self, tensors: Tensors, workspace: torch.Tensor | None, stream) -> None:
        """Calculates. tensors: out, then the inputs, in the order of the spec. workspace, stream: see `calculate`."""
        if not self._destroy.address:  # three times faster than to read `self._pointer.value`
            self._check_alive()
        if stream is not None:
            stream = stream_address(stream)
        if self._device_index >= 0 and fast.module is not None:
            status = fast.module.calculate(self._address, self._code, self._device_index, stream, workspace, tensors)
            if status is None:
                return
            if status is not NotImplemented:
                raise self.product.spec.named(fast.failed(status), tensors)
        out = tensors[0]
        checks.check_out(out)
        if self._device_index < 0:
            self._check_on_cpu(tensors, workspace)
            return self.product.spec.compute(*tensors)
        self._check_data(out)
        try:
            self.product.calculate(self._address, *tensors, workspace, -1 if stream is None else stream)
        except (RuntimeError, TypeError) as error:
            raise self.product.spec.named(dispatcher.typed_error(error), tensors) from None
        checks.mark_written(out)

    def _check_data(self, out: torch.Tensor) -> None:
        """BadTensorDeviceError for a meta tensor, whose operator would return without computing."""
        if isinstance(out, torch.Tensor) and out.is_meta:
            raise BadTensorDeviceError(f"out: expected a tensor on {self.device}, got one on {out.device}")

    def _check_on_cpu(self, tensors: Tensors, workspace: torch.Tensor | None) -> None:
        """The checks that the CUDA operators make before a launch: the tensors match the plan, and out aliases no input."""
        self._check_workspace(workspace)
        if self._are_planned(tensors):
            return
        self._check_planned(tensors)
        checks.check_overlap(tensors[0], self.product.spec.input_names, tensors[1:])

    def _check_planned(self, tensors: tuple) -> None:
        """Raises the typed error that says how the tensors differ from the plan; returns if they match."""
        names = self.product.spec.operand_names
        for name, tensor in zip(names, tensors):
            if isinstance(tensor, TensorDesc):
                raise BadParamError(f"{name}: expected a tensor, got a TensorDesc")
        described = [self._describe(name, tensor) for name, tensor in zip(names, tensors)]
        c_operands = binding.operands([desc and desc._c() for desc in described])
        try:
            binding.call("scaledMMCheckTensors", self._pointer, self.product.spec.code, *c_operands)
        except BadTensorDtypeError as error:
            raise self.product.spec.named(error, tensors) from None

    def _check_workspace(self, workspace: torch.Tensor | None) -> None:
        """A CPU does not use the workspace, but an invalid one is refused as on a GPU."""
        if workspace is None:
            return
        if not isinstance(workspace, torch.Tensor):
            raise BadParamError(f"workspace: expected a tensor or None, got {type(workspace).__name__}")
        checks.check_device("workspace", workspace, self.device)
        if not workspace.is_contiguous():
            got = f"strides {list(workspace.stride())} for shape {list(workspace.shape)}"
            raise BadTensorStridesError(f"workspace: expected a contiguous tensor, got {got}")

    def _are_planned(self, tensors: Tensors) -> bool:
        """Fast path: true if CPU tensors match the plan exactly and out does not alias. Five times cheaper than building the error."""
        out_begin = out_end = None
        for planned, tensor in zip(self._planned, tensors):
            if planned is None or tensor is None:
                if planned is not tensor:
                    return False
                continue
            if not isinstance(tensor, torch.Tensor) or not checks.is_plain_cpu(tensor):
                return False
            if tensor.dtype is not planned.dtype or tensor.shape != planned.shape or tensor.stride() != planned.strides:
                return False
            begin = tensor.data_ptr()
            if out_begin is None:
                out_begin, out_end = begin, begin + planned.bytes
            elif begin < out_end and out_begin < begin + planned.bytes:
                return False
        return True

    def destroy(self) -> None:
        """Frees the plan. A second call does nothing."""
        self._destroy()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.destroy()

    def __repr__(self) -> str:
        state = f"kernel={self.kernel.row!r}" if self._pointer else "destroyed"
        out = self._planned[0]
        sizes = f"{self.product.spec.describe_sizes(*self._planned)}, {str(out.dtype).removeprefix('torch.')}"
        return f"{type(self).__name__}({sizes}, device={str(self.device)!r}, {state})"
