"""What the tests of schemas share: the package's collection, each reference once, and a folder that tests may spoil."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

from scaled_mm import schema

ROOT = schema.schemas_dir()


@functools.cache
def collection() -> schema.Collection:
    return schema.load()


@functools.cache
def distinct() -> dict[str, tuple[schema.Definition, schema.Workload]]:
    """By the definition's name: each text of a reference once, with its smallest workload."""
    return {definition.name: (definition, workload) for definition, workload in collection().references()}


def small_folder(folder: Path, names: tuple[str, ...] = ("gemm_q4_0_w4a16",)) -> Path:
    """A copy of these definitions, their solutions and workloads, and the files of inputs that are kept."""
    for name in names:
        op_type = collection().definitions[name].op_type
        parts = [f"definitions/{op_type}/{name}.json", f"workloads/{op_type}/{name}.jsonl"]
        parts += [f"solutions/{author}/{op_type}/{name}" for author in ("scaled_mm", "pytorch")]
        parts += [f"blob/workloads/{op_type}/{name}"] if (ROOT / f"blob/workloads/{op_type}/{name}").is_dir() else []
        for part in parts:
            target = folder / part
            target.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if (ROOT / part).is_dir() else shutil.copyfile)(ROOT / part, target)
    return folder


def edit(path: Path, **fields) -> None:
    """Sets fields of a JSON file. `a__b` is field b of a; None takes one out."""
    document = json.loads(path.read_text())
    for name, value in fields.items():
        *way, last = name.split("__")
        target = functools.reduce(lambda at, key: at[int(key) if isinstance(at, list) else key], way, document)
        if value is None:
            del target[last]
        else:
            target[last] = value
    path.write_text(json.dumps(document) + "\n")
