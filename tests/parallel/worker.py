"""A rank of a test: `python worker.py RANK SIZE FOLDER MODULE:CHECK,... [BACKEND]`. Runs the checks, and writes what each one raised. RANK "all": one
process for each rank, forked after the imports, which take longer than most checks.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    size, folder, names = int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4].split(",")
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    if sys.argv[1] != "all":
        return run(int(sys.argv[1]), size, folder, names)
    for name in names:
        importlib.import_module(name.partition(":")[0])
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            errors = os.open(folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT)
            os.dup2(errors, 1), os.dup2(errors, 2)
            return run(rank, size, folder, names)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def run(rank: int, size: int, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    backend = sys.argv[5] if len(sys.argv) > 5 else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
    found = {}
    for name in names:
        try:
            module, _, check = name.partition(":")
            getattr(importlib.import_module(module), check)(rank, size)
            found[name] = ""
        except BaseException:  # noqa: BLE001 - reported by the parent
            found[name] = traceback.format_exc()
            break  # the ranks may be out of step
    (folder / f"{rank}.json").write_text(json.dumps(found))
    if all(not error for error in found.values()):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
