"""What the model of a kernel's time knows of a GPU."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from scaled_mm.errors import BadParamError
from scaled_mm.kernels.arch import ARCHES, GPUS, KIB, Gpu

if TYPE_CHECKING:
    from scaled_mm.core.handle import Handle


@dataclasses.dataclass(frozen=True)
class GpuFacts:
    """operations: dense INT8 operations per second. bandwidth: bytes per second of device memory."""

    arch: str
    multiprocessors: int
    operations: float
    bandwidth: float

    @property
    def shared_memory(self) -> int:
        """Bytes per SM."""
        return ARCHES[self.arch].shared_memory + KIB  # a block's limit leaves 1 KiB to the system


def facts(gpu: str, arch: str, multiprocessors: int) -> GpuFacts:
    """Facts of a GPU by the driver's name for it; for an unknown one those of a common GPU of its table, scaled.

    arch: that of the table which serves the GPU. BadParamError for one without a table.
    """
    common = typical(arch)
    if gpu in GPUS:
        return GpuFacts(arch, multiprocessors, GPUS[gpu].operations, GPUS[gpu].bandwidth)
    scale = multiprocessors / common.multiprocessors
    return GpuFacts(arch, multiprocessors, common.operations * scale, common.bandwidth * scale)


def of_handle(handle: Handle) -> GpuFacts:
    """Facts of a handle's GPU, with the bandwidth that its driver states. The core predicts times with these."""
    common = typical(handle.arch)
    operations = common.operations * handle.multiprocessors / common.multiprocessors
    return GpuFacts(handle.arch, handle.multiprocessors, operations, handle.memory_bandwidth)


def typical(arch: str, name: str | None = None) -> GpuFacts:
    """Facts of the GPU with this driver name or, if it is unknown, of a common GPU of the architecture. BadParamError if no GPU of it is known."""
    gpu: Gpu | None = ARCHES[arch].typical if arch in ARCHES else None
    if gpu is None:
        known = ", ".join(one.name for one in ARCHES.values() if one.typical)
        raise BadParamError(f"arch: expected one of {known}, got {arch!r}")
    gpu = GPUS.get(name or "", gpu)
    return GpuFacts(arch, gpu.multiprocessors, gpu.operations, gpu.bandwidth)
