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
from scaled_mm.jit import codegen, compile, library, toolchain
from scaled_mm.kernels.config import KernelConfig
from scaled_mm.kernels.dtypes import MAX_OUT_BYTES, OUT_DTYPES
from scaled_mm.kernels.family import Code
from scaled_mm.kernels.registry import family_of
from scaled_mm.tables import rules
from scaled_mm.tables.schema import TileTable

# One report of ptxas, on one device function for one GPU: from this line to the next of its kind.
_FUNCTION = re.compile(r"Compiling entry function '(?P<function>[^\n']+)' for '(?P<code>sm_\w+)'")
_SPILLED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SERIALIZED = re.compile(r"wgmma\.mma_async instructions are serialized[^\n]*function '(?P<function>[^\n']+)'")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One device function of one kernel, compiled for one GPU. code: "sm_86". registers: per thread. spilled: bytes of stores and loads together.

    seconds: of nvcc; kernels that are compiled as one translation unit share its time equally.
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
    return compile_together(table, [name])[name]


def compile_together(table: TileTable, names: Sequence[library.KernelName]) -> dict[library.KernelName, list[Compiled]]:
    """As `compile_kernel`, but several kernels as one translation unit, whose headers are parsed once.

    A device function without the mark of a kernel (`scaled_mm.kernels.family.Code`) is reported for each of them.
    """
    if len(names) == 1:
        marks, source = {names[0]: ""}, library.kernel_source(table, names[0])  # "" is in the name of every function
    else:
        marks = {name: _code(table, name).mark or "" for name in names}
        source = codegen.together([(table.row(row), out_dtype) for row, out_dtype in names], rules.shared_memory_of(table))
    what = ", ".join(map(_called, names))
    wanted, output, seconds = _compile(table, what, source)
    serialized = {found["function"] for found in _SERIALIZED.finditer(output)}
    compiled: dict[library.KernelName, list[Compiled]] = {name: [] for name in names}
    own: dict[library.KernelName, set[str]] = {name: set() for name in names}
    starts = list(_FUNCTION.finditer(output))
    for found, end in zip(starts, [*(start.start() for start in starts[1:]), len(output)]):
        function, code = found["function"], found["code"]
        report = output[found.end() : end]
        registers, spills = _REGISTERS.search(report), _SPILLED.findall(report)
        if not registers or not spills:  # an unreadable report does not count as clean
            raise KernelNotBuiltError(f"{what}: expected ptxas to report registers and spills of {function} on {code}, got\n{report[-2000:]}")
        spilled = sum(int(count) for pair in spills for count in pair)
        owners = [name for name in names if marks[name] in function]
        for name in owners or names:
            compiled[name].append(Compiled(*name, code, int(registers[1]), spilled, seconds / len(names), function in serialized))
        for name in owners:
            own[name].add(code)
    for name in names:
        if unreported := set(wanted) - own[name]:
            raise KernelNotBuiltError(f"{_called(name)}: expected ptxas to report on {', '.join(sorted(unreported))}, got\n{output[-2000:]}")
    return compiled


def _called(name: library.KernelName) -> str:
    return " ".join(part for part in name if part)


def _code(table: TileTable, name: library.KernelName) -> Code:
    config = table.row(name[0])
    return family_of(config).code(config, name[1], rules.shared_memory_of(table))


def _compile(table: TileTable, what: str, source: str) -> tuple[list[str], str, float]:
    """(The GPUs that a source was compiled for, the compiler's output, its seconds). KernelNotBuiltError if it fails."""
    nvcc, flags = library.nvcc_and_flags(table.arch)
    capability = compile.target(table.arch)
    toolchain.require_architecture(nvcc, f"compute_{capability}")
    wanted = codes(table, nvcc)
    gencode = f"-gencode=arch=compute_{capability},code=[{','.join(wanted)}]"
    flags = [flag for flag in flags if not flag.startswith(("-gencode", "--compress"))]  # the result is not kept
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="scaled-mm-check-") as folder:
        (Path(folder) / "kernel.cu").write_text(source, encoding="utf-8")
        with compile.speakable(Path(folder), flags) as (flags,):
            command = [str(nvcc.path), *flags, gencode, "-Xptxas=-v", "-fatbin", "kernel.cu", "-o", "kernel.fatbin"]
            done = compile.run_program(command, {**toolchain.environment(), "TMPDIR": "."}, Path(folder))
    output = done.stdout + done.stderr
    if done.returncode != 0:
        tail = "\n".join(output.strip().splitlines()[-12:])
        raise KernelNotBuiltError(f"{what}: the compiler failed (status {done.returncode})\n{tail}")
    return wanted, output, time.monotonic() - start


