"""`scaled-mm bench --block`: time products with llama.cpp's block formats, next to llama.cpp's own, and write the report."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scaled_mm.cli import common
from scaled_mm.gguf_formats import WEIGHT_FORMATS

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from scaled_mm.bench.gguf.cases import BlockCase
    from scaled_mm.bench.gguf.llama import LlamaTimes
    from scaled_mm.bench.gguf.record import BlockDocument
    from scaled_mm.bench.int8.peers import Peer
    from scaled_mm.bench.int8.run import Options
    from scaled_mm.measure.record import Environment

OK, FAILED = 0, 1

#: Options that mean something with --block alone, and those that mean nothing with it; with their defaults.
ONLY_BLOCK = {"formats": None, "sweep": False, "llama": None}
NOT_BLOCK = {"vllm_lib": None, "sgl_lib": None, "rows": None, "overhead": False, "check_limit": None, "render": None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("products with llama.cpp's block formats").add_argument
    shapes = "default 28672x8192,4096x14336,4096x4096, rows of the weight x K; on a CPU 4096x4096"
    add("--block", action="store_true", help=f"time these in place of INT8. --m are tokens; --shapes also NxK, {shapes}")
    add("--formats", metavar="NAMES", help=f"all, or some of {','.join(WEIGHT_FORMATS)}; default all")
    add("--sweep", action="store_true", help="--m 1-64, or these besides those that --m names")
    llama = "llama.cpp's test-backend-ops, to be run first; without it an H200's recorded times, on an H200"
    add("--llama", type=Path, metavar="PATH", help=llama)


def check_options(args: argparse.Namespace) -> None:
    """BadParamError for an option that goes with the other of the two benchmarks."""
    from scaled_mm.errors import BadParamError

    which, why = (NOT_BLOCK, "does not go with --block") if args.block else (ONLY_BLOCK, "goes with --block alone")
    for name, default in which.items():
        if getattr(args, name) != default:
            raise BadParamError(f"--{name.replace('_', '-')}: {why}")


@dataclass(frozen=True)
class Plan:
    """What a command line asks for, all of it there: known before anything is timed."""

    cases: list[BlockCase]
    peers: list[Peer]
    environment: Environment
    out: Path
    llama: LlamaTimes


def plan(args: argparse.Namespace, device: torch.device) -> Plan:
    """Runs llama.cpp too, where it is to be run. ValueError or a ScaledMMError for arguments that make no sense."""
    from scaled_mm.bench.gguf import llama
    from scaled_mm.bench.int8 import plots
    from scaled_mm.measure.environment import read_environment, report_folder

    cases, chosen = _cases(args, device), _peers(args, device)
    environment = read_environment(device)
    out = common.writable_folder("--out", args.out or report_folder(environment))
    plots.preload()
    times = llama.recorded(environment.gpu) if args.llama is None else llama.measure(args.llama, device)
    return Plan(cases, chosen, environment, out, times)


def run(args: argparse.Namespace, planned: Plan, options: Options, device: torch.device, command: str, console: Console) -> int:
    """0: done; 1: a case of ours failed or is not within the bound."""
    from scaled_mm.bench.gguf import run as block_run
    from scaled_mm.bench.gguf.record import save
    from scaled_mm.measure.environment import read_clocks

    cases, out, times = planned.cases, planned.out, planned.llama
    document = _new_document(args, device, planned, options, command)
    here = [peer for peer, one in zip(planned.peers, document.implementations, strict=True) if one.unavailable is None]
    with common.progress_bar(console, len(cases) * (len(here) + 1)) as step:
        for records in block_run.run_grid(cases, here, device, options, times, step):
            document.cases += records
            first = f"{records[0].fmt} {records[0].shape}"
            if (clocks := read_clocks(device, f"after {first}")) is not None:
                document.clocks.append(clocks)
            save(document, out)  # a run that is cut short leaves what it has
            common.log(console, f"{first}: {len(records)} case{'s' * (len(records) > 1)}")
    return _finish(document, out, args, console)


def _cases(args: argparse.Namespace, device: torch.device) -> list[BlockCase]:
    from scaled_mm.bench.gguf import cases
    from scaled_mm.measure.shapes import parse_ms

    cpu = device.type == "cpu"
    try:
        named = () if args.m is None else parse_ms(args.m)
    except ValueError as error:
        raise ValueError(f"--m: {error}") from error
    tokens = tuple(sorted({*named, *cases.SWEEP})) if args.sweep else named
    tokens = tokens or (cases.CPU_TOKENS if cpu else cases.TOKENS)
    shapes = (cases.CPU_SHAPES if cpu else cases.SHAPES) if args.shapes is None else args.shapes
    return cases.parse_cases(cases.parse_formats(args.formats or "all"), shapes, tokens)


def _peers(args: argparse.Namespace, device: torch.device) -> list[Peer]:
    from scaled_mm.bench.gguf import peers as block_peers
    from scaled_mm.bench.int8 import peers
    from scaled_mm.errors import BadParamError, KernelNotFoundError
    from scaled_mm.jit.dispatch import callable_table

    if args.kernel is not None:
        if device.type == "cpu":
            raise BadParamError("--kernel: rows of a tile table are kernels for a GPU, the device is a CPU")
        known = [row.name for row in callable_table(peers.our_handle(device).arch).gguf.rows]
        if args.kernel not in known:
            raise KernelNotFoundError(f"--kernel: expected one of {', '.join(known)}, got {args.kernel!r}")
    ours, *others = block_peers.every_peer(args.kernel)
    return [ours, *peers.select(args.peers, device, others)]


def _new_document(args: argparse.Namespace, device: torch.device, planned: Plan, options: Options, command: str) -> BlockDocument:
    from datetime import datetime, timezone

    from scaled_mm.bench.gguf.record import BlockDocument, BlockSettings
    from scaled_mm.bench.int8 import run
    from scaled_mm.measure import timing
    from scaled_mm.measure.environment import read_clocks

    clocks = read_clocks(device, "before")
    return BlockDocument(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=command,
        settings=BlockSettings(budget_ms=options.budget_ms, rounds=timing.ROUNDS, check=options.check, seed=options.seed, kernel=args.kernel),
        environment=planned.environment,
        clocks=[clocks] if clocks is not None else [],
        implementations=run.implementations(planned.peers, device),
        llama=planned.llama.source,
    )


def _finish(document: BlockDocument, out: Path, args: argparse.Namespace, console: Console) -> int:
    from rich.markup import escape

    from scaled_mm.bench.gguf import analysis as block_analysis
    from scaled_mm.bench.gguf import report
    from scaled_mm.bench.gguf.record import BLOCK_JSON, save
    from scaled_mm.bench.int8 import analysis, plots

    save(document, out)
    paths = report.render(out)
    if args.json:
        common.print_json(document.model_dump(mode="json"))
    _print_cases(document, console)
    for line in (*report.summary(document), *report.drops(document)):
        console.print(escape(line.replace("**", "").replace("`", "")), highlight=False)
    if (reason := plots.unavailable()) is not None:
        console.print(f"[yellow]no plots:[/yellow] {escape(reason)}", highlight=False)
    console.print(f"wrote {out / BLOCK_JSON}, " + ", ".join(path.name for path in paths), highlight=False, markup=False)
    ours = block_analysis.OURS_ALL
    failed = [f"{report.name_of(case)}: {name}: {why}" for case, name, why in analysis.failures(document) if name in ours]
    failed += [one.unavailable for one in document.implementations if one.name in ours and one.unavailable is not None]
    if failed or block_analysis.wrong_cases(document):
        why = failed[0] if failed else "not within the bound"
        console.print(f"[red]ours failed or is wrong:[/red] {escape(why)}; see {escape(str(out / BLOCK_JSON))}", highlight=False)
        return FAILED
    return OK


def _print_cases(document: BlockDocument, console: Console) -> None:
    from scaled_mm.bench.gguf import analysis, report

    table = common.narrow_table(f"{document.environment.gpu}: microseconds per call")
    for title in ("format", "weight", *report.header(document)):
        table.add_column(title, justify="left" if title in ("format", "weight", "kernel") else "right", overflow="fold")
    for (fmt, shape), cases in analysis.weights(document).items():
        for case in cases:
            cells = [cell.replace("`", "") for cell in report.row(document, case)]
            table.add_row(fmt, shape, *(f"[red]{cell}[/red]" if cell.startswith(("NO", "failed")) else cell for cell in cells))
        table.add_section()
    console.print(table)
