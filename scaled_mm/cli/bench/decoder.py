"""`scaled-mm bench decoder`: times one decoder layer of whole models, and writes the report."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from scaled_mm.cli import common
from scaled_mm.cli.bench import frame, shown

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from scaled_mm.bench.decoder.cases import DecoderCase
    from scaled_mm.bench.decoder.record import DecoderDocument

HELP = "time one decoder layer of whole models against vLLM's operators and torch in bfloat16, and write a report"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    models = "llama-8b, llama-70b, qwen3-30b-a3b, tiny, tiny-experts, comma-separated, or all"
    add("--models", metavar="NAMES", help=f"{models}; default all but tiny and tiny-experts, on a CPU only these two")
    add("--tokens", metavar="T", help="comma-separated; default 1,16,64,256,2048, on a CPU 1,17")
    frame.add_measuring_options(parser, "60", "of the random inputs; default a new one, which the report records")
    frame.add_peer_options(parser, "vllm,bf16; on a CPU bf16", kernel=False)
    frame.add_vllm_option(parser)
    add("--render", type=Path, metavar="DIR", help="only render the report of DIR/decoder.json again")


def run(args: argparse.Namespace) -> int:
    """0: done; 1: one of our layers failed or is wrong; 2: the arguments are invalid."""
    from scaled_mm.bench.analysis import wrong_cases
    from scaled_mm.bench.decoder import peers, report
    from scaled_mm.bench.decoder.record import DecoderDocument
    from scaled_mm.bench.decoder.suite import DecoderSuite
    from scaled_mm.errors import ScaledMMError
    from scaled_mm.measure import plots
    from scaled_mm.measure.environment import read_environment
    from scaled_mm.measure.peer import OURS, select
    from scaled_mm.measure.record import Settings

    console = common.console(stderr=args.json)
    if args.render is not None:
        return shown.render(args, report.render, DecoderDocument, console)
    try:
        device = common.device_of(args.device)
        options = frame.options(args, device, not args.no_check)
        wanted = wanted_cases(args, device)
        frame.refuse_missing_library("--vllm-lib", args.vllm_lib)
        chosen = [peers.Ours(), *select(args.peers, device, peers.every_peer(args.vllm_lib))]
        environment = read_environment(device)
        out = frame.report_folder(args, environment)
        plots.preload()
    except (ValueError, ScaledMMError) as error:
        return frame.usage(args, str(error))
    fields, settings = frame.document_fields(args, environment, device, chosen, options)
    document = DecoderDocument(**fields, settings=Settings(**settings))
    shown.print_unavailable(document, console)
    frame.fill(document, DecoderSuite(), wanted, frame.available(document, chosen), device, options, out, console)
    path = document.path(out)
    shown.finish(document, path, report.render(out), args, console, lambda: _show(document, console))
    return shown.verdict(document, (OURS,), wrong_cases(document), "graph and plain call give different bits", path, console)


def wanted_cases(args: argparse.Namespace, device: torch.device) -> list[DecoderCase]:
    """The cases of --models and --tokens, whose defaults depend on the device. ValueError for what makes no sense."""
    from scaled_mm.bench.decoder import cases
    from scaled_mm.bench.experts.cases import some_of
    from scaled_mm.measure.shapes import parse_ms

    models, tokens = cases.defaults(device)
    with frame.naming("--models"):
        models = some_of(models if args.models is None else args.models, cases.MODELS)
    with frame.naming("--tokens"):
        tokens = tokens if args.tokens is None else parse_ms(args.tokens)
    return cases.cases(models, tokens)


def _show(document: DecoderDocument, console: Console) -> None:
    from rich.markup import escape

    from scaled_mm.bench.analysis import names_run, over, us_of
    from scaled_mm.bench.decoder import goals
    from scaled_mm.bench.decoder.report import RIVALS

    names = names_run(document)
    rivals = [name for name in RIVALS if name in names]
    title = f"{document.environment.gpu}: microseconds per layer"
    table = shown.table(title, ("case", *names, *(f"over {name}" for name in rivals)), left=("case",))
    for case in document.cases:
        factors = [over(case, name) for name in rivals]
        table.add_row(
            escape(case.label),
            *("[red]failed[/red]" if (us := us_of(case, name)) is None else f"{us:.1f}" for name in names),
            *("" if one is None else f"[{'green' if one >= 1 else 'red'}]{one:.2f}x" for one in factors),
        )
    console.print(table)
    shown.print_goals(goals.outcomes(document), console)
