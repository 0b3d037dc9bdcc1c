"""The floor under a product's time: the larger of its arithmetic and its compulsory memory traffic."""

from __future__ import annotations

from scaled_mm.kernels.arch import GPUS

#: Dense INT8 operations per second and bytes per second of device memory, by the name that the driver gives the GPU.
PEAKS: dict[str, tuple[float, float]] = {name: (gpu.operations, gpu.bandwidth) for name, gpu in GPUS.items()}


def traffic_bytes(M: int, N: int, K: int) -> int:
    """Bytes that must move: int8 a and b read once, 16-bit out written once, one fp32 scale per row and per column."""
    return M * K + N * K + 2 * M * N + 4 * (M + N)


def roof_us(M: int, N: int, K: int, gpu: str) -> float | None:
    """max(2MNK / INT8 rate, bytes / bandwidth) in microseconds; None for a GPU without an entry in `PEAKS`."""
    if gpu not in PEAKS:
        return None
    operations, bandwidth = PEAKS[gpu]
    return 1e6 * max(2 * M * N * K / operations, traffic_bytes(M, N, K) / bandwidth)


def memory_us(bytes_moved: int, gpu: str) -> float | None:
    """bytes / bandwidth in microseconds; None for a GPU without an entry in `PEAKS`."""
    return 1e6 * bytes_moved / PEAKS[gpu][1] if gpu in PEAKS else None


def linear_bytes(M: int, N: int, K: int) -> int:
    """Bytes that a linear layer must move: bfloat16 x and int8 weight read once, 16-bit out written once, one fp32 scale per column.

    The quantized activation is not counted: it need not leave the chip.
    """
    return 2 * M * K + N * K + 2 * M * N + 4 * N


def linear_us(M: int, N: int, K: int, gpu: str) -> float | None:
    """max(2MNK / INT8 rate, `linear_bytes` / bandwidth) in microseconds; None for a GPU without an entry in `PEAKS`."""
    return max(2e6 * M * N * K / PEAKS[gpu][0], memory_us(linear_bytes(M, N, K), gpu)) if gpu in PEAKS else None


def tops(M: int, N: int, K: int, us: float) -> float:
    """Tera-operations per second of a product that took `us` microseconds, two operations per multiply-add."""
    return 2 * M * N * K / us * 1e-6
