"""`scaled-mm bench`: time our kernels and everybody else's on the same inputs, and write the report."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from scaled_mm.cli import bench_gguf, common

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from scaled_mm.bench.int8.peers import Peer
    from scaled_mm.bench.int8.run import Options
    from scaled_mm.measure.record import BenchDocument, OverheadRecord
    from scaled_mm.measure.shapes import Case

HELP = "time INT8 products against vLLM, SGLang and torch, or block products against llama.cpp, and write a report"

OK, FAILED, USAGE = 0, 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    add = parser.add_argument
    add("--shapes", help="llama-70b, llama-8b, llm (both), layer names (8B_qkv, ...) or MxNxK, comma-separated; default llm, on a CPU 8B_o")
    add("--m", help="M values for named shapes, comma-separated; default 1 ... 8192, on a CPU 1,16,64")
    add("--device", help="cuda:0, cpu, ...; default the first GPU, or the CPU when there is none")
    add("--out", type=Path, metavar="DIR", help="report directory; default reports/<arch>/<gpu>")
    peers = "all, none, or names: ours_tensor,bf16,intmm,fp8row,vllm,sgl; on a CPU bf16,fp32,intmm_epilogue; default all. "
    peers += "With --block: ours_w4a8,ours_q8_1; on a CPU these and mm,dequantize_mm"
    add("--peers", default="all", metavar="NAMES", help=peers)
    add("--vllm-lib", metavar="PATH", help="vLLM's _C_stable_libtorch library, when vllm is not installed")
    add("--sgl-lib", metavar="PATH", help="sgl_kernel's common_ops library, when sgl_kernel is not installed")
    add("--kernel", metavar="ROW", help="force ours to one row of the tile table")
    rows = "time rows of the tile table (all, or these names) on each case instead of peers; writes rows.json"
    add("--rows", nargs="?", const="all", metavar="NAMES", help=rows)
    add("--overhead", action="store_true", help="also measure host microseconds per call")
    add("--no-check", action="store_true", help="do not compare with the reference")
    limit = "check products of up to so many billion multiply-adds; default 8192, on a CPU 4"
    add("--check-limit", type=common.number("a number of 0 or more", lambda value: value >= 0), metavar="GMAC", help=limit)
    positive = common.number("a number above 0", lambda value: value > 0)
    add("--budget-ms", type=positive, metavar="MS", help="timed milliseconds per implementation and case; default 60")
    add("--seed", type=common.seed, help="seed of the random inputs; default a new one, which the report records")
    add("--render", type=Path, metavar="DIR", help="only render the report of DIR/bench.json again")
    add("--json", action="store_true", help="print the document on stdout")
    bench_gguf.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command. 0: done; 1: a case of ours failed or has wrong bits; 2: the arguments make no sense."""
    from scaled_mm.bench.int8 import peers, plots
    from scaled_mm.bench.rows import rows
    from scaled_mm.errors import ScaledMMError

    console = common.console(stderr=args.json)
    try:
        bench_gguf.check_options(args)
        if args.block:
            device = common.device_of(args.device)
            planned = bench_gguf.plan(args, device)
    except (ValueError, ScaledMMError) as error:
        return _usage(args, str(error))
    if args.block:
        return bench_gguf.run(args, planned, _options(args, device), device, _command(args), console)
    if args.render is not None:
        return _render(args, console)
    try:
        device = common.device_of(args.device)
        cases = _cases(args, device)
        options = _options(args, device)
        _check_names(args, device)
        if args.out is not None:
            common.writable_folder("--out", args.out)
        if args.rows is not None:
            names = rows.row_names(args.rows, peers.our_handle(device).arch)
        else:
            plots.preload()
            others = peers.select(args.peers, device, peers.every_peer(args.vllm_lib, args.sgl_lib))
    except (ValueError, ScaledMMError) as error:
        return _usage(args, str(error))
    if args.rows is not None:
        return _run_rows(args, device, cases, names, options, console)
    return _run_bench(args, device, cases, [peers.Ours(args.kernel), *others], options, console)


def _usage(args: argparse.Namespace, message: str) -> int:
    common.say(f"scaled-mm bench: {message}")
    if args.json:
        common.print_json({"error": {"status": "BAD_PARAM", "message": message}}, indent=2)
    return USAGE


def _check_names(args: argparse.Namespace, device: torch.device) -> None:
    """BadParamError or KernelNotFoundError for a row or a library that is not there: known before anything is timed."""
    from scaled_mm.bench.int8 import peers
    from scaled_mm.bench.rows import rows
    from scaled_mm.errors import BadParamError, KernelNotFoundError

    for option, value in (("--rows", args.rows), ("--kernel", args.kernel)):
        if value is not None and device.type == "cpu":
            raise BadParamError(f"{option}: rows of a tile table are kernels for a GPU, the device is a CPU")
    if args.kernel is not None:
        known = rows.row_names("all", peers.our_handle(device).arch)
        if args.kernel not in known:
            raise KernelNotFoundError(f"--kernel: expected one of {', '.join(known)}, got {args.kernel!r}")
    for option, value in (("--vllm-lib", args.vllm_lib), ("--sgl-lib", args.sgl_lib)):
        if value is not None and not Path(value).is_file():
            raise BadParamError(f"{option}: expected the path of a library, got {value}")


