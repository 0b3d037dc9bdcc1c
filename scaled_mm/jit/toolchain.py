"""Finds the tools for a build: a C++ compiler, nvcc, CUTLASS headers, ninja. Nothing here compiles or imports torch."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from scaled_mm.errors import KernelNotBuiltError


@dataclasses.dataclass(frozen=True)
class Nvcc:
    """`path` of the compiler; `version`, such as "13.0.88"; `origin`: where it was found."""

    path: Path
    version: str
    origin: str


def _wheel_roots() -> list[Path]:
    """`site-packages/nvidia/...` folders of PyPI's CUDA wheels (nvidia/cu13, nvidia/cuda_nvcc)."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    return [child for root in roots for child in sorted(root.glob("cu*"), reverse=True) if child.is_dir()]


OLDEST_NVCC = (12, 0)  # the first that supports sm_90a
TOOLKIT_NVCC = Path("/usr/local/cuda/bin/nvcc")


def _nvcc_candidates() -> list[tuple[str, Path]]:
    found: list[tuple[str, Path]] = []
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if value := os.environ.get(variable):
            found.append((f"environment variable {variable}", Path(value) / "bin" / "nvcc"))
    if on_path := shutil.which("nvcc"):
        found.append(("PATH", Path(on_path)))
    found.append(("toolkit", TOOLKIT_NVCC))
    found += [("nvidia-cuda-nvcc wheel", root / "bin" / "nvcc") for root in _wheel_roots()]
    return found


def _ask_nvcc(path: Path, origin: str) -> Nvcc | None:
    """The nvcc at a path. None if it does not run, or is older than OLDEST_NVCC."""
    try:
        answer = subprocess.run([str(path), "--version"], capture_output=True, encoding="utf-8", errors="replace")
    except OSError:
        return None  # no such file, or not a program for this machine
    version = re.search(r"V(\d+)\.(\d+)\.\d+", answer.stdout)
    if answer.returncode != 0 or version is None or tuple(map(int, version.groups())) < OLDEST_NVCC:
        return None
    return Nvcc(path, version.group(0)[1:], origin)


def _wrong_variable(variable: str, expected: str, value: str) -> KernelNotBuiltError:
    """The error for an environment variable with an unusable value; no default is used instead."""
    return KernelNotBuiltError(f"{variable}: expected {expected}, got {value}")


@functools.cache
def find_nvcc() -> Nvcc | None:
    """SCALED_MM_NVCC, else the first nvcc that is new enough in CUDA_HOME, CUDA_PATH, PATH, the toolkit and the `nvidia-cuda-nvcc` wheel.

    Raises KernelNotBuiltError if SCALED_MM_NVCC is not a usable nvcc.
    """
    if value := os.environ.get("SCALED_MM_NVCC"):
        nvcc = _ask_nvcc(Path(value), "environment variable SCALED_MM_NVCC")
        if nvcc is None:
            raise _wrong_variable("SCALED_MM_NVCC", f"the path of an nvcc of CUDA {'.'.join(map(str, OLDEST_NVCC))} or newer", value)
        return nvcc
    found = (_ask_nvcc(path, origin) for origin, path in _nvcc_candidates())
    return next((nvcc for nvcc in found if nvcc), None)


def environment() -> dict[str, str]:
    """The environment for a compiler, without variables from which nvcc adds flags: those would change the machine code but not the key."""
    return {name: value for name, value in os.environ.items() if name not in ("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS")}


