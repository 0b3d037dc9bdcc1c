"""Compiles a table's kernel configs for every GPU served, on any machine with nvcc, and reports registers and spills.

A kernel that spills keeps accumulators in local memory. A kernel whose wgmma instructions are serialized waits for each of them. Both would
be correct but silently slow.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scaled_mm.errors import KernelNotBuiltError
from scaled_mm.jit import compile, library, toolchain
from scaled_mm.tables.schema import TileTable

_REPORT = re.compile(
    r"Compiling entry function '(?P<function>[^\n']+)' for '(?P<code>sm_\w+)'.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)
_SERIALIZED = re.compile(r"wgmma\.mma_async instructions are serialized[^\n]*function '(?P<function>[^\n']+)'")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One kernel compiled for one GPU. code: "sm_86". registers: per thread. spilled: bytes of stores and loads together. seconds: of nvcc.

    serialized: the compiler reported that it serializes the wgmma instructions.
    """

    row: str
    out_dtype: str | None
    code: str
    registers: int
    spilled: int
    seconds: float
    serialized: bool = False


def codes(table: TileTable, nvcc: toolchain.Nvcc) -> list[str]:
    """The GPUs to compile a table for: the oldest one served, and every other one that this nvcc knows."""
    oldest = f"sm_{compile.target(table.arch)}"
    served = sorted({name.replace("sm", "sm_") for name in table.serves or (table.arch,)}, key=lambda code: int(code[3:]))
    known = toolchain.known_machine_codes(nvcc)
    return [oldest, *(code for code in served if code in known and code != oldest.rstrip("a"))]


def compile_kernel(table: TileTable, name: library.KernelName) -> list[Compiled]:
    """Compiles one kernel for every GPU that its table serves, and keeps no file. KernelNotBuiltError if the compiler fails."""
    nvcc, flags = library.nvcc_and_flags(table.arch)
    capability = compile.target(table.arch)
    toolchain.require_architecture(nvcc, f"compute_{capability}")
    wanted = codes(table, nvcc)
    gencode = f"-gencode=arch=compute_{capability},code=[{','.join(wanted)}]"
    flags = [flag for flag in flags if not flag.startswith("-gencode")]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="scaled-mm-check-") as folder:
        (Path(folder) / "kernel.cu").write_text(library.kernel_source(table, name), encoding="utf-8")
        with compile.speakable(Path(folder), flags) as (flags,):
            command = [str(nvcc.path), *flags, gencode, "-Xptxas=-v", "-fatbin", "kernel.cu", "-o", "kernel.fatbin"]
            done = compile.run_program(command, {**toolchain.environment(), "TMPDIR": "."}, Path(folder))
    seconds = time.monotonic() - start
    output = done.stdout + done.stderr
    if done.returncode != 0:
        tail = "\n".join(output.strip().splitlines()[-12:])
        raise KernelNotBuiltError(f"{name[0]}: the compiler failed (status {done.returncode})\n{tail}")
    serialized = {found["function"] for found in _SERIALIZED.finditer(output)}
    compiled = [
        Compiled(
            *name,
            found["code"],
            int(found["registers"]),
            int(found["stores"]) + int(found["loads"]),
            seconds,
            found["function"] in serialized,
        )
        for found in _REPORT.finditer(output)
    ]
    if unreported := set(wanted) - {kernel.code for kernel in compiled}:  # an unreadable report does not count as clean
        raise KernelNotBuiltError(f"{name[0]}: expected ptxas to report on {', '.join(sorted(unreported))}, got\n{output[-2000:]}")
    return compiled


def compile_kernels(
    table: TileTable, names: Sequence[library.KernelName], jobs: int | None = None, on_kernel: Callable[[list[Compiled]], None] | None = None
) -> list[Compiled]:
    """Compiles kernels of a table, `jobs` at a time (default: one per core). on_kernel is called with the results of each kernel, in order."""
    found: list[Compiled] = []
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        futures = [pool.submit(compile_kernel, table, name) for name in names]
        try:
            for future in futures:
                found += future.result()
                if on_kernel:
                    on_kernel(future.result())
        except BaseException as error:
            for future in futures:
                future.cancel()
            if not isinstance(error, Exception):
                compile.end_all()
            raise
    return found


def kernels_to_check(table: TileTable) -> list[library.KernelName]:
    """Every kernel config for its first output dtype, bfloat16, or its first GGUF format. The other dtypes only change the epilogue; they are
    compiled for the kernel config with the most accumulators."""
    from scaled_mm.jit.codegen import ZERO_POINT_TERMS, out_dtypes, rowwise_names
    from scaled_mm.kernels.registry import config_cost

    others = []
    for section in table.sections:
        largest = max(section.rows, key=lambda row: config_cost(row, table.arch).accumulators or 0)
        others += [(largest.name, out) for out in out_dtypes(largest)[1:]]
    return [*((row.name, out_dtypes(row)[0]) for row in table.all_rows), *others, *rowwise_names(), (ZERO_POINT_TERMS, None)]
