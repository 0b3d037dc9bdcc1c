"""`scaled-mm autotune`: measure candidate kernels on this GPU, and write its tile table and a report."""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaled_mm.cli import common

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from scaled_mm.autotune.record import AutotuneDocument
    from scaled_mm.measure.shapes import Case
    from scaled_mm.tables import TileTable

HELP = "find the fastest rows for some products on this GPU, and write its tile table and a report"

OK, NOTHING_TIMED = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    add = parser.add_argument
    shapes = "llama-70b, llama-8b, llm, layer names or MxNxK, comma-separated, or a file of them; default llm"
    add("--shapes", default="llm", metavar="SHAPES", help=shapes)
    add("--m", help="M values for named shapes, comma-separated; default 1 ... 8192")
    sections = ("gemm", "block_scaled", "grouped", "grouped_block_scaled")
    add("--section", choices=sections, default="gemm", help="the kind of product to tune; default gemm, plain INT8 products")
    experts = "of the grouped sections: the number of experts; M is then the rows of each of them"
    add("--experts", type=common.integer(1), metavar="E", help=experts)
    add("--arch", help="tune the table and kernels of another architecture, by forced dispatch; default the GPU's own")
    minutes = common.number("a number of minutes above 0", lambda value: value > 0)
    add("--budget", type=minutes, default=30.0, metavar="MINUTES", help="minutes for compiling and timing; default 30")
    add("--top", type=common.integer(1), default=12, metavar="N", help="candidates per product; the table's row is measured in any case; default 12")
    add(
        "--budget-ms",
        type=common.number("a number above 0", lambda value: value > 0),
        default=40.0,
        metavar="MS",
        help="milliseconds of samples per candidate and product; default 40",
    )
    add("--jobs", type=common.integer(1), metavar="N", help="kernels compiled at a time; default one per core")
    add("--seed", type=common.seed, help="seed of the random inputs; default a new one, which the report records")
    add("--device", help="cuda:0, ...; default the first GPU")
    add("--out", type=Path, metavar="DIR", help="report directory, and the journal to go on from; default reports/<arch>/<gpu>")
    add("--table", type=Path, metavar="FILE", help="the table to write; default cutlass_configs/tuned/<gpu>.yaml, with --arch DIR/<arch>.yaml")
    add("--dry-run", action="store_true", help="list the candidates; needs no GPU with --arch")


def run(args: argparse.Namespace) -> int:
    """0: a table was written; 1: nothing could be timed; 2 (as an error): the arguments are invalid, or there is no GPU."""
    _check_section(args)
    cases = _cases(args)
    if args.dry_run:
        return _dry_run(args, cases)
    device = _gpu(args)
    if args.arch is not None:
        os.environ["SCALED_MM_ARCH"] = common.table_of(args.arch).arch  # for this process and the timing process
    return _tune(args, device, cases)


def _check_section(args: argparse.Namespace) -> None:
    from scaled_mm.errors import BadParamError
    from scaled_mm.kernels.sections import OF_EXPERTS

    if (args.section in OF_EXPERTS) != (args.experts is not None):
        expected = f"the number of experts of --section {args.section}" if args.section in OF_EXPERTS else f"none: --section {args.section} has none"
        raise BadParamError(f"--experts: expected {expected}, got {args.experts}")


def _cases(args: argparse.Namespace) -> list[Case]:
    from scaled_mm.errors import BadParamError
    from scaled_mm.measure import shapes

    try:
        ms = shapes.LLM_M if args.m is None else shapes.parse_ms(args.m)
    except ValueError as error:
        raise BadParamError(f"--m: {error}") from error
    text = args.shapes
    try:
        if Path(text).is_file():
            lines = [line.partition("#")[0] for line in Path(text).read_text(encoding="utf-8").splitlines()]
            text = ",".join(line.strip() for line in lines if line.strip())
        cases = shapes.parse_cases(text, ms)
    except UnicodeDecodeError as error:
        raise BadParamError(f"--shapes: expected a text file in UTF-8, got {text} ({error})") from error
    except ValueError as error:
        raise BadParamError(f"--shapes: {error}") from error
    products: dict[tuple[int, int, int], Case] = {}  # several layers may have the same product
    for case in cases:
        products.setdefault((case.M, case.N, case.K), case)
    return list(products.values())


def _gpu(args: argparse.Namespace) -> torch.device:
    from scaled_mm.errors import DeviceNotSupportedError

    device = common.device_of(args.device)
    if device.type != "cuda":
        raise DeviceNotSupportedError("--device: expected a GPU, got the CPU: kernels are timed; `--dry-run --arch sm90` lists candidates")
    return device


