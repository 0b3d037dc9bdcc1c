"""`scaled-mm bench block-scaled`: times products with block scales, and writes the report."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from scaled_mm.cli import common
from scaled_mm.cli.bench import frame, shown

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from scaled_mm.bench.block_scaled.record import BlockScaledDocument
    from scaled_mm.measure.shapes import Case

HELP = "time products with block scales against Triton and torch, and write a report"
GPU_SHAPES, CPU_SHAPES, CPU_M = "deepseek", "dsv3_down", (1, 16)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shapes = f"deepseek, its layers (dsv3_o, ...), those of `bench int8` or MxNxK, comma-separated; default {GPU_SHAPES}, on a CPU {CPU_SHAPES}"
    frame.add_grid_options(parser, shapes, "M values for named shapes, comma-separated; default 1 ... 8192, on a CPU 1,16")
    frame.add_peer_options(parser, "triton,bf16; on a CPU bf16")
    parser.add_argument("--render", type=Path, metavar="DIR", help="only render the report of DIR/block_scaled.json again")


def run(args: argparse.Namespace) -> int:
    """0: done; 1: one of our cases failed or has wrong bits; 2: the arguments are invalid."""
    from scaled_mm.bench import ours
    from scaled_mm.bench.analysis import wrong_cases
    from scaled_mm.bench.block_scaled import peers, report
    from scaled_mm.bench.block_scaled.record import BlockScaledDocument
    from scaled_mm.bench.block_scaled.suite import BlockScaledSuite
    from scaled_mm.errors import ScaledMMError
    from scaled_mm.measure import plots
    from scaled_mm.measure.environment import read_environment
    from scaled_mm.measure.peer import OURS, select
    from scaled_mm.measure.record import Settings

    console = common.console(stderr=args.json)
    if args.render is not None:
        return shown.render(args, report.render, BlockScaledDocument, console)
    try:
        device = common.device_of(args.device)
        cases = wanted_cases(args, device)
        options = frame.options(args, device, not args.no_check)
        if args.kernel is not None:
            ours.refuse_cpu("--kernel", device)
            ours.refuse_kernel("--kernel", args.kernel, [row.name for row in ours.table_of(device).block_scaled.rows])
        chosen = [peers.Ours(args.kernel), *select(args.peers, device, peers.every_peer())]
        environment = read_environment(device)
        out = frame.report_folder(args, environment)
        plots.preload()
    except (ValueError, ScaledMMError) as error:
        return frame.usage(args, str(error))
    fields, settings = frame.document_fields(args, environment, device, chosen, options)
    document = BlockScaledDocument(**fields, settings=Settings(**settings))
    shown.print_unavailable(document, console)
    frame.fill(document, BlockScaledSuite(), cases, frame.available(document, chosen), device, options, out, console)
    path = document.path(out)
    shown.finish(document, path, report.render(out), args, console, lambda: _show(document, console))
    return shown.verdict(document, (OURS,), wrong_cases(document), "wrong bits", path, console)


def wanted_cases(args: argparse.Namespace, device: torch.device) -> list[Case]:
    """The cases of --shapes and --m, whose defaults depend on the device. ValueError for what makes no sense."""
    from scaled_mm.measure import shapes

    cpu = device.type == "cpu"
    with frame.naming("--m"):
        ms = (CPU_M if cpu else shapes.LLM_M) if args.m is None else shapes.parse_ms(args.m)
    with frame.naming("--shapes"):
        return shapes.parse_cases((CPU_SHAPES if cpu else GPU_SHAPES) if args.shapes is None else args.shapes, ms)


def _show(document: BlockScaledDocument, console: Console) -> None:
    from rich.markup import escape

    from scaled_mm.bench.analysis import names_run, of_roof, over, us_of
    from scaled_mm.bench.block_scaled import goals
    from scaled_mm.bench.block_scaled.peers import TRITON

    names = names_run(document)
    table = shown.table(f"{document.environment.gpu}: microseconds per call", ("case", *names, "over triton", "of roof"), left=("case",))
    for case in document.cases:
        factor, roof = over(case, TRITON), of_roof(case)
        table.add_row(
            escape(case.label),
            *("[red]failed[/red]" if (us := us_of(case, name)) is None else f"{us:.1f}" for name in names),
            "" if factor is None else f"[{'green' if factor >= 1 else 'red'}]{factor:.2f}x",
            "" if roof is None else f"{roof:.2f}",
        )
    console.print(table)
    shown.print_goals(goals.outcomes(document), console)
