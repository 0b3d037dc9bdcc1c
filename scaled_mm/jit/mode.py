"""`SCALED_MM_JIT`: whether products wait for the compiler."""

from __future__ import annotations

import os
from typing import Literal

from scaled_mm.errors import BadParamError

JIT = "SCALED_MM_JIT"
Mode = Literal["background", "wait", "off"]
MODES: tuple[Mode, ...] = ("background", "wait", "off")


def current() -> Mode:
    """The value of the variable; `background` if it is not set. BadParamError for any other value."""
    value = os.environ.get(JIT) or "background"
    if value not in MODES:
        raise BadParamError(f"{JIT}: expected background, wait or off, got {value}")
    return value


def always_wait() -> None:
    """Sets `wait` for this process and its children: a command that measures must run the kernels that the table selects."""
    current()
    os.environ[JIT] = "wait"
