"""`scaled-mm table show | check | explain M N K`: shows, checks and explains the tile tables."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from scaled_mm.cli import common, table_explain
from scaled_mm.cli.table_explain import row_dict
from scaled_mm.kernels.arch import ARCHES

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from scaled_mm.jit.check import Compiled
    from scaled_mm.kernels.config import KernelConfig
    from scaled_mm.tables import Problem, TileTable

HELP = "show a tile table, check tables, or explain which kernel serves a product"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="table_command", metavar="show | check | explain", required=True)
    show = commands.add_parser("show", help="rows with their cost, and buckets")
    check = commands.add_parser("check", help="every problem of every table, or of the one given; exit status 1 on any")
    explain = commands.add_parser("explain", help="the row that serves one product, and why")
    table_explain.add_arguments(explain)
    check.add_argument(
        "--compile",
        action="store_true",
        help="also compile every row for every GPU its table serves (needs nvcc, no GPU): a row that spills is a problem",
    )
    check.add_argument(
        "--cliffs",
        nargs="?",
        const="",
        metavar="FILE",
        help="also look for cliffs: a product that takes over 1.05 times the next larger M, by times that were measured "
        "(autotune.json, bench.json or rows.json; default: those below reports/); a cliff is a problem",
    )
    for command, default, said in ((show, "sm90", " sm90"), (check, None, ": all"), (explain, None, ": SCALED_MM_ARCH, else sm90")):
        which = command.add_mutually_exclusive_group()
        which.add_argument("--arch", default=default, help=f"architecture of the table (default{said})")
        which.add_argument("--table", metavar="FILE", help="a YAML file instead")
        command.add_argument("--json", action="store_true", help="print one JSON document")
        command.set_defaults(parser=command)


def run(args: argparse.Namespace) -> int:
    """0; 1 if a checked table has a problem, or no kernel takes the product; 2 if there is no table."""
    from scaled_mm.errors import ScaledMMError

    commands = {"show": _show, "check": _check, "explain": lambda args: table_explain.run(args, _load(args))}
    try:
        return commands[args.table_command](args)
    except ScaledMMError as error:
        print(error, file=sys.stderr)
        if args.json:
            common.print_json({"error": {"status": error.status.name, "message": str(error)}}, indent=2)
        return 2


def _load(args: argparse.Namespace) -> TileTable:
    from pathlib import Path

    from scaled_mm.tables import load_table
    from scaled_mm.tables.tuned import gpus_served, usable_tuned

    if args.table is not None:
        return load_table(Path(args.table))
    table = common.table_of(args.arch or common.forced_arch() or "sm90")
    return usable_tuned(table.arch, gpus_served(table.arch)) or table  # tuned for this machine's GPU, if that has this architecture


# ---- show --------------------------------------------------------------------------------------------------------


def _show(args: argparse.Namespace) -> int:
    from scaled_mm.kernels.sections import OTHER_SECTIONS, SECTIONS

    table = _load(args)
    sections = table.sections
    rows = [[row_dict(table, row.name) for row in section.rows] for section in sections]
    if args.json:
        contents = [
            {"fallback": section.fallback, "rows": dicts, "buckets": [bucket.model_dump(mode="json") for bucket in section.buckets]}
            for section, dicts in zip(sections, rows)
        ]
        head = {"arch": table.arch, "source": table.source, "tuned": table.tuned, "gpu": table.gpu}
        of = {id(section): content for section, content in zip(sections, contents)}
        for section, content in zip(sections, contents):
            if section.auto:
                content["auto"] = [rule.model_dump(mode="json") for rule in section.auto]
        others = {name: of.get(id(getattr(table, name))) for name in OTHER_SECTIONS}
        common.print_json({**head, **contents[0], **others}, indent=2)
        return 0
    console = common.console(markup=False)
    kind = f"tuned on {table.gpu}" if table.tuned else "not tuned"
    console.print(f"{table.source}: {table.arch}, {kind}, fallback {table.fallback}", highlight=False, soft_wrap=True)
    for section, dicts in zip(sections, rows):
        if section is not table:
            modes = f"; mode auto: {_modes(section)}" if section.auto else ""
            heading = f"{SECTIONS[section.rows[0].section].heading}, fallback {section.fallback}{modes}"
            console.print(heading, highlight=False, soft_wrap=True)
        console.print(_rows_view(section, dicts, console))
        console.print(_buckets_view(section))
    return 0


def _modes(section: TileTable) -> str:
    """`w4a8 to 16 tokens, w4a16 beyond`."""
    beyond = " beyond" if len(section.auto) > 1 else ""
    return ", ".join(rule.mode + (beyond if rule.m is None else f" to {rule.m} tokens") for rule in section.auto)


# Columns that a narrow terminal omits first: most kernel configs have the same value, or their name contains it.
_LEFT_OUT_FIRST = ("scheduler", "registers", "swap", "buckets", "shared memory", "cluster", "schedule")


def _rows_view(table: TileTable, rows: list[dict[str, Any]], console: Console) -> Any:
    limit = ARCHES[table.arch].shared_memory
    what = "of the format that needs most" if table.auto else "estimate for a 4-byte out"
    caption = f"shared memory: {what}, limit {limit / 1024:.0f} KB; registers: accumulators per thread"
    cells = [_row_cells(table, row, entry["estimate"]) for row, entry in zip(table.rows, rows, strict=True)]
    for left_out in (_LEFT_OUT_FIRST[:count] for count in range(len(_LEFT_OUT_FIRST) + 1)):
        note = f"; not shown in {console.width} columns: {', '.join(left_out)}" if left_out else ""
        view = common.narrow_table("rows", caption=caption + note)
        shown = [header for header in cells[0] if header not in left_out]
        for header in shown:
            right = header in ("stages", "shared memory", "registers", "buckets")
            view.add_column(header, no_wrap=True, justify="right" if right else "left")
        for row in cells:
            view.add_row(*(row[header] for header in shown))
        if console.measure(view, options=console.options.update(width=10 * common.WIDE)).maximum <= console.width:
            break
    return view


def _row_cells(table: TileTable, row: KernelConfig, estimate: dict[str, Any]) -> dict[str, str]:
    from scaled_mm.kernels.registry import family_of
    from scaled_mm.tables import FASTEST

    registers = estimate["accumulator_registers"]
    uses = sum(bucket.kernel == row.name for bucket in table.buckets)
    by_time = row.name in table.times and any(bucket.kernel == FASTEST for bucket in table.buckets)
    auto = row.stages == "auto" and family_of(row).auto_stages
    return {
        "name": row.name,
        "tile": str(row.tile),
        "cluster": str(row.cluster),
        "schedule": row.schedule or "-",
        "scheduler": row.scheduler if row.split_k == 1 else f"{row.scheduler}, split {row.split_k}",
        "swap": "yes" if row.swap_ab else "",
        "stages": f"auto ({estimate['stages']})" if auto else str(estimate["stages"]),
        "shared memory": f"{estimate['shared_memory_bytes'] / 1024:.1f} KB",
        "registers": "-" if registers is None else str(registers),
        "buckets": "fallback" if row.name == table.fallback else str(uses or ("by time" if by_time else "-")),
    }


def _bounds(least: int, most: int | None) -> str:
    """`4096`, `open`, `9-16`, `17-open`."""
    upper = "open" if most is None else str(most)
    return f"{least}-{upper}" if least else upper


def _buckets_view(table: TileTable) -> Any:
    from scaled_mm.tables.select import describe_conditions

    view = common.narrow_table("buckets, the first that fits wins")
    for header in ("", "M <=", "N <=", "K <="):
        view.add_column(header, justify="right")
    view.add_column("kernel", no_wrap=True)
    conditions = [", ".join(describe_conditions(bucket)) for bucket in table.buckets]
    if any(conditions):
        view.add_column("only")
    previous = None
    for index, bucket in enumerate(table.buckets):
        if index and bucket.m != previous:
            view.add_section()
        previous = bucket.m
        bounds = (_bounds(least, most) for least, most in zip(bucket.least, (bucket.m, bucket.n, bucket.k)))
        view.add_row(str(index), *bounds, bucket.kernel, *([conditions[index]] if any(conditions) else []))
    return view


# ---- check -------------------------------------------------------------------------------------------------------


def _check(args: argparse.Namespace) -> int:
    from scaled_mm.errors import BadParamError
    from scaled_mm.jit import toolchain
    from scaled_mm.tables import check_table

    if args.compile:
        toolchain.require("nvcc", toolchain.find_nvcc())
    results = []
    timed = 0
    for path, arch in _tables_to_check(args):
        found = check_table(path, arch)
        if args.cliffs is not None and not found:
            timed += _look_for_cliffs(args, path, found)
        compiled = _compile(path, found, args.json) if args.compile and not found else []
        results.append((path, found, compiled))
    if args.cliffs and not timed:
        raise BadParamError(f"--cliffs: expected times of rows that the table chooses, {args.cliffs} has none of them")
    problems = sum(len(found) for _, found, _ in results)
    if args.json:
        tables = [
            {
                "table": str(path),
                "problems": [dataclasses.asdict(problem) for problem in found],
                **({"compiled": [dataclasses.asdict(kernel) for kernel in compiled]} if args.compile else {}),
            }
            for path, found, compiled in results
        ]
        common.print_json({"ok": problems == 0, "tables": tables}, indent=2)
        return 1 if problems else 0
    for path, found, _ in results:
        for problem in found:
            print(problem)
        if not found:
            print(f"{path}: ok")
    if problems:
        print(f"{problems} problem{'s' if problems > 1 else ''}", file=sys.stderr)
    return 1 if problems else 0


def _look_for_cliffs(args: argparse.Namespace, path: Path, problems: list[Problem]) -> int:
    """Adds a problem for every cliff of a table. Returns the number of products whose selected kernel config was timed."""
    from pathlib import Path

    from scaled_mm.autotune.cells import cliffs_of, reports_of
    from scaled_mm.tables import Problem, load_table

    table = load_table(path)
    files = [Path(args.cliffs)] if args.cliffs else reports_of(table, Path("reports"))
    if not files and not args.json:
        print(f"{path}: no measured times below reports/{table.arch}: cliffs not looked for")
    timed = 0
    for file in files:
        found, measured, products = cliffs_of(table, file)
        timed += measured
        problems += [Problem(str(path), None, "buckets", f"a cliff at {cliff} ({file})") for cliff in found]
        if measured and not args.json:
            print(f"{path}: {len(found)} cliffs among the {measured} of {products} products of {file} whose row was timed")
    return timed


def _compile(path: Path, problems: list[Problem], quiet: bool) -> list[Compiled]:
    """Compiles a table's kernel configs and prints the results. Adds a problem for each one that spills, is serialized or does not compile."""
    from scaled_mm.errors import KernelNotBuiltError
    from scaled_mm.jit import check
    from scaled_mm.tables import Problem, load_table

    def say(kernels: list[Compiled]) -> None:
        for kernel in kernels if not quiet else ():
            name = f"{kernel.row} {kernel.out_dtype or ''}".rstrip()
            print(
                f"{table.arch} {name} {kernel.code}: {kernel.registers} registers, {kernel.spilled} bytes "
                f"spilled{', serialized' * kernel.serialized}",
                flush=True,
            )

    table = load_table(path)
    try:
        compiled = check.compile_kernels(table, check.kernels_to_check(table), on_kernel=say)
    except KernelNotBuiltError as error:
        problems.append(Problem(str(path), None, "rows", str(error)))
        return []
    reasons = []
    for kernel in compiled:
        name = f"{kernel.row} {kernel.out_dtype or ''}".rstrip()
        if kernel.spilled:
            reasons.append(f"{name} spills {kernel.spilled} bytes on {kernel.code}")
        if kernel.serialized:
            reasons.append(f"{name} waits after each of its wgmma instructions on {kernel.code}")
    problems += [Problem(str(path), None, "rows", reason) for reason in dict.fromkeys(reasons)]  # a kernel config may have several device kernels
    return compiled


def _tables_to_check(args: argparse.Namespace) -> list[tuple[Path, str | None]]:
    """(path, the architecture that the file must be for; None: any), including the tuned tables."""
    from pathlib import Path

    from scaled_mm.errors import ArchitectureNotSupportedError
    from scaled_mm.tables import available_tables, configs_dir
    from scaled_mm.tables.loader import table_of

    if args.table is not None:
        return [(Path(args.table), None)]
    tables: list[tuple[Path, str | None]] = [(path, arch) for arch, path in available_tables()]
    if args.arch is None:
        return tables + [(path, None) for path in sorted(configs_dir().glob("tuned/*.yaml"))]
    chosen = [(path, arch) for path, arch in tables if arch == table_of(args.arch)]
    if not chosen:
        known = ", ".join(str(arch) for _, arch in tables)
        raise ArchitectureNotSupportedError(f"arch: no tile table for {args.arch!r}; there are: {known}")
    return chosen
