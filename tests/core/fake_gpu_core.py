"""What the scripts of the fake GPU share: the C core behind ctypes. They run in processes of their own, where libcuda.so.1 is the fake driver.

Tensors are torch's on the CPU; their pointers go to the C core as if they were a GPU's. Import it first: it lets scripts find tests/operands.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from operands.cases import Operands  # noqa: E402

from scaled_mm import TensorDesc  # noqa: E402
from scaled_mm.core import binding  # noqa: E402
from scaled_mm.errors import ScaledMMError  # noqa: E402
from scaled_mm.products import codes  # noqa: E402

STREAM = 0x5EED0


class Core:
    """The C core with a fake GPU and these kernels; the provider that would build kernels is replaced by `provide`."""

    PRODUCT = codes.GEMM

    def __init__(self, *kernel_libraries: str, arch: str | None = None, provide=None):
        self.lib = binding.library()
        self.lib.scaledMMCalculate.argtypes = [
            ctypes.c_void_p,
            ctypes.c_int32,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_void_p,
            ctypes.c_int32,
            ctypes.c_void_p,
        ]
        self.asked: list[tuple[str, str | None, int, int]] = []  # arch, row, dtype, scaledMMProvide_t
        self.provide = provide
        self._provider = binding._PROVIDER(self._ask)
        binding.call("scaledMMSetKernelProvider", self._provider, None)
        for path in kernel_libraries:
            binding.call("scaledMMLoadKernels", path.encode())
        self.handle = ctypes.c_void_p()
        encoded = arch.encode() if arch else None
        binding.call("scaledMMCreateHandle", ctypes.byref(self.handle), binding.DEVICE_CUDA, 0, encoded)

    def _ask(self, arch, row, out_dtype, when, _user) -> int:
        self.asked.append((arch.decode(), row.decode() if row else None, out_dtype, when))
        return self.provide(*self.asked[-1]) if self.provide else 0

    def create_from(self, descs: list[TensorDesc | None], kernel: str | None = None, option: int = 0) -> ctypes.c_void_p:
        """A descriptor of operands in the order of the C interface."""
        descriptor = ctypes.c_void_p()
        operands = binding.operands([None if desc is None else desc._c() for desc in descs])
        encoded = kernel.encode() if kernel else None
        binding.call("scaledMMCreateDescriptor", self.handle, ctypes.byref(descriptor), self.PRODUCT, *operands, option, encoded)
        return descriptor

    def create(self, kernel: str | None = None, **descs: TensorDesc | None) -> ctypes.c_void_p:
        return self.create_from([descs.get(name) for name in binding.operand_names(self.PRODUCT)], kernel)

    def check(self, descriptor, descs: list[TensorDesc | None]) -> None:
        operands = binding.operands([None if desc is None else desc._c() for desc in descs])
        binding.call("scaledMMCheckTensors", descriptor, self.PRODUCT, *operands)

    def choice(self, descriptor) -> binding.KernelChoiceC:
        choice = binding.KernelChoiceC()
        binding.call("scaledMMGetKernel", descriptor, ctypes.byref(choice))
        return choice

    def workspace_size(self, descriptor) -> int:
        size = ctypes.c_size_t()
        binding.call("scaledMMGetWorkspaceSize", descriptor, ctypes.byref(size))
        return size.value

    def calculate(self, descriptor, out, operands: dict, workspace: torch.Tensor | None, size: int | None = None) -> None:
        tensors = [out, *(operands.get(name) for name in binding.operand_names(self.PRODUCT)[1:])]
        pointers = (ctypes.c_void_p * len(tensors))(*(None if tensor is None else tensor.data_ptr() for tensor in tensors))
        address = workspace.data_ptr() if workspace is not None else None
        bytes_given = size if size is not None else (workspace.numel() if workspace is not None else 0)
        binding.call("scaledMMCalculate", descriptor, self.PRODUCT, address, bytes_given, pointers, len(tensors), STREAM)

    def destroy(self, descriptor) -> None:
        binding.call("scaledMMDestroyDescriptor", descriptor)


def described(operands: Operands, out: torch.Tensor) -> dict[str, TensorDesc | None]:
    tensors = {**operands.inputs, "out": out}
    return {name: None if tensor is None else TensorDesc.of(tensor) for name, tensor in tensors.items()}


def aligned_bytes(size: int) -> torch.Tensor:
    return torch.full((size + 64,), 0xA5, dtype=torch.uint8)[: max(size, 1)]


def status_of(call) -> tuple[str, str]:
    try:
        call()
    except ScaledMMError as error:
        return error.status.name, str(error)
    return "SUCCESS", ""