def _cases(args: argparse.Namespace, device: torch.device) -> list[Case]:
    from scaled_mm.measure import shapes

    cpu = device.type == "cpu"
    with _naming("--m"):
        ms = (shapes.CPU_M if cpu else shapes.LLM_M) if args.m is None else shapes.parse_ms(args.m)
    with _naming("--shapes"):
        return shapes.parse_cases((shapes.CPU_SHAPES if cpu else "llm") if args.shapes is None else args.shapes, ms)


@contextmanager
def _naming(option: str) -> Iterator[None]:
    """Puts the option's name before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error


def _options(args: argparse.Namespace, device: torch.device) -> Options:
    import secrets

    from scaled_mm.bench.int8.run import CHECK_LIMIT_GMAC, Options
    from scaled_mm.measure import timing

    return Options(
        budget_ms=timing.DEFAULT_BUDGET_MS if args.budget_ms is None else args.budget_ms,
        check=not args.no_check,
        check_limit_gmac=CHECK_LIMIT_GMAC[device.type] if args.check_limit is None else args.check_limit,
        seed=secrets.randbelow(2**31) if args.seed is None else args.seed,
    )


def command_line(args: argparse.Namespace, defaults: argparse.Namespace) -> str:
    """The command that gives `args`: every option that differs from its default."""
    words = ["scaled-mm", "bench"]
    for key, value in vars(args).items():
        if not hasattr(defaults, key) or value == getattr(defaults, key):
            continue  # the first: options of the program, not of this command
        words.append("--" + key.replace("_", "-"))
        if value is not True and not (key == "rows" and value == "all"):
            words.append(str(value))
    return shlex.join(words)


def _command(args: argparse.Namespace) -> str:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return command_line(args, parser.parse_args([]))


def _run_bench(
    args: argparse.Namespace,
    device: torch.device,
    cases: list[Case],
    chosen: list[Peer],
    options: Options,
    console: Console,
) -> int:
    from rich.markup import escape

    from scaled_mm.bench.int8 import analysis, peers, run
    from scaled_mm.measure.environment import read_clocks, report_folder
    from scaled_mm.measure.record import BENCH_JSON, save

    document = _new_document(args, device, chosen, options)
    out = args.out or common.writable_folder("--out", report_folder(document.environment))
    for one in document.implementations:
        if one.unavailable is not None:
            console.print(f"[yellow]not run:[/yellow] {one.name}: {escape(one.unavailable)}", highlight=False)
    here = [peer for peer, one in zip(chosen, document.implementations, strict=True) if one.unavailable is None]
    with common.progress_bar(console, len(cases) * (len(here) + 2)) as step:
        if args.overhead:  # first: what the process has done before shows in it
            document.overhead = run.run_overhead(here, device)
        for records in run.run_grid(cases, here, device, options, step):
            document.cases += records
            if (clocks := read_clocks(device, f"after {records[0].shape}")) is not None:
                document.clocks.append(clocks)
            save(document, out)  # a run that is cut short leaves what it has
            common.log(console, f"{records[0].shape}: {len(records)} case{'s' * (len(records) > 1)}")
    save(document, out)
    _finish(document, out, args, console)
    failed = [f"{case.shape} M={case.M}: {reason}" for case, name, reason in analysis.failures(document) if name == peers.OURS]
    failed += [one.unavailable for one in document.implementations if one.name == peers.OURS and one.unavailable is not None]
    if failed or analysis.wrong_cases(document):
        why = failed[0] if failed else "wrong bits"
        console.print(f"[red]ours failed or has wrong bits:[/red] {escape(why)}; see {escape(str(out / BENCH_JSON))}", highlight=False)
        return FAILED
    return OK


def _new_document(args: argparse.Namespace, device: torch.device, chosen: list[Peer], options: Options) -> BenchDocument:
    from datetime import datetime, timezone

    from scaled_mm.bench.int8 import run
    from scaled_mm.measure import timing
    from scaled_mm.measure.environment import read_clocks, read_environment
    from scaled_mm.measure.record import BenchDocument, Settings

    clocks = read_clocks(device, "before")
    return BenchDocument(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=_command(args),
        settings=Settings(
            budget_ms=options.budget_ms,
            rounds=timing.ROUNDS,
            check=options.check,
            check_limit_gmac=options.check_limit_gmac,
            seed=options.seed,
            kernel=args.kernel,
        ),
        environment=read_environment(device),
        clocks=[clocks] if clocks is not None else [],
        implementations=run.implementations(chosen, device),
    )


def _run_rows(
    args: argparse.Namespace,
    device: torch.device,
    cases: list[Case],
    names: list[str],
    options: Options,
    console: Console,
) -> int:
    from scaled_mm.bench.rows import rows
    from scaled_mm.measure.environment import read_environment, report_folder

    environment = read_environment(device)
    out = args.out or common.writable_folder("--out", report_folder(environment))
    entries: list[dict] = []
    with common.progress_bar(console, len(cases) * (len(names) + 1)) as step:
        for layer in rows.run_rows(cases, names, device, options, step):
            entries += layer
            rows.save_rows(entries, out, environment, _command(args))
            common.log(console, f"{layer[0]['shape']}: {len(layer)} case{'s' * (len(layer) > 1)}")
    if args.json:
        common.print_json(entries)
    _print_rows(entries, console)
    console.print(f"wrote {out / rows.ROWS_JSON} and {rows.ROWS_MD}", highlight=False, markup=False)
    return OK if all(entry["rows"] for entry in entries) else FAILED


def _render(args: argparse.Namespace, console: Console) -> int:
    from pydantic import ValidationError

    from scaled_mm.bench.int8 import report
    from scaled_mm.measure import record

    try:
        paths = report.render(args.render)
    except (OSError, ValidationError) as error:
        return _usage(args, f"{args.render / record.BENCH_JSON}: {error}")
    console.print("wrote " + ", ".join(str(path) for path in paths), highlight=False, markup=False)
    if args.json:
        common.print_json(record.load(args.render).model_dump(mode="json"))
    return OK


def _finish(document: BenchDocument, out: Path, args: argparse.Namespace, console: Console) -> None:
    from rich.markup import escape

    from scaled_mm.bench.int8 import plots, report
    from scaled_mm.bench.int8.analysis import geometric_mean, load_recorded

    paths = report.render(out)
    if args.json:
        common.print_json(document.model_dump(mode="json"))
    _print_cases(document, console)
    if document.overhead:
        _print_overhead(document.overhead, console)
    against, speedups = report.headline(document, load_recorded())
    if speedups:
        mean = geometric_mean(one.factor for one in speedups)
        console.print(f"speed-up [bold]{mean:.3f}x[/bold] over {against}, {len(speedups)} cases", highlight=False)
    if (reason := plots.unavailable()) is not None:
        console.print(f"[yellow]no plots:[/yellow] {escape(reason)}", highlight=False)
    console.print(f"wrote {out / 'bench.json'}, " + ", ".join(path.name for path in paths), highlight=False, markup=False)


def _print_cases(document: BenchDocument, console: Console) -> None:
    from rich.table import Table

    from scaled_mm.bench.int8 import analysis, report

    names = analysis.names_run(document)
    factors = {id(one.case): one.factor for one in analysis.measured_speedups(document)}
    table = Table(title=f"{document.environment.gpu}: microseconds per call")
    for title in ("shape", "M", *names, "speed-up", "of roof", "bits"):
        table.add_column(title, justify="left" if title == "shape" else "right")
    for cases in analysis.shapes(document).values():
        for case in cases:
            factor, roof = factors.get(id(case)), analysis.of_roof(case)
            times = [analysis.us_of(case, name) for name in names]
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


def _print_overhead(overhead: Iterable[OverheadRecord], console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="host microseconds per call")
    table.add_column("call")
    table.add_column("µs", justify="right")
    for one in overhead:
        table.add_row(one.name, f"[red]{escape(one.failed)}[/red]" if one.us is None else f"{one.us:.2f}")
    console.print(table)


def _print_rows(entries: list[dict], console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    from scaled_mm.bench.rows import rows

    table = Table(title="best row by case, and what the dispatched one loses")
    for title in ("shape", "M", "best row", "µs", "dispatched", "loss", "failed"):
        table.add_column(title, justify="right" if title in ("M", "µs", "loss", "failed") else "left")
    for entry in entries:
        fastest, cost = rows.best(entry), rows.loss(entry)
        table.add_row(
            entry["shape"],
            str(entry["M"]),
            fastest[0] if fastest else "[red]every row failed[/red]",
            f"{fastest[1]:.2f}" if fastest else "",
            entry["dispatched"],
            "" if cost is None else f"{cost:.1%}",
            str(len(entry["failed"])) if entry["failed"] else "",
        )
    console.print(table)
    messages = {(name, message) for entry in entries for name, message in entry["failed"].items()}
    for name, message in sorted(messages):
        console.print(f"[yellow]failed:[/yellow] {name}: {escape(message)}", highlight=False)
