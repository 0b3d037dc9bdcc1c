"""`scaled-mm bench cliffs`: the time of the dispatched row for hundreds of M, and the products that are slower than one with a larger M."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from scaled_mm.cli import common
from scaled_mm.cli.bench import frame, shown
from scaled_mm.measure.regime import BRIEF

if TYPE_CHECKING:
    from rich.console import Console

HELP = "time the dispatched row for hundreds of M; a cliff is a product that takes longer than one with a larger M; writes cliffs.json"
_SHAPES, _M, _BUDGET_MS = "llama-8b,70B_qkv,70B_gu_tp4", "1-600:7,600-8192:61", 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shapes = "llama-70b, llama-8b, llm (both), layer names (8B_qkv, ...) or MxNxK, comma-separated"
    parser.add_argument("--shapes", default=_SHAPES, help=f"{shapes}; default {_SHAPES}")
    parser.add_argument("--m", default=_M, help=f"M values for named shapes, comma-separated; 1-600:7 is every seventh; default {_M}")
    frame.add_measuring_options(parser, "5", "of the random inputs; default a new one, which the report records", BRIEF)


def run(args: argparse.Namespace) -> int:
    """0: done; 1: a product failed; 2: the arguments are invalid."""
    import secrets

    from scaled_mm.bench import ours
    from scaled_mm.bench.cliffs import report
    from scaled_mm.bench.cliffs.suite import CliffsSuite
    from scaled_mm.bench.int8.peers import Ours
    from scaled_mm.errors import ScaledMMError
    from scaled_mm.measure import plots
    from scaled_mm.measure.environment import read_environment

    console = common.console(stderr=args.json)
    args.budget_ms = _BUDGET_MS if args.budget_ms is None else args.budget_ms
    args.seed = secrets.randbelow(2**31) if args.seed is None else args.seed  # a new one is part of the command that repeats the run
    try:
        device = common.device_of(args.device)
        cases = frame.int8_cases(args, device)
        ours.refuse_cpu("--device", device)
        environment = read_environment(device)
        out = frame.report_folder(args, environment)
        plots.preload()
    except (ValueError, ScaledMMError) as error:
        return frame.usage(args, str(error))
    options, command = frame.options(args, device), frame.command_line(args, args.parser)
    entries: list[dict[str, Any]] = []
    for layer in frame.grid(CliffsSuite(), cases, [Ours()], device, options, console):
        entries += layer
        report.save(entries, out, environment, command)
        frame.log(console, layer[0]["shape"], layer)
    if args.json:
        common.print_json(entries)
    _show(entries, console)
    console.print(f"wrote {out / report.CLIFFS_JSON} and {report.CLIFFS_MD}", highlight=False, markup=False)
    return frame.FAILED if any("failed" in entry for entry in entries) else frame.OK


def _show(entries: list[dict[str, Any]], console: Console) -> None:
    from scaled_mm.bench.cliffs import report

    table = shown.table(
        f"cliffs: more than {report.LIMIT:g} times as long as with a larger M", report.HEADER, left=("shape", "at", "kernel", "a larger M")
    )
    for line in report.summary(entries):
        table.add_row(*line)
    console.print(table)
