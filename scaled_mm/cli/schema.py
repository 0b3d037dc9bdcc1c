"""`scaled-mm schema list | show | validate | draw | run`: definitions, solutions, workloads and traces."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from scaled_mm.cli import common

if TYPE_CHECKING:
    import torch

    from scaled_mm.schema import Collection, Definition, Solution, Trace, Workload

HELP = "list, show, check and run the definitions of operators, in flashinfer-bench's format"

_CPU_LIMIT = 64  # millions of input elements; above this, a float64 reference takes seconds on two cores


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="schema_command", metavar="list | show | validate | draw | run", required=True)
    made = {
        name: commands.add_parser(name, help=text, description=text)
        for name, text in (
            ("list", "the definitions, by group"),
            ("show", "a definition with its reference, solutions and traces, or a solution"),
            ("validate", "every problem of every file, references run included; exit status 1 on any"),
            ("draw", "write the files of inputs that workloads name, those that are not there (all of this package's: 8.5 GB)"),
            ("run", "run solutions against references and time both; exit status 1 if one did not pass"),
        )
    }
    for name, command in made.items():
        command.add_argument("--root", type=Path, metavar="DIR", help="a folder with definitions/; default: this package's own schemas")
        if name in ("list", "draw", "run"):
            command.add_argument("names", nargs="*", metavar="NAME", help="the same as --definition NAME")
            command.add_argument(
                "--definition", action="append", metavar="NAME", help="this one, or those of a pattern such as 'gemm_q*' (repeatable); default: all"
            )
        command.set_defaults(parser=command)
    made["list"].add_argument("--group", help="gemm, quantization, activation, normalization or attention")
    made["show"].add_argument("name", help="of a definition or a solution")
    made["validate"].add_argument("--no-run", action="store_true", help="leave references unexecuted")
    made["draw"].add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder below which files are written")
    run = made["run"]
    run.add_argument("--solution", action="append", metavar="NAME", help="this one, or those of a pattern (repeatable); default: all")
    run.add_argument("--device", help="cuda:0, cpu, ...; default the first GPU, or the CPU when there is none")
    run.add_argument("--out", type=Path, metavar="DIR", help="add the traces to DIR/traces/<author>/<op_type>/<definition>.jsonl")
    run.add_argument(
        "--limit",
        type=common.integer(1),
        metavar="MILLIONS",
        help=f"leave out workloads with more elements of inputs; default: on a CPU {_CPU_LIMIT}, on a GPU none",
    )
    for name in ("draw", "run"):
        made[name].add_argument("--workload", action="append", metavar="UUID", help="this one, or those of a pattern (repeatable); default: all")
    for name in ("list", "run"):
        made[name].add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    commands = {"list": _list, "show": _show, "validate": _validate, "draw": _draw, "run": _run}
    return commands[args.schema_command](args)


def _list(args: argparse.Namespace) -> int:
    from scaled_mm import schema
    from scaled_mm.schema.vocabulary import GROUPS, OP_TYPES

    if args.group is not None and args.group not in GROUPS:
        raise schema.SchemaError(f"--group: expected one of {', '.join(GROUPS)}, got {args.group!r}")
    collection = schema.load(args.root)
    order = list(OP_TYPES)
    chosen = [one for one in _chosen(collection, args) if args.group in (None, one.group)]
    chosen.sort(key=lambda one: (GROUPS.index(one.group), order.index(one.op_type)))
    rows = [
        {
            "group": one.group,
            "op_type": one.op_type,
            "name": one.name,
            "solutions": len(collection.solutions.get(one.name, ())),
            "workloads": len(collection.workloads.get(one.name, ())),
            "traces": len(collection.traces.get(one.name, ())),
        }
        for one in chosen
    ]
    if args.json:
        common.print_json(rows)
        return 0
    table = common.narrow_table(f"{len(rows)} definitions of {collection.root}")
    for column in rows[0] if rows else ():
        table.add_column(column, justify="right" if column in ("solutions", "workloads", "traces") else "left", no_wrap=True)
    before = None
    for row in rows:
        first = [
            row["group"] if row["group"] != (before or {}).get("group") else "",
            row["op_type"] if row["op_type"] != (before or {}).get("op_type") else "",
        ]
        table.add_row(*first, row["name"], *(str(row[name]) for name in ("solutions", "workloads", "traces")))
        before = row
    common.console(markup=False).print(table)
    return 0


def _show(args: argparse.Namespace) -> int:
    from scaled_mm import schema

    collection = schema.load(args.root)
    solutions = {one.name: one for several in collection.solutions.values() for one in several}
    if args.name in solutions:
        _show_solution(solutions[args.name])
        return 0
    definition = collection.definition(args.name)
    print(f"{definition.name}: {definition.description or 'no description'}")
    print(f"\n  group {definition.group}, op type {definition.op_type}, outputs compared: {definition.compare}")
    for title, tensors in (("inputs", definition.inputs), ("outputs", definition.outputs)):
        print(f"\n  {title}")
        for name, tensor in tensors.items():
            axes = "a number" if tensor.shape is None else f"[{', '.join(tensor.shape)}]"
            logical = f", {definition.logical[name]} blocks" if name in definition.logical else ""
            print(f"    {name}: {tensor.dtype} {axes}{logical}")
    print("\n  axes")
    for name, axis in definition.axes.items():
        print(f"    {name}: {'of the workload' if axis.value is None else axis.value}")
    for expression in definition.constraints:
        print(f"    {expression}")
    print("\n  reference\n")
    print("\n".join(f"    {line}".rstrip() for line in definition.reference.splitlines()))
    print("\n  solutions")
    for one in collection.solutions.get(definition.name, ()):
        print(f"    {one.name}: {one.description or one.author}")
    print("\n  workloads")
    for one in collection.workloads.get(definition.name, ()):
        print(f"    {one.uuid}: {_sizes(one)}")
    traces = collection.traces.get(definition.name, ())
    if traces:
        print("\n  traces")
        common.console(markup=False).print(_trace_table("", traces))
    return 0


def _show_solution(solution: Solution) -> None:
    print(f"{solution.name}: {solution.description or 'no description'}")
    spec = solution.spec
    print(f"\n  of {solution.definition}, by {solution.author}; {spec.language}, {spec.entry_point}, for {', '.join(spec.target_hardware)}")
    for source in solution.sources:
        print(f"\n  {source.path}\n")
        print("\n".join(f"    {line}".rstrip() for line in source.content.splitlines()))


def _validate(args: argparse.Namespace) -> int:
    """Exit status 0; 1 with a line for each problem."""
    from scaled_mm import schema

    collection, problems = schema.read(args.root)
    for solution in (one for several in collection.solutions.values() for one in several):
        try:
            schema.check_solution(solution)
        except schema.SchemaError as error:
            op_type = collection.definitions[solution.definition].op_type
            problems.append(schema.SchemaError(f"solutions/{solution.author}/{op_type}/{solution.definition}/{solution.name}.json: {error}"))
    count = 0
    for name, definition in collection.definitions.items() if not args.no_run else ():
        if name not in collection.workloads:
            problems.append(
                schema.SchemaError(
                    f"definitions/{definition.op_type}/{name}.json: workloads: expected one at least, without which the reference cannot be run"
                )
            )
    if not args.no_run:
        for definition, workload in collection.references():
            count += 1
            try:
                schema.check_reference(definition, workload, collection.root)
            except schema.SchemaError as error:
                problems.append(schema.SchemaError(f"definitions/{definition.op_type}/{definition.name}.json: {error}"))
    for problem in problems:
        print(problem, file=sys.stderr)
    sums = {name: sum(map(len, getattr(collection, name).values())) for name in ("solutions", "workloads", "traces")}
    said = ", ".join(f"{number} {name}" for name, number in sums.items())
    ran = "no reference was run" if args.no_run else f"{count} references that differ in text, inputs or outputs were run on their smallest workload"
    print(f"{collection.root}: {len(collection.definitions)} definitions, {said} are right; {len(problems)} problems; {ran}")
    return 1 if problems else 0


def _draw(args: argparse.Namespace) -> int:
    from safetensors.torch import save_file

    from scaled_mm import schema

    collection = schema.load(args.root)
    common.writable_folder("--out", args.out)
    count = size = kept = 0
    log = common.LogLines(terminal=False, seconds=2.0)
    for definition in _chosen(collection, args):
        for workload in collection.workloads.get(definition.name, ()):
            if not _matches(workload.uuid, args.workload):
                continue
            for name, tensors in schema.blob_tensors(definition, workload).items():
                path = args.out / name
                if path.exists():
                    kept += 1
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                save_file(tensors, path)
                count, size = count + 1, size + path.stat().st_size
                log.say(f"{count} files, {size / 1e6:.0f} MB, the last one {path}")
    print(f"{count} files, {size / 1e6:.1f} MB below {args.out}{f'; {kept} that were there are as they were' if kept else ''}")
    return 0


def _run(args: argparse.Namespace) -> int:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from scaled_mm import schema
    from scaled_mm.schema.collection import append

    collection = schema.load(args.root)
    device = common.device_of(args.device)
    limit = args.limit or (_CPU_LIMIT if device.type == "cpu" else None)
    work, left_out = _work(collection, args, limit)
    if args.out:
        common.writable_folder("--out", args.out)
    console = common.console(stderr=True, markup=False)
    log = common.LogLines(console.is_terminal)
    log.begin(f"{sum(len(solutions) for _, solutions, _ in work)} runs on {device}")
    traces: list[Trace] = []
    with Progress(
        BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"), console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=len(work))
        for number, (definition, solutions, workload) in enumerate(work):
            progress.update(task, completed=number, description=workload.uuid)
            with contextlib.redirect_stdout(sys.stderr):  # the output of a solution is not part of the answer
                done = schema.evaluate(definition, solutions, workload, device, collection.root)
            for solution, trace in zip(solutions, done):
                traces.append(trace)
                if args.out:
                    append(trace, solution.author, definition.op_type, args.out)
            log.say(f"{number + 1} of {len(work)} workloads, the last one {workload.uuid}")
    failed = [trace for trace in traces if trace.evaluation.status != "PASSED"]
    if args.json:
        common.print_json([json.loads(trace.model_dump_json(exclude_unset=True)) for trace in traces])  # infinities as strings
    else:
        common.console(markup=False).print(_trace_table(_hardware(device), traces))
        for trace in failed:
            print(f"{trace.solution} on {trace.workload.uuid}: {trace.evaluation.status}: {trace.evaluation.log.strip()}", file=sys.stderr)
    print(
        f"{len(traces) - len(failed)} of {len(traces)} "
        f"passed{f', {left_out} workloads of more than {limit} million elements left out (--limit)' if left_out else ''}",
        file=sys.stderr if args.json else sys.stdout,
    )
    return 1 if failed else 0


def _work(collection: Collection, args: argparse.Namespace, limit: int | None) -> tuple[list[tuple[Definition, list[Solution], Workload]], int]:
    """(definition, solutions, workload) of each run, and the number of workloads excluded by the limit. Raises SchemaError if nothing remains."""
    from scaled_mm import schema

    known = {
        "--solution": [one.name for several in collection.solutions.values() for one in several],
        "--workload": [one.uuid for several in collection.workloads.values() for one in several],
    }
    for option, names in known.items():
        for pattern in getattr(args, option[2:]) or ():
            if not fnmatch.filter(names, pattern):
                raise schema.SchemaError(f"{option}: expected the name of one or a pattern that fits one, got {pattern!r}")
    work, left_out = [], 0
    for definition in _chosen(collection, args):
        solutions = [one for one in collection.solutions.get(definition.name, ()) if _matches(one.name, args.solution)]
        for workload in collection.workloads.get(definition.name, ()):
            if not solutions or not _matches(workload.uuid, args.workload):
                continue
            if limit is not None and schema.elements(definition, workload) > limit * 10**6:
                left_out += 1
            else:
                work.append((definition, solutions, workload))
    if not work:
        why = (
            f"{left_out} workloads have more than {limit} million elements (--limit)"
            if left_out
            else "no solution and workload of these definitions go by those names"
        )
        raise schema.SchemaError(f"--definition, --solution, --workload: expected something to run; {why}")
    return work, left_out


def _chosen(collection: Collection, args: argparse.Namespace) -> list[Definition]:
    """The definitions that match the names and patterns; all of them if none are given. Raises SchemaError for one that matches nothing."""
    patterns = [*args.names, *(args.definition or ())]
    if not patterns:
        return list(collection.definitions.values())
    names: dict[str, None] = {}
    for pattern in patterns:
        found = fnmatch.filter(collection.definitions, pattern)
        if not found:
            collection.definition(pattern)  # raises an error with similar names
        names.update(dict.fromkeys(found))
    return [collection.definitions[name] for name in names]


def _matches(name: str, patterns: list[str] | None) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _sizes(workload: Workload) -> str:
    return ", ".join(f"{name} = {size}" for name, size in workload.axes.items())


def _hardware(device: torch.device) -> str:
    from scaled_mm.measure.environment import read_environment

    return f"{read_environment(device).gpu}: milliseconds per call"


def _trace_table(title: str, traces):
    table = common.narrow_table(title)
    for column in ("workload", "solution", "status", "ms", "reference ms", "times as fast", "largest error"):
        table.add_column(column, justify="left" if column in ("workload", "solution", "status") else "right", no_wrap=True)
    for trace in traces:
        done = trace.evaluation
        author = trace.solution.removesuffix(f"_{trace.definition}")
        times = (
            (f"{done.performance.latency_ms:.4f}", f"{done.performance.reference_latency_ms:.4f}", f"{done.performance.speedup_factor:.2f}")
            if done.performance
            else ("", "", "")
        )
        extra = (done.correctness.extra or {}).values() if done.correctness else ()
        ours = [one for one in extra if isinstance(one, dict) and {"bit_equal", "relative_norm"} <= set(one)]  # other tools write other keys
        error = (
            "same bits"
            if ours and all(one["bit_equal"] for one in ours)
            else f"{max(float(one['relative_norm']) for one in ours):.1e}"
            if ours
            else ""
        )
        table.add_row(trace.workload.uuid, author, done.status, *times, error)
    return table
