"""Where the C++ sources and prebuilt libraries are: inside an installed package, or beside it in a checkout."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def csrc_dir() -> Path:
    """The C++ and CUDA sources; setup.py copies them into the installed package."""
    installed = _PACKAGE / "csrc"
    return installed if installed.is_dir() else _PACKAGE.parent / "csrc"


def lib_dir() -> Path:
    """Libraries built ahead of time (setup.py): the core, and kernels per architecture. May not exist."""
    return _PACKAGE / "lib"


def include_dir() -> Path:
    """What a C program passes to its compiler: the folder that holds `scaled_mm/scaled_mm.h`."""
    return csrc_dir() / "include"
