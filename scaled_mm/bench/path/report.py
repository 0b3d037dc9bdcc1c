"""Renders the report of the path from `path.json`, and from nothing else: the same file gives the same report."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from scaled_mm.bench.analysis import by_weight, names_run, of_roof, speedup, speedups, wrong_cases
from scaled_mm.bench.overhead import overhead_section
from scaled_mm.bench.path import analysis, goals, plots
from scaled_mm.bench.path.cases import LAYER, LINEARS
from scaled_mm.bench.path.inputs import OUTLIER_EVERY, OUTLIER_FACTOR
from scaled_mm.bench.path.operators import OPERATORS
from scaled_mm.bench.path.peers import OURS_ALL, TORCH, VLLM
from scaled_mm.bench.path.record import PathCaseRecord, PathDocument
from scaled_mm.bench.report import head, kernel_cell, legend, mean_tables, noise, plots_section, regime_of, time_cell, what_did_not_run, write
from scaled_mm.measure.document import Heading, Items, Part, Table, Text
from scaled_mm.measure.rotation import CACHE_MULTIPLE, MAX_ROTATION

PATH_MD = "path.md"


def render(directory: Path, keep_plots: bool = False) -> list[Path]:
    """Reads `path.json` in `directory`, writes `path.md`, `path.html` and the PNG plots there, and returns their paths.

    Without matplotlib the plots are left out and the report says so. keep_plots: see `scaled_mm.bench.report.write`.
    """
    directory = Path(directory)
    document = PathDocument.load(directory)
    return write(
        directory / PATH_MD,
        _title(document),
        lambda drawn: contents(document, drawn),
        lambda: plots.draw(document, directory),
        plots.NAMES,
        keep_plots,
    )


def contents(document: PathDocument, drawn: list[Path] | None = None) -> list[Part]:
    """The whole report. drawn: the plots beside it; None when they could not be drawn."""
    layers = [case for case in document.cases if case.part == LAYER]
    operators = [case for case in document.cases if case.part not in LINEARS]
    return [
        *head(document, _title(document), _method(document)),
        *_goals(document),
        *_summary(document),
        *_tables(document),
        *mean_tables("Linear layers: speed-up over vLLM's quantizer and product", speedups(layers, VLLM)),
        *mean_tables("Linear layers: speed-up over torch.mm in bfloat16", speedups(layers, TORCH)),
        *mean_tables("Row-wise operators: speed-up over vLLM", speedups(operators, VLLM)),
        *overhead_section(document.overhead, document.environment.arch, "Ours allocates its outputs, vLLM's are preallocated."),
        *what_did_not_run(document, lacking_lines(document)),
        *plots_section(drawn),
    ]


def lacking_lines(document: PathDocument) -> list[str]:
    """What implementations that run lack."""
    return [f"`{one.implementation}` on {one.part}: {one.why}" for one in document.lacking]


def _title(document: PathDocument) -> str:
    return f"From float activation to float output: {document.environment.gpu}"


def _method(document: PathDocument) -> str:
    timed = (
        "`time.perf_counter` around passes over rotated inputs."
        if document.environment.arch == "cpu"
        else "CUDA-graph replays between events. The calls of a graph rotate over the weight sets of a layer, or over the inputs of an operator, and "
        f"over outputs, that together exceed the L2 cache {CACHE_MULTIPLE} times. Where not even {MAX_ROTATION} sets do, the column `from` says "
        "cache. The activation of a linear layer is one set, because the operator before it has just written it."
    )
    return (
        f"{timed}{regime_of(document)} Random data, seed {document.settings.seed}: bfloat16 activations of normal values, one channel of "
        f"{OUTLIER_EVERY} (at least one) {OUTLIER_FACTOR:g} times as large; int8 weights with one scale per column; "
        "no bias. Every implementation gets the same inputs; samples are "
        f"taken in {document.settings.rounds} rounds over all implementations. Microseconds per call, median. Ours allocates its outputs in the "
        "call. The roof of a layer is the larger of its INT8 arithmetic and its memory traffic. The roof of an operator is its memory traffic: each "
        "input read once and each output written once, at the memory's nominal bandwidth."
    )


def _goals(document: PathDocument) -> list[Part]:
    found = goals.outcomes(document)
    if not found:
        return []
    said = (
        f"{goals.count(found)} Means are geometric: of the layers at each M, of which the "
        "lowest is shown, and of all random layers of a band. A case on which an implementation failed does not count here; it is listed below."
    )
    return [Heading(2, "Goals"), Text(said), Table(goals.HEADER, [goals.cells(one) for one in found], goals.ALIGN)]


def _summary(document: PathDocument) -> list[Part]:
    checked, wrong = analysis.checked_cases(document), wrong_cases(document, OURS_ALL)
    lines = [f"Bit-equal with the reference: {len(checked) - len(wrong)} of {len(checked)} checked cases."]
    lines += [f"**Wrong bits**: {case.label}." for case in wrong]
    unlike = Counter(case.check for case in document.cases if case.check != "checked")
    lines += [f"{count} case{'s' * (count > 1)} {said}." for said, count in unlike.items()]
    return [Heading(2, "Summary"), Items(lines + noise(document.cases, document.environment.arch))]


def _tables(document: PathDocument) -> list[Part]:
    known = {one.name: one for one in document.implementations}
    found: list[Part] = [Heading(2, "Microseconds per call"), Items([legend(known[name]) for name in names_run(document)])]
    for weight, cases in by_weight(document).items():
        names = [name for name in names_run(document) if any(name in case.results for case in cases)]
        sizes, title = _sizes(cases[0], weight)
        last = ["from", "bits", "kernel"] if cases[0].linear else ["from", "bits"]
        header = [*sizes, *names, *_rivals(names), "of roof", *last]
        table = Table(header, [_row(case, list(sizes), names) for case in cases], "r" * (len(header) - len(last)) + "l" * len(last))
        found += [Heading(3, title), table]
    return found


def _rivals(names: list[str]) -> list[str]:
    return [f"over {name}" for name in (VLLM, TORCH) if name in names]


def _sizes(case: PathCaseRecord, weight: str) -> tuple[tuple[str, ...], str]:
    """(the sizes that differ in a table, its title)"""
    if case.part == LAYER:
        return ("M",), f"{weight}: N={case.N}, K={case.K}"
    return (("M", "N", "K"), weight) if case.linear else (("M", "K"), f"{weight}: `{OPERATORS[case.part].ours}`")


def _row(case: PathCaseRecord, sizes: list[str], names: list[str]) -> list[str]:
    roof = of_roof(case)
    return [
        *(str(getattr(case, size)) for size in sizes),
        *(time_cell(case, name) for name in names),
        *(_factor(case, name) for name in (VLLM, TORCH) if name in names),
        "—" if roof is None else f"{roof:.2f}",
        "memory" if case.cold else "cache",
        analysis.bits(case),
        *([kernel_cell(case)] if case.linear else []),
    ]


def _factor(case: PathCaseRecord, rival: str) -> str:
    found = speedup(case, rival)
    return "—" if found is None else f"{found.factor:.2f}x"
