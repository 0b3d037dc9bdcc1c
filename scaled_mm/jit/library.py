"""Builds the C core, the torch operators, the fast path, and kernels, one at a time or a whole architecture; and computes their cache keys."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sysconfig
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from pathlib import Path

from scaled_mm.jit import cache, codegen, compile, toolchain
from scaled_mm.jit.paths import csrc_dir, lib_dir
from scaled_mm.kernels.registry import family_of
from scaled_mm.tables import rules
from scaled_mm.tables.schema import TileTable

# A kernel of an architecture: (name of the kernel config, key of codegen.BUILT_FOR), or one that no table lists: of codegen.rowwise_names(), or
# (ZERO_POINT_TERMS, None).
KernelName = tuple[str, str | None]
_KERNEL_OBJECT = "kernel.o"


# ---- libraries made ahead of time -------------------------------------------------------------------------------------


def _prebuilt(name: str, key: str) -> Path | None:
    """A library that setup.py put into the package, if its key matches the present sources."""
    library = lib_dir() / f"{name}.so"
    record = library.with_suffix(".json")
    if not (library.is_file() and record.is_file()):
        return None
    try:
        return library if json.loads(record.read_text(encoding="utf-8"))["key"] == key else None
    except (ValueError, KeyError, TypeError):
        return None  # an unreadable record: the library is built again


def shipped_kernels() -> list[tuple[str, Path]]:
    """(architecture, library) of every kernel library that setup.py put into the package, up to date or not."""
    return [(path.stem.removeprefix("kernels_"), path) for path in sorted(lib_dir().glob("kernels_*.so"))]


def serves(table: TileTable) -> bool:
    """Whether the package's kernel library was built from this table and the present sources."""
    return _prebuilt(f"kernels_{table.arch}", _arch_key(table)) is not None


def install_prebuilt(library: Path, name: str, key: str, folder: Path) -> Path:
    """Puts a built library into a package's lib folder, with its key."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}.so"
    shutil.copyfile(library, target)
    target.with_suffix(".json").write_text(json.dumps({"key": key}), encoding="utf-8")
    return target


# ---- the core ---------------------------------------------------------------------------------------------------------


def core_key() -> str:
    """The key of the sources alone, because a prebuilt core also serves machines with another compiler, or none."""
    return cache.digest("core", compile.sources_digest("core", "problems", "include"))


def core_sources() -> list[Path]:
    """The sources of the core: the life cycle of a product, and one file for each kind of product."""
    return sorted(path for room in ("core", "problems") for path in (csrc_dir() / room).glob("*.cpp"))


def build_core() -> Path:
    """The C core, from the cache or compiled now. Needs only a C++ compiler."""
    cxx = toolchain.require("C++ compiler", toolchain.find_cxx())
    sources = core_sources()

    def build(folder: Path) -> None:
        with compile.progress_line("the C core"):
            compile.run_ninja(folder, "core", cxx, sources, compile.cxx_flags(), ["-shared"], ["-ldl"])

    return cache.get_or_build("core", "scaled_mm", cache.digest(core_key(), toolchain.cxx_version()), build)


def core_library() -> Path:
    """Path of the C core: the package's, else the cache's."""
    return _prebuilt("libscaled_mm", core_key()) or build_core()


# ---- the torch operators ----------------------------------------------------------------------------------------------


def _torch_key() -> str:
    """Of the sources alone, as `core_key`. With the stable ABI one binary serves every torch from 2.10 on: torch's version is no part of it."""
    return cache.digest("torch", compile.sources_digest("torch", "include"))


def torch_library() -> Path:
    """Path of the torch operators: the package's, else the cache's, which are compiled on first use against the installed torch."""
    return _prebuilt("torch_operators", _torch_key()) or _build_torch()


