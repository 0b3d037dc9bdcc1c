"""compute-sanitizer over one run of every kernel config and every row-wise operator: no access out of bounds, no race in shared memory, no read
before a write."""

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
EVERY_ROW_WISE_OPERATOR = Path(__file__).parent / "every_rowwise.py"


def find_sanitizer() -> str | None:
    nvcc = toolchain.find_nvcc()
    beside = nvcc and nvcc.path.resolve().parent / "compute-sanitizer"
    return str(beside) if beside and beside.is_file() else shutil.which("compute-sanitizer")


TOOLS = ["memcheck", "racecheck", "initcheck"]


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("arch", [None, "sm75", "sm80", "sm89"], ids=lambda arch: arch or "native")
def test_every_row_is_clean_under_compute_sanitizer(tool, arch):
    check(tool, EVERY_ROW, *([arch] if arch else []))


@pytest.mark.parametrize("tool", TOOLS)
def test_every_row_wise_operator_is_clean_under_compute_sanitizer(tool):
    check(tool, EVERY_ROW_WISE_OPERATOR)


def check(tool: str, *script: str | Path) -> None:
    sanitizer = find_sanitizer()
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer of the CUDA toolkit")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "86", "--print-limit", "20", sys.executable, *map(str, script)]
    # Each tensor an allocation of its own: inside torch's cached blocks nothing would be out of bounds.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "SCALED_MM_JIT": "wait"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    clean = "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)" if tool == "racecheck" else "ERROR SUMMARY: 0 errors"
    assert "0 wrong" in done.stdout and clean in done.stdout
