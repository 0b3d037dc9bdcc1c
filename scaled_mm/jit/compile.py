"""Compiles and links one library with ninja. `library` decides what to compile."""

from __future__ import annotations

import functools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from scaled_mm.errors import InternalError, KernelNotBuiltError
from scaled_mm.jit import cache, toolchain
from scaled_mm.jit.paths import csrc_dir, include_dir
from scaled_mm.kernels.arch import ARCHES

_NINJA = """\
ninja_required_version = 1.5
rule cxx
  command = $compiler $flags -MD -MF $out.d -c $in -o $out
  depfile = $out.d
rule link
  command = $compiler $linkflags $in -o $out $libraries
"""


def cxx_flags() -> list[str]:
    # No contraction: the core's predicted times are the same on every host, and so is the choice between GGUF kernel configs.
    return ["-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", f"-I{csrc_dir()}", f"-I{include_dir()}"]


def target(arch: str) -> str:
    """The compute capability that a table's kernels are compiled for: "86" for sm89, "90a" for sm90."""
    return ARCHES[arch].capability


def gencode(arch: str) -> str:
    """nvcc's -gencode for the kernels of a table: machine code, and PTX of which the driver makes code for any newer GPU.

    Machine code also runs on newer GPUs of the same major version, except that of sm_90a, which only runs on 9.0 and has no PTX.
    """
    capability = target(arch)
    code = f"sm_{capability}" if capability.endswith("a") else f"[sm_{capability},compute_{capability}]"
    return f"arch=compute_{capability},code={code}"


def nvcc_flags(arch: str, cutlass: Path, nvcc_version: str) -> list[str]:
    """Flags for one kernel and an nvcc such as "13.0.88". They are part of its cache key.

    NDEBUG: without it ptxas serializes wgmma. -fmad=false: the numerics allow no contraction (docs/design/numerics.md), although the
    epilogue also rounds explicitly. CUTLASS's GDC macro is not defined, because our kernels wait for the preceding kernel themselves
    (csrc/int8/c3x/loads.cuh). Compression reduces a library to between a quarter and a half of its size. Every driver that
    supports CUDA 13 reads compressed libraries, but older drivers may not, so older compilers do not compress.
    """
    compressed = ["--compress-mode=size"] if int(nvcc_version.partition(".")[0]) >= 13 else []
    return [
        "-std=c++17",
        "-O3",
        "-DNDEBUG",
        "-fmad=false",
        "--expt-relaxed-constexpr",
        f"-gencode={gencode(arch)}",
        *compressed,
        "-Xcompiler=-fPIC,-fvisibility=hidden",
        f"-I{csrc_dir()}",
        f"-I{include_dir()}",
        f"-I{cutlass}",
    ]


@functools.cache
def sources_digest(*places: str) -> str:
    """A digest over these files of csrc and all sources below these folders, computed once per process."""
    root = csrc_dir()
    found = [path for place in places for path in ((root / place).rglob("*") if (root / place).is_dir() else [root / place])]
    files = sorted(path for path in found if path.is_file())
    return cache.digest(*(part for path in files for part in (str(path.relative_to(root)), path.read_bytes())))


_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)
_OWN = ("core/", "int8/", "gguf/", "rowwise/", "scaled_mm/")  # includes of our sources from csrc


def includes_digest(text: str) -> str:
    """A digest over a source and every file of csrc that it includes, directly or indirectly. CUTLASS's files are not part of it."""
    found: dict[str, str] = {}
    waiting = [text]
    while waiting:
        for name in _INCLUDE.findall(waiting.pop()):
            if name not in found:
                found[name] = _own_header(name)
                waiting.append(found[name])
    return cache.digest(text, *(part for name in sorted(found) for part in (name, found[name])))


@functools.cache
def _own_header(name: str) -> str:
    for root in (csrc_dir(), csrc_dir() / "include"):
        if (root / name).is_file():
            return (root / name).read_text(encoding="utf-8")
    if name.startswith(_OWN):
        raise InternalError(f"{name}: expected this header in {csrc_dir()}")
    return ""  # a file of CUTLASS, CUDA or the compiler, whose versions are part of the key


# ninja's exit status for an interrupt since 1.12 (before, it is 2, and the output says so), or killed by the signal.
_INTERRUPTED = (130, -signal.SIGINT)
_PATIENCE_S = 5  # time for ninja to stop its compilers


@contextmanager
def progress_line(text: str) -> Iterator[None]:
    """Reports a build and its duration on stderr: a build takes seconds and must not look like a hang."""
    start = time.monotonic()
    say(f"scaled_mm: building {text} ...")
    yield
    say(f"scaled_mm: built {text} in {time.monotonic() - start:.1f} s")


def say(line: str) -> None:
    """Prints a line on stderr, if it can be written."""
    if sys.stderr is None:  # print would use stdout
        return
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        pass  # a build does not fail because stderr cannot be written


