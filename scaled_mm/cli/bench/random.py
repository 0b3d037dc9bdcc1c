"""`scaled-mm bench random`: what the table's choice of kernel loses on products that no tuning saw."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from scaled_mm.cli import common
from scaled_mm.cli.bench import frame, shown

if TYPE_CHECKING:
    from rich.console import Console

HELP = "time every row of the tile table on random products, and what the dispatched row loses; writes random.json"
_BUDGET_MS = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    frame.add_measuring_options(parser, "5", "of the products, and of their random inputs; default a new one, which the report records")
    parser.add_argument("--count", type=common.integer(1, 4096), default=200, metavar="N", help="random products; default 200")
    parser.add_argument("--only", default="all", metavar="NAMES", help="these rows, comma-separated; default all")


def run(args: argparse.Namespace) -> int:
    """0: done; 1: on some case every kernel config failed; 2: the arguments are invalid."""
    from scaled_mm.bench import ours
    from scaled_mm.bench.rows import choice, suite
    from scaled_mm.errors import ScaledMMError
    from scaled_mm.measure import shapes
    from scaled_mm.measure.environment import read_environment

    console = common.console(stderr=args.json)
    args.budget_ms = _BUDGET_MS if args.budget_ms is None else args.budget_ms
    try:
        device = common.device_of(args.device)
        ours.refuse_cpu("--device", device)
        names = suite.row_names(args.only, device)
        environment = read_environment(device)
        out = frame.report_folder(args, environment)
    except (ValueError, ScaledMMError) as error:
        return frame.usage(args, str(error))
    options = frame.options(args, device)
    args.seed = options.seed  # a new one is part of the command that repeats the run
    cases, command = shapes.random_cases(args.count, options.seed), frame.command_line(args, args.parser)
    entries: list[dict[str, Any]] = []
    for layer in frame.grid(suite.RowsSuite(), cases, suite.row_peers(names), device, options, console):
        entries += layer
        choice.save(entries, out, environment, command)
        frame.log(console, layer[0]["shape"], layer)
    if args.json:
        common.print_json(entries)
    _show(entries, console)
    console.print(f"wrote {out / choice.RANDOM_JSON} and {choice.RANDOM_MD}", highlight=False, markup=False)
    return frame.OK if all(entry["rows"] for entry in entries) else frame.FAILED


def _show(entries: list[dict[str, Any]], console: Console) -> None:
    from scaled_mm.bench.rows import choice

    table = shown.table("time of the dispatched row over that of the best", choice.HEADER, left=("products", "at"))
    for line in choice.summary(entries):
        table.add_row(*line)
    console.print(table)
