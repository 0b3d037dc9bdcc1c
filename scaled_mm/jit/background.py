"""Builds kernels beside the program: a queue, and daemon threads that each wait for one compiler.

No thread is left when the queue is empty. At exit the queue is dropped and the compilers are stopped. A forked child starts with an empty
queue. The cache's lock keeps two processes from building the same kernel.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path

from scaled_mm.jit import compile, library
from scaled_mm.tables.schema import TileTable

Key = tuple[str, str, str | None]  # architecture, kernel config, key of codegen.BUILT_FOR
_TRIES = 3  # of a build whose compiler was interrupted, as Ctrl-C interrupts all programs of a terminal
_EXIT_S, _GRACE_S = 5.0, 0.3  # at exit: for compilers to stop, and for threads without one


@dataclasses.dataclass(eq=False)
class _Build:
    table: TileTable
    name: library.KernelName
    load: Callable[[Path], None]
    tries: int = 0

    @property
    def key(self) -> Key:
        return (self.table.arch, *self.name)


class _Queue:
    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.waiting: deque[_Build] = deque()
        self.unfinished: set[Key] = set()
        self.failed: dict[Key, str] = {}
        self.threads: set[threading.Thread] = set()
        self.closed = False


_queue = _Queue()


def workers() -> int:
    """The most kernels that are compiled at a time: one for every two cores of this process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // 2)


def start(table: TileTable, name: library.KernelName, load: Callable[[Path], None]) -> None:
    """Builds a kernel of a table and calls `load` with its library, on another thread. Does nothing for a kernel that is being built or that
    failed to build in this process. A failure is a warning."""
    build = _Build(table, name, load)
    with _queue.lock:
        if _queue.closed or build.key in _queue.unfinished or build.key in _queue.failed:
            return
        _queue.unfinished.add(build.key)
        _queue.waiting.append(build)
        if len(_queue.threads) >= workers():
            return
        thread = threading.Thread(target=_work, name="scaled_mm build", daemon=True)
        _queue.threads.add(thread)
    try:
        thread.start()
    except RuntimeError as error:  # no more threads for this process
        with _queue.lock:
            _queue.threads.discard(thread)
            if _queue.threads or build not in _queue.waiting:
                return  # another thread has taken it, or will
            _queue.waiting.remove(build)
        _end(build, error)


def state(arch: str, row: str) -> str | None:
    """What happens to the kernels of a kernel config: "is being compiled", "could not be compiled: <reason>", or None: nothing."""
    with _queue.lock:
        if any(key[:2] == (arch, row) for key in _queue.unfinished):
            return "is being compiled"
        reasons = [reason for key, reason in _queue.failed.items() if key[:2] == (arch, row)]
    return f"could not be compiled: {reasons[-1]}" if reasons else None


def join(timeout: float | None = None) -> bool:
    """Waits until nothing is being built. False if that takes longer than `timeout` seconds."""
    with _queue.lock:
        return _queue.lock.wait_for(lambda: not _queue.unfinished, timeout)


def _next() -> _Build | None:
    with _queue.lock:
        if _queue.waiting and not _queue.closed:
            return _queue.waiting.popleft()
        _queue.threads.discard(threading.current_thread())
        return None


def _work() -> None:
    while (build := _next()) is not None:
        try:
            build.load(library.build_kernel(build.table, build.name))
        except BaseException as error:  # noqa: BLE001 - an interrupt of the compiler too; there is no caller that it could be raised to
            _end(build, error)
        else:
            _end(build, None)


def _end(build: _Build, error: BaseException | None) -> None:
    with _queue.lock:
        build.tries += 1
        if not _queue.closed and error is not None and not isinstance(error, Exception) and build.tries < _TRIES:
            _queue.waiting.append(build)
            return
        _queue.unfinished.discard(build.key)
        if error is not None and not _queue.closed:
            _queue.failed[build.key] = (str(error) or type(error).__name__).splitlines()[0]  # without the compiler's output
        reported = error is not None and not _queue.closed
        _queue.lock.notify_all()
    if reported:
        _report(build, error)


def _report(build: _Build, error: BaseException) -> None:
    row, out_dtype = build.name
    what = f"kernel {row}{f' ({out_dtype})' if out_dtype else ''} of {build.table.arch}"
    text = f"{what} could not be built in the background and is not tried again in this process; products that it would serve stay slower: {error}"
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    except Warning:  # warnings are errors in this process; on this thread nobody would see one
        compile.say(f"scaled_mm: {text}")


# ---- the end of the process, and forks ----------------------------------------------------------------------------------


@atexit.register
def _close() -> None:
    """Drops the queue, stops the compilers, and lets their threads remove what they left."""
    with _queue.lock:
        _queue.closed = True
        _queue.waiting.clear()
        threads = list(_queue.threads)
    start = last = time.monotonic()
    while any(thread.is_alive() for thread in threads):
        compile.end_all()
        now = time.monotonic()
        last = now if compile.is_running() else last
        if now - last > _GRACE_S or now - start > _EXIT_S:
            return  # threads that wait for another process's build, or for the driver: daemons do not keep the interpreter
        time.sleep(0.01)


def _forget() -> None:
    global _queue
    _queue = _Queue()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
