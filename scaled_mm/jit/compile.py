"""Compile and link one library with ninja. What to compile is decided in `library`; this runs it and reports."""

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
    return ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", f"-I{csrc_dir()}", f"-I{include_dir()}"]


def target(arch: str) -> str:
    """The compute capability that a table's kernels are compiled for: "86" for sm89, "90a" for sm90."""
    return ARCHES[arch].capability


def gencode(arch: str) -> str:
    """nvcc's -gencode for the kernels of a table: machine code, and PTX of which the driver makes code for any newer GPU.

    Machine code serves the newer GPUs of its major version too. That of sm_90a serves itself alone and has no PTX.
    """
    capability = target(arch)
    code = f"sm_{capability}" if capability.endswith("a") else f"[sm_{capability},compute_{capability}]"
    return f"arch=compute_{capability},code={code}"


def nvcc_flags(arch: str, cutlass: Path, nvcc_version: str) -> list[str]:
    """Flags for one kernel and an nvcc such as "13.0.88". They are part of its cache key.

    NDEBUG: without it ptxas serialises wgmma. -fmad=false: the numerics allow no contraction (docs/design/numerics.md); the
    epilogue spells its roundings out as well. Without CUTLASS's GDC macro: our kernels wait for the preceding one themselves
    (csrc/int8/c3x/early_weights.cuh). Compression makes a library a quarter to a half as large; every driver that
    runs CUDA 13 reads it, older ones may not, so older compilers leave it.
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
    """One digest over these files of csrc and the sources below these folders, read once per process."""
    root = csrc_dir()
    found = [path for place in places for path in ((root / place).rglob("*") if (root / place).is_dir() else [root / place])]
    files = sorted(path for path in found if path.is_file())
    return cache.digest(*(part for path in files for part in (str(path.relative_to(root)), path.read_bytes())))


_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)
_OWN = ("core/", "int8/", "gguf/", "scaled_mm/")  # what our sources include from csrc


def includes_digest(text: str) -> str:
    """One digest over a source and every file of csrc that it includes, directly or not. CUTLASS's files are not in it."""
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
    return ""  # CUTLASS's, CUDA's or the compiler's: their versions are part of the key


# Of ninja: its exit status for an interrupt (before 1.12 it is 2, and its output says so), or killed by the signal.
_INTERRUPTED = (130, -signal.SIGINT)
_PATIENCE_S = 5  # for ninja to end its compilers


@contextmanager
def progress_line(text: str) -> Iterator[None]:
    """Say on stderr what is being built, and how long it took: a build takes seconds and must not look like a hang."""
    start = time.monotonic()
    _say(f"scaled_mm: building {text} ...")
    yield
    _say(f"scaled_mm: built {text} in {time.monotonic() - start:.1f} s")


def _say(line: str) -> None:
    if sys.stderr is None:  # print would take stdout
        return
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        pass  # a build does not fail because a log is full


def _escape(path: object) -> str:
    """A path as ninja reads it; it quotes paths for the shell itself."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _command(*words: object) -> str:
    """Words of a command as the shell behind ninja reads them: folders may have spaces in their names."""
    return shlex.join(map(str, words)).replace("$", "$$")


# nvcc hands its folders to a shell of its own, and splits lists at commas; a line of ninja's ends at the end of a line.
_UNSPEAKABLE = re.compile(r"^(-I|-L|-isystem)(.*[\n'\"`,].*)$", re.DOTALL)


@contextmanager
def speakable(folder: Path, *groups: Sequence[str]) -> Iterator[list[list[str]]]:
    """Groups of flags for a compiler that runs in `folder`: links in it stand for folders with names that no compiler could be told."""
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


def end_all() -> None:
    """Ends the compilers of every thread, whose calls raise then. An interrupt reaches the main thread alone."""
    for process in list(_running):
        process.terminate()


def run_program(command: Sequence[str], environment: dict[str, str], folder: Path | None = None) -> subprocess.CompletedProcess:
    """The output and exit status of a program, which is run in a folder. One that this process is interrupted in ends first, with what it has
    started.

    `subprocess.run` would kill it, and ninja's compilers would go on for a minute.
    """
    # What a compiler prints is in its own encoding.
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
    """Compile `sources` to objects in `folder` and link them to `folder / cache.LIBRARY`. Commands run in `folder`.

    Raises KernelNotBuiltError with the end of the compiler's output; the whole output stays in the cache folder. Also where a compiler
    that did not fail left no library.
    KeyboardInterrupt if the interrupt reached ninja or the compiler first: nothing failed then.
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
            # A source in the folder goes by its name: the cache's may hold what ninja cannot be told.
            lines.append(f"build {objects[-1]}: cxx {_escape(source.relative_to(folder) if source.is_relative_to(folder) else source)}")
        lines.append(f"build {cache.LIBRARY}: link {' '.join(objects)}")
        (folder / "build.ninja").write_bytes(os.fsencode("\n".join(lines) + "\n"))
        # nvcc's temporary files, which a killed one leaves, go with the folder.
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
    """What an error says about the log of a failed build: most often that it is in the cache."""
    log = cache.cache_dir() / f"failed-{name}.log"
    try:
        log.write_text(output, encoding="utf-8")
    except OSError as error:  # a full disk: often what the compiler says too
        return f"its log could not be kept in {log} ({error.strerror})"
    return f"the whole log is in {log}"
