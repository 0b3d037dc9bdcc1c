"""Shared by the suites of `scaled-mm bench`: what is printed after a run, and the exit status."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scaled_mm.cli import common
from scaled_mm.cli.bench import frame

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from scaled_mm.bench.goals import Outcome
    from scaled_mm.bench.overhead import OverheadRecord
    from scaled_mm.measure.record import CaseRecord, Document


def finish(document: Document, path: Path, paths: list[Path], args: argparse.Namespace, console: Console, show: Callable[[], None]) -> None:
    """Prints the document (with --json), what `show` prints, and the written files. path: the document. paths: files made from it."""
    from rich.markup import escape

    from scaled_mm.measure import plots

    if args.json:
        common.print_json(document.model_dump(mode="json"))
    show()
    if (reason := plots.unavailable()) is not None:
        console.print(f"[yellow]no plots:[/yellow] {escape(reason)}; `scaled-mm report DIR` draws them afterwards", highlight=False)
    console.print(f"wrote {path}, " + ", ".join(one.name for one in paths), highlight=False, markup=False)


def verdict(document: Document, ours: Sequence[str], wrong: list[CaseRecord], why: str, path: Path, console: Console) -> int:
    """The exit status: FAILED, with a line that gives the reason, if one of `ours` failed or could not run, or if cases are wrong; else OK."""
    from rich.markup import escape

    from scaled_mm.bench.analysis import failures

    failed = [f"{case.label}: {f'{name}: ' if len(ours) > 1 else ''}{message}" for case, name, message in failures(document) if name in ours]
    failed += [one.unavailable for one in document.implementations if one.name in ours and one.unavailable is not None]
    if not failed and not wrong:
        return frame.OK
    said = failed[0] if failed else f"{wrong[0].label}: {why}"
    console.print(f"[red]ours failed or is wrong:[/red] {escape(said)}; see {escape(str(path))}", highlight=False)
    return frame.FAILED


def table(title: str, header: Sequence[str], left: Sequence[str]) -> Table:
    """A table whose columns are right-justified, except those named in `left`."""
    from rich.table import Table

    made = Table(title=title)
    for name in header:
        made.add_column(name, justify="left" if name in left else "right")
    return made


def print_overhead(overhead: Iterable[OverheadRecord], console: Console) -> None:
    """The host's microseconds of each call."""
    from rich.markup import escape

    made = table("host microseconds per call", ("call", "µs"), left=("call",))
    for one in overhead:
        made.add_row(escape(one.name), f"[red]{escape(one.failed)}[/red]" if one.us is None else f"{one.us:.2f}")
    console.print(made)


def print_goals(found: Sequence[Outcome], console: Console) -> None:
    """A table of goals, missed ones in red; nothing without goals."""
    from rich.markup import escape

    from scaled_mm.bench.goals import HEADER, cells

    if not found:
        return
    made = table("goals", HEADER, left=("goal", "met", "worst case"))
    for one in found:
        made.add_row(*(escape(cell.replace("**", "")) for cell in cells(one)), style="red" if one.met is False else None)
    console.print(made)


def print_unavailable(document: Document, console: Console) -> None:
    """A line for each implementation that cannot run here."""
    from rich.markup import escape

    for one in document.implementations:
        if one.unavailable is not None:
            console.print(f"[yellow]not run:[/yellow] {one.name}: {escape(one.unavailable)}", highlight=False)


def render(args: argparse.Namespace, draw: Callable[[Path], list[Path]], document: type[Document], console: Console) -> int:
    """Renders the report of --render again with `draw`, and prints the paths; `USAGE` if there is no valid document."""
    from pydantic import ValidationError

    try:
        paths = draw(args.render)
    except (OSError, ValidationError) as error:
        return frame.usage(args, f"{document.path(args.render)}: {error}")
    console.print("wrote " + ", ".join(str(path) for path in paths), highlight=False, markup=False)
    if args.json:
        common.print_json(document.load(args.render).model_dump(mode="json"))
    return frame.OK
