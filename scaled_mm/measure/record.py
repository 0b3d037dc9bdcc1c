"""What the files of a run hold. The models are the schema: `model_json_schema()` of a document prints it.

Times are microseconds per call, sizes bytes, clocks MHz, power watts. A field that could not be read is null, and where
that needs a word a neighbouring field has it.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from scaled_mm.measure.regime import STANDARD

if TYPE_CHECKING:
    from typing_extensions import Self

SCHEMA_VERSION = 1


class Model(BaseModel):
    """What all records share: a field that is not known is refused."""

    # NaN is a result (an output that was never written): JSON has no word for it but "NaN".
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")


class Clocks(Model):
    """One reading of the GPU's state; `when` says at what point of the run."""

    when: str
    sm_mhz: float | None = None
    mem_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None


class Environment(Model):
    """Where the numbers come from. `gpu` is the CPU's model when device is "cpu"; `arch` then is "cpu"."""

    device: str
    gpu: str
    arch: str
    cpu: str
    platform: str
    python: str
    torch: str
    cuda: str | None
    driver: str | None
    cutlass: str | None
    scaled_mm: str | None
    git_commit: str | None
    git_dirty: bool | None
    multiprocessors: int | None
    memory_bytes: int | None
    cache_bytes: int
    sm_max_mhz: float | None
    power_limit_w: float | None
    nvidia_smi: str  # "read", or why it was not


class Implementation(Model):
    """A peer of the run. unavailable: why it could not run, null when it could. rival: counts for the speed-up."""

    name: str
    label: str
    int8: bool
    rival: bool
    version: str | None
    library: str | None
    unavailable: str | None


class Result(Model):
    """One implementation on one case: either measured (`us`, `samples`, ...) or `failed` with its message.

    error: ||out - reference|| / ||reference||. bit_equal: torch.equal with the reference, for ours also after the timed
    graph ran; null when the case was not checked. spread: range of the rounds' medians over the median. joules: of one call,
    the whole GPU's, and sm_mhz: the SM clock just after the metered replays; null where the regime does not meter them.
    """

    us: float | None = None
    samples: list[float] = []
    calls_per_graph: int | None = None
    method: str | None = None
    spread: float | None = None
    joules: float | None = None
    sm_mhz: float | None = None
    error: float | None = None
    bit_equal: bool | None = None
    note: str | None = None
    kernel: str | None = None
    reason: str | None = None
    failed: str | None = None

    @model_validator(mode="after")
    def _measured_or_failed(self) -> Result:
        if (self.us is None) == (self.failed is None):
            raise ValueError("a result has either `us` or `failed`")
        if self.us is not None and not self.samples:
            raise ValueError("a measured result has samples")
        return self


class CaseRecord(Model):
    """One product: M tokens and a weight [N, K]. rotation: weight sets; outputs: outputs that rotate; cold: whether the sets exceed the cache."""

    shape: str
    M: int
    N: int
    K: int
    rotation: int
    outputs: int
    cold: bool
    results: dict[str, Result]

    @property
    def weight(self) -> str:
        """Name of the weight that cases of one table share."""
        return self.shape

    @property
    def label(self) -> str:
        """The case in a sentence."""
        return f"{self.weight} M={self.M}"


class Settings(Model):
    """budget_ms: per implementation and case. rounds: turns of each implementation. kernel: the tile configuration that was forced.
    regime: one of `regime.REGIMES`."""

    budget_ms: float
    rounds: int
    check: bool
    seed: int
    kernel: str | None
    regime: str = STANDARD


class Document(Model):
    """A run of one suite, as its file holds it."""

    FILES: ClassVar[tuple[str, ...]]  # the file's name; then names of earlier versions, which are read

    schema_version: int = SCHEMA_VERSION
    created: str
    command: str
    settings: Settings
    environment: Environment
    clocks: list[Clocks] = []
    implementations: list[Implementation]
    cases: list[CaseRecord] = []

    @model_validator(mode="after")
    def _known_schema(self) -> Self:
        if self.schema_version != SCHEMA_VERSION:
            raise ValueError(f"schema_version {self.schema_version}: this version of scaled_mm reads {SCHEMA_VERSION}")
        return self

    def save(self, directory: Path) -> Path:
        """Writes the file, whole or not at all, and returns its path."""
        return write_atomically(directory / self.FILES[0], self.model_dump_json(indent=1) + "\n")

    @classmethod
    def path(cls, directory: Path) -> Path:
        """The file in a folder: the first of `FILES` that is there."""
        return next((path for name in cls.FILES if (path := directory / name).is_file()), directory / cls.FILES[0])

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Reads and validates the file; pydantic.ValidationError names the field that does not fit, or says that it is no JSON."""
        return cls.model_validate_json(cls.path(directory).read_bytes())


def write_atomically(path: Path, text: str) -> Path:
    """Writes through a temporary name in the same directory, so that a reader or a crash never meets half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def describe(error: BaseException) -> str:
    """`Type: first line of the message`, for a record."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
