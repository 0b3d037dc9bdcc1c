"""Renders the report of experts from `experts.json`, and from nothing else: the same file gives the same report."""

from __future__ import annotations

from pathlib import Path

from scaled_mm.bench.analysis import by_weight, names_run, of_roof, over, speedups, wrong_cases
from scaled_mm.bench.experts import goals
from scaled_mm.bench.experts.cases import MODELS
from scaled_mm.bench.experts.inputs import FEW_ROUTINGS, MANY_TOKENS, ROUTINGS, ZIPF
from scaled_mm.bench.experts.peers import CHAIN, OURS_ALL, TRITON
from scaled_mm.bench.experts.record import ExpertsCaseRecord, ExpertsDocument
from scaled_mm.bench.report import goals_section, head, kernel_cell, legend, noise, plots_section, regime_of, time_cell, what_did_not_run, write
from scaled_mm.measure import plots
from scaled_mm.measure.document import Heading, Items, Part, Table

EXPERTS_MD, PLOTS = "experts.md", ("experts_triton.png", "experts_chain.png")


def render(directory: Path, keep_plots: bool = False) -> list[Path]:
    """Reads `experts.json` in `directory`, writes `experts.md`, `experts.html` and the plots there, and returns their paths."""
    directory = Path(directory)
    document = ExpertsDocument.load(directory)
    path, title = directory / EXPERTS_MD, _title(document)
    return write(path, title, lambda drawn: contents(document, drawn), lambda: draw(document, directory), PLOTS, keep_plots)


def draw(document: ExpertsDocument, directory: Path) -> list[Path]:
    """Writes the plots that the document has speed-ups for; returns their paths."""
    wanted = ((TRITON, "the Triton kernel"), (CHAIN, "the chain with Triton products"))
    return [
        plots.save(plots.speedup_figure(found, against, document.environment.gpu), directory / name)
        for (rival, against), name in zip(wanted, PLOTS, strict=True)
        if (found := speedups(document.cases, rival))
    ]


def contents(document: ExpertsDocument, drawn: list[Path] | None = None) -> list[Part]:
    """The whole report. drawn: the plots beside it; None when they could not be drawn."""
    return [
        *head(document, _title(document), _method(document)),
        *goals_section(goals.outcomes(document)),
        *_summary(document),
        *_tables(document),
        *what_did_not_run(document),
        *plots_section(drawn),
    ]


def _title(document: ExpertsDocument) -> str:
    return f"Experts: {document.environment.gpu}"


def _method(document: ExpertsDocument) -> str:
    models = "; ".join(
        f"{name}: {m.experts} experts, {m.here} of them here, {m.choices} of a token, H = {m.hidden}, I = {m.inner}"
        for name, m in MODELS.items()
        if any(case.shape == name for case in document.cases)
    )
    return (
        f"Microseconds per call, median.{regime_of(document)} Random data, seed {document.settings.seed}. {models}. w13 is [2 I, H], w2 [H, I]; "
        "a layer is both with what lies around them, from bfloat16 tokens to bfloat16 tokens. A router draws the experts of each token without "
        f"replacement: balanced, all with the same probability; skewed, in proportion to 1 / rank^{ZIPF:g}. Calls rotate over {ROUTINGS} routings, "
        f"{FEW_ROUTINGS} for more than {MANY_TOKENS} tokens; in skewed ones other experts are popular each time, so that weights come from memory. "
        "Implementations of products get rows that are sorted and quantized already; the Triton kernel gathers the rows of w13 itself. Roof: the "
        "larger of INT8 arithmetic and memory traffic, each weight of an expert with rows read once."
    )


def _summary(document: ExpertsDocument) -> list[Part]:
    wrong, checked = wrong_cases(document, OURS_ALL), [case for case in document.cases if case.check != "not checked"]
    lines = [f"Bit-equal with the CPU backend in some rows: {len(checked) - len(wrong)} of {len(checked)} checked cases."]
    lines += [f"**Wrong bits**: {case.label}." for case in wrong]
    return [Heading(2, "Summary"), Items(lines + noise(document.cases, document.environment.arch))]


def _tables(document: ExpertsDocument) -> list[Part]:
    known = {one.name: one for one in document.implementations}
    found: list[Part] = [Heading(2, "Microseconds per call"), Items([legend(known[name]) for name in names_run(document)])]
    for weight, cases in by_weight(document).items():
        names = [name for name in names_run(document) if any(name in case.results for case in cases)]
        rivals = [name for name in (TRITON, CHAIN) if name in names]
        header = ["tokens", *names, *(f"over {name}" for name in rivals), "of roof", "kernel"]
        rows = [_row(case, names, rivals) for case in cases]
        found += [Heading(3, weight), Table(header, rows, "r" * (len(header) - 1) + "l")]
    return found


def _row(case: ExpertsCaseRecord, names: list[str], rivals: list[str]) -> list[str]:
    factors, roof = [over(case, name) for name in rivals], of_roof(case)
    return [
        str(case.M),
        *(time_cell(case, name) for name in names),
        *("—" if factor is None else f"{factor:.2f}x" for factor in factors),
        "—" if roof is None else f"{roof:.2f}",
        kernel_cell(case),
    ]
