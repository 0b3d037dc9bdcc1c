"""What the commands share: arguments with a type of their own, the device, and where a report is printed."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table

    from scaled_mm.measure.run import Progress
    from scaled_mm.measure.shapes import Case
    from scaled_mm.tables import TileTable

SEED_LIMIT = 2**64  # torch's generators take 64 bits
WIDE = 160
LARGEST_SIZE = 2**31 - 1  # of M, N and K: the C interface takes no larger one


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
    """An argparse type: a finite number that `accept` takes; `expected` says which those are."""

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
    """The device of a --device option, with its index; None is the first GPU, or the CPU when there is none.

    Raises BadParamError for what is no device of this machine.
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


def process_age() -> float:
    """Seconds since this process started, imports included, as Linux tells them; 0.0 where nothing does."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])  # since the boot; the name before it may have spaces and brackets
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0


def writable_folder(option: str, folder: Path) -> Path:
    """The folder, made if it is not there, before anything that takes long; BadParamError if no file can be put there."""
    from scaled_mm.errors import BadParamError

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise BadParamError(f"{option}: expected a folder that can be written to, got {folder} ({error.strerror})") from error


def table_of(arch: str) -> TileTable:
    """The table of an --arch option: an architecture, or a file that is there. BadParamError for a
    file that is not, ArchitectureNotSupportedError for the rest."""
    from scaled_mm.errors import ArchitectureNotSupportedError, BadParamError
    from scaled_mm.tables import available_tables, load_table

    if re.fullmatch(r"sm\d+", arch) or Path(arch).is_file():
        return load_table(arch)
    if arch.endswith((".yaml", ".yml")):
        raise BadParamError(f"--arch: expected an architecture or a file, there is no {arch}; `scaled-mm autotune` writes tuned tables")
    known = ", ".join(name for name, _ in available_tables())
    raise ArchitectureNotSupportedError(f"--arch: no tile table for {arch!r}; there are: {known}")


def forced_arch() -> str | None:
    """What SCALED_MM_ARCH forces calls to use, None if it is not set; BadParamError for what names no architecture."""
    from scaled_mm.errors import BadParamError

    arch = os.environ.get("SCALED_MM_ARCH") or None
    if arch is not None and not re.fullmatch(r"sm\d+", arch):
        raise BadParamError(f"SCALED_MM_ARCH: expected the name of an architecture, as sm80, got {arch}")
    return arch


def console(stderr: bool = False, markup: bool = True) -> Console:
    """Where a report goes. A file or a pipe has no width: without one tables would be squeezed into 80 columns.

    markup: whether brackets are rich's markup; without it the names of files and rows are printed as they are.
    """
    from rich.console import Console

    class _Console(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # `main` ends the command; rich would exit with 1, which is an answer

    made = _Console(stderr=stderr, markup=markup)
    return made if made.is_terminal else _Console(stderr=stderr, markup=markup, width=WIDE)


def say(*lines: str) -> None:
    """Lines on stderr, which is flushed. One that takes nothing (a full disk) changes neither the answer nor the exit status."""
    try:
        for line in lines:
            print(line, file=sys.stderr)
        sys.stderr.flush()
    except BrokenPipeError:
        raise
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # else the interpreter tries again as it ends, and exits with 120


class LogLines:
    """Progress for a log file: a line on stderr every `seconds` at most. On a terminal nothing, for a bar says it there."""

    def __init__(self, terminal: bool, seconds: float = 30.0):
        self._terminal, self._seconds = terminal, seconds
        self._start = self._last = time.monotonic()

    def begin(self, text: str) -> None:
        """What is about to be done, at once."""
        if not self._terminal:
            say(text)

    def say(self, text: str) -> None:
        now = time.monotonic()
        if not self._terminal and now - self._last >= self._seconds:
            self._last = now
            say(f"{text}, {now - self._start:.0f} s")


def narrow_table(title: str, **options) -> Table:
    """A table without lines between its columns: for those whose words must stay whole in 80 columns."""
    from rich import box
    from rich.table import Table

    return Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, padding=0, pad_edge=False, **options)


def print_json(document: object, indent: int | None = None) -> None:
    """On stdout, in one line or with its parts indented. JSON has no NaN and no infinities: they are strings, as in traces."""
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
    """A line for a log file; on a terminal the progress bar says it."""
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
