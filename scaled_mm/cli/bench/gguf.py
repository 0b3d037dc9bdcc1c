"""`scaled-mm bench gguf`: times products with GGUF formats, next to llama.cpp and bfloat16, and writes the report."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from scaled_mm.cli import common
from scaled_mm.cli.bench import frame, shown
from scaled_mm.gguf_formats import WEIGHT_FORMATS

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from scaled_mm.bench.gguf.cases import GgufCase
    from scaled_mm.bench.gguf.record import GgufDocument
    from scaled_mm.measure.peer import Peer

HELP = "time GGUF products against llama.cpp and bfloat16, and write a report"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shapes = "NxK (rows of the weight x K), MxNxK, layer names (8B_qkv, ...), llama-8b, llama-70b or llm, comma-separated, or none; "
    shapes += "default 28672x8192,4096x14336,4096x4096, on a CPU 4096x4096"
    frame.add_grid_options(parser, shapes, "tokens, comma-separated; default 1 ... 4096, on a CPU 1,32,512")
    frame.add_peer_options(parser, "ours_bf16,ours_f32,ours_w4a8,ours_q8_1; on a GPU also bf16, on a CPU mm,dequantize_mm")
    add = parser.add_argument
    add("--formats", metavar="NAMES", help=f"all, or some of {','.join(WEIGHT_FORMATS)}; default all")
    add("--sweep", action="store_true", help="--m 1-64, or these besides those that --m names")
    count = "also COUNT random weights in each format, chosen by the seed, with nine numbers of tokens each; default 0"
    add("--random", type=common.integer(0, 256), default=0, metavar="COUNT", help=count)
    llama = "llama.cpp's test-backend-ops, to be run first; without it an H200's recorded times, on an H200"
    add("--llama", type=Path, metavar="PATH", help=llama)


def run(args: argparse.Namespace) -> int:
    """0: done; 1: one of our cases failed or exceeds the error bound; 2: the arguments are invalid."""
    from scaled_mm.bench.gguf import analysis, llama, report
    from scaled_mm.bench.gguf.peers import OursGguf
    from scaled_mm.bench.gguf.record import GgufDocument
    from scaled_mm.bench.gguf.suite import GgufSuite
    from scaled_mm.errors import ScaledMMError
    from scaled_mm.measure import plots
    from scaled_mm.measure.environment import read_environment
    from scaled_mm.measure.record import Settings

    console = common.console(stderr=args.json)
    try:
        device = common.device_of(args.device)
        options = frame.options(args, device, not args.no_check)
        cases, peers = wanted_cases(args, device, options.seed), wanted_peers(args, device)
        environment = read_environment(device)
        out = frame.report_folder(args, environment)
        plots.preload()
        times = llama.recorded(environment.gpu) if args.llama is None else llama.measure(args.llama, device)
    except (ValueError, ScaledMMError) as error:
        return frame.usage(args, str(error))
    fields, settings = frame.document_fields(args, environment, device, peers, options)
    bounds = {peer.name: peer.bound for peer in peers if isinstance(peer, OursGguf)}
    document = GgufDocument(**fields, settings=Settings(**settings), llama=times.source, bounds=bounds)
    frame.fill(document, GgufSuite(times), cases, frame.available(document, peers), device, options, out, console)
    path = document.path(out)
    shown.finish(document, path, report.render(out), args, console, lambda: _show(document, console))
    return shown.verdict(document, analysis.OURS_ALL, analysis.wrong_cases(document), "not within the bound", path, console)


def wanted_cases(args: argparse.Namespace, device: torch.device, seed: int) -> list[GgufCase]:
    """The cases of --formats, --shapes, --m, --sweep and --random, whose defaults depend on the device."""
    from scaled_mm.bench.gguf import cases
    from scaled_mm.errors import BadParamError
    from scaled_mm.measure.shapes import parse_ms

    cpu = device.type == "cpu"
    with frame.naming("--m"):
        named = () if args.m is None else parse_ms(args.m)
    tokens = tuple(sorted({*named, *cases.SWEEP})) if args.sweep else named
    tokens = tokens or (cases.CPU_TOKENS if cpu else cases.TOKENS)
    shapes = (cases.CPU_SHAPES if cpu else cases.SHAPES) if args.shapes is None else args.shapes
    formats = cases.parse_formats(args.formats or "all")
    found = [*cases.parse_cases(formats, shapes, tokens), *cases.random_cases(formats, args.random, seed)]
    if not found:
        raise BadParamError("--shapes, --random: expected something to time, got none and 0")
    return found


def wanted_peers(args: argparse.Namespace, device: torch.device) -> list[Peer]:
    """Ours, then those of --peers. KernelNotFoundError for a --kernel that is not in the section `gguf` of the tile table."""
    from scaled_mm.bench import ours
    from scaled_mm.bench.gguf import peers
    from scaled_mm.measure.peer import select

    if args.kernel is not None:
        ours.refuse_cpu("--kernel", device)
        ours.refuse_kernel("--kernel", args.kernel, [row.name for row in ours.table_of(device).gguf.rows])
    first, *others = peers.every_peer(args.kernel)
    return [first, *select(args.peers, device, others)]


def _show(document: GgufDocument, console: Console) -> None:
    from rich.markup import escape

    from scaled_mm.bench.gguf import goals, report

    _print_cases(document, console)
    shown.print_goals(goals.outcomes(document), console)
    for line in (*report.summary(document), *report.drops(document)):
        console.print(escape(line.replace("**", "").replace("`", "")), highlight=False)


def _print_cases(document: GgufDocument, console: Console) -> None:
    from scaled_mm.bench.analysis import by_weight
    from scaled_mm.bench.gguf import report

    table = common.narrow_table(f"{document.environment.gpu}: microseconds per call")
    for title in ("format", "weight", *report.header(document)):
        table.add_column(title, justify="left" if title in ("format", "weight", "kernel") else "right", overflow="fold")
    for cases in by_weight(document).values():
        for case in cases:
            cells = [cell.replace("`", "") for cell in report.row(document, case)]
            table.add_row(case.fmt, case.shape, *(f"[red]{cell}[/red]" if cell.startswith(("NO", "failed")) else cell for cell in cells))
        table.add_section()
    console.print(table)
