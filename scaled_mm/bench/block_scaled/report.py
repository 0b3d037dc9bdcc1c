"""Renders the report of block-scaled products from `block_scaled.json`, and from nothing else: the same file gives the same report."""

from __future__ import annotations

from pathlib import Path

from scaled_mm.bench.analysis import names_run, of_roof, over, speedups, wrong_cases
from scaled_mm.bench.block_scaled import goals
from scaled_mm.bench.block_scaled.peers import TRITON
from scaled_mm.bench.block_scaled.record import BlockScaledCaseRecord, BlockScaledDocument
from scaled_mm.bench.report import (
    goals_section,
    head,
    how_timed,
    kernel_cell,
    mean_tables,
    noise,
    plots_section,
    tables,
    time_cell,
    what_did_not_run,
    write,
)
from scaled_mm.measure import plots
from scaled_mm.measure.document import Heading, Items, Part

BLOCK_SCALED_MD, PLOT = "block_scaled.md", "block_scaled_triton.png"


def render(directory: Path, keep_plots: bool = False) -> list[Path]:
    """Reads `block_scaled.json` in `directory`, writes `block_scaled.md`, `.html` and the plot there, and returns their paths."""
    directory = Path(directory)
    document = BlockScaledDocument.load(directory)
    path = directory / BLOCK_SCALED_MD
    return write(path, _title(document), lambda drawn: contents(document, drawn), lambda: draw(document, directory), (PLOT,), keep_plots)


def draw(document: BlockScaledDocument, directory: Path) -> list[Path]:
    """Writes the plot if the document has speed-ups; returns its path."""
    found = speedups(document.cases, TRITON)
    return [plots.save(plots.speedup_figure(found, "the Triton kernel", document.environment.gpu), directory / PLOT)] if found else []


def contents(document: BlockScaledDocument, drawn: list[Path] | None = None) -> list[Part]:
    """The whole report. drawn: the plots beside it; None when they could not be drawn."""
    return [
        *head(document, _title(document), _method(document)),
        *goals_section(goals.outcomes(document)),
        *_summary(document),
        *mean_tables("Speed-up over the Triton kernel", speedups(document.cases, TRITON)),
        *_tables(document),
        *what_did_not_run(document),
        *plots_section(drawn),
    ]


def _title(document: BlockScaledDocument) -> str:
    return f"Block-scaled products: {document.environment.gpu}"


def _method(document: BlockScaledDocument) -> str:
    return (
        f"Microseconds per call, median. {how_timed(document, 'weights')} Random data, seed {document.settings.seed}; a scale for 128 elements of K "
        "of a row of a, and for 128 x 128 elements of b. Roof: the larger of INT8 arithmetic and memory traffic."
    )


def _summary(document: BlockScaledDocument) -> list[Part]:
    wrong, checked = wrong_cases(document), [case for case in document.cases if case.check != "not checked"]
    lines = [f"Bit-equal with the CPU backend in some rows: {len(checked) - len(wrong)} of {len(checked)} checked cases."]
    lines += [f"**Wrong bits**: {case.label}." for case in wrong]
    return [Heading(2, "Summary"), Items(lines + noise(document.cases, document.environment.arch))]


def _tables(document: BlockScaledDocument) -> list[Part]:
    names = names_run(document)

    def row(case: BlockScaledCaseRecord) -> list[str]:
        factor, roof = over(case, TRITON), of_roof(case)
        shown = "—" if factor is None else f"{factor:.2f}x", "—" if roof is None else f"{roof:.2f}"
        return [str(case.M), *(time_cell(case, name) for name in names), *shown, kernel_cell(case)]

    return tables(document, ["M", *names, "over triton", "of roof", "kernel"], row)
