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
    status = Status.INTERNAL_ERROR


class NullPointerError(ScaledMMError):
    status = Status.NULL_POINTER


class BadParamError(ScaledMMError, ValueError):
    status = Status.BAD_PARAM


class BadTensorDtypeError(ScaledMMError, TypeError):
    status = Status.BAD_TENSOR_DTYPE


class BadTensorShapeError(ScaledMMError, ValueError):
    status = Status.BAD_TENSOR_SHAPE


class BadTensorStridesError(ScaledMMError, ValueError):
    status = Status.BAD_TENSOR_STRIDES


class BadTensorAlignmentError(ScaledMMError, ValueError):
    status = Status.BAD_TENSOR_ALIGNMENT


class BadTensorDeviceError(ScaledMMError, ValueError):
    status = Status.BAD_TENSOR_DEVICE


class InsufficientWorkspaceError(ScaledMMError, ValueError):
    status = Status.INSUFFICIENT_WORKSPACE


class DeviceNotSupportedError(ScaledMMError):
    status = Status.DEVICE_NOT_SUPPORTED


class ArchitectureNotSupportedError(ScaledMMError):
    status = Status.ARCHITECTURE_NOT_SUPPORTED


class KernelNotFoundError(ScaledMMError, KeyError):
    status = Status.KERNEL_NOT_FOUND

    __str__ = RuntimeError.__str__  # KeyError would print the repr of the message


class KernelNotBuiltError(ScaledMMError):
    status = Status.KERNEL_NOT_BUILT


class AccumulatorOverflowError(ScaledMMError, OverflowError):
    status = Status.OVERFLOW


class CudaError(ScaledMMError):
    status = Status.CUDA_ERROR


_BY_STATUS = {cls.status: cls for cls in ScaledMMError.__subclasses__()}


def error_for(status: int, message: str) -> ScaledMMError:
    """The typed error for a C status; an unknown status is an `InternalError` that names it."""
    try:
        known = Status(status)
    except ValueError:
        return InternalError(f"{message} (unknown status {status})")
    return _BY_STATUS[known](message)
