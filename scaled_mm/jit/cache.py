"""The cache of built libraries: one folder per entry, written atomically.

An entry is built in a temporary folder and renamed under a file lock. So two processes build it once, and a killed build leaves no
incomplete entry. Each entry records a digest of its library; an entry that does not match is renamed and rebuilt.

Loading a library runs its code, so no other user may be able to write to the folder.
"""

from __future__ import annotations

import dataclasses
import errno
import glob
import hashlib
import json
import os
import shlex
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from scaled_mm.errors import KernelNotBuiltError

LIBRARY = "library.so"
_RECORD = "entry.json"
_UNFINISHED = ("building-", "damaged-")


_TRUST = "SCALED_MM_TRUST_CACHE"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def cache_dir() -> Path:
    """SCALED_MM_CACHE_DIR, else `scaled_mm` below XDG_CACHE_HOME or ~/.cache. Absolute, because compilers run in another folder.

    Raises KernelNotBuiltError if the home folder is unknown.
    """
    if value := os.environ.get("SCALED_MM_CACHE_DIR"):
        return Path(value).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification says to ignore relative paths
        return Path(base) / "scaled_mm"
    try:
        return Path.home().absolute() / ".cache" / "scaled_mm"
    except RuntimeError as error:
        raise KernelNotBuiltError("SCALED_MM_CACHE_DIR: expected a folder for the cache, got none, and this user has no home folder") from error


def _named() -> str:
    """The cache's path for error messages, with the variable that changes it."""
    default = "" if os.environ.get("SCALED_MM_CACHE_DIR") else " (the default, as the variable is not set)"
    return f"{cache_dir()}{default}"


def _unusable(error: Exception) -> KernelNotBuiltError:
    reason = getattr(error, "strerror", None) or error
    return KernelNotBuiltError(f"SCALED_MM_CACHE_DIR: expected a folder that can be written to, got {_named()}: {reason}")


@contextmanager
def _writing() -> Iterator[None]:
    """Turns an OSError into a KernelNotBuiltError: the cache cannot be used. It names the variable that changes its path."""
    try:
        yield
    except (OSError, NotImplementedError) as error:  # NotImplementedError: a file system without locks
        raise _unusable(error) from error


