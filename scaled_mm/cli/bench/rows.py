"""`scaled-mm bench rows`: times every kernel config of the tile table on the same products, as a basis for choosing buckets."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaled_mm.cli import common
from scaled_mm.cli.bench import frame, shown

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from scaled_mm.measure.environment import Environment
    from scaled_mm.measure.shapes import Case

HELP = "time rows of the tile table on each product, and what the dispatched row loses; writes rows.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shapes = "llama-70b, llama-8b, llm (both), layer names (8B_qkv, ...) or MxNxK, comma-separated; default llm"
    frame.add_grid_options(parser, shapes, "M values for named shapes, comma-separated; default 1 ... 8192")
    add_choosing_options(parser)


def add_choosing_options(parser: argparse.ArgumentParser) -> None:
    """Adds --only, --peers and --vllm-lib."""
    parser.add_argument(
        "--only", default="all", metavar="NAMES", help="these rows, comma-separated, or dispatched: only the one that the table picks; default all"
    )
    names = "bf16,intmm,cublaslt,fp8row,fp8,vllm,sgl"
    parser.add_argument("--peers", default="none", metavar="NAMES", help=f"time these beside the rows: all, none, or names: {names}; default none")
    frame.add_vllm_option(parser)


def run(args: argparse.Namespace) -> int:
    """0: done; 1: on some case every kernel config failed; 2: the arguments are invalid."""
    from scaled_mm.bench.rows import report

    files = (report.ROWS_JSON, report.ROWS_MD)
    return time_rows(args, lambda device: frame.int8_cases(args, device), report.save_rows, _show, files)


def time_rows(
    args: argparse.Namespace,
    cases_on: Callable[[torch.device], list[Case]],
    save: Callable[[list[dict[str, Any]], Path, Environment, str], Path],
    show: Callable[[list[dict[str, Any]], Console], None],
    files: Sequence[str],
) -> int:
    """Times the rows of --only on cases, and saves after each weight. files: what `save` writes. Returns as `run` does."""
    from scaled_mm.bench import ours
    from scaled_mm.bench.int8.peers import OURS_WITH_TENSORS, every_peer
    from scaled_mm.bench.rows import suite
    from scaled_mm.errors import ScaledMMError
    from scaled_mm.measure.environment import read_environment
    from scaled_mm.measure.peer import implementations, select

    console = common.console(stderr=args.json)
    try:
        device = common.device_of(args.device)
        cases = cases_on(device)
        ours.refuse_cpu("--device", device)
        names = suite.row_names(args.only, device)
        frame.refuse_missing_library("--vllm-lib", args.vllm_lib)
        others = [peer for peer in select(args.peers, device, every_peer(args.vllm_lib)) if peer.name != OURS_WITH_TENSORS]
        environment = read_environment(device)
        out = frame.report_folder(args, environment)
    except (ValueError, ScaledMMError) as error:
        return frame.usage(args, str(error))
    options, command = frame.options(args, device), frame.command_line(args, args.parser)
    entries: list[dict[str, Any]] = []
    for one in implementations(others, device):
        if one.unavailable is not None:
            return frame.usage(args, f"--peers: {one.name} cannot run here: {one.unavailable}")
    rows = suite.RowsSuite(ours.table_of(device).fallback, others=[peer.name for peer in others])
    for layer in frame.grid(rows, cases, [*suite.row_peers(names), *others], device, options, console):
        entries += layer
        save(entries, out, environment, command)
        frame.log(console, layer[0]["shape"], layer)
    if args.json:
        common.print_json(entries)
    show(entries, console)
    console.print(f"wrote {out / files[0]} and {files[1]}", highlight=False, markup=False)
    return frame.OK if all(entry["rows"] for entry in entries) else frame.FAILED


def _show(entries: list[dict[str, Any]], console: Console) -> None:
    from rich.markup import escape

    from scaled_mm.bench.rows import report

    table = shown.table("best row by case, and what the dispatched one loses", report.HEADER, left=("shape", "best row", "dispatched row"))
    for entry in entries:
        table.add_row(*(f"[red]{cell}[/red]" if cell.endswith("failed") else escape(cell) for cell in report.cells(entry)))
    console.print(table)
    for name, message in report.messages(entries):
        console.print(f"[yellow]failed:[/yellow] {name}: {escape(message)}", highlight=False)
