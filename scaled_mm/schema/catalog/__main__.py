"""Writes schemas/ from the catalog: definitions, solutions, workloads, and small files of inputs."""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

from scaled_mm.schema.catalog import entries
from scaled_mm.schema.collection import schemas_dir
from scaled_mm.schema.inputs import blob_tensors
from scaled_mm.schema.vocabulary import torch_dtype

KEPT_BYTES = 32768
"""Files of inputs up to this size are stored with the schemas; `scaled-mm schema draw` writes the others."""


def texts() -> Iterator[tuple[str, str]]:
    """(path below schemas/, contents) of every text file."""
    for entry in entries():
        definition = entry.definition()
        yield f"definitions/{entry.op_type}/{entry.name}.json", definition.model_dump_json(indent=2, exclude_unset=True) + "\n"
        for one in entry.solutions():
            yield f"solutions/{one.author}/{entry.op_type}/{entry.name}/{one.name}.json", one.model_dump_json(indent=2, exclude_unset=True) + "\n"
        yield f"workloads/{entry.op_type}/{entry.name}.jsonl", "".join(f"{one.model_dump_json(exclude_unset=True)}\n" for one in entry.traces())


def blobs() -> Iterator[tuple[str, dict]]:
    """(path below schemas/, tensors by key) of every stored file of inputs."""
    for entry in entries():
        definition = entry.definition()
        for trace in entry.traces():
            if _bytes(definition, trace.workload) <= KEPT_BYTES:
                yield from blob_tensors(definition, trace.workload).items()


def _bytes(definition, workload) -> int:
    sizes = definition.sizes(workload.axes)
    wanted = [name for name, given in workload.inputs.items() if given.type == "safetensors"]
    return sum(math.prod(definition.shape(name, sizes)) * torch_dtype(definition.inputs[name].dtype).itemsize for name in wanted)


def main() -> None:
    from safetensors.torch import save_file

    parser = argparse.ArgumentParser(prog="python -m scaled_mm.schema.catalog", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=schemas_dir(), help="default: schemas/ of this checkout")
    root = parser.parse_args().folder
    if root == schemas_dir() and not (root.parent / "pyproject.toml").is_file():
        parser.error(f"expected a folder: {root} is installed, and no checkout's")
    for folder in ("definitions", "solutions", "workloads", "blob"):
        shutil.rmtree(root / folder, ignore_errors=True)
    count = 0
    for name, text in texts():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        count += 1
    for name, tensors in blobs():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path)
        count += 1
    print(f"wrote {count} files below {root}")


if __name__ == "__main__":
    main()
