"""`scaled-mm bench random`: what the table's choice of kernel loses on products that no tuning saw."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from scaled_mm.cli import common
from scaled_mm.cli.bench import frame, rows, shown
from scaled_mm.measure.regime import BRIEF

if TYPE_CHECKING:
    from rich.console import Console

HELP = "time every row of the tile table on random products, and what the dispatched row loses; writes random.json"
_BUDGET_MS = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    frame.add_measuring_options(parser, "5", "of the products, and of their random inputs; default a new one, which the report records", BRIEF)
    parser.add_argument("--count", type=common.integer(1, 4096), default=200, metavar="N", help="random products; default 200")
    rows.add_choosing_options(parser)


def run(args: argparse.Namespace) -> int:
    """As `rows.run`."""
    import secrets

    from scaled_mm.bench.rows import choice
    from scaled_mm.measure import shapes

    args.budget_ms = _BUDGET_MS if args.budget_ms is None else args.budget_ms
    args.seed = secrets.randbelow(2**31) if args.seed is None else args.seed  # a new one is part of the command that repeats the run
    files = (choice.RANDOM_JSON, choice.RANDOM_MD)
    return rows.time_rows(args, lambda device: shapes.random_cases(args.count, args.seed), choice.save, _show, files)


def _show(entries: list[dict[str, Any]], console: Console) -> None:
    from scaled_mm.bench.rows import choice

    if choice.has_choice(entries):
        table = shown.table("time of the dispatched row over that of the best", choice.HEADER, left=("products", "at"))
        for line in choice.summary(entries):
            table.add_row(*line)
        console.print(table)
    if speeds := choice.speeds(entries):
        table = shown.table("speed of the dispatched row over the peers'", choice.SPEED_HEADER, left=("products", "over", "at"))
        for line in speeds:
            table.add_row(*line)
        console.print(table)