@functools.cache
def _known(nvcc: Nvcc, option: str, name: str) -> frozenset[str]:
    try:
        answer = subprocess.run([str(nvcc.path), option], capture_output=True, encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    return frozenset(word for word in answer.stdout.split() if re.fullmatch(name, word))


def known_machine_codes(nvcc: Nvcc) -> frozenset[str]:
    """The architectures (sm_75 ...) that an nvcc compiles machine code for."""
    return _known(nvcc, "--list-gpu-code", r"sm_\d+")


def require_architecture(nvcc: Nvcc, virtual: str) -> None:
    """Raises KernelNotBuiltError if the nvcc does not compile for a virtual architecture such as compute_100 (compute_90a counts as compute_90).

    If an nvcc lists no architectures, the compilation itself reports the error.
    """
    known = _known(nvcc, "--list-gpu-arch", r"compute_\d+")
    if known and virtual.rstrip("a") not in known:
        names = ", ".join(sorted(known, key=lambda name: int(name.removeprefix("compute_"))))
        raise KernelNotBuiltError(
            f"nvcc: expected one that compiles for {virtual}, got {nvcc.version} ({nvcc.path}), which knows {names}; "
            "install a newer CUDA toolkit, or set SCALED_MM_NVCC"
        )


@functools.cache
def find_cutlass() -> Path | None:
    """CUTLASS's include folder: SCALED_MM_CUTLASS (a checkout), else the `nvidia-cutlass` wheel.

    Raises KernelNotBuiltError if SCALED_MM_CUTLASS is not a CUTLASS checkout.
    """
    if value := os.environ.get("SCALED_MM_CUTLASS"):
        include = Path(value) / "include"
        if not (include / "cutlass" / "version.h").is_file():
            raise _wrong_variable("SCALED_MM_CUTLASS", "the folder of a CUTLASS checkout, with include/cutlass/version.h in it", value)
        return include
    # find_spec does not import the package, which would import its generator's dependencies.
    spec = importlib.util.find_spec("cutlass_library")
    include = Path(spec.origin).parent / "source" / "include" if spec and spec.origin else None
    return include if include and (include / "cutlass" / "version.h").is_file() else None


@functools.cache
def cutlass_version() -> str | None:
    include = find_cutlass()
    if include is None:
        return None
    text = (include / "cutlass" / "version.h").read_text(encoding="utf-8")
    parts = [re.search(rf"#define CUTLASS_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part.group(1) if part else "?" for part in parts)


@functools.cache
def find_ninja() -> Path | None:
    """ninja: from the `ninja` package, else from PATH."""
    if importlib.util.find_spec("ninja"):
        import ninja

        candidate = Path(ninja.BIN_DIR) / "ninja"
        if candidate.is_file():
            return candidate
    on_path = shutil.which("ninja")
    return Path(on_path) if on_path else None


@functools.cache
def find_cxx() -> str | None:
    """The C++ compiler: CXX, else c++, g++ or clang++ from PATH. Raises KernelNotBuiltError if CXX is not a usable compiler."""
    if value := os.environ.get("CXX"):
        path = shutil.which(value)
        if path is None:
            raise _wrong_variable("CXX", "a C++ compiler: its path, or its name in PATH, without options", value)
        return path
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


@functools.cache
def cxx_version() -> str:
    cxx = find_cxx()
    if cxx is None:
        return "none"
    answer = subprocess.run([cxx, "--version"], capture_output=True, encoding="utf-8", errors="replace")
    return answer.stdout.splitlines()[0] if answer.stdout else "unknown"


HOW_TO_GET = {
    "nvcc": 'install the CUDA toolkit (12.0 or newer), or `pip install ".[cuda]"`, which brings one from PyPI; or set CUDA_HOME or SCALED_MM_NVCC',
    "CUTLASS": "`pip install nvidia-cutlass==4.2.0.0`, or set SCALED_MM_CUTLASS to a checkout",
    "ninja": "`pip install ninja`",
    "C++ compiler": "install g++ (Debian: `apt-get install g++`), or set CXX",
}


def require(what: str, found):
    """Returns `found`, or raises the typed error: what is missing, what needs it, and how to get it."""
    if found is None:
        raise KernelNotBuiltError(f"{what}: needed for building, not found; {HOW_TO_GET[what]}")
    return found
