"""`scaled-mm doctor`: reports what is installed, what is missing, what needs it, and how to get it."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from scaled_mm.cli import common

HELP = "report what is installed and what is missing; exit status 0 if the CPU backend works"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report. `found`: a description, or None if the component is missing or unusable. In that case `needed_for` names what
    needs it, `reason` what is wrong, and `get` the remedy.

    `required`: nothing works without it, not even the CPU backend.
    """

    name: str
    found: str | None
    needed_for: str = ""
    get: str = ""
    reason: str = ""
    required: bool = False
    details: Any = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """0 if the CPU backend works, else 1."""
    findings = examine()
    works = all(finding.found is not None for finding in findings if finding.required)
    if args.json:
        common.print_json({"ok": works, "findings": [dataclasses.asdict(finding) for finding in findings]}, indent=2)
    else:
        _print(findings, works)
    return 0 if works else 1


def examine() -> list[Finding]:
    """All findings, in the order of the report."""
    findings = [Finding("Python", f"{platform.python_version()} ({sys.executable})", required=True)]
    for look in _LOOKS:
        try:
            found = look()
        except Exception as error:  # noqa: BLE001 - a broken component is a finding; the others are still reported
            found = _failed(look, error)
        findings += found if isinstance(found, list) else [found]
    return findings


def _failed(look: Callable[[], Any], error: Exception) -> Finding:
    from scaled_mm.errors import ScaledMMError

    name, needed_for, get = _ABOUT[look]
    reason = str(error) if isinstance(error, ScaledMMError) else f"{type(error).__name__}: {error}"
    variable = reason.partition(":")[0]
    if variable in os.environ:
        get = f"correct the variable {variable}, or unset it"
    return Finding(name, None, needed_for, get, reason, required=look in _REQUIRED)


# ---- torch and the CPU -----------------------------------------------------------------------------------------------


def _torch() -> Finding:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA in this build"
    return Finding("torch", f"{torch.__version__}, {build}", required=True)


def _core_library() -> Finding:
    import scaled_mm as sm
    from scaled_mm.jit.library import core_library

    sm.Handle("cpu").destroy()
    return Finding("core library", str(core_library()), required=True)


def _cpu_backend() -> Finding:
    """Computes a product with zero points and bias, and compares it with the reference."""
    import torch

    import scaled_mm as sm
    from scaled_mm import reference
    from scaled_mm.cpu import gemm as cpu_gemm
    from scaled_mm.cpu import integer_product

    generator = torch.Generator().manual_seed(0)
    a, w = (torch.randint(-128, 128, (rows, 333), dtype=torch.int8, generator=generator) for rows in (17, 65))
    scale, bias = torch.tensor([0.01]), torch.ones(65, dtype=torch.bfloat16)
    zero_point = torch.tensor([-128], dtype=torch.int32)
    arguments = dict(bias=bias, a_zero_point=zero_point, b_zero_point=zero_point)
    out = sm.scaled_mm(a, w.t(), scale, scale, **arguments)
    expected = reference.scaled_mm(a, w.t(), scale, scale, **arguments)
    if not reference.same_bits(out, expected):
        raise RuntimeError(f"a product differs from the reference: {reference.describe_difference(out, expected)}")
    threads = torch.get_num_threads()
    found = f"works, {cpu_gemm.kernel_name()} on {threads} thread{'s' * (threads > 1)} ({integer_product.choice().reason})"
    return Finding("CPU backend", found, required=True)


# ---- GPUs ------------------------------------------------------------------------------------------------------------

_CUDA_TORCH = "install a CUDA build of torch, if this machine has an NVIDIA GPU: see https://pytorch.org/get-started/locally/"


def _driver() -> Finding:
    """The driver as reported by nvidia-smi, which needs no torch."""
    needed_for, get = "GPU kernels", "install the NVIDIA driver, if this machine has an NVIDIA GPU"
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Finding("NVIDIA driver", None, needed_for, get)
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    versions = sorted({line.strip() for line in done.stdout.splitlines() if re.fullmatch(r"\s*[\d.]+\s*", line)})
    if done.returncode != 0 or not versions:
        message = " ".join((done.stderr or done.stdout).split())
        return Finding("NVIDIA driver", None, needed_for, reason=f"nvidia-smi exits with {done.returncode}: {message}")
    return Finding("NVIDIA driver", ", ".join(versions))


def _torch_operators() -> list[Finding]:
    """Loads the torch operators; the first time, this compiles them."""
    import torch

    from scaled_mm.core import dispatcher, fast
    from scaled_mm.jit.library import torch_library

    if torch.version.cuda is None:
        return [Finding("torch operators", None, "products of CUDA tensors", _CUDA_TORCH)]
    dispatcher.load_cuda_operators(compiles_kernels=False)
    operators = Finding("torch operators", str(torch_library()))
    if fast.module is None:
        get = "install Python's headers (Debian: `apt-get install python3-dev`); if they are there, this torch is too old"
        return [operators, Finding("short call path", None, "calls that cost the host a few microseconds", get)]
    return [operators, Finding("short call path", "loaded")]


