"""Renders a report directory from its `autotune.json`, and from nothing else: `report.md`, `report.html` and the plots."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from scaled_mm.autotune import plots
from scaled_mm.autotune.choose import CLIFF
from scaled_mm.autotune.model import Accuracy
from scaled_mm.autotune.record import AutotuneDocument, ProductRecord, load
from scaled_mm.kernels.sections import OF_EXPERTS, SECTIONS, TOP_LEVEL
from scaled_mm.measure import plots as measure_plots
from scaled_mm.measure.document import Command, Heading, Image, Items, Part, Table, Text, markdown, page
from scaled_mm.measure.record import write_atomically
from scaled_mm.measure.stats import geometric_mean

REPORT_MD, REPORT_HTML = "report.md", "report.html"
_LISTED = 40  # cells left out that are named; the JSON has all


def render(directory: Path, keep_plots: bool = False) -> list[Path]:
    """Writes the report into `directory` and returns its paths. Without matplotlib the plots are left out, and it says so.

    keep_plots: they are of this very `autotune.json`, so those that are there stay in the report.
    """
    directory = Path(directory)
    document = load(directory)
    if measure_plots.unavailable() is None:
        drawn = plots.draw(document, directory)
    else:
        drawn = [(directory / name, alt) for name, alt in plots.SHOWN.items() if keep_plots and (directory / name).is_file()] or None
    content = blocks(document, drawn)
    title = f"Tuned tile table: {document.environment.gpu}"
    return [
        write_atomically(directory / REPORT_MD, markdown(content)),
        write_atomically(directory / REPORT_HTML, page(content, title)),
        *(path for path, _ in drawn or []),
    ]


def blocks(document: AutotuneDocument, drawn: list[tuple[Path, str]] | None) -> list[Part]:
    """The whole report. drawn: the plots and what they show; None when they could not be drawn."""
    return [
        *_head(document),
        Heading(2, "Summary"),
        Items(summary_lines(document)),
        *_plots(drawn),
        *_products(document),
        *_cliffs(document),
        *_model(document),
        *_failures(document),
        *_left_out(document),
    ]


def _head(document: AutotuneDocument) -> list[Part]:
    env = document.environment
    rows = [
        ("GPU", f"{env.gpu} ({env.arch}), {env.multiprocessors or 'unknown'} multiprocessors"),
        ("driver, CUDA", f"{env.driver or 'unknown'}, {env.cuda or 'none'}"),
        ("torch, CUTLASS", f"{env.torch}, {env.cutlass or 'unknown'}"),
        ("commit", (env.git_commit or "none") + (" with changes" if env.git_dirty else "")),
        ("made", document.created),
        ("table before", document.base),
        ("table written", document.table or "none"),
    ]
    if document.section != TOP_LEVEL:
        experts = f", {document.experts} experts with M rows each" if document.section in OF_EXPERTS else ""
        rows.insert(5, ("products", SECTIONS[document.section].products + experts))
    checked = "Its bits were" if document.section == TOP_LEVEL else "Up to 48 rows of its output were"
    method = (
        f"Every cell is one row on one product, timed in a process of its own: CUDA-graph replays over rotated weights, {document.budget_ms:g} ms "
        f"of samples after a rest, out bfloat16, constant weights, microseconds per call, median. {checked} compared with the "
        "reference before and after timing."
    )
    return [Heading(1, f"Tuned tile table: {env.gpu}"), Command(document.command), Table(["", ""], rows, "ll"), Text(method)]


def summary_lines(document: AutotuneDocument) -> list[str]:
    """What a run came to, a line each."""
    outcomes = Counter(cell.outcome for cell in document.cells)
    how = Counter(product.how for product in document.products)
    lines = [
        f"{document.legal} legal candidates; {len({cell.row for cell in document.cells})} measured, {len(document.unbuilt)} that did not compile.",
        f"{len(document.cells)} cells, {document.resumed} of them from an earlier run: "
        + ", ".join(f"{outcomes[name]} {name}" for name in ("timed", "wrong", "failed", "crashed", "hung"))
        + f". The process that times was started {document.worker_starts} times.",
        f"{len(document.products)} products: " + ", ".join(f"{how[name]} {name}" for name in ("measured", "inherited", "predicted", "none")) + ".",
        f"{len(document.cliffs)} cliffs; {len(document.left_out)} cells left out by a budget of {document.budget_minutes:g} minutes.",
    ]
    factors = [one.factor for one in plots.speedups(document)]
    if factors:
        lines.insert(
            0,
            f"{geometric_mean(factors):.3f}x over the table before, geometric mean of {len(factors)} products; "
            f"from {min(factors):.2f}x to {max(factors):.2f}x.",
        )
    if document.ended:
        lines.append(f"Timing ended early: {document.ended}")
    return lines


def _plots(drawn: list[tuple[Path, str]] | None) -> list[Part]:
    if drawn is None:
        return [Text(f"No plots: {measure_plots.unavailable()}.")]
    return [Image(path, alt) for path, alt in drawn]


def _products(document: AutotuneDocument) -> list[Part]:
    found: list[Part] = [Heading(2, "Rows")]
    for shape, products in plots.shapes(document).items():
        found += [Heading(3, f"{shape}: N={products[0].N} K={products[0].K}"), _product_table(products)]
    if document.model_picked:
        text = "Narrower than anything measured, so the model picked: "
        picked = sorted({(product.N, product.K) for product in document.model_picked})
        found.append(Text(text + ", ".join(f"N={N} (K={K})" for N, K in picked) + "."))
    return found


def _product_table(products: list[ProductRecord]) -> Table:
    header = ["M", "row", "how", "µs", "row before", "µs before", "speed-up", "of roof"]
    rows = [
        [
            str(product.M),
            product.row or "none",
            product.how,
            _us(product.us),
            product.base_row,
            _us(product.base_us),
            "" if product.speedup is None else f"{product.speedup:.2f}x",
            "" if product.us is None or product.roof_us is None else f"{product.roof_us / product.us:.2f}",
        ]
        for product in products
    ]
    return Table(header, rows, "rllrlrrr")


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _cliffs(document: AutotuneDocument) -> list[Part]:
    rule = f"A cliff: a product takes more than {CLIFF:g} times the next larger measured M of the same N and K."
    return [Heading(2, "Cliffs"), Text(rule), Items(document.cliffs) if document.cliffs else Text("None.")]


def _model(document: AutotuneDocument) -> list[Part]:
    found: list[Part] = [Heading(2, "The model")]
    if document.accuracy is None:
        return [*found, Text("Not compared: no product has two measured rows.")]
    return [*found, Text(accuracy_text(document.accuracy))]


def accuracy_text(accuracy: Accuracy) -> str:
    """How well the model predicted the winners, in a sentence or three."""
    of = accuracy.products
    return (
        f"Among the measured rows of {of} products the model's first choice is the fastest for {accuracy.top1}, and one of its first three for "
        f"{accuracy.top3}. Its first choice takes {accuracy.median_loss:.1%} longer than the fastest in the median, {accuracy.mean_loss:.1%} in "
        f"the mean and {accuracy.worst_loss:.1%} at worst; a measured row taken at random {accuracy.chance:.1%} in the median."
    )


def _failures(document: AutotuneDocument) -> list[Part]:
    lines = [f"{cell.row} {cell.outcome} at {cell.M}x{cell.N}x{cell.K}: {cell.message}" for cell in document.cells if cell.outcome != "timed"]
    lines += [f"{row} did not compile: {message}" for row, message in document.unbuilt.items()]
    return [Heading(2, "Failures"), Items(lines)] if lines else []


def _left_out(document: AutotuneDocument) -> list[Part]:
    if not document.left_out:
        return []
    lines = [f"{one.M}x{one.N}x{one.K} {one.row}" for one in document.left_out[:_LISTED]]
    if len(document.left_out) > _LISTED:
        lines.append(f"and {len(document.left_out) - _LISTED} more, in autotune.json")
    return [Heading(2, "Left out"), Text("Run the same command again: it goes on where this one stopped."), Items(lines)]
