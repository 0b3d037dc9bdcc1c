"""Builds beside the program: what SCALED_MM_JIT says, one build of each kernel, one report of a failure, and no process that waits for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from scaled_mm.errors import BadParamError, KernelNotBuiltError
from scaled_mm.jit import background, cache, library, mode, provide, toolchain
from scaled_mm.jit.provide import When
from scaled_mm.tables import load_table

TABLE = load_table("sm90")
ROW = TABLE.rows[0].name
NAME = (ROW, "bf16")
GGUF = (TABLE.gguf.buckets[0].kernel, "q4_0")
SOON_S = 30


@pytest.fixture(autouse=True)
def fresh(monkeypatch, cache_root):
    """An empty queue in background mode; it is empty again afterwards."""
    monkeypatch.setattr(background, "_queue", background._Queue())
    monkeypatch.setenv(mode.JIT, "background")
    yield
    assert background.join(SOON_S)


class Builds:
    """Stands in for library.build_kernel: counts builds, and holds them until `go` is set."""

    def __init__(self):
        self.names, self.go, self.begun, self.most, self.now, self.error = [], threading.Event(), threading.Semaphore(0), 0, 0, None
        self.lock = threading.Lock()

    def __call__(self, table, name, announce=True) -> Path:
        with self.lock:
            self.names.append(name)
            self.now += 1
            self.most = max(self.most, self.now)
        self.begun.release()
        assert self.go.wait(SOON_S)
        with self.lock:
            self.now -= 1
        if self.error:
            raise self.error
        return Path(f"{name[0]}.so")


@pytest.fixture
def builds(monkeypatch):
    builds = Builds()
    monkeypatch.setattr(library, "build_kernel", builds)
    yield builds
    builds.go.set()


def provided(when: When, name=NAME) -> list[Path]:
    loaded = []
    provide.provide(TABLE, name, when, loaded.append)
    return loaded


# ---- what the variable says -----------------------------------------------------------------------------------------------


def test_the_default_is_background_and_another_value_is_an_error_that_names_the_variable(monkeypatch):
    monkeypatch.delenv(mode.JIT)
    assert mode.current() == "background"
    monkeypatch.setenv(mode.JIT, "")
    assert mode.current() == "background"
    monkeypatch.setenv(mode.JIT, "soon")
    for use in (mode.current, mode.always_wait, lambda: provided(When.LATER)):
        with pytest.raises(BadParamError, match="^SCALED_MM_JIT: expected background, wait or off, got soon$"):
            use()


def test_in_the_background_a_product_does_not_wait_and_the_kernel_is_loaded_when_it_is_built(builds):
    loaded = []
    provide.provide(TABLE, NAME, When.LATER, loaded.append)
    assert loaded == [] and background.state("sm90", ROW) == "is being compiled" and not background.join(0)
    builds.go.set()
    assert background.join(SOON_S) and loaded == [Path(f"{ROW}.so")] and background.state("sm90", ROW) is None


def test_what_nothing_can_stand_in_for_is_waited_for_also_in_the_background(builds):
    builds.go.set()
    assert provided(When.NOW) == [Path(f"{ROW}.so")], "a kernel that was named, or the one to start with"
    assert provided(When.LATER, GGUF) == [Path(f"{GGUF[0]}.so")], "kernel configs of GGUF products differ in their last bits"


def test_wait_builds_what_is_selected_at_once(builds, monkeypatch):
    monkeypatch.setenv(mode.JIT, "wait")
    builds.go.set()
    for when in (When.LATER, When.NOW):
        assert provided(when) == [Path(f"{ROW}.so")]
    assert provided(When.BUILT) == [] and len(builds.names) == 2


def test_off_builds_nothing_and_says_what_to_do_where_nothing_else_can_run(builds, monkeypatch):
    monkeypatch.setenv(mode.JIT, "off")
    for name in (NAME, GGUF):
        assert provided(When.LATER, name) == provided(When.BUILT, name) == []
    for name, option in ((NAME, "--out-dtype bf16"), (GGUF, "--format q4_0")):
        with pytest.raises(KernelNotBuiltError) as caught:
            provided(When.NOW, name)
        text = str(caught.value)
        assert text.startswith(f"kernel {name[0]} ({name[1]}) of sm90: expected a built kernel, got none, and SCALED_MM_JIT=off forbids")
        assert "`scaled-mm build --arch sm90`" in text and f"`--row {name[0]} {option}`" in text
    assert builds.names == [] and background.join(0)


@pytest.mark.parametrize("how", mode.MODES)
def test_a_kernel_in_the_cache_is_loaded_in_every_mode(builds, monkeypatch, how):
    monkeypatch.setenv(mode.JIT, how)
    monkeypatch.setattr(library, "nvcc_and_flags", lambda arch: (type("Nvcc", (), {"version": "13.0"}), []))
    monkeypatch.setattr(provide.toolchain, "find_nvcc", lambda: "nvcc")
    monkeypatch.setattr(provide.toolchain, "find_cutlass", lambda: "cutlass")
    monkeypatch.setattr(provide.toolchain, "cutlass_version", lambda: "4.2.0")
    path = cache.get_or_build("kernel", f"sm90-{ROW}-bf16", library.kernel_key(TABLE, NAME), lambda folder: (folder / cache.LIBRARY).touch())
    builds.go.set()
    assert provided(When.BUILT) == [path] and provided(When.BUILT, (ROW, "fp16")) == []
    if how != "wait":
        assert provided(When.LATER) == [path] and builds.names == []


def test_the_cache_is_searched_for_no_kernel_that_it_cannot_have(monkeypatch, cache_root):
    monkeypatch.setattr(library, "find_kernel", lambda *_: pytest.fail("the key of a kernel takes milliseconds"))
    assert provided(When.BUILT) == [] and provided(When.BUILT, ("of_another_table", "bf16")) == []


# ---- the queue ------------------------------------------------------------------------------------------------------------


def test_threads_that_ask_for_the_same_kernel_have_it_built_once(builds):
    loaded, start = [], threading.Barrier(8)

    def ask() -> None:
        start.wait(SOON_S)
        provide.provide(TABLE, NAME, When.LATER, loaded.append)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    builds.go.set()
    assert background.join(SOON_S) and builds.names == [NAME] and len(loaded) == 1


def test_no_more_kernels_are_compiled_at_a_time_than_there_are_workers(builds, monkeypatch):
    monkeypatch.setattr(background, "workers", lambda: 2)
    names = [(row.name, "bf16") for row in TABLE.rows[:5]]
    for name in names:
        provide.provide(TABLE, name, When.LATER, lambda path: None)
    for _ in range(2):
        assert builds.begun.acquire(timeout=SOON_S)
    assert not builds.begun.acquire(timeout=0.1) and builds.most == 2
    builds.go.set()
    assert background.join(SOON_S) and sorted(builds.names) == sorted(names) and builds.most == 2
    deadline = time.monotonic() + SOON_S
    while background._queue.threads:
        assert time.monotonic() < deadline, "threads end with the queue"


def test_there_is_one_worker_for_every_two_cores_and_at_least_one(monkeypatch):
    for cores, expected in ((1, 1), (2, 1), (3, 1), (16, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores), raising=False)  # noqa: B023
        assert background.workers() == expected


def test_a_failure_is_one_warning_that_names_the_kernel_and_is_not_tried_again(builds):
    builds.error = KernelNotBuiltError("nvcc: needed for building, not found")
    builds.go.set()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            assert provided(When.LATER) == [] and background.join(SOON_S)
        deadline = time.monotonic() + SOON_S
        while not seen and time.monotonic() < deadline:
            time.sleep(0.01)
    assert [str(one.message) for one in seen] == [
        f"kernel {ROW} (bf16) of sm90 could not be built in the background and is not tried again in this process; products that it would serve "
        "stay slower: nvcc: needed for building, not found"
    ]
    assert builds.names == [NAME] and background.state("sm90", ROW) == "could not be compiled: nvcc: needed for building, not found"


def test_a_library_that_cannot_be_loaded_is_reported_too(builds, monkeypatch):
    reported = []
    monkeypatch.setattr(background, "_report", lambda build, error: reported.append(str(error)))
    builds.go.set()

    def load(path: Path) -> None:
        raise BadParamError("path: expected a kernel library")

    provide.provide(TABLE, NAME, When.LATER, load)
    assert background.join(SOON_S)
    deadline = time.monotonic() + SOON_S
    while not reported and time.monotonic() < deadline:
        time.sleep(0.01)
    assert reported == ["path: expected a kernel library"]


def test_an_interrupt_of_the_terminals_programs_is_no_failure(monkeypatch):
    """Ctrl-C reaches the compilers too; the program may go on, as an interactive one does."""
    tries, loaded = [], []

    def build(table, name, announce=True) -> Path:
        tries.append(name)
        if len(tries) == 1:
            raise KeyboardInterrupt
        return Path("row.so")

    monkeypatch.setattr(library, "build_kernel", build)
    provide.provide(TABLE, NAME, When.LATER, loaded.append)
    assert background.join(SOON_S) and len(tries) == 2 and loaded == [Path("row.so")]


# ---- processes --------------------------------------------------------------------------------------------------------------

# A compiler that writes its number and waits.
SLOW = """#!/bin/sh
echo $$ > "$PIDS.new"
mv "$PIDS.new" "$PIDS"
exec sleep 300
"""
# The room that builds, without torch, whose import takes seconds.
PROGRAM = f"""
import os, sys, time, types
from pathlib import Path
package = types.ModuleType("scaled_mm")
package.__path__ = [{str(Path(cache.__file__).parent.parent)!r}]
sys.modules["scaled_mm"] = package
from scaled_mm.jit import background, cache, compile, library
from scaled_mm.tables import load_table