def _gpus() -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        get = "a GPU of compute capability 7.5 or newer that torch can see" if torch.version.cuda else _CUDA_TORCH
        return [Finding("GPU", None, "GPU kernels; the CPU backend gives the same bits", get)]
    findings = []
    for index in range(torch.cuda.device_count()):
        name = f"GPU {index}"
        properties = torch.cuda.get_device_properties(index)
        about = (
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.multi_processor_count} multiprocessors, {properties.total_memory / 2**30:.0f} GiB"
        )
        findings += [Finding(name, about), _gpu_table(index)]
    return findings


def _gpu_table(index: int) -> Finding:
    """The tile table that a handle on this GPU uses."""
    import scaled_mm as sm
    from scaled_mm.errors import ScaledMMError
    from scaled_mm.jit.dispatch import machine_table

    name = f"tile table of GPU {index}"
    try:
        arch = sm.Handle(f"cuda:{index}").arch
        table = machine_table(arch)
    except ScaledMMError as error:
        return Finding(name, None, "choosing kernels on this GPU", reason=f"{error.status.name}: {error}")
    found = f"{arch}: {len(table.rows)} rows, {len(table.buckets)} buckets, {f'tuned on {table.gpu}' if table.tuned else 'not tuned'}"
    return Finding(name, f"{found} ({table.source})")


def _forced() -> list[Finding]:
    """The architecture that SCALED_MM_ARCH forces, if it is set."""
    arch = os.environ.get("SCALED_MM_ARCH")
    if not arch:
        return []
    from scaled_mm.errors import ScaledMMError
    from scaled_mm.tables import load_table

    name, needed_for = "forced architecture", "choosing GPU kernels"
    try:
        table = load_table(arch) if re.fullmatch(r"sm\d+", arch) else None
    except ScaledMMError:
        table = None
    if table is None:
        why = f"SCALED_MM_ARCH: expected the name of an architecture, as sm80, got {arch}"
        return [Finding(name, None, needed_for, "correct the variable SCALED_MM_ARCH, or unset it", why)]
    return [Finding(name, f"{arch} by SCALED_MM_ARCH ({table.source})")]


def _tables() -> list[Finding]:
    """One line for all valid tables, and one line per invalid table."""
    from scaled_mm.tables import available_tables, check_table, configs_dir

    tables = available_tables()
    problems = {arch: check_table(path, arch) for arch, path in tables}
    good = [arch for arch in problems if not problems[arch]]
    findings = []
    if good:
        details = [str(path) for arch, path in tables if arch in good]
        findings.append(Finding("tile tables", f"{', '.join(good)} in {configs_dir()}", details=details))
    for arch, found in problems.items():
        if found:
            more = f" (and {len(found) - 1} more: `scaled-mm table check`)" if len(found) > 1 else ""
            get = "correct the file, or install the package again"
            reason = f"{found[0]}{more}"
            findings.append(Finding(f"tile table {arch}", None, f"choosing kernels of {arch}", get, reason, details=[str(p) for p in found]))
    return findings


def _shipped_kernels() -> list[Finding]:
    """Kernels built into the package; no line if there are none."""
    from scaled_mm.jit import library
    from scaled_mm.tables import load_table

    serving, findings = [], []
    for arch, path in library.shipped_kernels():
        table = load_table(arch)
        if library.serves(table):
            serving.append(f"{arch}, {len(library.kernel_names(table))}")
        else:
            reason = f"{path} was made from another tile table or other sources: kernels are compiled just in time"
            findings.append(Finding(f"kernels in the wheel for {arch}", None, "running without nvcc", "build the wheel again", reason))
    if serving:
        findings.insert(0, Finding("kernels in the wheel", f"{'; '.join(serving)} ({library.lib_dir()})"))
    return findings


def _just_in_time() -> Finding:
    """SCALED_MM_JIT, and how many kernels of this machine's architecture are built."""
    import torch

    import scaled_mm as sm
    from scaled_mm.jit import background, dispatch, library, mode, provide

    meanings = {
        "background": f"products wait for small kernels only; kernels compiled at a time: {background.workers()}",
        "wait": "products wait for their kernels",
        "off": "nothing is compiled",
    }
    about = f"{mode.current()}: {meanings[mode.current()]}"
    arch = common.forced_arch() or (sm.Handle("cuda:0").arch if torch.cuda.is_available() else None)
    if arch is None:
        return Finding("kernel builds", about)
    table = dispatch.machine_table(arch)
    names = library.kernel_names(table)
    built = len(names) if library.arch_library(table) else sum(provide.built(table, name) is not None for name in names)
    details = {"mode": mode.current(), "arch": table.arch, "built": built, "kernels": len(names)}
    return Finding("kernel builds", f"{about}; {built} of {len(names)} kernels of {table.arch} are built", details=details)


