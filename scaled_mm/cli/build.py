"""`scaled-mm build`: compile kernels ahead of time."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

HELP = "compile every kernel of an architecture ahead of time, or one row of it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", default="sm90", help="the tile table to build (default: sm90)")
    parser.add_argument("--row", help="build this row only, for every output dtype")
    parser.add_argument("--jobs", type=int, help="kernels compiled at a time (default: one per core)")
    parser.add_argument("--out", type=Path, help="also copy the library here, for programs that use the C interface")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from scaled_mm.build import codegen, library
    from scaled_mm.tables import load_table

    table = load_table(args.arch)
    start = time.monotonic()
    if args.row:
        table.row(args.row)
        built = [library.build_kernel(table, (args.row, out)) for out in codegen.OUT_DTYPES]
    else:
        # Progress goes to stderr: stdout is the answer.
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task(f"kernels of {table.arch}", total=len(library.kernel_names(table)))

            def on_kernel(name: library.KernelName, done: int, total: int) -> None:
                progress.update(task, completed=done, description=f"{table.arch} {name[0]} {name[1] or ''}".rstrip())

            built = [library.build_arch(table, args.jobs, on_kernel)]
    if args.out:
        if args.row:
            print("scaled-mm build: --out copies a whole architecture's library; leave --row out", file=sys.stderr)
            return 2
        args.out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(built[0], args.out)
    result = {
        "arch": table.arch,
        "row": args.row,
        "libraries": [{"path": str(path), "bytes": path.stat().st_size} for path in built],
        "seconds": round(time.monotonic() - start, 2),
    }
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        for entry in result["libraries"]:
            print(f"{entry['path']}  {entry['bytes'] / 1e6:.2f} MB")
        print(f"{result['seconds']:.1f} s")
    return 0
