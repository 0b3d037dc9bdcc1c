"""What a new user waits for, from a new virtual environment and an empty cache: `python tests/jit/first_use.py --out DIR`.

Copies this checkout, installs the copy with `pip install .`, and measures `scaled-mm verify --time`, with --arch `scaled-mm build --arch`, and the
first product of a process, each with an empty cache of its own. Writes first_use.json and first_use.md. The torch of the Python that
runs this is used as it is; pip's environment variables hold (PIP_NO_INDEX, PIP_FIND_LINKS). Not run by pytest: it takes minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from scaled_mm.bench.report import commit
from scaled_mm.measure.document import Command, Heading, Part, Table, Text, markdown
from scaled_mm.measure.environment import read_environment
from scaled_mm.measure.record import Environment, write_atomically

CHECKOUT = Path(__file__).resolve().parents[2]
SOURCES = ("csrc", "cutlass_configs", "scaled_mm", "schemas", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
FIRST = """
import json, time
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
a = torch.randint(-128, 128, (40, 4096), dtype=torch.int8, device=device)
b = torch.randint(-128, 128, (4096, 4096), dtype=torch.int8, device=device).t()
x, a_scale, b_scale = torch.randn(40, 4096, device=device).bfloat16(), torch.rand(40, 1, device=device), torch.rand(4096, device=device)
finish = torch.cuda.synchronize if device == "cuda" else lambda: None
finish()
seconds, start = {}, time.perf_counter()

def lap(name):
    global start
    finish()
    seconds[name], start = time.perf_counter() - start, time.perf_counter()

import scaled_mm as sm
lap("import scaled_mm")
sm.scaled_mm(a, b, a_scale, b_scale)
lap("the first scaled_mm, M = 40, N = K = 4096")
sm.int8_linear(x, b, b_scale)
lap("the first int8_linear after it")
print(json.dumps(seconds))
"""
INSTALL, VERIFY, BUILD = "pip install .", "scaled-mm verify --time", "scaled-mm build --arch "


class NewUser:
    """A copy of the checkout and a virtual environment in a folder, and a cache for each program that is measured."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.copy = folder / "checkout"
        self.copy.mkdir()
        for name in SOURCES:
            source = CHECKOUT / name
            if source.is_dir():
                shutil.copytree(source, self.copy / name, ignore=shutil.ignore_patterns("__pycache__", "lib", "*.egg-info"))
            else:
                shutil.copy(source, self.copy / name)
        self.bin = folder / "venv" / "bin"
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        site = subprocess.run(
            [self.bin / "python", "-c", "import site; print(site.getsitepackages()[0])"], capture_output=True, text=True, check=True
        )
        Path(site.stdout.strip(), "torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")

    def run(self, name: str, *command: str, cwd: Path | None = None) -> tuple[float, str]:
        """(seconds, stdout). Ends this program if the command fails."""
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        environment |= {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}", "SCALED_MM_CACHE_DIR": str(self.folder / f"cache {name}")}
        print(f"{name} ...", file=sys.stderr, flush=True)
        start = time.perf_counter()
        done = subprocess.run([self.bin / command[0], *command[1:]], cwd=cwd or self.folder, env=environment, stdout=subprocess.PIPE, text=True)
        seconds = time.perf_counter() - start
        if done.returncode != 0:
            sys.exit(f"{shlex.join(command)}: exit code {done.returncode}\n{done.stdout[-2000:]}")
        return seconds, done.stdout


def measure(arch: str | None) -> dict[str, float]:
    """Seconds by what was measured."""
    with tempfile.TemporaryDirectory() as folder:
        user = NewUser(Path(folder))
        seconds = {INSTALL: user.run("install", "pip", "install", "--quiet", ".", cwd=user.copy)[0]}
        seconds[VERIFY] = user.run("verify", "scaled-mm", "verify", "--time")[0]
        if arch is not None:
            seconds[BUILD + arch] = user.run("build", "scaled-mm", "build", "--arch", arch)[0]
        # The last one: its better kernels may still be compiled when it ends.
        return seconds | json.loads(user.run("first product", "python", "-c", FIRST)[1].splitlines()[-1])


def report(seconds: dict[str, float], environment: Environment, cores: int, command: str) -> str:
    parts: list[Part] = [
        Heading(1, f"What a new user waits for: {environment.gpu} ({environment.arch}), {cores} cores"),
        Command(command),
        Text(
            f"Commit {commit(environment)}, Python {environment.python}, torch {environment.torch}, {environment.cpu}. A new virtual environment "
            "that has torch; each program has an empty cache."
        ),
        Table(("what", "seconds"), [(what, f"{value:.1f}") for what, value in seconds.items()], "lr"),
    ]
    return markdown(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the report")
    parser.add_argument("--arch", help="also build all kernels of this architecture")
    args = parser.parse_args()
    environment = read_environment(torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))
    cores = len(os.sched_getaffinity(0))
    seconds = measure(args.arch)
    args.out.mkdir(parents=True, exist_ok=True)
    record = {"cores": cores, "seconds": seconds, "environment": environment.model_dump()}
    write_atomically(args.out / "first_use.json", json.dumps(record, indent=2) + "\n")
    text = report(seconds, environment, cores, shlex.join(["python", "tests/jit/first_use.py", *sys.argv[1:]]))
    write_atomically(args.out / "first_use.md", text)
    print(text)


if __name__ == "__main__":
    main()
