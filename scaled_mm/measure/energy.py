"""What a GPU draws while an implementation runs: joules and clocks, from NVML's energy counter (`pip install nvidia-ml-py`)."""

from __future__ import annotations

import contextlib
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


_meters: dict[torch.device, Meter | None] = {}


def meter(device: torch.device) -> Meter | None:
    """The device's meter; None where there is none."""
    if device not in _meters:
        _meters[device] = None
        with contextlib.suppress(MeterError):
            _meters[device] = Meter(device)
    return _meters[device]
