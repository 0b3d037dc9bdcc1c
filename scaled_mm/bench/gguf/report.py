"""Renders the GGUF report from `bench_gguf.json`, and from nothing else."""

from __future__ import annotations

from pathlib import Path

from scaled_mm.bench.analysis import kernel_of, names_run, us_of
from scaled_mm.bench.gguf import analysis, goals, plots
from scaled_mm.bench.gguf.analysis import LIKE_LLAMA, TOLERANCE, Pair
from scaled_mm.bench.gguf.peers import BF16, ERROR_BOUND
from scaled_mm.bench.gguf.record import GgufCaseRecord, GgufDocument
from scaled_mm.bench.report import (
    goals_section,
    head,
    how_timed,
    kernel_cell,
    noise,
    plots_section,
    tables,
    time_cell,
    what_did_not_run,
    write,
)
from scaled_mm.measure.document import Heading, Items, Part, Table, Text
from scaled_mm.measure.peer import OURS
from scaled_mm.measure.roofline import tops
from scaled_mm.measure.stats import geometric_mean


def render(directory: Path, keep_plots: bool = False) -> list[Path]:
    """Reads `bench_gguf.json` in `directory`, writes Markdown, HTML and plots there, and returns their paths.

    A `bench_block.json` of an earlier version is read where there is none, and its report has that name. keep_plots: see
    `scaled_mm.bench.report.write`.
    """
    path = GgufDocument.path(Path(directory))
    document = GgufDocument.load(path.parent)
    return write(
        path.with_suffix(".md"),
        _title(document),
        lambda drawn: contents(document, drawn),
        lambda: plots.draw(document, path.parent, path.stem),
        plots.names(path.stem),
        keep_plots,
    )


def contents(document: GgufDocument, drawn: list[Path] | None = None) -> list[Part]:
    """The whole report. drawn: the plots beside it; None when they could not be drawn."""
    return [
        *head(document, _title(document), _method(document)),
        Heading(2, "Summary"),
        Items(summary(document)),
        *goals_section(goals.outcomes(document)),
        *_over_bf16(document),
        *tables(document, header(document), lambda case: row(document, case)),
        *([Heading(2, "Where time is not monotone"), Items(lines)] if (lines := drops(document)) else []),
        *_hand_overs(document),
        *what_did_not_run(document),
        *plots_section(drawn),
    ]


def _title(document: GgufDocument) -> str:
    return f"GGUF products benchmark: {document.environment.gpu}"


def _method(document: GgufDocument) -> str:
    out = "out in the dtype of the activations, float32 for q8_1" if document.bounds else "out float32"
    return (
        f"{how_timed(document, 'weights')} Normal data, seed {document.settings.seed}; weights quantized by the rule ggml and packed; {out}, "
        f"no bias. Samples are taken in {document.settings.rounds} rounds over all implementations; microseconds per call, median. "
        f"TB/s are bytes of the weight's blocks, TOPS two operations a multiply-add, both of `{OURS}`. {document.llama.told}."
    )


def summary(document: GgufDocument) -> list[str]:
    """The lines that the command prints too."""
    lines = [*_ratios(document), _check(document)]
    lines += [f"**Not within {_bound(document)}**: {case.label}, {_check_cell(document, case)}." for case in analysis.wrong_cases(document)]
    count = len(analysis.all_drops(document))
    if count:
        lines.append(f"**Not monotone** within {TOLERANCE:.0%} in {count} place{'s' * (count > 1)}: fewer tokens take longer than more of them.")
    elif document.cases:
        lines.append(f"Monotone within {TOLERANCE:.0%}: nowhere do fewer tokens take longer than more of them.")
    return lines + noise(document.cases, document.environment.arch)


def _ratios(document: GgufDocument) -> list[str]:
    lines = []
    for name in LIKE_LLAMA:
        found = [(ratio, case) for case in document.cases if (ratio := analysis.llama_ratio(case, name)) is not None]
        if not found:
            continue
        (low, slowest), (high, fastest) = min(found, key=lambda one: one[0]), max(found, key=lambda one: one[0])
        lines.append(
            f"llama.cpp's time over that of `{name}` ({document.llama.status}): **{geometric_mean(ratio for ratio, _ in found):.2f}x** "
            f"(geometric mean of {len(found)} of {len(document.cases)} cases), from {low:.2f}x ({slowest.label}) to {high:.2f}x "
            f"({fastest.label}); above 1 on {sum(ratio > 1 for ratio, _ in found)}."
        )
    return lines or ["No time of llama.cpp to compare with."]


