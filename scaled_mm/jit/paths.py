"""Paths of the C++ sources and prebuilt libraries: inside an installed package, or beside it in a checkout."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def csrc_dir() -> Path:
    """The C++ and CUDA sources; setup.py copies them into the installed package."""
    installed = _PACKAGE / "csrc"
    return installed if installed.is_dir() else _PACKAGE.parent / "csrc"


def lib_dir() -> Path:
    """The folder of libraries built ahead of time (setup.py): the core, and kernels per architecture. It may not exist."""
    return _PACKAGE / "lib"


def include_dir() -> Path:
    """The include folder for C programs, which contains `scaled_mm/scaled_mm.h`."""
    return csrc_dir() / "include"
