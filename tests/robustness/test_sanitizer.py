"""compute-sanitizer over one run of every kernel config and every row-wise operator: no access out of bounds, no race in shared memory, no read
before a write."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scaled_mm.jit import toolchain

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
EVERY_ROW = Path(__file__).parent / "every_row.py"
EVERY_ROW_WISE_OPERATOR = Path(__file__).parent / "every_rowwise.py"
SYNCWARP_THEN_ONE_ARRIVAL = "block_scaled_wgmma|gguf_wgmma_[0-9]+x(8|16)_"  # kernel configs by name
TOOLS = ["memcheck", "racecheck", "initcheck"]
# Patterns for the kernel configs of each section: a whole table would take minutes, and its tests would not run side by side.
SECTIONS = {
    "plain": "^(?!grouped_|block_scaled_|gguf_)",
    "grouped": "^grouped_(?!block_scaled_)",
    "block_scaled": "^block_scaled_",
    "grouped_block_scaled": "^grouped_block_scaled_",
    "gguf_mma": "^gguf_mma_",
    "gguf_wgmma_few": "^gguf_wgmma_[0-9]+x(8|16|32|64)_",  # tokens of a tile
    "gguf_wgmma_cluster": "^gguf_wgmma_cluster_",
    "gguf_wgmma_many": "^gguf_wgmma_[0-9]+x(96|[0-9]{3})_",
}
ARCHES = ["", "sm75", "sm80", "sm89"]
CASES = [(arch, section) for arch in ARCHES for section in SECTIONS if not (arch and "wgmma" in section)]


def find_sanitizer() -> str | None:
    nvcc = toolchain.find_nvcc()
    beside = nvcc and nvcc.path.resolve().parent / "compute-sanitizer"
    return str(beside) if beside and beside.is_file() else shutil.which("compute-sanitizer")


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("arch, section", CASES, ids=lambda name: name or "native")
def test_every_row_is_clean_under_compute_sanitizer(arch, section, tool):
    without = f"^(?!.*({SYNCWARP_THEN_ONE_ARRIVAL}))" if tool == "racecheck" else ""
    check(tool, EVERY_ROW, arch, without + SECTIONS[section])


def test_kernels_in_which_one_lane_arrives_for_a_warp_have_no_races(tmp_path):
    """In these kernels one lane of a warp arrives at an mbarrier, after __syncwarp, when all lanes have read a stage. racecheck tracks the mbarrier
    but not __syncwarp, and reports the other lanes' reads as races. So here a copy of the sources is compiled in which every lane arrives.
    That a kernel has its __syncwarp is not tested."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of SM90")
    for room in ("csrc", "cutlass_configs", "scaled_mm"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    for header, one, all_lanes in (
        ("int8/block_scaled/wgmma_stages.cuh", "kArrivingLanes = 1;", "kArrivingLanes = 32;"),
        ("gguf/wgmma_shape.cuh", "kArrivals = kWide ? 32 : 1;", "kArrivals = 32;"),
    ):
        path = tmp_path / "csrc" / header
        source = path.read_text()
        assert source.count(one) == 1
        path.write_text(source.replace(one, all_lanes))
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    variables = {"PYTHONPATH": str(tmp_path), "SCALED_MM_CACHE_DIR": str(cache)}
    # Without racecheck first, to compile the kernels: racecheck would slow that down.
    subprocess.run([sys.executable, EVERY_ROW, "sm90", SYNCWARP_THEN_ONE_ARRIVAL], env={**os.environ, **variables}, check=True)
    check("racecheck", EVERY_ROW, "sm90", SYNCWARP_THEN_ONE_ARRIVAL, **variables)


@pytest.mark.parametrize("tool", TOOLS)
def test_every_row_wise_operator_is_clean_under_compute_sanitizer(tool):
    check(tool, EVERY_ROW_WISE_OPERATOR)


def check(tool: str, *script: str | Path, **variables: str) -> None:
    sanitizer = find_sanitizer()
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer of the CUDA toolkit")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "86", "--print-limit", "20", sys.executable, *map(str, script)]
    # Each tensor an allocation of its own: inside torch's cached blocks nothing would be out of bounds.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "SCALED_MM_JIT": "wait", **variables}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    clean = "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)" if tool == "racecheck" else "ERROR SUMMARY: 0 errors"
    assert "0 wrong" in done.stdout and clean in done.stdout
