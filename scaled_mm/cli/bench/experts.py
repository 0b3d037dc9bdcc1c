"""`scaled-mm bench experts`: times grouped products and whole layers of mixtures of experts, and writes the report."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from scaled_mm.cli import common
from scaled_mm.cli.bench import frame, shown

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from scaled_mm.bench.experts.cases import ExpertsCase
    from scaled_mm.bench.experts.record import ExpertsDocument

HELP = "time grouped products and whole layers of mixtures of experts against Triton and torch, and write a report"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--models", metavar="NAMES", help="mixtral, qwen3, deepseek, deepseek_ep8, tiny, comma-separated, or all; default all but tiny, on a CPU tiny"
    )
    add("--tokens", metavar="T", help="comma-separated; default 1,8,64,256,1024,4096,8192, on a CPU 1,17")
    add("--parts", default="all", metavar="NAMES", help="w13, w2, layer, or all; default all")
    add("--routing", default="all", metavar="NAMES", help="balanced, skewed, or all; default all")
    add("--scales", default="all", metavar="NAMES", help="channel, block, or all; default all")
    frame.add_measuring_options(parser, "60", "of the random inputs; default a new one, which the report records")
    frame.add_peer_options(parser, "loop,triton,chain,steps,bf16; on a CPU loop", kernel=False)
    add("--render", type=Path, metavar="DIR", help="only render the report of DIR/experts.json again")


def run(args: argparse.Namespace) -> int:
    """0: done; 1: one of our cases failed or has wrong bits; 2: the arguments are invalid."""
    from scaled_mm.bench.analysis import wrong_cases
    from scaled_mm.bench.experts import peers, report
    from scaled_mm.bench.experts.record import ExpertsDocument
    from scaled_mm.bench.experts.suite import ExpertsSuite
    from scaled_mm.errors import ScaledMMError
    from scaled_mm.measure import plots
    from scaled_mm.measure.environment import read_environment
    from scaled_mm.measure.peer import select
    from scaled_mm.measure.record import Settings

    console = common.console(stderr=args.json)
    if args.render is not None:
        return shown.render(args, report.render, ExpertsDocument, console)
    try:
        device = common.device_of(args.device)
        options = frame.options(args, device, not args.no_check)
        wanted = wanted_cases(args, device)
        chosen = [peers.Ours(), *select(args.peers, device, peers.every_peer())]
        environment = read_environment(device)
        out = frame.report_folder(args, environment)
        plots.preload()
    except (ValueError, ScaledMMError) as error:
        return frame.usage(args, str(error))
    fields, settings = frame.document_fields(args, environment, device, chosen, options)
    document = ExpertsDocument(**fields, settings=Settings(**settings))
    shown.print_unavailable(document, console)
    here = frame.available(document, chosen)
    kinds = dict.fromkeys((case.part, case.scales) for case in wanted)
    for part, scales in kinds:  # what a peer does not serve is no failure
        serving = [peer for peer in here if peer.serves(part, scales)]
        of_kind = [case for case in wanted if (case.part, case.scales) == (part, scales)]
        frame.fill(document, ExpertsSuite(), of_kind, serving, device, options, out, console)
    path = document.path(out)
    shown.finish(document, path, report.render(out), args, console, lambda: _show(document, console))
    return shown.verdict(document, peers.OURS_ALL, wrong_cases(document, peers.OURS_ALL), "wrong bits", path, console)


def wanted_cases(args: argparse.Namespace, device: torch.device) -> list[ExpertsCase]:
    """The cases of the options, whose defaults depend on the device. ValueError for what makes no sense."""
    from scaled_mm.bench.experts import cases
    from scaled_mm.measure.shapes import parse_ms

    models, tokens = cases.defaults(device)
    with frame.naming("--models"):
        models = cases.some_of(models if args.models is None else args.models, cases.MODELS)
    with frame.naming("--tokens"):
        tokens = tokens if args.tokens is None else parse_ms(args.tokens)
    found = {}
    for option, known in (("parts", cases.PARTS), ("routing", cases.ROUTINGS), ("scales", cases.SCALES)):
        with frame.naming(f"--{option}"):
            found[option] = cases.some_of(getattr(args, option), known)
    return cases.cases(models, tokens, found["parts"], found["routing"], found["scales"])


def _show(document: ExpertsDocument, console: Console) -> None:
    from rich.markup import escape

    from scaled_mm.bench.analysis import names_run, of_roof, over, us_of
    from scaled_mm.bench.experts import goals
    from scaled_mm.bench.experts.peers import CHAIN, TRITON

    names = names_run(document)
    rivals = [name for name in (TRITON, CHAIN) if name in names]
    title = f"{document.environment.gpu}: microseconds per call"
    table = shown.table(title, ("case", *names, *(f"over {name}" for name in rivals), "of roof"), left=("case",))
    for case in document.cases:
        factors, roof = [over(case, name) for name in rivals], of_roof(case)
        table.add_row(
            escape(case.label),
            *("" if name not in case.results else "[red]failed[/red]" if (us := us_of(case, name)) is None else f"{us:.1f}" for name in names),
            *("" if one is None else f"[{'green' if one >= 1 else 'red'}]{one:.2f}x" for one in factors),
            "" if roof is None else f"{roof:.2f}",
        )
    console.print(table)
    shown.print_goals(goals.outcomes(document), console)
