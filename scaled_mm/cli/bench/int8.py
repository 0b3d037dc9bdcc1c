"""`scaled-mm bench int8`: times our INT8 kernels and those of other libraries on the same inputs, and writes the report."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from scaled_mm.cli import common
from scaled_mm.cli.bench import frame, shown

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from scaled_mm.bench.int8.record import Int8Document

#: Those of `scaled_mm.bench.int8.inputs`, which imports torch.
DATA = ("uniform", "gauss")
HELP = "time INT8 products against vLLM, SGLang and torch, and write a report"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shapes = "llama-70b, llama-8b, llm (both), layer names (8B_qkv, ...) or MxNxK, comma-separated; default llm, on a CPU 8B_o"
    frame.add_grid_options(parser, shapes, "M values for named shapes, comma-separated; default 1 ... 8192, on a CPU 1,16,64")
    frame.add_peer_options(parser, "ours_tensor,bf16,intmm,cublaslt,fp8row,fp8,vllm,sgl; on a CPU bf16,fp32,intmm_epilogue")
    add = parser.add_argument
    frame.add_vllm_option(parser)
    add("--sgl-lib", metavar="PATH", help="sgl_kernel's common_ops library, when sgl_kernel is not installed")
    add("--data", choices=DATA, default=DATA[0], help="int8 numbers: uniform, or gauss: rounded normal ones of sigma 30; default uniform")
    frame.add_check_options(parser, "bench.json")
    add("--block", action=frame.Former, nargs=0, suite="gguf")
    add("--rows", action=frame.Former, nargs="?", suite="rows [--only NAMES]")


def run(args: argparse.Namespace) -> int:
    """0: done; 1: one of our cases failed or has wrong bits; 2: the arguments are invalid."""
    from scaled_mm.bench.analysis import wrong_cases
    from scaled_mm.bench.int8 import peers, report
    from scaled_mm.bench.int8.record import Int8Document, Int8Settings
    from scaled_mm.bench.int8.suite import Int8Suite, run_overhead
    from scaled_mm.errors import ScaledMMError
    from scaled_mm.measure import energy, plots
    from scaled_mm.measure.environment import read_environment
    from scaled_mm.measure.peer import OURS, select
    from scaled_mm.measure.regime import REGIMES

    console = common.console(stderr=args.json)
    if args.render is not None:
        return shown.render(args, report.render, Int8Document, console)
    try:
        device = common.device_of(args.device)
        cases = frame.int8_cases(args, device)
        options = frame.options(args, device, not args.no_check, args.check_limit)
        check_names(args, device)
        others = select(args.peers, device, peers.every_peer(args.vllm_lib, args.sgl_lib))
        environment = read_environment(device)
        out = frame.report_folder(args, environment)
        plots.preload()
    except (ValueError, ScaledMMError) as error:
        return frame.usage(args, str(error))
    chosen = [peers.Ours(args.kernel), *others]
    fields, settings = frame.document_fields(args, environment, device, chosen, options)
    document = Int8Document(**fields, settings=Int8Settings(**settings, check_limit_gmac=options.check_limit_gmac, data=args.data))
    shown.print_unavailable(document, console)
    if REGIMES[args.regime].meter_ms and device.type == "cuda" and (reason := energy.unavailable(device)) is not None:
        console.print(f"energy is not metered: {reason}", highlight=False, markup=False)
    here = frame.available(document, chosen)
    if args.overhead:  # first, because earlier work of the process affects it
        document.overhead = run_overhead(here, device)
    frame.fill(document, Int8Suite(args.data), cases, here, device, options, out, console)
    path = document.path(out)
    shown.finish(document, path, report.render(out), args, console, lambda: _show(document, console))
    return shown.verdict(document, (OURS,), wrong_cases(document), "wrong bits", path, console)


def check_names(args: argparse.Namespace, device: torch.device) -> None:
    """BadParamError or KernelNotFoundError for an unknown kernel config or a missing library, before anything is timed."""
    from scaled_mm.bench import ours

    if args.kernel is not None:
        ours.refuse_cpu("--kernel", device)
        ours.refuse_kernel("--kernel", args.kernel, [row.name for row in ours.table_of(device).rows])
    frame.refuse_missing_library("--vllm-lib", args.vllm_lib)
    frame.refuse_missing_library("--sgl-lib", args.sgl_lib)


def _show(document: Int8Document, console: Console) -> None:
    from scaled_mm.bench.int8 import report
    from scaled_mm.bench.int8.analysis import load_recorded
    from scaled_mm.measure.stats import geometric_mean

    _print_cases(document, console)
    if document.overhead:
        shown.print_overhead(document.overhead, console)
    against, speedups = report.headline(document, load_recorded())
    if speedups:
        mean = geometric_mean(one.factor for one in speedups)
        console.print(f"speed-up [bold]{mean:.3f}x[/bold] over {against}, {len(speedups)} cases", highlight=False)


def _print_cases(document: Int8Document, console: Console) -> None:
    from scaled_mm.bench.analysis import by_weight, names_run, of_roof, us_of
    from scaled_mm.bench.int8 import analysis, report

    names = names_run(document)
    factors = {id(one.case): one.factor for one in analysis.measured_speedups(document)}
    title = f"{document.environment.gpu}: microseconds per call"
    table = shown.table(title, ("shape", "M", *names, "speed-up", "of roof", "bits"), left=("shape",))
    for cases in by_weight(document).values():
        for case in cases:
            factor, roof = factors.get(id(case)), of_roof(case)
            times = [us_of(case, name) for name in names]
            table.add_row(
                case.shape,
                str(case.M),
                *("[red]failed[/red]" if us is None else f"{us:.2f}" for us in times),
                "" if factor is None else f"[{'green' if factor >= 1 else 'red'}]{factor:.2f}x",
                "" if roof is None else f"{roof:.2f}",
                report.bits(case).replace("WRONG", "[red]WRONG[/red]"),
            )
        table.add_section()
    console.print(table)
