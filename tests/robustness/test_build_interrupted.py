"""Builds that are interrupted, killed, or meet a full disk: nothing half-made is used, nothing stays behind without bound."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from scaled_mm.errors import KernelNotBuiltError
from scaled_mm.jit import cache, compile, library
from scaled_mm.tables import load_table

PACKAGE = Path(cache.__file__).parent.parent
DEADLINE_S = 60

# A compiler that writes half of its output, starts a program of its own as nvcc does, and waits.
SLOW = """#!/bin/sh
echo half > main.o
sleep 300 > /dev/null 2>&1 &
echo $! $$ > "$PIDS.new"
mv "$PIDS.new" "$PIDS"
wait
"""
QUICK = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
echo whole > "$2"
"""
# The room that builds, without torch, whose import takes seconds.
BUILD = f"""
import sys, types
from pathlib import Path
package = types.ModuleType("scaled_mm")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["scaled_mm"] = package
from scaled_mm.jit import cache, compile
def build(folder):
    (folder / "main.cpp").write_text("")
    compile.run_ninja(folder, "main", sys.argv[1], [folder / "main.cpp"], [], [])
cache.get_or_build("kernel", "row", "key", build)
"""


@pytest.fixture
def cache_root(tmp_path, monkeypatch) -> Path:
    root = tmp_path / "cache"
    monkeypatch.setenv("SCALED_MM_CACHE_DIR", str(root))
    return root


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def build_with(compiler: Path, key: str = "key") -> Path:
    def build(folder: Path) -> None:
        (folder / "main.cpp").write_text("")
        compile.run_ninja(folder, "main", compiler, [folder / "main.cpp"], [], [])

    return cache.get_or_build("kernel", "row", key, build)


def fake(folder: Path) -> None:
    (folder / cache.LIBRARY).write_bytes(b"a library")


def wait_until(true, what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def building(tmp_path, cache_root, monkeypatch):
    """A process whose compiler is at work: (process, pids of the compiler's program, the compiler, its parents up to ninja)."""
    pids = tmp_path / "pids"
    monkeypatch.setenv("PIDS", str(pids))
    process = subprocess.Popen([sys.executable, "-c", BUILD, str(program(tmp_path / "slow", SLOW))], stderr=subprocess.PIPE, text=True)
    wait_until(lambda: pids.exists() or process.poll() is not None, "the compiler starts")
    found = list(map(int, pids.read_text().split()))
    while (parent := parent_of(found[-1])) != process.pid:  # ninja has a shell start compilers
        found.append(parent)
    yield process, found
    process.kill()
    process.wait()
    process.stderr.close()
    for pid in found:
        with contextlib.suppress(ProcessLookupError):  # it may end between the question and the signal
            if runs(pid):
                os.kill(pid, signal.SIGKILL)


def left(root: Path) -> list[str]:
    """Folders of the cache: entries, and what builds left."""
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def check_the_next_build_works(tmp_path, cache_root, key: str = "key") -> None:
    assert cache.find("kernel", "row", key) is None and cache.entries() == []
    assert build_with(program(tmp_path / "quick", QUICK), key).read_text() == "whole\n"
    assert left(cache_root) == [f"kernel-row-{key}"]


def test_an_interrupt_of_python_alone_ends_the_compilers_too_and_leaves_nothing(building, tmp_path, cache_root):
    process, pids = building
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=DEADLINE_S)[1]
    wait_until(lambda: not any(map(runs, pids)), "the compiler and what it started end")
    assert left(cache_root) == []
    check_the_next_build_works(tmp_path, cache_root)


@pytest.mark.parametrize("late", [0, 0.5])  # seconds until the second compiler starts: after the interrupt
def test_an_interrupt_of_a_build_of_many_kernels_waits_for_none_of_them(tmp_path, cache_root, monkeypatch, late):
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    compiler = program(tmp_path / "slow", SLOW)

    def build(table, name, announce):
        time.sleep(late * (name[0] == "two"))
        return build_with(compiler, name[0])

    monkeypatch.setattr(library, "build_kernel", build)

    def interrupt() -> None:
        wait_until((tmp_path / "pids").exists, "a compiler starts")
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        library.build_kernels(load_table("sm90"), [("one", "bf16"), ("two", "bf16"), ("three", "bf16")], jobs=2)
    assert time.monotonic() - start < DEADLINE_S
    wait_until(lambda: not any(map(runs, map(int, (tmp_path / "pids").read_text().split()))), "the compilers end")
    assert left(cache_root) == []


@pytest.mark.parametrize("who", ["the compiler", "ninja"])
def test_a_killed_compiler_or_ninja_is_an_error_and_leaves_nothing(building, tmp_path, cache_root, who):
    process, (_, compiler, *_, ninja) = building
    os.kill(compiler if who == "the compiler" else ninja, signal.SIGKILL)
    error = process.communicate(timeout=DEADLINE_S)[1]
    assert process.returncode == 1 and "KernelNotBuiltError: main: the compiler failed" in error
    assert left(cache_root) == []
    check_the_next_build_works(tmp_path, cache_root)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
@pytest.mark.parametrize("key", ["key", "another"])
def test_what_a_killed_python_leaves_goes_with_the_next_build_of_any_entry(building, tmp_path, cache_root, sign, key):
    process, _ = building
    process.send_signal(sign)
    assert process.wait(DEADLINE_S) == -sign
    assert len(left(cache_root)) == 1 and left(cache_root)[0].startswith("building-kernel-row-key-")
    check_the_next_build_works(tmp_path, cache_root, key)


def test_a_build_that_is_going_on_is_not_cleared_away(building, tmp_path, cache_root):
    assert build_with(program(tmp_path / "quick", QUICK), "another").read_text() == "whole\n"
    of_the_other, mine = left(cache_root)
    assert of_the_other.startswith("building-kernel-row-key-") and mine == "kernel-row-another"


