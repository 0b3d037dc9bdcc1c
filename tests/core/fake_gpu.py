"""Small C programs, and a machine that pretends to have a GPU (fake_driver.c, host_kernels.cpp)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scaled_mm.jit import cache, codegen, compile, toolchain
from scaled_mm.jit.paths import include_dir
from scaled_mm.kernels.sections import TOP_LEVEL
from scaled_mm.tables import TileTable, load_table

HERE = Path(__file__).resolve().parent
# The host kernels know these; float16 is left out, so that one dtype has no kernel.
HOST_DTYPES = {"bf16": "SCALED_MM_DTYPE_BFLOAT16", "fp32": "SCALED_MM_DTYPE_FLOAT32", "int32": "SCALED_MM_DTYPE_INT32"}


def c_compiler() -> str:
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if found is None:
        pytest.skip("no C compiler here")
    return found


def compile_c(source: str, target: Path, *extra: str) -> Path:
    """A C11 source of this folder, without one warning."""
    command = [
        c_compiler(),
        "-std=c11",
        "-Wall",
        "-Wextra",
        "-pedantic",
        "-Werror",
        "-O1",
        "-ffp-contract=off",
        f"-I{include_dir()}",
        str(HERE / source),
        *extra,
        "-o",
        str(target),
    ]
    subprocess.run(command, check=True, timeout=120)
    return target


def host_library(folder: Path, table: TileTable, broken: str = "", index_table: TileTable | None = None) -> Path:
    """A kernel library of the table, whose kernels are loops over host memory, for three of the four dtypes.

    broken: further entries, one BROKEN_KERNEL a line; index_table: the table that the library brings, if another one.
    """
    folder.mkdir()
    entries = ['#include "host_kernels.cpp"', f"HOST_ZERO_POINT_TERMS({codegen.symbol(codegen.ZERO_POINT_TERMS, None)})"]
    symbols = [codegen.symbol(codegen.ZERO_POINT_TERMS, None)]
    for row in table.all_rows:
        for fmt in codegen.out_dtypes(row) if row.section == "gguf" else ():
            symbols.append(codegen.symbol(row.name, fmt))
            entries.append(f'HOST_BLOCK_KERNEL({symbols[-1]}, "{row.name}", {fmt.upper()})')
        for suffix, dtype in HOST_DTYPES.items():
            if suffix not in codegen.out_dtypes(row):
                continue
            symbols.append(codegen.symbol(row.name, suffix))
            maps = "kNone" if row.alignment == (1, 1, 1) else "kAll" if row.alignment[2] > 1 else "kInputs"
            macro = "HOST_KERNEL" if row.section == TOP_LEVEL else f"HOST_{row.section.upper()}_KERNEL"  # of host_kernels.cpp
            entries.append(f'{macro}({symbols[-1]}, "{row.name}", {dtype}, {maps})')
    (folder / "entries.cpp").write_text("\n".join([*entries, broken]))
    symbols += [line.split("(")[1].split(",")[0] for line in broken.splitlines()]
    (folder / "index.cpp").write_text(codegen.library_source(table.arch, symbols, index_table or table))
    flags = [*compile.cxx_flags(), "-ffp-contract=off", f"-I{HERE}"]
    compile.run_ninja(folder, "host", toolchain.find_cxx(), [folder / "entries.cpp", folder / "index.cpp"], flags, ["-shared"])
    return folder / cache.LIBRARY


class FakeGpu:
    """`environment`: of a process that sees the fake driver. `kernels`: a library for it with the table of sm90."""

    def __init__(self, folder: Path):
        driver = folder / "driver"
        driver.mkdir()
        compile_c("fake_driver.c", driver / "libcuda.so.1", "-shared", "-fPIC")
        self.table = load_table("sm90")
        self.kernels = host_library(folder / "kernels", self.table)
        place = os.pathsep.join(filter(None, (str(driver), os.environ.get("LD_LIBRARY_PATH"))))
        self.environment = {**os.environ, "LD_LIBRARY_PATH": place, "CUDA_VISIBLE_DEVICES": ""}
        self.environment.pop("SCALED_MM_ARCH", None)

    def run(self, command: list, **variables: str) -> subprocess.CompletedProcess:
        environment = {**self.environment, **variables}
        return subprocess.run([str(word) for word in command], env=environment, capture_output=True, text=True, timeout=300)

    def python(self, function: str, *arguments, script: str = "fake_gpu_script.py", **variables: str) -> subprocess.CompletedProcess:
        """<function>(*arguments) of a script of this folder in a process of its own."""
        return self.run([sys.executable, HERE / script, function, *arguments], **variables)