_TOGETHER = 8  # kernels of a translation unit at most: more save little, and one failure repeats them all


def units(table: TileTable, names: Sequence[library.KernelName], jobs: int) -> list[list[library.KernelName]]:
    """The translation units for kernels of a table, the largest first: kernels of one header and different marks together, the others alone.

    They are as many as `jobs` at least, if there are as many kernels.
    """
    groups: list[tuple[str | None, dict[str, library.KernelName]]] = []  # (header, name by mark)
    for name in dict.fromkeys(names):
        code = _code(table, name) if name[1] is not None and name[0] not in codegen.ROWWISE else None
        header, mark = (code.header, code.mark) if code and code.mark else (None, "")
        group = next((kernels for other, kernels in groups if header and other == header and mark not in kernels), None)
        if group is None:
            groups.append((header, {mark: name}))
        else:
            group[mark] = name

    def units_of(most: int) -> list[list[library.KernelName]]:
        found = []
        for _, group in groups:
            kernels, count = list(group.values()), -(-len(group) // most)
            found += [kernels[i::count] for i in range(count)]
        return sorted(found, key=len, reverse=True)

    wanted = min(jobs, sum(len(group) for _, group in groups))
    return next(found for most in range(_TOGETHER, 0, -1) if len(found := units_of(most)) >= wanted)


def _compile_unit(table: TileTable, names: Sequence[library.KernelName]) -> dict[library.KernelName, list[Compiled]]:
    try:
        return compile_together(table, names)
    except KernelNotBuiltError:
        if len(names) == 1:
            raise
        return {name: compile_kernel(table, name) for name in names}  # the error then names one kernel


def compile_kernels(
    table: TileTable, names: Sequence[library.KernelName], jobs: int | None = None, on_kernel: Callable[[list[Compiled]], None] | None = None
) -> list[Compiled]:
    """Compiles kernels of a table, `jobs` translation units at a time (default: one per core); see `units`.

    on_kernel is called with the results of each kernel, in order.
    """
    jobs = jobs or os.cpu_count() or 1
    found: list[Compiled] = []
    with ThreadPoolExecutor(jobs) as pool:
        futures = {}
        for unit in units(table, names, jobs):
            futures |= dict.fromkeys(unit, pool.submit(_compile_unit, table, unit))
        try:
            for name in names:
                compiled = futures[name].result()[name]
                found += compiled
                if on_kernel:
                    on_kernel(compiled)
        except BaseException as error:
            for future in futures.values():
                future.cancel()
            if not isinstance(error, Exception):
                compile.end_all()
            raise
    return found


def kernels_to_check(table: TileTable) -> list[library.KernelName]:
    """Every kernel config for its first output dtype, bfloat16, or its first GGUF format. The other dtypes change the epilogue alone, unless the
    accumulators of a thread differ with them, which is another main loop: such kernels are compiled too. Besides, each dtype is compiled for the
    kernel config with the most accumulators."""

    def accumulators(row: KernelConfig, out: str) -> int:
        out_bytes = OUT_DTYPES[out].bytes if out in OUT_DTYPES else MAX_OUT_BYTES
        return family_of(row).accumulators(row, out_bytes) or 0

    others = []
    for section in table.sections:
        first, *more = codegen.out_dtypes(section.rows[0])
        for out in more:
            largest = max(section.rows, key=lambda row: accumulators(row, out))  # noqa: B023
            others += [(row.name, out) for row in section.rows if row == largest or accumulators(row, out) != accumulators(row, first)]
    return [*((row.name, codegen.out_dtypes(row)[0]) for row in table.all_rows), *others, (codegen.ZERO_POINT_TERMS, None)]
