"""The cache of built libraries: one folder an entry, made whole or not at all.

An entry is built in a temporary folder beside it and renamed into place under a file lock, so two processes build it
once and a killed build leaves nothing that could be taken for a result. Each entry records a digest of its library; one
that does not match is set aside and built again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from scaled_mm.errors import KernelNotBuiltError

LIBRARY = "library.so"
_RECORD = "entry.json"
_UNFINISHED = ("building-", "damaged-")


def cache_dir() -> Path:
    """SCALED_MM_CACHE_DIR, else `scaled_mm` below XDG_CACHE_HOME or ~/.cache."""
    if value := os.environ.get("SCALED_MM_CACHE_DIR"):
        return Path(value)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scaled_mm"


@contextmanager
def _writing() -> Iterator[None]:
    """KernelNotBuiltError in the place of an OSError: the cache cannot be used, and which variable moves it."""
    try:
        yield
    except OSError as error:
        raise KernelNotBuiltError(
            f"SCALED_MM_CACHE_DIR: expected a folder that can be written to, got {cache_dir()}"
            f"{'' if os.environ.get('SCALED_MM_CACHE_DIR') else ' (the default, as the variable is not set)'}: {error.strerror or error}"
        ) from error


def check_writable() -> None:
    """Makes the cache and a file in it, which goes again; KernelNotBuiltError if that fails."""
    with _writing():
        cache_dir().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache_dir()):
            pass


@dataclasses.dataclass(frozen=True)
class Entry:
    """A finished entry. `size`: bytes of its library."""

    path: Path
    kind: str
    name: str
    size: int


def digest(*parts: str | bytes) -> str:
    """One key over everything that changes the result; parts are kept apart by their lengths."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()[:24]


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else hashlib.sha256(file.read()).hexdigest()


def _read(folder: Path) -> Entry | None:
    """The entry in a folder, or None if its record or library is missing or does not match."""
    try:
        record = json.loads((folder / _RECORD).read_text())
        library = folder / LIBRARY
        if record["sha256"] != _file_digest(library):
            return None
        return Entry(folder, record["kind"], record["name"], library.stat().st_size)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # incomplete or damaged: the caller builds again


def find(kind: str, name: str, key: str) -> Path | None:
    """The library of a whole entry, or None."""
    folder = cache_dir() / f"{kind}-{name}-{key}"
    return folder / LIBRARY if _read(folder) else None


def entries() -> list[Entry]:
    """Every whole entry in the cache, by name."""
    root = cache_dir()
    folders = root.iterdir() if root.is_dir() else ()
    found = [_read(folder) for folder in folders if (folder / _RECORD).is_file() and not folder.name.startswith(_UNFINISHED)]
    return sorted((entry for entry in found if entry), key=lambda entry: (entry.kind, entry.name))


def clear() -> int:
    """Remove everything in the cache; returns how many bytes of libraries that were."""
    freed = sum(entry.size for entry in entries())
    if cache_dir().is_dir():
        shutil.rmtree(cache_dir())
    return freed


def get_or_build(kind: str, name: str, key: str, build: Callable[[Path], None]) -> Path:
    """The library of an entry, built by `build(folder)` (which writes `folder / LIBRARY`) if it is not there.

    Raises what `build` raises; nothing is left behind then but the log that the error names. KernelNotBuiltError for a
    cache that cannot be written to.
    """
    import filelock

    root = cache_dir()
    folder = root / f"{kind}-{name}-{key}"
    if _read(folder):
        return folder / LIBRARY
    lock = filelock.FileLock(root / f"{folder.name}.lock")
    with _writing():
        root.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        if _read(folder):  # another process built it while this one waited
            return folder / LIBRARY
        with _writing():
            if folder.exists():
                folder.rename(tempfile.mkdtemp(prefix=f"damaged-{folder.name}-", dir=root))
            # Dead builds of this entry: the lock says that nobody is at work on them.
            for leftover in root.glob(f"building-{folder.name}-*"):
                shutil.rmtree(leftover, ignore_errors=True)  # a compiler that outlived its parent may still write there
            working = Path(tempfile.mkdtemp(prefix=f"building-{folder.name}-", dir=root))
        try:
            build(working)
            record = {"kind": kind, "name": name, "key": key, "sha256": _file_digest(working / LIBRARY)}
            (working / _RECORD).write_text(json.dumps(record))
            os.replace(working, folder)
        finally:
            shutil.rmtree(working, ignore_errors=True)
    finally:
        lock.release()
    return folder / LIBRARY
