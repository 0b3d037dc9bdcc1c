"""A wheel of the package with kernels in it, for machines without nvcc: `scaled-mm build --wheel`."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from scaled_mm.errors import BadParamError, KernelNotBuiltError
from scaled_mm.jit import cache, compile, library, toolchain
from scaled_mm.tables.schema import TileTable

_SETUPTOOLS = 77  # as pyproject.toml asks for


def source_tree() -> Path:
    """The folder of setup.py. BadParamError in an installed package, which has none."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "setup.py").is_file() or not (root / "csrc").is_dir():
        raise BadParamError(
            f"--wheel: expected a checkout or an unpacked source distribution, with setup.py beside scaled_mm, got {root}; "
            "`python -m scaled_mm` in the root of a checkout uses its sources"
        )
    return root


def check_tools(tables: Sequence[TileTable]) -> None:
    """KernelNotBuiltError that names the first missing tool, before anything that takes long."""
    toolchain.require("C++ compiler", toolchain.find_cxx())
    toolchain.require("ninja", toolchain.find_ninja())
    for table in tables:
        nvcc, _ = library.nvcc_and_flags(table.arch)
        toolchain.require_architecture(nvcc, f"compute_{compile.target(table.arch)}")
    try:
        version = importlib.metadata.version("setuptools")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if not version or int(version.partition(".")[0]) < _SETUPTOOLS:
        found = f"got {version}" if version else "not found"
        raise KernelNotBuiltError(
            f"setuptools: needed for building a wheel, {_SETUPTOOLS} or newer, {found}; `pip install 'setuptools>={_SETUPTOOLS}'`"
        )


def build(
    tables: Sequence[TileTable],
    folder: Path,
    jobs: int | None = None,
    on_kernel: Callable[[TileTable, library.KernelName, int, int], None] | None = None,
) -> Path:
    """Builds the kernels of every table into the cache, then a wheel with them into `folder`. Needs no network.

    tables: of architectures, as the package has them: a wheel's kernels are used with these. on_kernel(table, name, done, total) is called as each
    kernel of a table is finished. An interrupted build goes on where it stopped.
    """
    root = source_tree()
    check_tools(tables)
    for table in tables:
        library.build_arch(table, jobs, (lambda *done, table=table: on_kernel(table, *done)) if on_kernel else None)
    archs = ",".join(table.arch for table in tables)
    variables = {"SCALED_MM_BUILD_ARCHS": archs, "SCALED_MM_BUILD_CACHE": str(cache.cache_dir())}
    with tempfile.TemporaryDirectory(prefix="scaled-mm-wheel-") as made:
        program = f"import setuptools.build_meta as backend; backend.build_wheel({made!r})"
        with compile.progress_line("the wheel"):
            done = compile.run_program([sys.executable, "-c", program], {**os.environ, **variables}, root)
        wheels = list(Path(made).glob("*.whl"))
        if done.returncode != 0 or len(wheels) != 1:
            tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
            raise KernelNotBuiltError(f"wheel: setup.py failed (status {done.returncode})\n{tail}")
        if missing := {table.arch for table in tables} - libraries(wheels[0]).keys():
            raise KernelNotBuiltError(f"wheel: expected kernels of {', '.join(sorted(missing))} in it, which setup.py left out")
        target = folder / wheels[0].name
        staged = target.with_name(target.name + ".part")
        staged.write_bytes(wheels[0].read_bytes())
        os.replace(staged, target)  # whole, or not there
    return target


def libraries(path: Path) -> dict[str, int]:
    """Bytes of the kernel library of each architecture in a wheel, compressed as they are there."""
    found = {}
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            folder, _, name = entry.filename.rpartition("/")
            if folder == "scaled_mm/lib" and name.startswith("kernels_") and name.endswith(".so"):
                found[name.removeprefix("kernels_").removesuffix(".so")] = entry.compress_size
    return found
