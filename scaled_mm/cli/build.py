"""`scaled-mm build`: compile kernels ahead of time."""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from scaled_mm.cli import common
from scaled_mm.kernels.dtypes import OUT_DTYPES, WEIGHT_FORMATS

if TYPE_CHECKING:
    from scaled_mm.jit import library
    from scaled_mm.tables import TileTable

HELP = "compile the kernels of an architecture ahead of time"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch",
        action="append",
        help="the tile table to build, or a YAML file (default: SCALED_MM_ARCH, else the first GPU's architecture, without a GPU sm90); with --wheel "
        "repeatable (default: every architecture that has a table)",
    )
    parser.add_argument("--row", action="append", help="build this row only (repeatable)")
    parser.add_argument("--out-dtype", action="append", choices=OUT_DTYPES, help="build this output dtype only (repeatable)")
    parser.add_argument("--format", action="append", choices=WEIGHT_FORMATS, help="build GGUF kernels for this format only (repeatable)")
    parser.add_argument("--jobs", type=common.integer(1), metavar="N", help="kernels compiled at a time (default: one per core)")
    parser.add_argument("--out", type=Path, help="also copy the library here, for programs that use the C interface")
    parser.add_argument(
        "--wheel", type=Path, metavar="FOLDER", help="build a wheel of this checkout into FOLDER, with the kernels in it, for machines without nvcc"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _default_arch() -> str:
    import torch

    from scaled_mm import Handle

    if arch := common.forced_arch():
        return arch
    return Handle("cuda:0").arch if torch.cuda.is_available() else "sm90"


def run(args: argparse.Namespace) -> int:
    return _library(args) if args.wheel is None else _wheel(args)


@contextmanager
def _progress(total: int) -> Iterator[tuple[common.LogLines, Callable[[TileTable, library.KernelName], None]]]:
    """(Lines for a log, on_kernel) for `total` kernels: a bar on a terminal, lines elsewhere. On stderr, because stdout is the answer."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    log = common.LogLines(console.is_terminal)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task, finished = progress.add_task("kernels", total=total), itertools.count(1)

        def on_kernel(table: TileTable, name: library.KernelName) -> None:
            kernel, done = f"{table.arch} {name[0]} {name[1] or ''}".rstrip(), next(finished)
            progress.update(task, completed=done, description=kernel)
            log.say(f"{done} of {total} kernels, the last one {kernel}")

        yield log, on_kernel


def _library(args: argparse.Namespace) -> int:
    from scaled_mm.errors import BadParamError, KernelNotFoundError
    from scaled_mm.jit import library

    if len(args.arch or ()) > 1:
        raise BadParamError(f"--arch: expected one without --wheel, got {', '.join(args.arch)}")
    table = common.table_of(args.arch[0] if args.arch else _default_arch())
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
    about = f"{len(names)} kernels of {table.arch}, {args.jobs or os.cpu_count()} at a time"
    announced = whole and args.arch is None  # many minutes of work by default, so it is announced on a terminal too
    if announced:
        common.say(f"{about}; --arch names another table, --row, --out-dtype and --format build a part of it")
    with _progress(len(names)) as (log, on_kernel):
        if not announced:
            log.begin(about)
        if whole:
            built = [library.build_arch(table, args.jobs, lambda name, *_: on_kernel(table, name))]
        else:
            paths = library.build_kernels(table, names, args.jobs, lambda name, *_: on_kernel(table, name))
            built = list(dict.fromkeys(paths.values()))  # kernels may share one
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


def _wheel(args: argparse.Namespace) -> int:
    from scaled_mm.errors import BadParamError
    from scaled_mm.jit import library, wheel
    from scaled_mm.tables import available_tables, load_table
    from scaled_mm.tables.loader import table_of

    for option in ("row", "out_dtype", "format", "out"):
        if getattr(args, option) is not None:
            raise BadParamError(f"--{option.replace('_', '-')}: expected none with --wheel, which has every kernel of its architectures")
    known = [arch for arch, _ in available_tables()]
    archs = list(dict.fromkeys(map(table_of, args.arch or known)))
    for arch in archs:
        if arch not in known:  # also a tuned table: the installed package chooses by the architecture's own
            raise BadParamError(f"--arch: expected architectures that have a table with --wheel, as {', '.join(known)}, got {arch}")
    wheel.source_tree()
    common.writable_folder("--wheel", args.wheel)
    tables = [load_table(arch) for arch in archs]
    wheel.check_tools(tables)
    start = time.monotonic()
    total = sum(len(library.kernel_names(table)) for table in tables)
    common.say(f"{total} kernels of {', '.join(archs)}, {args.jobs or os.cpu_count()} at a time; what is in the cache is not built again")
    with _progress(total) as (_, on_kernel):
        path = wheel.build(tables, args.wheel, args.jobs, lambda table, name, *_: on_kernel(table, name))
    result = {
        "wheel": str(path),
        "bytes": path.stat().st_size,
        "libraries": [{"arch": arch, "bytes": size} for arch, size in wheel.libraries(path).items()],
        "seconds": round(time.monotonic() - start, 2),
    }
    if args.json:
        common.print_json(result, indent=2)
    else:
        for entry in result["libraries"]:
            print(f"kernels of {entry['arch']}  {entry['bytes'] / 1e6:.2f} MB")
        print(f"{path}  {result['bytes'] / 1e6:.2f} MB")
        print(f"{result['seconds']:.1f} s")
    return 0
