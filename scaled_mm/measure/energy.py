"""What a GPU draws while an implementation runs: joules and clocks, from NVML's energy counter (`pip install nvidia-ml-py`)."""

from __future__ import annotations

import functools
from typing import Any

import torch


class Meter:
    """The energy counter and the SM clock of one GPU. Raises MeterError where NVML or its Python module is missing."""

    def __init__(self, device: torch.device):
        try:
            import pynvml
        except ImportError:
            raise MeterError("nvidia-ml-py is not installed") from None
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
            pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except pynvml.NVMLError as error:
            raise MeterError(f"NVML: {error}") from error

    def joules(self) -> float:
        """Drawn since the driver was loaded. The counter moves every few tens of milliseconds."""
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1000

    def sm_mhz(self) -> float:
        """The SM clock now."""
        return float(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))


class MeterError(Exception):
    """Why nothing is metered."""


@functools.cache
def _meter(device: torch.device) -> Meter | str:
    try:
        return Meter(device)
    except MeterError as error:
        return str(error)


def meter(device: torch.device) -> Meter | None:
    """The device's meter; None where there is none, and `unavailable` says why."""
    found = _meter(device)
    return found if isinstance(found, Meter) else None


def unavailable(device: torch.device) -> str | None:
    """Why nothing is metered on a GPU; None if it is."""
    found = _meter(device)
    return found if isinstance(found, str) else None