def test_temporary_files_of_a_compiler_lie_in_the_folder_that_is_removed(tmp_path, cache_root):
    script = QUICK + 'echo temporary > "$TMPDIR/tmpxft_1"\nls > "$SEEN"\n'
    os.environ["SEEN"] = str(tmp_path / "seen")
    try:
        build_with(program(tmp_path / "compiler", script))
    finally:
        del os.environ["SEEN"]
    assert {"main.cpp", "tmpxft_1"} <= set((tmp_path / "seen").read_text().split())


def test_an_entry_that_is_damaged_again_and_again_is_kept_aside_once(cache_root):
    for _ in range(3):
        path = cache.get_or_build("kernel", "row", "key", fake)
        path.write_bytes(b"damaged")
    aside, entry = left(cache_root)
    assert aside.startswith("damaged-kernel-row-key-") and entry == "kernel-row-key"


def test_a_cache_that_is_removed_during_a_build_is_no_untyped_error(cache_root):
    """docs/design/builds-and-cache.md: it may be removed at any time."""

    def remove(folder: Path) -> None:
        fake(folder)
        shutil.rmtree(cache_root)

    with pytest.raises(KernelNotBuiltError, match="^row: expected a library, the build ended with: "):
        cache.get_or_build("kernel", "row", "key", remove)

    def other_builds_it(folder: Path) -> None:  # without this one's lock
        fake(folder)
        (cache_root / "kernel-row-key.lock").unlink()
        if not (cache_root / "kernel-row-key").exists():
            other = threading.Thread(target=cache.get_or_build, args=("kernel", "row", "key", fake))
            other.start()
            other.join()

    assert cache.get_or_build("kernel", "row", "key", other_builds_it).read_bytes() == b"a library"
    assert left(cache_root) == ["kernel-row-key"]


# ---- a disk that takes nothing ------------------------------------------------------------------------------------------


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("at", ["the source", "the record", "the move"])
def test_a_full_disk_is_a_typed_error_that_names_the_cache(cache_root, monkeypatch, at):
    def build(folder: Path) -> None:
        if at == "the source":
            full()
        fake(folder)

    if at == "the record":
        monkeypatch.setattr(Path, "write_text", full)
    if at == "the move":
        monkeypatch.setattr(cache.os, "replace", full)
    with pytest.raises(KernelNotBuiltError, match=f"^SCALED_MM_CACHE_DIR: expected a folder that can be written to, got {cache_root}: No space left"):
        cache.get_or_build("kernel", "row", "key", build)
    monkeypatch.undo()
    monkeypatch.setenv("SCALED_MM_CACHE_DIR", str(cache_root))
    assert left(cache_root) == [] and cache.entries() == []
    assert cache.get_or_build("kernel", "row", "key", fake).read_bytes() == b"a library"


def test_a_compiler_that_meets_a_full_disk_says_so_even_where_its_log_cannot_be_kept(tmp_path, cache_root, monkeypatch):
    compiler = program(tmp_path / "compiler", "#!/bin/sh\necho 'fatal error: No space left on device' >&2\nexit 1\n")
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(KernelNotBuiltError) as caught:
        cache.get_or_build("kernel", "row", "key", lambda folder: compile.run_ninja(folder, "main", compiler, [Path(__file__)], [], []))
    assert "main: the compiler failed (status 1); its log could not be kept in" in str(caught.value)
    assert "fatal error: No space left on device" in str(caught.value)
    assert left(cache_root) == []


def test_a_file_that_grows_beyond_the_limit_is_a_typed_error(tmp_path, cache_root):
    """RLIMIT_FSIZE: Python gets EFBIG, a compiler is killed by SIGXFSZ."""
    script = BUILD.replace("def build(folder):", "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))\ndef build(folder):")
    done = subprocess.run([sys.executable, "-c", script, str(program(tmp_path / "quick", QUICK))], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 1 and "KernelNotBuiltError: SCALED_MM_CACHE_DIR: expected a folder that can be written to" in done.stderr
    assert left(cache_root) == []
    check_the_next_build_works(tmp_path, cache_root)


def test_a_cache_that_can_only_be_read_serves_what_it_has_and_refuses_the_rest(cache_root, monkeypatch):
    path = cache.get_or_build("kernel", "row", "key", fake)

    def read_only(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("open", "mkdir", "rename", "replace"):
        monkeypatch.setattr(os, name, read_only)
    assert cache.get_or_build("kernel", "row", "key", fake) == path
    with pytest.raises(KernelNotBuiltError, match="expected a folder that can be written to, got .*: Read-only file system"):
        cache.get_or_build("kernel", "row", "another", fake)
    with pytest.raises(KernelNotBuiltError, match="Read-only file system"):
        cache.check_writable()


def test_a_compiler_that_cannot_be_started_is_a_typed_error(tmp_path, cache_root, monkeypatch):
    monkeypatch.setattr(compile.toolchain, "find_ninja", lambda: tmp_path / "gone")
    with pytest.raises(KernelNotBuiltError, match="^row: expected a library, the build ended with: .*No such file or directory"):
        build_with(tmp_path / "compiler")
    assert left(cache_root) == []


def test_a_full_or_closed_stderr_does_not_fail_a_build():
    """Nor does what would have gone there go to stdout."""
    script = BUILD.partition("def build")[0] + "with compile.progress_line('a kernel'): pass\nprint('built', flush=True)\n"
    for redirection in ("2> /dev/full", "2>&-"):
        command = ["sh", "-c", f'"$0" -c "$1" {redirection}', sys.executable, script]
        assert subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S).stdout == "built\n"
