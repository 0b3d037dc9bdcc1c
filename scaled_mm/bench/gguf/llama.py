"""llama.cpp's times of the same products: measured by its `test-backend-ops`, or the committed ones of one H200.

`test-backend-ops perf -o MUL_MAT` prints a line a product (print_perf_console in tests/test-backend-ops.cpp), m being the
rows of the weight and n the tokens:

    MUL_MAT(type_a=q4_0,type_b=f32,m=4096,n=1,k=14336,bs=[1,1],nr=[1,1],...):   22152 runs -    45.22 us/run - 117.44 MFLOP/run - 2.60 TFLOPS
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from scaled_mm.bench.gguf.record import LlamaSource
from scaled_mm.bench.recorded import read_recorded, recorded_path
from scaled_mm.errors import BadParamError
from scaled_mm.gguf_formats import WEIGHT_FORMATS

_FILE = "llama_cpp_h200.json"
RECORDED_FILE = recorded_path(_FILE)

#: (format, N, K, M): rows of the weight, K, tokens.
Product = tuple[str, int, int, int]

_PATIENCE_S = 1800
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_LINE = re.compile(r"^\s*MUL_MAT\((?P<parameters>.*)\):\s+\d+ runs -\s+(?P<us>[0-9.]+) us/run")
_PARAMETER = re.compile(r"(\w+)=(\[[^\]]*\]|[^,]*)")
# One product of a whole weight: no batch, nothing broadcast, permuted, viewed or fused, float32 activations.
_PLAIN = {"type_b": "f32", "bs": "[1,1]", "nr": "[1,1]", "per": "[0,1,2,3]", "v": "0", "k_v": "0", "o": "1"}


@dataclass(frozen=True)
class LlamaTimes:
    """Microseconds by product, and where they come from."""

    us: dict[Product, float]
    source: LlamaSource


def parse(text: str) -> dict[Product, float]:
    """The plain products of GGUF formats among the lines that `test-backend-ops perf` printed; of repeats the first."""
    found: dict[Product, float] = {}
    for line in _COLOR.sub("", text).splitlines():
        if (match := _LINE.match(line)) is None:
            continue
        given = dict(_PARAMETER.findall(match["parameters"]))
        if given.get("type_a") not in WEIGHT_FORMATS or any(given.get(name, value) != value for name, value in _PLAIN.items()):
            continue
        try:
            product = (given["type_a"], int(given["m"]), int(given["k"]), int(given["n"]))
        except (KeyError, ValueError):
            continue  # a line of another form says nothing that could be compared
        found.setdefault(product, float(match["us"]))
    return found


def measure(path: Path, device: torch.device) -> LlamaTimes:
    """Runs `PATH perf -o MUL_MAT` on `device` and reads what it prints. BadParamError when that gives no times."""
    if not path.is_file() or not os.access(path, os.X_OK):
        raise BadParamError(f"--llama: expected the path of llama.cpp's test-backend-ops, got {path}")
    words = [str(path.resolve()), "perf", "-o", "MUL_MAT"]
    environment = dict(os.environ)
    if device.type == "cpu":
        words += ["-b", "CPU"]  # which it leaves out unless it is named
    else:
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        environment["CUDA_VISIBLE_DEVICES"] = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=_PATIENCE_S, env=environment, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadParamError(f"--llama: {path} gave no times: {type(error).__name__}: {error}") from error
    us = parse(done.stdout)
    if done.returncode or not us:
        last = (done.stderr.strip() or done.stdout.strip() or "it printed nothing").splitlines()[-1]
        raise BadParamError(f"--llama: {path} gave no times of GGUF formats, exit status {done.returncode}: {last}")
    command = " ".join([path.name, *words[1:]])
    told = f"llama.cpp was measured right before this run by `{command}`, which gave {len(us)} products of GGUF formats"
    return LlamaTimes(us, LlamaSource(status="measured", told=told))


def recorded(gpu: str) -> LlamaTimes:
    """The committed times, on the GPU that they are of; on any other none."""
    data, rows = read_recorded(_FILE)
    if gpu != data["gpu"]:
        told = f"llama.cpp was not run (`--llama PATH` does), and the times in `{RECORDED_FILE}` are of an {data['gpu']}"
        return LlamaTimes({}, LlamaSource(status="none", told=told))
    us = {(row["fmt"], row["N"], row["K"], row["M"]): row["us"] for row in rows}
    told = f"llama.cpp's times are those in `{RECORDED_FILE}`, of another {data['gpu']}, not measured in this run: {data['what']}; {data['when']}"
    return LlamaTimes(us, LlamaSource(status="recorded", told=told))
