"""The device that is measured: waking it, waiting for it, and its largest cache."""

from __future__ import annotations

import time
from pathlib import Path

import torch


def wake(device: torch.device, ms: float = 200.0) -> None:
    """Keeps a GPU busy for about `ms` milliseconds so that the first case does not meet idle clocks."""
    if device.type != "cuda":
        return
    x = torch.rand(4096, 4096, device=device, dtype=torch.float16)
    out = torch.empty_like(x)
    deadline = time.perf_counter() + ms / 1000
    while time.perf_counter() < deadline:
        for _ in range(20):
            torch.mm(x, x, out=out)
        torch.cuda.synchronize(device)


def synchronize(device: torch.device) -> None:
    """Waits for the device's queue; nothing to do on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def multiprocessors(device: torch.device) -> int:
    """Of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def last_level_cache_bytes(device: torch.device) -> int:
    """Bytes of the GPU's L2, or of the CPU's largest cache as Linux reports it (32 MiB where it does not)."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return _cpu_cache_bytes()


def _cpu_cache_bytes(root: str = "/sys/devices/system/cpu/cpu0/cache") -> int:
    reported = []
    for file in sorted(Path(root).glob("index*/size")):
        text = file.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            reported.append(int(text[:-1]) << 10)
        elif text.endswith("M") and text[:-1].isdigit():
            reported.append(int(text[:-1]) << 20)
    return max(reported, default=32 << 20)
