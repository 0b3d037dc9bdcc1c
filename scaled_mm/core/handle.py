"""`Handle`: one device. Also the base class of all objects of the C library."""

from __future__ import annotations

import ctypes
import weakref

import torch

from scaled_mm.core import binding, checks
from scaled_mm.errors import BadParamError, DeviceNotSupportedError


class Owner:
    """Frees an object of the C library once: when called, or when its last copy is collected. All copies share the owner.

    Nothing is freed at exit. address: the object's address; 0 after it was freed.
    """

    def __init__(self, function: str, pointer: ctypes.c_void_p):
        self._pointer, self.address = pointer, pointer.value
        self._free = weakref.finalize(self, binding.call, function, ctypes.c_void_p(pointer.value))
        self._free.atexit = False

    def __call__(self) -> None:
        self._pointer.value, self.address = None, 0
        self._free()


class CObject:
    """Owns an object of the C library. `copy.copy` shares it; it cannot be pickled or deep-copied."""

    def __copy__(self):
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __reduce_ex__(self, protocol):  # called by pickle and copy.deepcopy
        name = type(self).__name__
        raise BadParamError(f"{name}: expected to stay as it is in its process, got a pickle or a deep copy to make; create another {name} instead")


class Handle(CObject):
    """One device.

    device: "cuda:0", "cuda" (the current one), "cpu", or a torch.device.
    arch: forces another architecture's tile table and kernels, such as "sm80". Default: SCALED_MM_ARCH, else the device's own.
    Raises DeviceNotSupportedError (no such device or no driver) or ArchitectureNotSupportedError (below compute capability 7.5,
    or an arch that the device cannot run).
    """

    def __init__(self, device: str | torch.device = "cuda", arch: str | None = None):
        self.device = checks.device(device)
        if self.device.type == "cuda":
            if self.device.index is None:
                self.device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
            kind = binding.DEVICE_CUDA
        elif self.device.type == "cpu":
            self.device = torch.device("cpu")  # there is only one, whatever its index
            kind = binding.DEVICE_CPU
        else:
            raise DeviceNotSupportedError(f"device: expected cuda or cpu, got {self.device.type}")
        self._pointer = ctypes.c_void_p()
        encoded = encode("arch", arch)
        binding.call("scaledMMCreateHandle", ctypes.byref(self._pointer), kind, self.device.index or 0, encoded)
        self._destroy = Owner("scaledMMDestroyHandle", self._pointer)
        info = binding.HandleInfoC()
        binding.call("scaledMMGetHandleInfo", self._pointer, ctypes.byref(info))
        self.arch: str = info.arch.decode()
        self.compute_capability: int = info.compute_capability
        self.multiprocessors: int = info.multiprocessors
        self.max_shared_memory: int = info.max_shared_memory
        self.memory_bandwidth: float = info.memory_bandwidth  # bytes per second, at its peak

    @property
    def address(self) -> int:
        """The scaledMMHandle_t as an integer."""
        return self._pointer.value

    def destroy(self) -> None:
        """Frees the handle. Descriptors created with it stay usable. A second call does nothing."""
        self._destroy()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_) -> None:
        self.destroy()

    def __repr__(self) -> str:
        state = "" if self._pointer else ", destroyed"
        return f"Handle(device={str(self.device)!r}, arch={self.arch!r}{state})"


def encode(name: str, value: str | None) -> bytes | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.isascii() or "\0" in value:
        raise BadParamError(f"{name}: expected an ASCII name, got {value!r}")
    return value.encode()