def _dry_run(args: argparse.Namespace, cases: list[Case]) -> int:
    from scaled_mm.kernels.gpu import typical

    if args.arch is None:
        base, gpu = _own_table(_gpu(args))
    else:
        base = common.table_of(args.arch)
        gpu = typical(base.arch)
    plan = _plan(args, base, cases, gpu)
    print(f"{base.arch}: {plan.legal} legal candidates, {len(plan.rows)} of them for {len(plan.wanted)} product{'s' * (len(plan.wanted) != 1)}")
    for (M, N, K), names in plan.wanted.items():
        print(f"{M}x{N}x{K}: {' '.join(names)}")
    return OK


def _plan(args: argparse.Namespace, base: TileTable, cases: list[Case], gpu: Any) -> Any:
    from scaled_mm.autotune import tune

    return tune.make_plan(_part(args, base), [(case.M, case.N, case.K) for case in cases], gpu, args.top, args.experts or 1)


def _part(args: argparse.Namespace, table: TileTable) -> TileTable:
    """What is tuned of a table: itself, or a section."""
    from scaled_mm.kernels.sections import TOP_LEVEL

    return table if args.section == TOP_LEVEL else getattr(table, args.section)


def _own_table(device: torch.device) -> tuple[TileTable, Any]:
    """The architecture's table of a GPU, never an earlier tuned one, and the GPU's properties."""
    from scaled_mm import Handle
    from scaled_mm.kernels.gpu import of_handle
    from scaled_mm.tables import load_table

    with Handle(device) as handle:
        base = load_table(handle.arch)
        return base, of_handle(handle)


def _tune(args: argparse.Namespace, device: torch.device, cases: list[Case]) -> int:
    from scaled_mm.autotune import record, tune
    from scaled_mm.autotune.measure import Measurer
    from scaled_mm.autotune.report import render
    from scaled_mm.autotune.state import Journal
    from scaled_mm.autotune.write import tuned_table
    from scaled_mm.jit import library
    from scaled_mm.kernels.sections import TOP_LEVEL
    from scaled_mm.measure import plots
    from scaled_mm.measure.environment import read_environment, report_folder
    from scaled_mm.tables.tuned import tuned_path

    plots.preload()
    console = common.console()
    base, gpu = _own_table(device)
    environment = read_environment(device)
    out = common.writable_folder("--out", args.out or report_folder(environment))
    default = tuned_path(environment.gpu) if args.arch is None else out / f"{base.arch}.yaml"
    path = args.table or default
    common.writable_folder("--table", path.parent)
    library.nvcc_and_flags(base.arch)  # KernelNotBuiltError names what is missing, before anything that takes long

    seed = secrets.randbelow(2**31) if args.seed is None else args.seed
    machine = " ".join(map(str, (environment.gpu, environment.driver, environment.torch, environment.cuda)))
    if args.experts is not None:
        machine += f" {args.experts} experts"
    settings = tune.Settings(args.budget * 60, machine, args.top, args.jobs)
    plan = _plan(args, base, cases, gpu)
    part = _part(args, base)
    trial_part = part.model_copy(update=dict(rows=(*plan.rows.values(), *(row for row in part.rows if row.name not in plan.rows))))
    trial = tuned_table(trial_part if args.section == TOP_LEVEL else base.model_copy(update={args.section: trial_part}), environment.gpu, [], [])
    setup = {
        "table": trial.model_dump(mode="json"),
        "section": args.section,
        "experts": args.experts or 1,
        "device": str(device),
        "budget_ms": args.budget_ms,
        "seed": seed,
    }
    journal = Journal(out / record.JOURNAL)
    if journal.skipped:
        console.print(f"{journal.path}: {journal.skipped} lines cannot be read and are measured again", highlight=False, markup=False)
    with _progress(console) as progress, Measurer(setup) as measurer:
        kernels = tune.BuiltKernels(trial)
        outcome = tune.tune(part, list(plan.wanted), gpu, settings, journal, kernels, measurer, progress, plan=plan)
        starts = measurer.starts
    document = _document(args, cases, part, gpu, environment, outcome, seed, starts)
    if outcome.choices:
        _write(args, base, environment, outcome, document, path)
        document.table = _without_machine(path)
    record.save(document, out)
    paths = render(out)
    _say(console, document)
    console.print(
        f"wrote {', '.join(map(str, [*([path] if document.table else []), out / record.AUTOTUNE_JSON, *paths]))}", highlight=False, markup=False
    )
    return OK if outcome.choices else NOTHING_TIMED


