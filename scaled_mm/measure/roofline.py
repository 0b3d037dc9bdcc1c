"""The floor under a product's time: the larger of its arithmetic and its compulsory memory traffic."""

from __future__ import annotations

#: Dense INT8 operations per second and bytes per second of device memory, from the makers' data sheets, by the name
#: that the driver gives the GPU. A GPU that is not here gets no roof rather than a wrong one.
PEAKS: dict[str, tuple[float, float]] = {
    "NVIDIA H200": (1979e12, 4.8e12),
    "NVIDIA H100 80GB HBM3": (1979e12, 3.35e12),
    "NVIDIA H100 PCIe": (1513e12, 2.0e12),
    "NVIDIA A100-SXM4-80GB": (624e12, 2.039e12),
    "NVIDIA A100 80GB PCIe": (624e12, 1.935e12),
    "NVIDIA L40S": (733e12, 864e9),
    "NVIDIA L4": (242e12, 300e9),
    "NVIDIA GeForce RTX 4090": (660e12, 1008e9),
    "NVIDIA A10": (250e12, 600e9),
    "Tesla T4": (130e12, 320e9),
}


def traffic_bytes(M: int, N: int, K: int) -> int:
    """Bytes that must move: int8 a and b read once, 16-bit out written once, one fp32 scale per row and per column."""
    return M * K + N * K + 2 * M * N + 4 * (M + N)


def roof_us(M: int, N: int, K: int, gpu: str) -> float | None:
    """max(2MNK / INT8 rate, bytes / bandwidth) in microseconds; None for a GPU without an entry in `PEAKS`."""
    if gpu not in PEAKS:
        return None
    operations, bandwidth = PEAKS[gpu]
    return 1e6 * max(2 * M * N * K / operations, traffic_bytes(M, N, K) / bandwidth)


def tops(M: int, N: int, K: int, us: float) -> float:
    """Tera-operations per second of a product that took `us` microseconds, two operations per multiply-add."""
    return 2 * M * N * K / us * 1e-6
