"""Hostile calls of the C interface, under the sanitizers of the C++ compiler. hostile/hostile.h says what must hold.

A failure of section "random", by hand: build as `hostile` does, then `hostile_core KERNELS 10000 random`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scaled_mm.jit import cache, compile, library, toolchain

HERE = Path(__file__).resolve().parent
DRIVER = HERE.parent / "core" / "fake_driver.c"
ROUNDS = {"address,undefined": 10_000, "thread": 2_000}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fake driver takes the place of libcuda.so.1, which is Linux's")


def run(command: list, **variables: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, **variables}
    environment.pop("SCALED_MM_ARCH", None)
    return subprocess.run([str(word) for word in command], env=environment, capture_output=True, text=True, errors="replace", timeout=120)


def sanitizer_environment(folder: Path, cxx: str, sanitizer: str) -> dict[str, str]:
    """What programs with this sanitizer need to run here; skips where they do not."""
    source, program = folder / "empty.cpp", folder / "empty"
    source.write_text("int main() { return 0; }\n")
    built = run([cxx, f"-fsanitize={sanitizer}", source, "-o", program])
    if built.returncode:
        pytest.skip(f"{cxx} has no runtime for -fsanitize={sanitizer}: {built.stderr.strip().splitlines()[-1]}")
    for environment in ({}, {"ASAN_OPTIONS": "detect_leaks=0"}):  # leaks cannot be looked for under a debugger and in some containers
        started = run([program], **environment)
        if started.returncode == 0:
            return environment
    pytest.skip(f"a program with -fsanitize={sanitizer} does not start here: {started.stderr.strip()[-300:]}")


@pytest.mark.parametrize("sanitizer", ROUNDS)
def test_no_call_of_the_c_interface_crashes_and_every_refusal_says_what_was_wrong(tmp_path, sanitizer):
    cxx = toolchain.find_cxx()
    if cxx is None:
        pytest.skip("no C++ compiler here")
    environment = sanitizer_environment(tmp_path, cxx, sanitizer)
    # -fstrict-enums: a number that is no enumerator has to be refused even so.
    sanitize = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    flags = [*compile.cxx_flags(), "-O1", "-g1", "-fstrict-enums", "-Werror=switch", *sanitize]
    threads = sanitizer == "thread"
    program, kernels, driver = (tmp_path / name for name in ("program", "kernels", "driver"))
    for folder in (program, kernels, driver):
        folder.mkdir()
    sources = [*sorted((HERE / "hostile").glob("*.cpp")), *library.core_sources()]  # no two of one name: all objects are in one folder
    compile.run_ninja(program, "hostile", cxx, sources, [*flags, *(["-DHOSTILE_UNDER_THREAD_SANITIZER"] if threads else [])], sanitize, ["-ldl"])
    # The kernels write what they were handed to variables of their own, in every thread: without the thread sanitizer.
    own = [] if threads else sanitize
    compile.run_ninja(kernels, "hostile", cxx, [HERE / "hostile_kernels.cpp"], [*compile.cxx_flags(), "-w", "-O1", "-g1", *own], ["-shared", *own])
    assert run([cxx, "-x", "c", "-shared", "-fPIC", DRIVER, "-o", driver / "libcuda.so.1"]).returncode == 0

    place = os.pathsep.join(filter(None, (str(driver), os.environ.get("LD_LIBRARY_PATH"))))
    done = run([program / cache.LIBRARY, kernels / cache.LIBRARY, ROUNDS[sanitizer]], LD_LIBRARY_PATH=place, **environment)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-8000:]}"
    assert done.stdout.endswith("everything held\n")