# ---- what builds kernels ---------------------------------------------------------------------------------------------

_BUILDING = "building GPU kernels"


def _nvcc() -> Finding:
    from scaled_mm.jit.toolchain import HOW_TO_GET, find_nvcc

    nvcc = find_nvcc()
    if nvcc is None:
        return Finding("nvcc", None, _BUILDING, HOW_TO_GET["nvcc"])
    return Finding("nvcc", f"{nvcc.version} ({nvcc.path}, from {nvcc.origin})")


def _cutlass() -> Finding:
    from scaled_mm.jit.toolchain import HOW_TO_GET, cutlass_version, find_cutlass

    include = find_cutlass()
    if include is None:
        return Finding("CUTLASS headers", None, _BUILDING, HOW_TO_GET["CUTLASS"])
    return Finding("CUTLASS headers", f"{cutlass_version()} ({include})")


def _ninja() -> Finding:
    from scaled_mm.jit.toolchain import HOW_TO_GET, find_ninja

    ninja = find_ninja()
    if ninja is None:
        return Finding("ninja", None, _BUILDING, HOW_TO_GET["ninja"])
    version = subprocess.run([str(ninja), "--version"], capture_output=True, text=True, timeout=30, check=True)
    return Finding("ninja", f"{version.stdout.strip()} ({ninja})")


def _cxx() -> Finding:
    from scaled_mm.jit.toolchain import HOW_TO_GET, cxx_version, find_cxx

    cxx = find_cxx()
    if cxx is None:
        return Finding("C++ compiler", None, "building the core library and kernels from source", HOW_TO_GET["C++ compiler"])
    return Finding("C++ compiler", f"{cxx_version()} ({cxx})")


def _cache() -> Finding:
    from scaled_mm.jit import cache

    cache.check_writable()
    entries = cache.entries()
    size = sum(entry.size for entry in entries)
    details = [{"kind": entry.kind, "name": entry.name, "size": entry.size, "path": str(entry.path)} for entry in entries]
    counts = collections.Counter(entry.kind for entry in entries)
    content = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    found = f"{cache.cache_dir()}: {f'{content}; {size / 2**20:.1f} MiB' if entries else 'empty'}"
    return Finding("build cache", found, details=details)


# In the order of the report: name, needed for, how to get it; used if the check itself fails.
_ABOUT: dict[Callable[[], Any], tuple[str, str, str]] = {
    _torch: ("torch", "everything", "`pip install torch`"),
    _core_library: (
        "core library",
        "everything",
        "it is compiled with a C++ compiler when the package is installed or first used",
    ),
    _cpu_backend: ("CPU backend", "products on a CPU", ""),
    _driver: ("NVIDIA driver", "GPU kernels", ""),
    _torch_operators: ("torch operators", "products of CUDA tensors", ""),
    _gpus: ("GPU", "GPU kernels", ""),
    _forced: ("forced architecture", "choosing GPU kernels", ""),
    _tables: ("tile tables", "choosing GPU kernels", "install the package again"),
    _shipped_kernels: ("kernels in the wheel", "running without nvcc", ""),
    _just_in_time: ("kernel builds", "running kernels that are not in the wheel", ""),
    _nvcc: ("nvcc", _BUILDING, ""),
    _cutlass: ("CUTLASS headers", _BUILDING, ""),
    _ninja: ("ninja", _BUILDING, ""),
    _cxx: ("C++ compiler", _BUILDING, ""),
    _cache: ("build cache", "keeping built kernels", "set SCALED_MM_CACHE_DIR to a folder that can be written to"),
}
_LOOKS = tuple(_ABOUT)
_REQUIRED = frozenset({_torch, _core_library, _cpu_backend})


# ---- output ----------------------------------------------------------------------------------------------------------


def _missing(finding: Finding) -> str:
    if not finding.reason:
        return f"not found; needed for {finding.needed_for}. To get it: {finding.get}"
    remedy = f". What to do: {finding.get}" if finding.get else ""
    return f"cannot be used: {finding.reason}; needed for {finding.needed_for}{remedy}"


def _print(findings: list[Finding], works: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    console = common.console()
    table = Table(show_header=False, box=None, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        if finding.found is not None:
            table.add_row(Text("ok", style="green"), finding.name, Text(finding.found))
            continue
        style = "bold red" if finding.required else "yellow"
        table.add_row(Text("--", style=style), finding.name, Text(_missing(finding)))  # a Text object, so that brackets are not markup
    console.print(table)
    if works:
        console.print("The CPU backend works.", style="green")
    else:
        broken = ", ".join(finding.name for finding in findings if finding.required and finding.found is None)
        console.print(f"The CPU backend does not work: {broken}", style="bold red", markup=False)
