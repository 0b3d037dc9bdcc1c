"""Typed errors. Each carries the status of the C header (`csrc/include/scaled_mm/scaled_mm.h`) that it stands for."""

from __future__ import annotations

import enum


class Status(enum.IntEnum):
    """`scaledMMStatus_t`: what a call of the C interface answered."""

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
    """Base of every error that this package raises on purpose.

    `status` is the C status; the message names the argument, what was expected and what came.
    """

    status: Status = Status.INTERNAL_ERROR

    def __init__(self, message: str, status: Status | None = None):
        super().__init__(message)
        if status is not None:
            self.status = status


class InternalError(ScaledMMError):
    """A bug of this package, or a host without memory."""

    status = Status.INTERNAL_ERROR


class NullPointerError(ScaledMMError):
    """The C interface got a null pointer."""

    status = Status.NULL_POINTER


class BadParamError(ScaledMMError, ValueError):
    """An argument has a wrong type or value, an object was destroyed, or a file is malformed."""

    status = Status.BAD_PARAM


class BadTensorDtypeError(ScaledMMError, TypeError):
    """A tensor has a dtype that its operand cannot have."""

    status = Status.BAD_TENSOR_DTYPE


class BadTensorShapeError(ScaledMMError, ValueError):
    """A shape does not fit the other operands."""

    status = Status.BAD_TENSOR_SHAPE


class BadTensorStridesError(ScaledMMError, ValueError):
    """Strides are negative, an output overlaps itself, or strides differ from the plan."""

    status = Status.BAD_TENSOR_STRIDES


class BadTensorAlignmentError(ScaledMMError, ValueError):
    """A pointer is less aligned than its operand needs, or than the descriptor says."""

    status = Status.BAD_TENSOR_ALIGNMENT


class BadTensorDeviceError(ScaledMMError, ValueError):
    """A tensor is on another device."""

    status = Status.BAD_TENSOR_DEVICE


class InsufficientWorkspaceError(ScaledMMError, ValueError):
    """The workspace is smaller than the descriptor's `workspace_size`."""

    status = Status.INSUFFICIENT_WORKSPACE


class DeviceNotSupportedError(ScaledMMError):
    """No such device, no driver, or neither CUDA nor CPU."""

    status = Status.DEVICE_NOT_SUPPORTED


class ArchitectureNotSupportedError(ScaledMMError):
    """A GPU below compute capability 7.5, or an architecture that the device cannot run."""

    status = Status.ARCHITECTURE_NOT_SUPPORTED


class KernelNotFoundError(ScaledMMError, KeyError):
    """No tile table has a row of that name."""

    status = Status.KERNEL_NOT_FOUND

    __str__ = RuntimeError.__str__  # KeyError would print the repr of the message


class KernelNotBuiltError(ScaledMMError):
    """The row exists, its binary does not, and nothing could build it."""

    status = Status.KERNEL_NOT_BUILT


class AccumulatorOverflowError(ScaledMMError, OverflowError):
    """K is beyond what a 32-bit accumulator holds exactly."""

    status = Status.OVERFLOW


class CudaError(ScaledMMError):
    """The driver or a launch failed; the message has its text."""

    status = Status.CUDA_ERROR


_BY_STATUS = {cls.status: cls for cls in ScaledMMError.__subclasses__()}


def error_for(status: int, message: str) -> ScaledMMError:
    """The typed error for a C status; an unknown status is an `InternalError` that names it."""
    try:
        known = Status(status)
    except ValueError:
        return InternalError(f"{message} (unknown status {status})")
    return _BY_STATUS[known](message)