def build(table, name, announce=True):
    def compiled(folder):
        (folder / "main.cpp").write_text("")
        compile.run_ninja(folder, "main", sys.argv[1], [folder / "main.cpp"], [], [])
    return cache.get_or_build("kernel", name[0], "key", compiled)

library.build_kernel = build
table = load_table("sm90")
for row in table.rows[:6]:
    background.start(table, (row.name, "bf16"), lambda path: None)
while not os.path.exists(os.environ["PIDS"]):
    time.sleep(0.01)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """program(lines): runs them while a compiler is at work and others wait; (process, seconds from the start of the compiler to the end)."""
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    (tmp_path / "slow").write_text(SLOW)
    (tmp_path / "slow").chmod(0o755)

    def program(lines: str) -> tuple[subprocess.CompletedProcess, float]:
        command = [sys.executable, "-c", PROGRAM + lines, str(tmp_path / "slow")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        return done, time.time() - (tmp_path / "pids").stat().st_mtime

    return program


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def check_nothing_is_left(tmp_path: Path, cache_root: Path) -> None:
    deadline = time.monotonic() + SOON_S
    while runs(int((tmp_path / "pids").read_text())):
        assert time.monotonic() < deadline, "the compiler ends"
        time.sleep(0.02)
    assert [path.name for path in cache_root.iterdir() if path.is_dir()] == []


def test_a_process_ends_at_once_with_work_in_the_queue_and_leaves_nothing(program, tmp_path, cache_root):
    done, seconds = program("")
    assert (done.returncode, done.stderr) == (0, "") and seconds < 10
    check_nothing_is_left(tmp_path, cache_root)


def test_an_interrupted_process_ends_at_once_too(program, tmp_path, cache_root):
    done, seconds = program("import signal\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)")
    assert done.returncode == -signal.SIGINT and "KeyboardInterrupt" in done.stderr and seconds < 10
    check_nothing_is_left(tmp_path, cache_root)


def test_a_forked_child_ends_on_its_own_and_leaves_the_parents_compiler_alone(program, tmp_path):
    done, seconds = program(
        """
pid = int(Path(os.environ["PIDS"]).read_text())
child = os.fork()
if child == 0:
    assert not background._queue.unfinished and not compile.is_running() and background.join(0)
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert Path(f"/proc/{pid}").exists() and not background.join(0)
print("the compiler is still at work")
"""
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "the compiler is still at work\n", "") and seconds < 10


def test_a_process_does_not_wait_for_the_build_of_another_one(program, tmp_path, cache_root):
    import filelock

    cache_root.mkdir(mode=0o700)
    with filelock.FileLock(cache_root / f"kernel-{TABLE.rows[0].name}-key.lock"):  # the other process's
        start = time.monotonic()
        (tmp_path / "pids").write_text("0")
        done, _ = program("time.sleep(0.5)")
    assert (done.returncode, done.stderr) == (0, "") and time.monotonic() - start < 30


# ---- the fallback of a new machine ----------------------------------------------------------------------------------------


@pytest.fixture
def many_cores(monkeypatch):
    monkeypatch.setattr(background, "workers", lambda: 8)


def begun(builds) -> list:
    builds.go.set()
    assert background.join(SOON_S)
    return sorted(builds.names)


def test_a_new_machine_compiles_the_fallback_for_16_bit_outputs(builds, many_cores):
    loaded = []
    provide.start_fallbacks("sm90", loaded.append)
    fallback = load_table("sm90").fallback
    assert begun(builds) == [(fallback, "bf16"), (fallback, "fp16")] and loaded == [Path(f"{fallback}.so")] * 2


@pytest.mark.parametrize("value", ["off", "wait"])
def test_nothing_is_compiled_ahead_in_other_modes(builds, many_cores, monkeypatch, value):
    monkeypatch.setenv(mode.JIT, value)
    provide.start_fallbacks("sm90", print)
    assert begun(builds) == []


@pytest.mark.parametrize("entry", ["arch-sm90-0123", "kernel-sm90-decode_64x8x128_k2_x11-bf16-0123", "row-sm90-generic_64x64x64-0123"])
def test_nothing_is_compiled_ahead_where_the_cache_has_kernels_of_the_architecture(builds, many_cores, entry):
    (cache.cache_dir() / entry).mkdir(parents=True)
    provide.start_fallbacks("sm90", print)
    assert begun(builds) == []


def test_kernels_of_another_architecture_do_not_count(builds, many_cores):
    (cache.cache_dir() / "kernel-sm80-generic_64x64x64-bf16-0123").mkdir(parents=True)
    provide.start_fallbacks("sm90", print)
    assert len(begun(builds)) == 2


def test_nothing_is_compiled_ahead_where_the_package_has_the_architecture_or_there_is_no_compiler(builds, many_cores, monkeypatch):
    monkeypatch.setattr(library, "shipped_kernels", lambda: [("sm90", Path("kernels_sm90.so"))])
    provide.start_fallbacks("sm90", print)
    monkeypatch.setattr(library, "shipped_kernels", list)
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    provide.start_fallbacks("sm90", print)
    assert begun(builds) == []


def test_nothing_is_compiled_ahead_on_a_machine_of_few_cores(builds, monkeypatch):
    monkeypatch.setattr(background, "workers", lambda: 1)
    provide.start_fallbacks("sm90", print)
    assert begun(builds) == []


# ---- kernels of one kernel config apart ------------------------------------------------------------------------------------


def test_the_longest_kernel_configs_are_taken_apart_while_jobs_would_be_idle(monkeypatch):
    monkeypatch.setattr(library, "find_kernel", lambda table, name: None)
    table = load_table("sm90")
    long = next(row.name for row in table.rows if row.family == "c3x")
    units = [[(table.fallback, out) for out in ("bf16", "fp16")], [(long, out) for out in ("bf16", "fp16", "fp32", "int32")]]
    for jobs, count in ((2, 2), (4, 3), (5, 5), (6, 6), (16, 6)):
        found = library._apart(table, units, jobs)
        assert len(found) == count and sorted(name for unit in found for name in unit) == sorted(name for unit in units for name in unit)
    assert [(long, "bf16")] in library._apart(table, units, 5)
    monkeypatch.setattr(library, "find_kernel", lambda table, name: Path("built.so") if name == (long, "fp32") else None)
    assert units[1] in library._apart(table, units, 16), "what is built in part is completed as one"
