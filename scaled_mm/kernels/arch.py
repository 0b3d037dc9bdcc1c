"""The SM architectures, one entry each, and the GPUs whose peak rates are known.

Sources: the table of technical specifications in the CUDA C++ Programming Guide; NVIDIA's data sheets.
"""

from __future__ import annotations

import dataclasses

KIB = 1024
WARP_SIZE = 32
WARPGROUP = 128  # threads that issue one wgmma
REGISTERS = 64 * KIB  # 32-bit registers of an SM, on every architecture below
MAX_CLUSTER = 8  # thread blocks per cluster: the most that every GPU with clusters can schedule
CLUSTER_SIZES = (1, 2, 4, 8)
STATIC_SHARED_MEMORY = 48 * KIB  # what a kernel may declare without opting in to more


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU model. operations: dense INT8 operations per second. bandwidth: bytes per second of device memory."""

    label: str
    multiprocessors: int
    operations: float
    bandwidth: float


GPUS: dict[str, Gpu] = {
    "NVIDIA H200": Gpu("H200", 132, 1979e12, 4.8e12),
    "NVIDIA H100 80GB HBM3": Gpu("H100", 132, 1979e12, 3.35e12),
    "NVIDIA H100 PCIe": Gpu("H100 PCIe", 114, 1513e12, 2.0e12),
    "NVIDIA A100-SXM4-80GB": Gpu("A100", 108, 624e12, 2.039e12),
    "NVIDIA A100 80GB PCIe": Gpu("A100 PCIe", 108, 624e12, 1.935e12),
    "NVIDIA L40S": Gpu("L40S", 142, 733e12, 864e9),
    "NVIDIA L4": Gpu("L4", 58, 242e12, 300e9),
    "NVIDIA GeForce RTX 4090": Gpu("RTX 4090", 128, 660e12, 1008e9),
    "NVIDIA A10": Gpu("A10", 72, 250e12, 600e9),
    "Tesla T4": Gpu("T4", 40, 130e12, 320e9),
}
"""By the driver's name of the GPU. For a GPU that is not listed, no roofline is reported."""


@dataclasses.dataclass(frozen=True)
class Arch:
    """One architecture.

    shared_memory: bytes that one thread block may opt in to.
    code_name: NVIDIA's name, such as "Hopper".
    typical: a common GPU, for predictions and `scaled-mm table explain`; None for an architecture that is served by another one's tile table.
    capability: the compute capability that nvcc compiles the tile table for: the oldest architecture served, or a variant with more
        instructions, such as 90a.
    wgmma: has SM90a's warpgroup MMA and TMA. Kernels that use them run on no other architecture.
    async_copies: has cp.async, from device memory to shared memory.
    """

    name: str
    shared_memory: int
    code_name: str
    typical: Gpu | None = None
    capability: str = ""
    wgmma: bool = False
    async_copies: bool = True

    def __post_init__(self):
        if not self.capability:
            object.__setattr__(self, "capability", self.name.removeprefix("sm"))


ARCHES: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch("sm75", 64 * KIB, "Turing", GPUS["Tesla T4"], async_copies=False),
        Arch("sm80", 163 * KIB, "Ampere", GPUS["NVIDIA A100-SXM4-80GB"]),
        Arch("sm86", 99 * KIB, "Ampere"),
        Arch("sm87", 163 * KIB, "Ampere"),
        Arch("sm88", 99 * KIB, "Ampere"),
        Arch("sm89", 99 * KIB, "Ada Lovelace", GPUS["NVIDIA L40S"], capability="86"),
        Arch("sm90", 227 * KIB, "Hopper", GPUS["NVIDIA H100 80GB HBM3"], capability="90a", wgmma=True),
        Arch("sm100", 227 * KIB, "Blackwell", Gpu("B200", 148, 4500e12, 8.0e12)),
        Arch("sm103", 227 * KIB, "Blackwell"),
        Arch("sm110", 227 * KIB, "Blackwell"),
        Arch("sm120", 99 * KIB, "Blackwell", Gpu("RTX 5090", 170, 838e12, 1.79e12)),
        Arch("sm121", 99 * KIB, "Blackwell"),
    )
}
"""A new architecture is an entry here, a tile table that serves it, and an entry of `kServed` in csrc/core/arch.cpp."""

DEFAULT_ARCH = "sm90"  # of commands without --arch


def wgmma_arches() -> str:
    """The names of the architectures whose kernels may use wgmma, for messages."""
    return ", ".join(arch.name for arch in ARCHES.values() if arch.wgmma)
