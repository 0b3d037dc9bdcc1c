"""`scaled-mm build`: compile kernels ahead of time."""

from __future__ import annotations

import argparse
import os
import shutil
import time
from pathlib import Path

from scaled_mm.cli import common
from scaled_mm.kernels.dtypes import OUT_DTYPES, WEIGHT_FORMATS

HELP = "compile the kernels of an architecture ahead of time"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch", help="the tile table to build, or a YAML file (default: SCALED_MM_ARCH, else the first GPU's architecture, without a GPU sm90)"
    )
    parser.add_argument("--row", action="append", help="build this row only (repeatable)")
    parser.add_argument("--out-dtype", action="append", choices=OUT_DTYPES, help="build this output dtype only (repeatable)")
    parser.add_argument("--format", action="append", choices=WEIGHT_FORMATS, help="build GGUF kernels for this format only (repeatable)")
    parser.add_argument("--jobs", type=common.integer(1), metavar="N", help="kernels compiled at a time (default: one per core)")
    parser.add_argument("--out", type=Path, help="also copy the library here, for programs that use the C interface")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _default_arch() -> str:
    import torch

    from scaled_mm import Handle

    if arch := common.forced_arch():
        return arch
    return Handle("cuda:0").arch if torch.cuda.is_available() else "sm90"


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from scaled_mm.errors import BadParamError, KernelNotFoundError
    from scaled_mm.jit import library

    table = common.table_of(args.arch or _default_arch())
    for row in args.row or ():
        table.row(row)  # KernelNotFoundError lists the known names
    of_rows = [(row, out) for row, out in library.kernel_names(table) if not args.row or row in args.row]
    wanted = [*(args.out_dtype or ()), *(args.format or ())]
    names = [(row, out) for row, out in of_rows if not wanted or out in wanted]
    if not names:
        there = ", ".join(sorted({out for _, out in of_rows if out}))
        raise KernelNotFoundError(
            f"--out-dtype, --format: expected some of {there}, which these rows of {table.source} have, got {', '.join(wanted)}"
        )
    whole = len(names) == len(library.kernel_names(table))
    if args.out and not whole:
        raise BadParamError("--out: expected no --row, --out-dtype or --format with it, for it copies a whole architecture's library")
    if args.out:
        if args.out.is_dir():
            raise BadParamError(f"--out: expected the name of a file, got the folder {args.out}")
        common.writable_folder("--out", args.out.parent)
    start = time.monotonic()
    # Progress goes to stderr, because stdout is the answer.
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    log = common.LogLines(console.is_terminal)
    about = f"{len(names)} kernels of {table.arch}, {args.jobs or os.cpu_count()} at a time"
    if whole and args.arch is None:  # many minutes of work by default, so it is announced on a terminal too
        common.say(f"{about}; --arch names another table, --row, --out-dtype and --format build a part of it")
    else:
        log.begin(about)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"kernels of {table.arch}", total=len(names))

        def on_kernel(name: library.KernelName, done: int, total: int) -> None:
            kernel = f"{table.arch} {name[0]} {name[1] or ''}".rstrip()
            progress.update(task, completed=done, description=kernel)
            log.say(f"{done} of {total} kernels, the last one {kernel}")

        if whole:
            built = [library.build_arch(table, args.jobs, on_kernel)]
        else:
            built = list(dict.fromkeys(library.build_kernels(table, names, args.jobs, on_kernel).values()))  # kernels may share one
    if args.out:
        shutil.copyfile(built[0], args.out)
    result = {
        "arch": table.arch,
        "row": args.row,
        "libraries": [{"path": str(path), "bytes": path.stat().st_size} for path in built],
        "seconds": round(time.monotonic() - start, 2),
    }
    if args.json:
        common.print_json(result, indent=2)
    else:
        for entry in result["libraries"]:
            print(f"{entry['path']}  {entry['bytes'] / 1e6:.2f} MB")
        print(f"{result['seconds']:.1f} s")
    return 0
