"""`scaled-mm bench path`: times linear layers from float to float, and the row-wise operators between them, and writes the report."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from scaled_mm.cli import common
from scaled_mm.cli.bench import frame, shown

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from scaled_mm.bench.path.cases import PathCase
    from scaled_mm.bench.path.record import PathCaseRecord, PathDocument

HELP = "time linear layers from float activation to float output, and row-wise operators, against vLLM and torch, and write a report"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shapes = "layers: llama-70b, llama-8b, llm (both), names (8B_qkv, ...) or MxNxK, comma-separated, or none; default llm, on a CPU two small ones"
    frame.add_grid_options(parser, shapes, "M values for named shapes, comma-separated; default 1 ... 8192, on a CPU 1,16,64")
    frame.add_peer_options(parser, "apart,torch,vllm; on a CPU apart,torch", kernel=False)
    add = parser.add_argument
    count = "also so many random layers, three M each, which follow from the seed; default 10, on a CPU 2 with two M each"
    add("--random", type=common.integer(0, 256), metavar="COUNT", help=count)
    operators = "row-wise operators: all, none, or names: quantize_int8, quantize_int8_static, rms_norm_quantize, add_rms_norm_quantize, "
    add("--operators", default="all", metavar="NAMES", help=operators + "add_rms_norm, silu_and_mul; default all")
    sizes = "their sizes, comma-separated; default 1 ... 4096 rows of 4096, 8192 and 14336 columns, on a CPU 1x512,33x512"
    add("--sizes", metavar="MxK", help=sizes)
    frame.add_vllm_option(parser)
    frame.add_check_options(parser, "path.json")


def run(args: argparse.Namespace) -> int:
    """0: done; 1: one of our cases failed or has wrong bits; 2: the arguments are invalid."""
    from scaled_mm.bench.analysis import wrong_cases
    from scaled_mm.bench.path import peers, report
    from scaled_mm.bench.path.cases import parts
    from scaled_mm.bench.path.record import PathDocument, PathSettings
    from scaled_mm.bench.path.suite import PathSuite, run_overhead
    from scaled_mm.errors import ScaledMMError
    from scaled_mm.measure import plots
    from scaled_mm.measure.environment import read_environment
    from scaled_mm.measure.peer import select

    console = common.console(stderr=args.json)
    if args.render is not None:
        return shown.render(args, report.render, PathDocument, console)
    try:
        device = common.device_of(args.device)
        options = frame.options(args, device, not args.no_check, args.check_limit)
        wanted = parts(wanted_cases(args, device, options.seed))
        frame.refuse_missing_library("--vllm-lib", args.vllm_lib)
        chosen = [peers.Ours(), *select(args.peers, device, peers.every_peer(args.vllm_lib))]
        environment = read_environment(device)
        out = frame.report_folder(args, environment)
        plots.preload()
    except (ValueError, ScaledMMError) as error:
        return frame.usage(args, str(error))
    fields, settings = frame.document_fields(args, environment, device, chosen, options)
    document = PathDocument(**fields, settings=PathSettings(**settings, check_limit_gmac=options.check_limit_gmac))
    here = frame.available(document, chosen)
    document.lacking = peers.lacking(here, wanted)
    shown.print_unavailable(document, console)
    for one in document.lacking:
        console.print(f"[yellow]not run:[/yellow] {one.implementation} on {one.part}: {one.why}", highlight=False)
    if args.overhead:  # first, because earlier work of the process affects it
        document.overhead = run_overhead(here, list(wanted), device)
    for part, cases in wanted.items():
        frame.fill(document, PathSuite(), cases, peers.serving(here, part), device, options, out, console)
    path = document.path(out)
    shown.finish(document, path, report.render(out), args, console, lambda: _show(document, console))
    return shown.verdict(document, peers.OURS_ALL, wrong_cases(document, peers.OURS_ALL), "wrong bits", path, console)


def wanted_cases(args: argparse.Namespace, device: torch.device, seed: int) -> list[PathCase]:
    """The cases of --shapes, --m, --random, --operators and --sizes, whose defaults depend on the device. ValueError for what makes no sense."""
    from scaled_mm.bench.path import cases
    from scaled_mm.measure.shapes import parse_ms

    given = cases.defaults(device)
    with frame.naming("--m"):
        ms = given.ms if args.m is None else parse_ms(args.m)
    with frame.naming("--shapes"):
        layers = cases.layers(given.shapes if args.shapes is None else args.shapes, ms)
    with frame.naming("--operators"):
        operators = cases.parse_operators(args.operators)
    with frame.naming("--sizes"):
        sizes = given.sizes if args.sizes is None else cases.parse_sizes(args.sizes)
    drawn = cases.random_layers(given.count if args.random is None else args.random, seed, given)
    found = [*layers, *drawn, *cases.rows(operators, sizes)]
    if not found:
        raise ValueError("--shapes, --random, --operators: expected something to time, got none, 0 and none")
    return found


def _show(document: PathDocument, console: Console) -> None:
    from scaled_mm.bench.path import goals

    for title, linear in (("linear layers", True), ("row-wise operators", False)):
        if cases := [case for case in document.cases if case.linear is linear]:
            _print_cases(document, cases, f"{document.environment.gpu}: {title}, microseconds per call", console)
    if document.overhead:
        shown.print_overhead(document.overhead, console)
    shown.print_goals(goals.outcomes(document), console)


def _print_cases(document: PathDocument, cases: list[PathCaseRecord], title: str, console: Console) -> None:
    from scaled_mm.bench.analysis import names_run, of_roof, speedup, us_of
    from scaled_mm.bench.path import analysis
    from scaled_mm.bench.path.peers import TORCH, VLLM

    names = [name for name in names_run(document) if any(name in case.results for case in cases)]
    rivals = [name for name in (VLLM, TORCH) if name in names]
    table = shown.table(title, ("case", *names, *(f"over {name}" for name in rivals), "of roof", "bits"), left=("case",))
    for case in cases:
        factors = [speedup(case, name) for name in rivals]
        roof = of_roof(case)
        table.add_row(
            case.label,
            *(_time(us_of(case, name), name in case.results) for name in names),
            *("" if one is None else f"[{'green' if one.factor >= 1 else 'red'}]{one.factor:.2f}x" for one in factors),
            "" if roof is None else f"{roof:.2f}",
            analysis.bits(case).replace("WRONG", "[red]WRONG[/red]"),
        )
    console.print(table)


def _time(us: float | None, ran: bool) -> str:
    return f"{us:.2f}" if us is not None else "[red]failed[/red]" if ran else ""
