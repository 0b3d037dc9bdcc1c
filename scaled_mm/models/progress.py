"""The progress of functions on whole models: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from scaled_mm.log_lines import LogLines


@contextmanager
def progress_bar(shown: bool, total: int, what: str) -> Iterator[Callable[[str], None]]:
    """Progress on stderr: a bar on a terminal, elsewhere a line every 30 seconds. Yields a function that takes the name of what is finished."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns, console = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")), Console(stderr=True)
    log, finished = LogLines(console.is_terminal or not shown), itertools.count(1)
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task(what, total=total)

        def advance(name: str) -> None:
            bar.update(task, advance=1, description=name)
            log.say(f"{what}: {next(finished)} of {total}, the last one {name}")

        yield advance
