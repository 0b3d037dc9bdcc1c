"""Tables that the autotuner wrote for one GPU model: `cutlass_configs/tuned/<gpu>.yaml`."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Collection
from pathlib import Path

from scaled_mm.kernels.sections import OTHER_SECTIONS
from scaled_mm.tables.loader import configs_dir, load_table, table_of
from scaled_mm.tables.schema import Problem, TableError, TileTable


def slug(gpu: str) -> str:
    """A GPU's name as a file or folder: "NVIDIA H100 80GB HBM3" -> "h100-80gb-hbm3"."""
    text = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return re.sub(r"^nvidia-", "", text) or "unknown"


def tuned_path(gpu: str) -> Path:
    """The path of the tuned table of a GPU model; the file need not exist. gpu: the driver's name of the model."""
    return configs_dir() / "tuned" / f"{slug(gpu)}.yaml"


def load_tuned(arch: str, gpus: Collection[str]) -> TileTable | None:
    """The tuned table that replaces an architecture's table ("sm90") on a machine with these GPU models; None if there is none.

    gpus: the models that the architecture's table serves. With several models there is no tuned table, because a process has one table per
    architecture. TableError if the file is for another GPU or architecture.
    """
    if len(set(gpus)) != 1:
        return None
    [gpu] = set(gpus)
    path = tuned_path(gpu)
    if not path.is_file():
        return None
    table = load_table(path)
    for field, expected, got in (("gpu", gpu, table.gpu), ("arch", arch, table.arch)):
        if got != expected:
            raise TableError([Problem(str(path), None, field, f"expected {expected!r} in the table tuned for {gpu}, got {got!r}")])
    return table


def usable_tuned(arch: str, gpus: Collection[str]) -> TileTable | None:
    """`load_tuned`, but None, with one warning, if the file cannot be used.

    A table written by an earlier version must not make every product on its GPU fail. The architecture's table is used instead.
    """
    try:
        return load_tuned(arch, gpus)
    except TableError as error:
        first, *more = error.problems
        others = f" (and {len(more)} more: `scaled-mm table check --table {first.file}`)" if more else ""
        warn_once(f"{first}{others}. The tuned table is not used, the table of {arch} is; `scaled-mm autotune` writes a new one")
        return None


@functools.cache
def warn_once(text: str) -> None:
    """A UserWarning, once per process and text."""
    warnings.warn(text, stacklevel=3)


def with_rows_of(table: TileTable, base: TileTable) -> TileTable:
    """A tuned table plus the other kernel configs of the architecture's table, which a call may force by name.

    Sections that the tuned table lacks, because an earlier version wrote it, are the architecture's, as is that of GGUF products, which is not tuned.
    """
    names = {row.name for row in table.rows}
    sections = {key: getattr(table, key) or getattr(base, key) for key in OTHER_SECTIONS} | {"gguf": base.gguf}
    rows = (*table.rows, *(row for row in base.rows if row.name not in names))
    return table.model_copy(update={"rows": rows, "times": {**base.times, **table.times}, **sections})


def gpus_served(arch: str) -> set[str]:
    """The models of this machine's GPUs that use an architecture's table; empty without CUDA."""
    import torch

    if not torch.cuda.is_available():
        return set()
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {one.name for one in properties if table_of(f"sm{one.major}{one.minor}") == arch}
