"""Find what the build needs: a C++ compiler, nvcc, CUTLASS headers, ninja. Nothing here compiles or imports torch."""

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
    """`path` of the compiler, `version` as in "13.0.88", `origin`: how it was found."""

    path: Path
    version: str
    origin: str


def _wheel_roots() -> list[Path]:
    """`site-packages/nvidia/...` folders that PyPI's CUDA wheels unpack into (nvidia/cu13, nvidia/cuda_nvcc)."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    return [child for root in roots for child in sorted(root.glob("cu*"), reverse=True) if child.is_dir()]


def _nvcc_candidates() -> list[tuple[str, Path]]:
    found: list[tuple[str, Path]] = []
    for variable in ("SCALED_MM_NVCC", "NVCC"):
        if value := os.environ.get(variable):
            found.append((f"environment variable {variable}", Path(value)))
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if value := os.environ.get(variable):
            found.append((f"environment variable {variable}", Path(value) / "bin" / "nvcc"))
    if on_path := shutil.which("nvcc"):
        found.append(("PATH", Path(on_path)))
    found.append(("toolkit", Path("/usr/local/cuda/bin/nvcc")))
    found += [("nvidia-cuda-nvcc wheel", root / "bin" / "nvcc") for root in _wheel_roots()]
    return found


@functools.cache
def find_nvcc() -> Nvcc | None:
    """The first nvcc that runs: the environment, PATH, the toolkit, then the `nvidia-cuda-nvcc` wheel."""
    for origin, path in _nvcc_candidates():
        if not path.is_file():
            continue
        answer = subprocess.run([str(path), "--version"], capture_output=True, text=True)
        version = re.search(r"V(\d+\.\d+\.\d+)", answer.stdout)
        if answer.returncode == 0 and version:
            return Nvcc(path, version.group(1), origin)
    return None


@functools.cache
def find_cutlass() -> Path | None:
    """CUTLASS's include folder: SCALED_MM_CUTLASS (a checkout), or the `nvidia-cutlass` wheel."""
    places = []
    if value := os.environ.get("SCALED_MM_CUTLASS"):
        places.append(Path(value) / "include")
    # find_spec does not import the package, which would pull in its generator's dependencies.
    spec = importlib.util.find_spec("cutlass_library")
    if spec and spec.origin:
        places.append(Path(spec.origin).parent / "source" / "include")
    for place in places:
        if (place / "cutlass" / "version.h").is_file():
            return place
    return None


@functools.cache
def cutlass_version() -> str | None:
    include = find_cutlass()
    if include is None:
        return None
    text = (include / "cutlass" / "version.h").read_text()
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
    """The C++ compiler: CXX, else c++, g++ or clang++ from PATH."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    return None


@functools.cache
def cxx_version() -> str:
    cxx = find_cxx()
    if cxx is None:
        return "none"
    answer = subprocess.run([cxx, "--version"], capture_output=True, text=True)
    return answer.stdout.splitlines()[0] if answer.stdout else "unknown"


HOW_TO_GET = {
    "nvcc": 'install the CUDA toolkit (13.0 or newer), or `pip install "scaled_mm[cuda]"`, which brings nvcc from PyPI; '
    "or set CUDA_HOME",
    "CUTLASS": "`pip install nvidia-cutlass==4.2.0.0`, or set SCALED_MM_CUTLASS to a checkout",
    "ninja": "`pip install ninja`",
    "C++ compiler": "install g++ (Debian: `apt-get install g++`), or set CXX",
}


def require(what: str, found):
    """`found`, or the typed error that says what is missing, what for, and how to get it."""
    if found is None:
        raise KernelNotBuiltError(f"{what}: needed to build a kernel, not found; {HOW_TO_GET[what]}")
    return found