def _document(args, cases, part, gpu, environment, outcome, seed: int, starts: int) -> AutotuneDocument:
    """part: the table that was tuned, or its section."""
    from datetime import datetime, timezone

    from scaled_mm.autotune import choose, model, record, tune

    times, choices = outcome.times(), {choice.product: choice for choice in outcome.choices}
    experts = outcome.plan.experts
    measured_accuracy = model.accuracy({product: us for product, us in times.items() if us}, outcome.plan.rows, gpu, experts)
    return record.AutotuneDocument(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=command_line(args),
        environment=environment,
        base=Path(part.source).name,
        section=args.section,
        experts=experts,
        budget_minutes=args.budget,
        budget_ms=args.budget_ms,
        seed=seed,
        top=args.top,
        legal=outcome.plan.legal,
        resumed=outcome.resumed,
        worker_starts=starts,
        table=None,
        ended=outcome.ended,
        products=[tune.product_record(case, part, choices, times, gpu, environment.gpu, experts=experts) for case in cases],
        cells=list(outcome.cells.values()),
        unbuilt=outcome.unbuilt,
        left_out=[record.LeftOut(row=name, M=M, N=N, K=K) for (M, N, K), name in outcome.left_out],
        cliffs=[str(cliff) for cliff in choose.cliffs(tune.chosen_us(outcome))],
        accuracy=measured_accuracy,
    )


def _write(args, base, environment, outcome, document: AutotuneDocument, path: Path) -> None:
    from scaled_mm.autotune.write import present_table, tuned_table, write_table
    from scaled_mm.kernels.sections import SECTIONS

    how = [choice.how for choice in outcome.choices]
    comment = [
        f"{environment.gpu}: which kernel serves which product, as measured there. Written by the autotuner; edit {document.base} instead.",
        "",
        document.command,
        f"{document.created}, driver {environment.driver or 'unknown'}, CUDA {environment.cuda or 'none'}, commit {environment.git_commit or 'none'}",
        f"{how.count('measured')} products measured, {how.count('inherited')} with the row of the next larger M. "
        f"{len(outcome.buckets)} buckets changed.",
        f"The other kinds of product are as they were before: those of {document.base}, or of an earlier run.",
    ]
    tuned = SECTIONS[args.section].products + (f", {args.experts} experts" if args.experts else "")
    comment.insert(0, f"Tuned last: {tuned}.")
    others = present_table(path, base, environment.gpu)
    write_table(tuned_table(base, environment.gpu, list(outcome.plan.rows.values()), outcome.buckets, args.section, others), path, comment)


def _without_machine(path: Path) -> str:
    """A path for a report. A table of the package is shown by its path in the repository, without the machine's folders."""
    from scaled_mm.tables.loader import configs_dir

    inside = path.is_relative_to(configs_dir())  # the folder has another name in an installed package
    return (Path("cutlass_configs") / path.relative_to(configs_dir())).as_posix() if inside else str(path)


def command_line(args: argparse.Namespace) -> str:
    """The command line for `args`: every option that differs from its default."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["scaled-mm", "autotune"]
    for key, default in vars(parser.parse_args([])).items():
        value = getattr(args, key)
        if value != default:
            words += [f"--{key.replace('_', '-')}"] + ([] if value is True else [f"{value:g}" if isinstance(value, float) else str(value)])
    return shlex.join(words)


def _say(console: Console, document: AutotuneDocument) -> None:
    from rich.markup import escape

    from scaled_mm.autotune.report import summary_lines

    for line in summary_lines(document):
        console.print(escape(line), highlight=False)


@contextmanager
def _progress(console: Console) -> Iterator[Any]:
    """A progress bar; yields the object to which `tune` reports its phases and steps. Without a terminal, a line for each phase."""
    from rich import progress

    columns = (
        progress.TextColumn("{task.fields[phase]}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.description}"),
    )
    with progress.Progress(*columns, console=console, transient=True) as bar:
        yield _Bar(bar, console)


class _Bar:
    def __init__(self, bar: Progress, console: Console):
        self._bar, self._console, self._task = bar, console, None
        self._log = common.LogLines(console.is_terminal)
        self._done = self._total = 0

    def phase(self, name: str, total: int) -> None:
        if not self._console.is_terminal:
            print(f"{name}: {total}", file=sys.stderr, flush=True)
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task("", total=total, phase=name)
        self._done, self._total = 0, total

    def step(self, text: str) -> None:
        self._bar.update(self._task, description=text)
        self._bar.advance(self._task)
        self._done += 1
        self._log.say(f"{self._done} of {self._total}: {text}")
