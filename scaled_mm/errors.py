"""Typed errors. Each has the corresponding status of the C header (`csrc/include/scaled_mm/scaled_mm.h`)."""

from __future__ import annotations

import enum
import sys


class Status(enum.IntEnum):
    """`scaledMMStatus_t`: the result of a call of the C interface."""

    SUCCESS = 0
    INTERNAL_ERROR = 1
    NULL_POINTER = 2
    BAD_PARAM = 3
    BAD_TENSOR_DTYPE = 4
    BAD_TENSOR_SHAPE = 5
    BAD_TENSOR_STRIDES = 6
    BAD_TENSOR_ALIGNMENT = 7
    BAD_TENSOR_DEVICE = 8
    INSUFFICIENT_WORKSPACE = 9
    DEVICE_NOT_SUPPORTED = 10
    ARCHITECTURE_NOT_SUPPORTED = 11
    KERNEL_NOT_FOUND = 12
    KERNEL_NOT_BUILT = 13
    OVERFLOW = 14
    CUDA_ERROR = 15


class ScaledMMError(RuntimeError):
    """Base class of this package's errors.

    `status` is the C status. The message names the argument, what was expected and what was given.
    """

    status: Status = Status.INTERNAL_ERROR

    def __init__(self, message: str, status: Status | None = None):
        super().__init__(message)
        if status is not None:
            self.status = status


class InternalError(ScaledMMError):
    """A bug in this package, or the host is out of memory."""

    status = Status.INTERNAL_ERROR


class NullPointerError(ScaledMMError):
    """The C interface got a null pointer."""

    status = Status.NULL_POINTER


class BadParamError(ScaledMMError, ValueError):
    """An argument has a wrong type or value, an object was destroyed, or a file is malformed."""

    status = Status.BAD_PARAM


class BadTensorDtypeError(ScaledMMError, TypeError):
    """A tensor has a dtype that this operand does not support."""

    status = Status.BAD_TENSOR_DTYPE


class BadTensorShapeError(ScaledMMError, ValueError):
    """A shape does not fit the other operands."""

    status = Status.BAD_TENSOR_SHAPE


class BadTensorStridesError(ScaledMMError, ValueError):
    """Strides are negative, an output overlaps itself, or strides differ from the descriptor's."""

    status = Status.BAD_TENSOR_STRIDES


class BadTensorAlignmentError(ScaledMMError, ValueError):
    """A pointer is less aligned than the operand requires, or than the descriptor states."""

    status = Status.BAD_TENSOR_ALIGNMENT


class BadTensorDeviceError(ScaledMMError, ValueError):
    """A tensor is on another device."""

    status = Status.BAD_TENSOR_DEVICE


class InsufficientWorkspaceError(ScaledMMError, ValueError):
    """The workspace is smaller than the descriptor's `workspace_size`."""

    status = Status.INSUFFICIENT_WORKSPACE


class DeviceNotSupportedError(ScaledMMError):
    """The device or the driver does not exist, or the device is neither CUDA nor CPU."""

    status = Status.DEVICE_NOT_SUPPORTED


class ArchitectureNotSupportedError(ScaledMMError):
    """The GPU is below compute capability 7.5, or cannot run the requested architecture."""

    status = Status.ARCHITECTURE_NOT_SUPPORTED


class KernelNotFoundError(ScaledMMError, KeyError):
    """No tile table has a kernel config of that name."""

    status = Status.KERNEL_NOT_FOUND

    __str__ = RuntimeError.__str__  # KeyError would print the repr of the message


class KernelNotBuiltError(ScaledMMError):
    """The kernel config exists, but its binary does not and could not be built."""

    status = Status.KERNEL_NOT_BUILT


K_BOUNDS = (131071, 65793, 33025)
"""The largest K for which a 32-bit accumulator is exact (docs/design/numerics.md): without zero points, with one, with two."""


class AccumulatorOverflowError(ScaledMMError, OverflowError):
    """K exceeds the bound for an exact 32-bit accumulator."""

    status = Status.OVERFLOW


class CudaError(ScaledMMError):
    """The driver or a launch failed; the message contains the driver's text."""

    status = Status.CUDA_ERROR


_BY_STATUS = {cls.status: cls for cls in ScaledMMError.__subclasses__()}


def error_for(status: int, message: str) -> ScaledMMError:
    """The typed error for a C status; an unknown status is an `InternalError` that names it."""
    try:
        known = Status(status)
    except ValueError:
        return InternalError(f"{message} (unknown status {status})")
    return _BY_STATUS[known](message)


def lacks_memory(error: BaseException) -> bool:
    """Whether an error of any package says that memory ran out, of the host or of a GPU."""
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    return "can't allocate memory" in str(error)  # torch's allocator on a CPU
