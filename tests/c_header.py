"""What the C headers say, read from their text: an independent list to compare Python's with."""

from __future__ import annotations

import functools
import re

from scaled_mm.jit.paths import csrc_dir, include_dir


@functools.cache
def enum(name: str) -> dict[str, int]:
    """The values of an enumeration of scaled_mm.h, each written with its number, in the order of the file."""
    body = re.search(rf"typedef enum SCALED_MM_ENUM_BASE \{{([^}}]*)\}} {name};", (include_dir() / "scaled_mm" / "scaled_mm.h").read_text())[1]
    return {key: int(value) for key, value in re.findall(r"^ *(SCALED_MM_\w+) = (\d+),", body, re.MULTILINE)}


@functools.cache
def macro(name: str) -> int:
    """A number that scaled_mm.h or kernel_abi.h defines."""
    text = (include_dir() / "scaled_mm" / "scaled_mm.h").read_text() + (csrc_dir() / "core" / "kernel_abi.h").read_text()
    return int(re.search(rf"^#define {name} (\d+)$", text, re.MULTILINE)[1])
