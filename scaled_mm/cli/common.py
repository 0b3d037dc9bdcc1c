"""Shared by the commands: argument types, the device, consoles, progress and JSON."""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from scaled_mm.log_lines import LogLines, say, warn  # noqa: F401, for the commands

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table

    from scaled_mm.measure.run import Progress
    from scaled_mm.measure.shapes import Case
    from scaled_mm.tables import TileTable

SEED_LIMIT = 2**64  # torch's generators take 64 bits
WIDE = 160
LARGEST_SIZE = 2**31 - 1  # of M, N and K in the C interface


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """An argparse type: an integer from `least` to `most`."""
    expected = f"an integer of {least} or more" if most is None else f"an integer from {least} to {most}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return parse


def number(expected: str, accept: Callable[[float], bool]) -> Callable[[str], float]:
    """An argparse type: a finite number for which `accept` is true. expected: for the message."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not accept(value):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return parse


seed = integer(0, SEED_LIMIT - 1)


def device_of(name: str | None) -> torch.device:
    """The device of a --device option, with its index. None: the first GPU, or the CPU if there is no GPU.

    Raises BadParamError if this machine has no such device.
    """
    import torch

    from scaled_mm.errors import BadParamError

    if name is None:
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cuda", "cpu"):
        raise BadParamError(f"--device: expected cuda, cuda:<index> or cpu, got {name!r}")
    if device.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise BadParamError(f"--device: {name!r} was asked for, but torch {torch.__version__} sees no GPU")
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        raise BadParamError(f"--device: expected an index below {count}, got {name!r}")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def models_extra() -> None:
    """Checks that the packages for whole models are installed, and makes them quiet. BadParamError if not."""
    import importlib.util
    import logging

    from scaled_mm.errors import BadParamError

    missing = [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise BadParamError(f'MODEL: expected {" and ".join(missing)} to be installed: pip install ".[models]"')
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from transformers.utils import logging as theirs

    theirs.disable_progress_bar()


def process_age() -> float:
    """Seconds since this process started, including imports, from Linux's /proc; 0.0 on other systems."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])  # since boot; the program's name before it may contain spaces and brackets
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0


def writable_folder(option: str, folder: Path) -> Path:
    """Creates the folder if necessary. BadParamError if it is not writable, before anything that takes long."""
    from scaled_mm.errors import BadParamError

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise BadParamError(f"{option}: expected a folder that can be written to, got {folder} ({error.strerror})") from error


def folder(text: str) -> Path:
    """An argument that is a folder, by argparse. An empty text, as of an unset variable, is not the current folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("expected a folder, got an empty text")
    return Path(text)


TERMINATED = 128 + signal.SIGTERM


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM ends the command, with TERMINATED, as Ctrl-C would end it, so that temporary folders are removed."""

    def end(*_) -> None:
        raise SystemExit(TERMINATED)

    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def text_of(option: str, path: Path) -> str:
    """The text of a file. BadParamError if it cannot be read, or is no UTF-8."""
    from scaled_mm.errors import BadParamError

    try:
        return path.read_text(encoding="utf-8-sig")  # editors on Windows put a mark first, which is no part of the text
    except (OSError, UnicodeDecodeError) as error:
        raise BadParamError(f"{option}: expected a file of UTF-8 text, got {path} ({getattr(error, 'strerror', None) or error})") from error


def table_of(arch: str) -> TileTable:
    """The table of an --arch option: an architecture or an existing file. BadParamError for a missing file; ArchitectureNotSupportedError for any
    other value."""
    from scaled_mm.errors import ArchitectureNotSupportedError, BadParamError
    from scaled_mm.tables import available_tables, load_table

    if re.fullmatch(r"sm\d+", arch) or Path(arch).is_file():
        return load_table(arch)
    if arch.endswith((".yaml", ".yml")):
        raise BadParamError(f"--arch: expected an architecture or a file, there is no {arch}; `scaled-mm autotune` writes tuned tables")
    known = ", ".join(name for name, _ in available_tables())
    raise ArchitectureNotSupportedError(f"--arch: no tile table for {arch!r}; there are: {known}")


def forced_arch() -> str | None:
    """The architecture that SCALED_MM_ARCH forces; None if it is not set. BadParamError if it does not name an architecture."""
    from scaled_mm.errors import BadParamError

    arch = os.environ.get("SCALED_MM_ARCH") or None
    if arch is not None and not re.fullmatch(r"sm\d+", arch):
        raise BadParamError(f"SCALED_MM_ARCH: expected the name of an architecture, as sm80, got {arch}")
    return arch


def console(stderr: bool = False, markup: bool = True) -> Console:
    """The console for a report. For a file or a pipe it has the width WIDE; rich would squeeze tables into 80 columns.

    markup: whether brackets are rich's markup. Without it, names of files and kernel configs are printed unchanged.
    """
    from rich.console import Console

    class _Console(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # `main` ends the command; rich would exit with 1, which means "no"

    made = _Console(stderr=stderr, markup=markup)
    return made if made.is_terminal else _Console(stderr=stderr, markup=markup, width=WIDE)


def narrow_table(title: str, **options) -> Table:
    """A table without lines between its columns, so that it fits in 80 columns without breaking words."""
    from rich import box
    from rich.table import Table

    return Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, padding=0, pad_edge=False, **options)


def print_json(document: object, indent: int | None = None) -> None:
    """Prints a document on stdout, in one line or indented. NaN and infinities, which JSON lacks, are strings, as in traces."""
    import json

    print(json.dumps(_in_json(document), indent=indent, allow_nan=False))


def _in_json(value: object) -> object:
    if isinstance(value, dict):
        return {key: _in_json(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_in_json(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def log(console: Console, text: str) -> None:
    """Prints a line for a log file. Nothing on a terminal, which has a progress bar."""
    if not console.is_terminal:
        console.print(text, highlight=False)


@contextmanager
def progress_bar(console: Console, total: int) -> Iterator[Progress]:
    """A progress bar on `console`; yields the callback that the grid calls before each step."""
    from rich import progress

    columns = (
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.description}"),
    )
    with progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("preparing", total=total)

        def step(case: Case, name: str) -> None:
            bar.update(task, description=f"{case}: {name}")
            bar.advance(task)

        yield step