def _check(document: GgufDocument) -> str:
    checked = [case for case in document.cases if _check_cell(document, case) != "not checked"]
    good = len(checked) - len(analysis.wrong_cases(document))
    bounds = ", ".join(f"`{name}` {bound:.2g}" for name, bound in document.bounds.items())
    return (
        f"Within {_bound(document)} of the formula in float64, on a slice of rows and tokens: {good} of {len(checked)} checked cases."
        f"{f' The bounds: {bounds}.' if bounds else ''}"
    )


def _bound(document: GgufDocument) -> str:
    return "the bound" if document.bounds else f"{ERROR_BOUND:g}"


def _check_cell(document: GgufDocument, case: GgufCaseRecord) -> str:
    return analysis.check_of(case, document.bounds)


def _over_bf16(document: GgufDocument) -> list[Part]:
    """The speed-up over bfloat16 by tokens and implementation; nothing without times of it."""
    found = goals.speedups(document)
    if not found:
        return []
    rows = []
    for tokens, name, values in found:
        worst, case = min(values, key=lambda one: one[0])
        below = sum(value < 1 for value, _ in values)
        rows.append([tokens, f"`{name}`", f"{goals.mean(values):.2f}x", f"{worst:.2f}x at {case.label}", f"{below} of {len(values)}"])
    said = f"The time of `{BF16}` over that of an implementation: geometric mean, lowest, and how many cases are below 1.00x."
    return [Heading(2, "Next to bfloat16"), Text(said), Table(["tokens", "implementation", "mean", "lowest", "below 1.00x"], rows, "llrlr")]


def drops(document: GgufDocument) -> list[str]:
    """A line for each place where time is not monotone; the command prints these too."""
    return [_drop(pair) for pair in analysis.all_drops(document)]


def _drop(pair: Pair) -> str:
    def one(case: GgufCaseRecord) -> str:
        return f"{us_of(case, pair.name):.2f} µs at {case.M} (`{kernel_of(case, pair.name)}`)"

    return f"{pair.first.fmt} {pair.first.shape}, `{pair.name}`: {one(pair.first)}, {one(pair.second)}: {pair.ratio:.2f}x."


def header(document: GgufDocument) -> list[str]:
    """The columns of a table; those of llama.cpp only where there are times of it."""
    names = names_run(document)
    ours = [name for name in names if name in LIKE_LLAMA]
    llama = ["llama.cpp", *(f"llama.cpp / {name}" for name in ours)] if document.llama.status != "none" else []
    return ["tokens", *names, "TB/s", "TOPS", *llama, f"within {_bound(document)}", "kernel"]


def row(document: GgufDocument, case: GgufCaseRecord) -> list[str]:
    """The cells of a case, in the order of `header`."""
    names = names_run(document)
    us = us_of(case, OURS)
    rates = ("—", "—") if us is None else (f"{analysis.terabytes(case, us):.4f}", f"{tops(case.M, case.N, case.K, us):.3f}")
    ratios = [analysis.llama_ratio(case, name) for name in names if name in LIKE_LLAMA]
    llama = ["—" if case.llama_us is None else f"{case.llama_us:.2f}", *("—" if ratio is None else f"{ratio:.2f}x" for ratio in ratios)]
    return [
        str(case.M),
        *(time_cell(case, name) for name in names),
        *rates,
        *(llama if document.llama.status != "none" else []),
        _check_cell(document, case),
        kernel_cell(case),
    ]


def _hand_overs(document: GgufDocument) -> list[Part]:
    pairs = analysis.hand_overs(document)
    if not pairs:
        return []
    rows = [
        [
            f"{pair.first.fmt} {pair.first.shape}",
            pair.name,
            f"{pair.first.M}, {pair.second.M}",
            f"`{kernel_of(pair.first, pair.name)}`, `{kernel_of(pair.second, pair.name)}`",
            f"{us_of(pair.first, pair.name):.2f}",
            f"{us_of(pair.second, pair.name):.2f}",
            f"{1 / pair.ratio:.2f}x",
        ]
        for pair in pairs
    ]
    said = "From one number of tokens to the next. Below 1 the first of the two kernels had better have ended earlier, well above 1 later."
    columns = ["weight", "implementation", "tokens", "kernels", "µs before", "µs after", "step"]
    return [Heading(2, "Where one kernel hands over to another"), Text(said), Table(columns, rows, "llllrrr")]