def _escape(path: object) -> str:
    """A path escaped for ninja, which quotes paths for the shell itself."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _command(*words: object) -> str:
    """Words of a command, quoted for the shell that ninja starts: folder names may contain spaces."""
    return shlex.join(map(str, words)).replace("$", "$$")


# nvcc passes folders to its own shell and splits lists at commas. ninja's commands end at the end of a line.
_UNSPEAKABLE = re.compile(r"^(-I|-L|-isystem)(.*[\n'\"`,].*)$", re.DOTALL)


@contextmanager
def speakable(folder: Path, *groups: Sequence[str]) -> Iterator[list[list[str]]]:
    """Groups of flags for a compiler that runs in `folder`. Links in `folder` replace folders whose names a compiler cannot take."""
    links: list[Path] = []

    def said(flag: str) -> str:
        found = _UNSPEAKABLE.match(flag)
        if not found:
            return flag
        links.append(folder / f"folder{len(links)}")
        links[-1].symlink_to(found[2])
        return f"{found[1]}{links[-1].name}"

    try:
        yield [[said(flag) for flag in flags] for flags in groups]
    finally:
        for link in links:
            link.unlink(missing_ok=True)


_running: set[subprocess.Popen] = set()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_running.clear)  # they are the parent's


def end_all() -> None:
    """Stops the compilers of all threads, whose calls then raise. An interrupt only reaches the main thread."""
    for process in list(_running):
        process.terminate()


def is_running() -> bool:
    """Whether any thread waits for a compiler."""
    return bool(_running)


def run_program(command: Sequence[str], environment: dict[str, str], folder: Path | None = None) -> subprocess.CompletedProcess:
    """The output and exit status of a program that runs in a folder. If this process is interrupted, the program and its children end first.

    `subprocess.run` would kill only the program, and ninja's compilers would continue for a minute.
    """
    # A compiler prints in its own encoding.
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8", "errors": "replace"}
    with subprocess.Popen(command, env=environment, cwd=folder, **pipes) as process:
        _running.add(process)
        try:
            out, error = process.communicate()
        except BaseException:
            process.terminate()
            try:
                process.communicate(timeout=_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
        finally:
            _running.discard(process)
    return subprocess.CompletedProcess(command, process.returncode, out, error)


def run_ninja(
    folder: Path,
    name: str,
    compiler: Path | str,
    sources: Sequence[Path],
    flags: Sequence[str],
    linkflags: Sequence[str],
    libraries: Sequence[str] = (),
) -> None:
    """Compiles `sources` to objects in `folder` and links them to `folder / cache.LIBRARY`. Commands run in `folder`.

    Raises KernelNotBuiltError with the end of the compiler's output; the full output stays in the cache folder. Raises it too if the
    compiler succeeded without writing a library. Raises KeyboardInterrupt if the interrupt reached ninja or the compiler first.
    """
    ninja = toolchain.require("ninja", toolchain.find_ninja())
    with speakable(folder, flags, linkflags, libraries) as (flags, linkflags, libraries):
        lines = [
            _NINJA,
            f"compiler = {_command(compiler)}",
            f"flags = {_command(*flags)}",
            f"linkflags = {_command(*linkflags)}",
            f"libraries = {_command(*libraries)}",
        ]
        objects = []
        for source in sources:
            objects.append(f"{source.stem}.o")
            # A source in the folder is named relative to it: the cache's path may contain characters that ninja cannot take.
            lines.append(f"build {objects[-1]}: cxx {_escape(source.relative_to(folder) if source.is_relative_to(folder) else source)}")
        lines.append(f"build {cache.LIBRARY}: link {' '.join(objects)}")
        (folder / "build.ninja").write_bytes(os.fsencode("\n".join(lines) + "\n"))
        # A killed nvcc leaves temporary files; they are deleted with the folder.
        environment = {**toolchain.environment(), "NINJA_STATUS": "", "TMPDIR": "."}
        done = run_program([str(ninja), "-C", str(folder)], environment)
    if done.returncode in _INTERRUPTED or "interrupted by user" in done.stdout:
        raise KeyboardInterrupt
    output = done.stdout + done.stderr
    if done.returncode != 0:
        log = _keep_log(name, output)
        tail = "\n".join(output.strip().splitlines()[-12:])
        raise KernelNotBuiltError(f"{name}: the compiler failed (status {done.returncode}); {log}\n{tail}")
    if not (folder / cache.LIBRARY).is_file():
        raise KernelNotBuiltError(f"{name}: expected a library from {compiler}, got none, though it ended without an error: is it a compiler?")


def _keep_log(name: str, output: str) -> str:
    """The text of an error about the log of a failed build: usually its path in the cache."""
    log = cache.cache_dir() / f"failed-{name}.log"
    try:
        log.write_text(output, encoding="utf-8")
    except OSError as error:  # a full disk, which often is the compiler's error too
        return f"its log could not be kept in {log} ({error.strerror})"
    return f"the whole log is in {log}"