def _build_torch() -> Path:
    import torch

    cxx = toolchain.require("C++ compiler", toolchain.find_cxx())
    sources = sorted((csrc_dir() / "torch").glob("*.cpp"))
    root = Path(torch.__file__).resolve().parent
    flags = [*compile.cxx_flags(), "-DTORCH_TARGET_VERSION=0x020a000000000000", f"-isystem{root / 'include'}"]

    def build(folder: Path) -> None:
        with compile.progress_line("the torch operators"):
            compile.run_ninja(folder, "torch", cxx, sources, flags, ["-shared"], [f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu"])

    return cache.get_or_build("torch", "scaled_mm", cache.digest(_torch_key(), toolchain.cxx_version()), build)


def _python_key() -> str:
    """Of the sources alone, as `core_key`. With the limited API one binary serves every CPython."""
    return cache.digest("python", compile.sources_digest("python", "include"))


def python_library() -> Path | None:
    """Path of the fast path from Python to the core (csrc/python): the package's, else the cache's, which is compiled on first use.

    None without Python's headers; calls then take torch's dispatcher.
    """
    return _prebuilt("fast_path", _python_key()) or _build_python()


def _build_python() -> Path | None:
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").is_file():
        return None
    cxx = toolchain.require("C++ compiler", toolchain.find_cxx())

    def build(folder: Path) -> None:
        with compile.progress_line("the Python fast path"):
            source = csrc_dir() / "python" / "fast.cpp"
            compile.run_ninja(folder, "python", cxx, [source], [*compile.cxx_flags(), f"-isystem{headers}"], ["-shared"])

    return cache.get_or_build("python", "scaled_mm", cache.digest(_python_key(), toolchain.cxx_version()), build)


# ---- kernels ----------------------------------------------------------------------------------------------------------


def kernel_names(table: TileTable) -> list[KernelName]:
    """Every kernel of a table, and those that no table lists."""
    names: list[KernelName] = [(row.name, out) for row in table.all_rows for out in codegen.out_dtypes(row)]
    return [*names, *codegen.rowwise_names(), (codegen.ZERO_POINT_TERMS, None)]


def kernel_source(table: TileTable, name: KernelName) -> str:
    """The translation unit of one kernel of a table."""
    row, out_dtype = name
    if out_dtype is None:
        return codegen.zero_point_terms_source()
    if row in codegen.ROWWISE:
        return codegen.rowwise_source(row, out_dtype)
    return codegen.kernel_source(table.row(row), out_dtype, rules.shared_memory_of(table))


def nvcc_and_flags(arch: str) -> tuple[toolchain.Nvcc, list[str]]:
    """The nvcc, and its flags for the kernels of a table. KernelNotBuiltError names what is missing."""
    nvcc = toolchain.require("nvcc", toolchain.find_nvcc())
    return nvcc, compile.nvcc_flags(arch, toolchain.require("CUTLASS", toolchain.find_cutlass()), nvcc.version)


def _link_flags(nvcc: toolchain.Nvcc) -> list[str]:
    # The wheels have libcudart_static in lib, where nvcc does not search.
    beside = nvcc.path.resolve().parent.parent / "lib"
    return ["-shared", "-cudart=static", *([f"-L{beside}"] if (beside / "libcudart_static.a").is_file() else [])]


def _kernel_key(arch: str, source: str) -> str:
    """The cache key of a kernel: a digest of everything that changes the machine code. Paths are left out."""
    nvcc, flags = nvcc_and_flags(arch)
    placeless = " ".join(flag for flag in flags if not flag.startswith("-I"))
    return cache.digest(compile.includes_digest(source), nvcc.version, str(toolchain.cutlass_version()), placeless)


def kernel_key(table: TileTable, name: KernelName) -> str:
    """The cache key of one kernel of a table."""
    return _kernel_key(table.arch, kernel_source(table, name))


def _row_names(table: TileTable, row: str) -> list[KernelName]:
    return [(row, out) for out in codegen.out_dtypes(table.row(row))]


def _row_key(table: TileTable, row: str) -> str:
    return cache.digest(*(kernel_key(table, name) for name in _row_names(table, row)))


def _find_row(table: TileTable, row: str) -> Path | None:
    if row in codegen.ROWWISE:
        return None  # each dtype is a translation unit of its own
    return cache.find("row", f"{table.arch}-{row}", _row_key(table, row))


def find_kernel(table: TileTable, name: KernelName) -> Path | None:
    """A library in the cache that has the kernel: its own, or that of its kernel config."""
    row, out_dtype = name
    if out_dtype is not None and (whole := _find_row(table, row)):
        return whole
    return cache.find("kernel", _label(table.arch, name), kernel_key(table, name))


def _label(arch: str, name: KernelName) -> str:
    return "-".join(part for part in (arch, *name) if part)


def may_be_built(table: TileTable, name: KernelName) -> bool:
    """False if the cache has no such kernel whatever its key, which costs a listing instead of the key."""
    row, out_dtype = name
    return cache.has("kernel", _label(table.arch, name)) or (out_dtype is not None and cache.has("row", f"{table.arch}-{row}"))


def build_kernel(table: TileTable, name: KernelName, announce: bool = True) -> Path:
    """A library with one kernel, from the cache or compiled now."""
    row, out_dtype = name
    if out_dtype is not None and (whole := _find_row(table, row)):
        return whole
    source = kernel_source(table, name)
    what = f"kernel {row}{f' ({out_dtype})' if out_dtype else ''}"
    return _compiled(
        table, "kernel", _label(table.arch, name), _kernel_key(table.arch, source), source, [codegen.symbol(*name)], what if announce else None
    )


def build_row(table: TileTable, row: str) -> Path:
    """A library with every kernel of a kernel config, compiled as one translation unit: three times as fast as one after the other."""
    source = codegen.row_source(table.row(row), rules.shared_memory_of(table))
    symbols = [codegen.symbol(*name) for name in _row_names(table, row)]
    return _compiled(table, "row", f"{table.arch}-{row}", _row_key(table, row), source, symbols, None)


def _compiled(table: TileTable, kind: str, label: str, key: str, source: str, symbols: list[str], announced: str | None) -> Path:
    """The cache's library of one translation unit. announced: what to say on stderr while it is compiled; None: nothing."""
    nvcc, flags = nvcc_and_flags(table.arch)

    def build(folder: Path) -> None:
        toolchain.require_architecture(nvcc, f"compute_{compile.target(table.arch)}")
        (folder / "kernel.cu").write_text(source, encoding="utf-8")
        (folder / "index.cpp").write_text(codegen.library_source(table.arch, symbols), encoding="utf-8")
        line = compile.progress_line(f"{announced} for {table.arch} with nvcc {nvcc.version}") if announced else contextlib.nullcontext()
        with line:
            compile.run_ninja(folder, label, nvcc.path, [folder / "kernel.cu", folder / "index.cpp"], flags, _link_flags(nvcc))

    return cache.get_or_build(kind, label, key, build)


def _arch_key(table: TileTable) -> str:
    """The key of the sources and the table alone, because a prebuilt library also serves machines without nvcc."""
    generated = [kernel_source(table, name) for name in kernel_names(table)]
    sources = [codegen.library_source(table.arch, [], table), *generated]
    return cache.digest(table.arch, *(compile.includes_digest(source) for source in sources))


def _built_arch_key(table: TileTable) -> str:
    """The cache key of a whole architecture: also of the compiler, its flags and CUTLASS."""
    return _kernel_key(table.arch, _arch_key(table))


def arch_library(table: TileTable) -> Path | None:
    """A whole architecture's library, if `scaled-mm build` or setup.py built one from the present sources and table."""
    if prebuilt := _prebuilt(f"kernels_{table.arch}", _arch_key(table)):
        return prebuilt
    if toolchain.find_nvcc() is None or toolchain.find_cutlass() is None:
        return None
    return cache.find("arch", table.arch, _built_arch_key(table))


def build_kernels(
    table: TileTable,
    names: Sequence[KernelName],
    jobs: int | None = None,
    on_kernel: Callable[[KernelName, int, int], None] | None = None,
    pairs: bool = False,
    apart: bool = False,
) -> dict[KernelName, Path]:
    """Build kernels in parallel; those in the cache are not built again, so an interrupted build goes on where it stopped.

    Several kernels of a kernel config are compiled as one translation unit, with all its others.
    jobs: translation units at a time; default: one per core. on_kernel(name, done, total) is called as each kernel is finished.
    pairs: two kernel configs may share a translation unit, where that takes less time. For whole architectures: nothing finds such kernels alone.
    apart: a kernel of a kernel config is a translation unit of its own while jobs would be idle. That ends sooner, and takes more CPU time.
    """
    built: dict[KernelName, Path] = {}
    jobs = jobs or os.cpu_count() or 1
    units = _by_row(names)
    if pairs:
        units = _paired(table, units, jobs)
    if apart:
        units = _apart(table, units, jobs)
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(_build_together, table, unit): unit for unit in sorted(units, key=lambda unit: -_compile_order(table, unit))}
        try:
            for future in as_completed(futures):
                paths = future.result()
                for name in futures[future]:
                    built[name] = paths[name]
                    if on_kernel:
                        on_kernel(name, len(built), len(names))
        except BaseException as error:
            for future in futures:
                future.cancel()  # one failure ends the build; what is finished stays in the cache
            if not isinstance(error, Exception):
                compile.end_all()
                while wait(futures, timeout=0.1).not_done:
                    compile.end_all()  # one that a thread was about to start
            raise
    return built


def _by_row(names: Sequence[KernelName]) -> list[list[KernelName]]:
    """The names of each translation unit, in the order of the first."""
    by_row: dict[str, list[KernelName]] = {}
    for name in names:
        by_row.setdefault(str(name) if name[0] in codegen.ROWWISE else name[0], []).append(name)
    return list(by_row.values())


def _compile_order(table: TileTable, names: Sequence[KernelName]) -> int:
    """Of a unit: the longest first. Row-wise kernels take about as long as c2x kernel configs, the preparation of zero points the least."""
    if names[0][0] in codegen.ROWWISE:
        return 1
    config = next((row for row in table.all_rows if row.name == names[0][0]), None)
    return -1 if config is None else family_of(config).compile_order


def _paired(table: TileTable, units: list[list[KernelName]], jobs: int) -> list[list[KernelName]]:
    """The units, with those of two kernel configs of one family joined, as long as every job has one."""
    found: list[list[KernelName]] = []
    joined = 0
    waiting: dict[str, list[KernelName]] = {}  # by the header
    for unit in units:
        found.append(unit)
        row, out_dtype = unit[0]
        if len(unit) == 1 or not out_dtype or not family_of(table.row(row)).compiled_in_pairs or len(units) - joined <= jobs:
            continue
        if any(find_kernel(table, name) for name in unit):
            continue
        header = family_of(table.row(row)).code(table.row(row), out_dtype, rules.shared_memory_of(table)).header
        if first := waiting.pop(header, None):
            first += found.pop()
            joined += 1
        else:
            waiting[header] = unit
    return found


def _apart(table: TileTable, units: list[list[KernelName]], jobs: int) -> list[list[KernelName]]:
    """The units, with the longest of them taken apart while there are fewer than jobs."""
    found: list[list[KernelName]] = []
    count = len(units)
    for unit in sorted(units, key=lambda unit: -_compile_order(table, unit)):
        if count + len(unit) - 1 <= jobs and not any(find_kernel(table, name) for name in unit):
            found += [[name] for name in unit]
            count += len(unit) - 1
        else:
            found.append(unit)
    return found


def _build_pair(table: TileTable, names: Sequence[KernelName]) -> Path:
    """A library with every kernel of two kernel configs, compiled as one translation unit."""
    source = codegen.together([(table.row(row), out) for row, out in names], rules.shared_memory_of(table))
    key = cache.digest(*(kernel_key(table, name) for name in names))
    symbols = [codegen.symbol(*name) for name in names]
    return _compiled(table, "pair", "-".join((table.arch, *dict.fromkeys(row for row, _ in names))), key, source, symbols, None)


def _build_together(table: TileTable, names: Sequence[KernelName]) -> dict[KernelName, Path]:
    """Kernels of one kernel config: those in the cache, and the others by one translation unit if they are several. Or all kernels of two kernel
    configs (`_paired`).

    Either all paths are that of the whole kernel config or none is: an object of it, linked with one of its kernels, defines a symbol twice.
    """
    if len(names) == 1:
        return {names[0]: build_kernel(table, names[0], announce=False)}
    if names[0][0] != names[-1][0]:
        return dict.fromkeys(names, _build_pair(table, names))
    found = {name: find_kernel(table, name) for name in names}
    if sum(path is None for path in found.values()) > 1:
        return dict.fromkeys(names, build_row(table, names[0][0]))
    paths = {name: path or build_kernel(table, name, announce=False) for name, path in found.items()}
    whole = _find_row(table, names[0][0])  # another process may have built it in the meantime
    return dict.fromkeys(names, whole) if whole else paths


def build_arch(table: TileTable, jobs: int | None = None, on_kernel: Callable[[KernelName, int, int], None] | None = None) -> Path:
    """Builds every kernel of a table and links them, with the table, into one library. Options: see `build_kernels`."""
    nvcc, flags = nvcc_and_flags(table.arch)
    names = kernel_names(table)
    if whole := cache.find("arch", table.arch, _built_arch_key(table)):
        return whole  # the single kernels need not be in the cache
    built = build_kernels(table, names, jobs, on_kernel, pairs=True)

    def build(folder: Path) -> None:
        objects = []
        for library in dict.fromkeys(built[name] for name in names):  # kernels of a kernel config may share one
            objects.append(folder / f"{len(objects)}.o")
            shutil.copyfile(library.parent / _KERNEL_OBJECT, objects[-1])
        source = folder / "index.cpp"
        source.write_text(codegen.library_source(table.arch, [codegen.symbol(*name) for name in names], table), encoding="utf-8")
        link = [*_link_flags(nvcc), "-Xlinker=--strip-all", *(path.name for path in objects)]  # the symbols are not needed and take two megabytes
        compile.run_ninja(folder, f"arch-{table.arch}", nvcc.path, [source], flags, link)
        for path in objects:
            path.unlink()

    return cache.get_or_build("arch", table.arch, _built_arch_key(table), build)


def install_arch(table: TileTable, folder: Path, **options) -> Path:
    """Builds an architecture and puts the library into a package's lib folder."""
    return install_prebuilt(build_arch(table, **options), f"kernels_{table.arch}", _arch_key(table), folder)


def install_core(folder: Path) -> Path:
    """Builds the core and puts it into a package's lib folder."""
    return install_prebuilt(build_core(), "libscaled_mm", core_key(), folder)


def install_operators(folder: Path) -> None:
    """Builds what joins torch and the core, and puts it into a package's lib folder. Needs torch and Python's headers."""
    install_prebuilt(_build_torch(), "torch_operators", _torch_key(), folder)
    if fast := _build_python():
        install_prebuilt(fast, "fast_path", _python_key(), folder)
