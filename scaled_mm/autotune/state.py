"""The journal of a run: one measured cell a line of JSON, so that an interrupted run goes on where it stopped.

Lines are appended whole, in one write, and a run that is killed in the middle of one leaves a last line that is skipped. A cell is
found again by its key, a digest of everything that decides the time: a changed kernel or another GPU has other keys, and its old
cells are left alone.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from scaled_mm.errors import BadParamError
from scaled_mm.jit.cache import digest

#: What became of a cell. wrong: its bits are not the reference's. failed: it raised. crashed: its process ended. hung: it was killed.
Outcome = Literal["timed", "wrong", "failed", "crashed", "hung"]


class Cell(BaseModel):
    """One row on one product. us: median microseconds of `samples`, for a timed cell alone; otherwise `message` says what happened."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str
    row: str
    M: int
    N: int
    K: int
    outcome: Outcome
    us: float | None = None
    samples: tuple[float, ...] = ()
    spread: float | None = None
    message: str | None = None

    @property
    def product(self) -> tuple[int, int, int]:
        return self.M, self.N, self.K

    @model_validator(mode="after")
    def _timed_or_not(self) -> Cell:
        if (self.outcome == "timed") != (self.us is not None and self.us > 0):
            raise ValueError("a cell has microseconds if and only if it was timed")
        return self


def cell_key(machine: str, kernel: str, product: tuple[int, int, int]) -> str:
    """Of a cell. machine: GPU, driver and libraries in words. kernel: the key of the row's kernel in the cache, or its source's digest."""
    return digest(machine, kernel, "x".join(map(str, product)))


class Journal:
    """Cells on disk. `skipped`: lines that could not be read; only the last one can be, unless somebody edited the file."""

    def __init__(self, path: Path):
        self.path = path
        self.cells: dict[str, Cell] = {}
        self.skipped = 0
        if path.exists():
            self._read()

    def _read(self) -> None:
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadParamError(f"--out: expected a journal of an earlier run, got {self.path} ({error})") from error
        for line in text.splitlines():
            try:
                cell = Cell.model_validate_json(line)
            except ValidationError:
                self.skipped += 1
            else:
                self.cells[cell.key] = cell
        if text and not text.endswith("\n"):
            with self.path.open("a") as file:  # the next line starts on its own
                file.write("\n")

    def get(self, key: str) -> Cell | None:
        return self.cells.get(key)

    def add(self, cell: Cell) -> None:
        """Keeps a cell, on disk when this returns."""
        line = json.dumps(cell.model_dump(mode="json", exclude_defaults=True)) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line.encode())
            os.fsync(handle)
        finally:
            os.close(handle)
        self.cells[cell.key] = cell
