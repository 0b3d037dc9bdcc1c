"""compute-sanitizer over one run of every row: no access out of bounds, no race in shared memory, nothing read before it was written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scaled_mm.jit import toolchain

pytestmark = pytest.mark.gpu
EVERY_ROW = Path(__file__).parent / "every_row.py"


def find_sanitizer() -> str | None:
    nvcc = toolchain.find_nvcc()
    beside = nvcc and nvcc.path.resolve().parent / "compute-sanitizer"
    return str(beside) if beside and beside.is_file() else shutil.which("compute-sanitizer")


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck"])
@pytest.mark.parametrize("arch", [None, "sm75", "sm80", "sm89"], ids=lambda arch: arch or "native")
def test_every_row_is_clean_under_compute_sanitizer(tool, arch):
    sanitizer = find_sanitizer()
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer of the CUDA toolkit")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "86", "--print-limit", "20"]
    # Each tensor an allocation of its own: inside torch's cached blocks nothing would be out of bounds.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    run = [*command, sys.executable, str(EVERY_ROW), *([arch] if arch else [])]
    done = subprocess.run(run, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    clean = "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)" if tool == "racecheck" else "ERROR SUMMARY: 0 errors"
    assert "0 wrong" in done.stdout and clean in done.stdout
