"""The build cache: an entry is built once, whole, or not at all."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from scaled_mm.errors import KernelNotBuiltError
from scaled_mm.jit import cache

CONTENT = b"a library" * 1000


def fake_build(folder: Path) -> None:
    (folder / cache.LIBRARY).write_bytes(CONTENT)


class Counted:
    """A builder that can say how often it ran."""

    def __init__(self, build=fake_build):
        self.count = 0
        self.build = build

    def __call__(self, folder: Path) -> None:
        self.count += 1
        self.build(folder)


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def logging_build(log: Path, seconds: float):
    """A slow builder that writes one line to `log` as it starts; lines of several processes do not mix."""

    def build(folder: Path) -> None:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        (folder / "kernel.o").write_bytes(b"half a")
        time.sleep(seconds)
        fake_build(folder)

    return build


# Module-level: a new process imports them.
def build_in_a_process(log: Path, barrier, results) -> None:
    barrier.wait(60)
    path = cache.get_or_build("kernel", "row", "key", logging_build(log, 0.3))
    results.put((os.getpid(), path.read_bytes() == CONTENT))


def hang_in_a_process(log: Path) -> None:
    cache.get_or_build("kernel", "row", "key", logging_build(log, 600))


def test_a_second_call_takes_what_the_first_one_built(cache_root):
    build = Counted()
    first = cache.get_or_build("kernel", "row", "key", build)
    second = cache.get_or_build("kernel", "row", "key", build)
    assert first == second and first.read_bytes() == CONTENT and build.count == 1
    assert [(entry.kind, entry.name, entry.size) for entry in cache.entries()] == [("kernel", "row", len(CONTENT))]


def test_another_key_kind_or_name_is_another_entry(cache_root):
    build = Counted()
    paths = {
        cache.get_or_build(kind, name, key, build)
        for kind, name, key in [("kernel", "row", "1"), ("kernel", "row", "2"), ("kernel", "other", "1"), ("core", "row", "1")]
    }
    assert len(paths) == build.count == len(cache.entries()) == 4


def test_a_digest_keeps_its_parts_apart():
    assert len({cache.digest("ab", "c"), cache.digest("a", "bc"), cache.digest("abc"), cache.digest("abc", ""), cache.digest()}) == 5
    assert cache.digest("ab", b"c") == cache.digest(b"ab", "c")


def test_processes_that_need_the_same_entry_at_once_build_it_once(cache_root, tmp_path):
    context = multiprocessing.get_context("spawn")
    log, barrier, results = tmp_path / "builds", context.Barrier(2), context.Queue()
    processes = [context.Process(target=build_in_a_process, args=(log, barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    answers = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert all(right for _, right in answers) and len({pid for pid, _ in answers}) == 2
    assert len(log.read_text().splitlines()) == 1
    assert folders(cache_root) == ["kernel-row-key"]


def test_threads_that_need_the_same_entry_at_once_build_it_once(cache_root, tmp_path):
    log = tmp_path / "builds"
    threads = [threading.Thread(target=cache.get_or_build, args=("kernel", "row", "key", logging_build(log, 0.1))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(log.read_text().splitlines()) == 1 and len(cache.entries()) == 1


def test_a_killed_build_leaves_no_entry_and_the_next_one_builds(cache_root, tmp_path):
    log = tmp_path / "builds"
    process = multiprocessing.get_context("spawn").Process(target=hang_in_a_process, args=(log,))
    process.start()
    deadline = time.monotonic() + 120
    while not list(cache_root.glob("building-*/kernel.o")):
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert cache.entries() == [] and not (cache_root / "kernel-row-key").exists()
    assert len(folders(cache_root)) == 1  # what it was working in

    path = cache.get_or_build("kernel", "row", "key", Counted())
    assert path.read_bytes() == CONTENT
    assert folders(cache_root) == ["kernel-row-key"]  # and the remains are gone


def test_a_build_that_was_killed_just_before_the_rename_is_no_entry(cache_root):
    path = cache.get_or_build("kernel", "row", "key", fake_build)
    path.parent.rename(cache_root / "building-kernel-row-key-abc")
    assert cache.entries() == []
    build = Counted()
    cache.get_or_build("kernel", "row", "key", build)
    assert build.count == 1 and folders(cache_root) == ["kernel-row-key"]


def test_a_build_that_fails_raises_its_error_and_leaves_nothing(cache_root):
    def fail(folder: Path) -> None:
        fake_build(folder)
        raise RuntimeError("the compiler said no")

    with pytest.raises(RuntimeError, match="the compiler said no"):
        cache.get_or_build("kernel", "row", "key", fail)
    assert folders(cache_root) == [] and cache.entries() == []
    assert cache.get_or_build("kernel", "row", "key", fake_build).read_bytes() == CONTENT


def test_a_build_that_writes_no_library_is_an_error_and_no_entry(cache_root):
    with pytest.raises(KernelNotBuiltError, match="^row: expected a library, the build ended with: .*No such file"):
        cache.get_or_build("kernel", "row", "key", lambda folder: None)
    assert folders(cache_root) == []


def truncate_library(folder: Path) -> None:
    library = folder / cache.LIBRARY
    library.write_bytes(library.read_bytes()[:-1])


def flip_a_bit(folder: Path) -> None:
    data = bytearray((folder / cache.LIBRARY).read_bytes())
    data[100] ^= 1
    (folder / cache.LIBRARY).write_bytes(data)


def remove_library(folder: Path) -> None:
    (folder / cache.LIBRARY).unlink()


def remove_record(folder: Path) -> None:
    (folder / "entry.json").unlink()


def truncate_record(folder: Path) -> None:
    (folder / "entry.json").write_text((folder / "entry.json").read_text()[:10])


def record_without_digest(folder: Path) -> None:
    (folder / "entry.json").write_text(json.dumps({"kind": "kernel", "name": "row"}))


def record_of_another_kind(folder: Path) -> None:
    (folder / "entry.json").write_text("[]")


DAMAGES = [truncate_library, flip_a_bit, remove_library, remove_record, truncate_record, record_without_digest, record_of_another_kind]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_entry_is_set_aside_and_built_again(cache_root, damage):
    path = cache.get_or_build("kernel", "row", "key", fake_build)
    damage(path.parent)
    assert cache.entries() == []
    build = Counted()
    assert cache.get_or_build("kernel", "row", "key", build) == path
    assert build.count == 1 and path.read_bytes() == CONTENT
    aside = [name for name in folders(cache_root) if name != "kernel-row-key"]
    assert len(aside) == 1 and aside[0].startswith("damaged-kernel-row-key-")
    assert [entry.path for entry in cache.entries()] == [path.parent]
    cache.get_or_build("kernel", "row", "key", build)
    assert build.count == 1


def test_a_cache_that_cannot_be_written_to_is_an_error_that_names_the_variable(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv("SCALED_MM_CACHE_DIR", str(root))
        for use in (cache.check_writable, lambda: cache.get_or_build("kernel", "row", "key", fake_build)):
            with pytest.raises(KernelNotBuiltError, match=f"SCALED_MM_CACHE_DIR: expected a folder that can be written to, got {root}: "):
                use()
        assert cache.entries() == [] and cache.find("kernel", "row", "key") is None


def test_a_cache_that_can_be_written_to_is_left_as_it_was(cache_root):
    cache.check_writable()
    assert list(cache_root.iterdir()) == []


def test_clear_removes_everything_and_says_how_much(cache_root):
    assert cache.clear() == 0  # there is no cache yet
    for key in "12":
        cache.get_or_build("kernel", "row", key, fake_build)
    assert cache.clear() == 2 * len(CONTENT)
    assert cache.entries() == [] and not cache_root.exists()


def test_the_cache_lies_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("SCALED_MM_CACHE_DIR", str(tmp_path / "mine"))
    assert cache.cache_dir() == tmp_path / "mine"
    monkeypatch.delenv("SCALED_MM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_dir() == tmp_path / "xdg" / "scaled_mm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.cache_dir() == tmp_path / "home" / ".cache" / "scaled_mm"
