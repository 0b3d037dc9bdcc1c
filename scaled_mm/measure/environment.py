"""Reads where a benchmark ran: GPU, driver, clocks, versions, commit. Changes nothing on the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from scaled_mm.measure.device import last_level_cache_bytes
from scaled_mm.measure.record import Clocks, Environment
from scaled_mm.tables.tuned import slug

BUSY_CPU = "is the CPU busy? OMP_WAIT_POLICY=PASSIVE keeps torch's threads from spinning"

SMI_FIELDS = (
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.draw",
    "power.limit",
    "temperature.gpu",
)


@dataclass(frozen=True)
class SmiReading:
    """nvidia-smi's answer. status: "read", or why there is none; `values` by field name, text as printed."""

    status: str
    values: dict[str, str]

    def number(self, field: str) -> float | None:
        """The field as a number; None when it is missing or not one ("[N/A]")."""
        try:
            return float(self.values[field])
        except (KeyError, ValueError):
            return None


def parse_smi(text: str) -> SmiReading:
    """One line of `--format=csv,noheader,nounits` -> a reading."""
    lines = [line for line in text.splitlines() if line.strip()]
    values = [value.strip() for value in lines[0].split(",")] if lines else []
    if len(lines) != 1 or len(values) != len(SMI_FIELDS):
        return SmiReading(f"nvidia-smi answered {text.strip()!r}, expected one line of {len(SMI_FIELDS)} fields", {})
    return SmiReading("read", dict(zip(SMI_FIELDS, values, strict=True)))


def query_smi(device: torch.device) -> SmiReading:
    """Asks nvidia-smi about one GPU, by UUID: its numbering ignores CUDA_VISIBLE_DEVICES."""
    if device.type != "cuda":
        return SmiReading("no GPU", {})
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    uuid = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    command = ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits", "-i", uuid]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return SmiReading(f"{type(error).__name__}: {error}", {})
    if done.returncode != 0:
        return SmiReading(f"nvidia-smi exit status {done.returncode}: {(done.stdout + done.stderr).strip()}", {})
    return parse_smi(done.stdout)


def read_clocks(device: torch.device, when: str) -> Clocks | None:
    """The GPU's clocks and power now; None when nvidia-smi gives no answer (the environment says why)."""
    reading = query_smi(device)
    if reading.status != "read":
        return None
    return Clocks(
        when=when,
        sm_mhz=reading.number("clocks.sm"),
        mem_mhz=reading.number("clocks.mem"),
        power_w=reading.number("power.draw"),
        temperature_c=reading.number("temperature.gpu"),
    )


def read_environment(device: torch.device) -> Environment:
    """The whole environment of a run on `device`."""
    reading = query_smi(device)
    cuda = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if cuda else None
    commit, dirty = git_state(Path(__file__).resolve().parents[2])
    return Environment(
        device=str(device),
        gpu=properties.name if cuda else cpu_name(),
        arch=f"sm{properties.major}{properties.minor}" if cuda else "cpu",
        cpu=cpu_name(),
        platform=platform.platform(),
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        driver=reading.values.get("driver_version"),
        cutlass=version_of("nvidia-cutlass"),
        scaled_mm=version_of("scaled_mm"),
        git_commit=commit,
        git_dirty=dirty,
        multiprocessors=properties.multi_processor_count if cuda else None,
        memory_bytes=properties.total_memory if cuda else None,
        cache_bytes=last_level_cache_bytes(device),
        sm_max_mhz=reading.number("clocks.max.sm"),
        power_limit_w=reading.number("power.limit"),
        nvidia_smi=reading.status,
    )


def git_state(folder: Path) -> tuple[str | None, bool | None]:
    """(commit, whether tracked files differ from it) of the checkout at `folder`.

    SCALED_MM_COMMIT comes before it, for copies of the sources whose repository is missing or stale.
    """
    if commit := os.environ.get("SCALED_MM_COMMIT"):
        return commit, None
    if not (folder / ".git").exists():
        return None, None
    try:
        commit = _git(folder, "rev-parse", "HEAD").strip()
        return commit, bool(_git(folder, "status", "--porcelain", "--untracked-files=no").strip())
    except (OSError, subprocess.SubprocessError):
        return None, None  # no git, or a repository without a commit: both are recorded as "no commit"


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model name on Linux, else what Python knows."""
    if cpuinfo.is_file():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if found:
            return found.group(1).strip()
    return platform.processor() or platform.machine()


def report_folder(environment: Environment) -> Path:
    """reports/<arch>/<gpu>, relative to where the command runs."""
    return Path("reports") / environment.arch / slug(environment.gpu)


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout


def version_of(package: str) -> str | None:
    """The version of an installed package; None when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
