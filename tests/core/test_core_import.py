"""What `import scaled_mm` costs and touches, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROCESSES = 5

# After torch, whose own import takes a second or more and is not ours. Not in a copy (fork) of a process that has torch: there each page that the
# import writes is copied first, which took 20 of 63 ms.
TIMED = """
import time, torch
start = time.perf_counter()
import scaled_mm
print(time.perf_counter() - start)
"""

TOUCHED = """
import json, sys, torch
before = set(sys.modules)
import scaled_mm
with open("/proc/self/maps") as maps:
    libraries = {line.split("/")[-1].strip() for line in maps if ".so" in line}
print(json.dumps({
    "cuda": torch.cuda.is_initialized(),
    "modules": sorted({name.split(".")[0] for name in set(sys.modules) - before}),
    "libraries": sorted(libraries),
}))
"""


def run(program: str, *arguments: str, **variables: str) -> str:
    command, environment = [sys.executable, "-c", program, *arguments], {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment).stdout


def test_the_import_adds_less_than_100_ms_to_that_of_torch(tmp_path):
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}  # as pip leaves a package: compiling takes as long again
    _, *seconds = (float(run(TIMED, **compiled)) for _ in range(1 + PROCESSES))  # the first one compiles
    # A busy machine makes single runs slow, never fast.
    assert min(seconds) < 0.1, f"import scaled_mm: {', '.join(f'{s * 1e3:.0f}' for s in seconds)} ms"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_import_touches_no_gpu_loads_no_library_and_imports_nothing_heavy():
    touched = json.loads(run(TOUCHED))
    assert touched["cuda"] is False
    assert not [name for name in touched["libraries"] if "scaled_mm" in name or name == "library.so"]
    heavy = {"pydantic", "yaml", "rich", "filelock", "matplotlib", "cutlass_library", "ninja"}
    assert not heavy & set(touched["modules"]), touched["modules"]


def test_a_product_on_the_cpu_touches_no_gpu():
    program = (
        "import torch, scaled_mm as sm; x = torch.ones(2, 3, dtype=torch.int8); "
        "assert sm.scaled_mm(x, x.t(), out_dtype=torch.int32).tolist() == [[3, 3], [3, 3]]; print(torch.cuda.is_initialized())"
    )
    assert run(program).strip() == "False"