@contextmanager
def _building(name: str) -> Iterator[None]:
    """Turns an OSError of a build into a KernelNotBuiltError: a full disk, or a compiler that cannot be started."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise _unusable(error) from error
        raise KernelNotBuiltError(f"{name}: expected a library, the build ended with: {error}") from error


# ---- permissions ------------------------------------------------------------------------------------------------


def _trusts_everyone() -> bool:
    value = os.environ.get(_TRUST) or "0"
    if value not in ("0", "1"):
        raise KernelNotBuiltError(f"{_TRUST}: expected 0 or 1, got {value}")
    return value == "1"


def _user() -> int:
    return os.geteuid()


def _exposed(status: os.stat_result) -> str | None:
    """The reason that another user may write to a file or folder, or None if none may. Root is always allowed."""
    if status.st_uid not in (_user(), 0):
        return f"belongs to user {status.st_uid}, while this is user {_user()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def _check_private(root: Path) -> None:
    """Raises KernelNotBuiltError if another user may write to the cache and could thus run code as this user.

    Exception: if this user owns the default folder, the write permissions of others are removed (umask 002 grants them to the group).
    """
    if _trusts_everyone():
        return
    try:
        status = root.stat()
    except OSError:
        return  # missing or unusable: the caller reports it
    if not os.environ.get("SCALED_MM_CACHE_DIR") and status.st_uid == _user() and _exposed(status):
        with suppress(OSError):
            root.chmod(stat.S_IMODE(status.st_mode) & ~0o022)
            status = root.stat()
    if reason := _exposed(status):
        ours = f"`chmod go-w {shlex.quote(str(root))}`, " if status.st_uid == _user() else ""
        raise KernelNotBuiltError(
            f"SCALED_MM_CACHE_DIR: expected a folder that only this user may write to, for its libraries are loaded, got {_named()}, which {reason}; "
            f"{ours}name another folder, which is made if it is not there, or set {_TRUST}=1 if you trust all who may write to it"
        )


def _is_private(folder: Path) -> bool:
    """Whether only this user or root can have written the entry."""
    if _trusts_everyone():
        return True
    status = folder.stat()
    if _exposed(status):
        return False
    closed = not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)  # then the modes of its contents do not matter
    return closed or not any(_exposed(path.stat()) for path in folder.iterdir())


def check_writable() -> None:
    """Creates the cache and a temporary file in it. Raises KernelNotBuiltError if that fails, or if other users may write there."""
    _make(cache_dir())
    with _writing(), tempfile.TemporaryFile(dir=cache_dir()):
        pass


def _make(root: Path) -> None:
    with _writing():
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(root)


# ---- entries ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Entry:
    """A complete entry. `size`: bytes of its library."""

    path: Path
    kind: str
    name: str
    size: int


def digest(*parts: str | bytes) -> str:
    """A key over everything that changes the result. Lengths separate the parts, so that different parts cannot give the same bytes."""
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
    """The entry in a folder. None if its record or library is missing or does not match, or if another user may have written it."""
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        library = folder / LIBRARY
        if record["sha256"] != _file_digest(library) or not _is_private(folder):
            return None
        return Entry(folder, record["kind"], record["name"], library.stat().st_size)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # incomplete or damaged: the caller rebuilds it


def find(kind: str, name: str, key: str) -> Path | None:
    """The library of a complete entry, or None. Raises KernelNotBuiltError for a cache that other users may write to."""
    root = cache_dir()
    _check_private(root)
    folder = root / f"{kind}-{name}-{key}"
    return folder / LIBRARY if _read(folder) else None


def has(kind: str, name: str) -> bool:
    """Whether there is an entry of this kind and name, with any key, whole or not."""
    return any(cache_dir().glob(f"{glob.escape(f'{kind}-{name}')}-*/"))


def entries() -> list[Entry]:
    """All complete entries in the cache, by name."""
    root = cache_dir()
    folders = root.iterdir() if root.is_dir() else ()
    found = [_read(folder) for folder in folders if (folder / _RECORD).is_file() and not folder.name.startswith(_UNFINISHED)]
    return sorted((entry for entry in found if entry), key=lambda entry: (entry.kind, entry.name))


def clear() -> int:
    """Removes everything in the cache; returns the number of bytes of libraries."""
    freed = sum(entry.size for entry in entries())
    if cache_dir().is_dir():
        shutil.rmtree(cache_dir())
    return freed


def get_or_build(kind: str, name: str, key: str, build: Callable[[Path], None]) -> Path:
    """The library of an entry. If it is missing, `build(folder)` builds it; it must write `folder / LIBRARY`.

    Raises the errors of `build`, with OSError as KernelNotBuiltError; then only the log named by the error remains. Raises
    KernelNotBuiltError for a cache that is not writable, or that other users may write to.
    """
    import filelock

    if path := find(kind, name, key):
        return path
    root = cache_dir()
    folder = root / f"{kind}-{name}-{key}"
    _make(root)
    lock = filelock.FileLock(_lock_of(root, folder.name))
    with _writing():
        lock.acquire()
    try:
        if _read(folder):  # another process has built it meanwhile
            return folder / LIBRARY
        with _writing():
            _clear_away(root, folder)
            working = Path(tempfile.mkdtemp(prefix=f"building-{folder.name}-", dir=root))
        try:
            with _building(name):
                build(working)
                record = {"kind": kind, "name": name, "key": key, "sha256": _file_digest(working / LIBRARY)}
                (working / _RECORD).write_text(json.dumps(record), encoding="utf-8")
                for path in working.iterdir():
                    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o022)  # other users may be given read access later
                os.replace(working, folder)
        except KernelNotBuiltError:
            if not _read(folder):  # it exists if the cache was deleted, with this lock, and another process then built the entry
                raise
        finally:
            shutil.rmtree(working, ignore_errors=True)
    finally:
        lock.release()
    return folder / LIBRARY


def _lock_of(root: Path, entry: str) -> Path:
    return root / f"{entry}.lock"


def _clear_away(root: Path, folder: Path) -> None:
    """Makes room for an entry whose lock is held: renames a damaged entry, once, and removes the folders of dead builds."""
    import filelock

    if folder.exists():
        for former in root.glob(f"damaged-{glob.escape(folder.name)}-*"):
            shutil.rmtree(former, ignore_errors=True)
        folder.rename(tempfile.mkdtemp(prefix=f"damaged-{folder.name}-", dir=root))
    for leftover in root.glob("building-*"):
        entry = leftover.name.removeprefix("building-").rpartition("-")[0]
        if entry == folder.name:
            shutil.rmtree(leftover, ignore_errors=True)  # a compiler that outlived its parent may still write to it
            continue
        lock = filelock.FileLock(_lock_of(root, entry))
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            continue  # a build is in progress
        try:
            shutil.rmtree(leftover, ignore_errors=True)
        finally:
            lock.release()
