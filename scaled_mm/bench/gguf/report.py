"""Renders a report from `bench_block.json`, and from nothing else."""

from __future__ import annotations

from pathlib import Path

from scaled_mm.bench.gguf import analysis
from scaled_mm.bench.gguf import plots as block_plots
from scaled_mm.bench.gguf.analysis import ERROR_BOUND, OURS_ALL, TOLERANCE, Pair
from scaled_mm.bench.gguf.record import BlockCaseRecord, BlockDocument, load
from scaled_mm.bench.int8 import plots
from scaled_mm.bench.int8.analysis import geometric_mean
from scaled_mm.bench.int8.peers import OURS
from scaled_mm.bench.int8.report import environment_table, legend, noise, plots_section, what_did_not_run
from scaled_mm.measure import document as blocks
from scaled_mm.measure.document import Block, Command, Heading, Items, Table, Text
from scaled_mm.measure.record import write_atomically
from scaled_mm.measure.roofline import tops
from scaled_mm.measure.timing import CACHE_MULTIPLE

BLOCK_MD, BLOCK_HTML = "bench_block.md", "bench_block.html"


def render(directory: Path, keep_plots: bool = False) -> list[Path]:
    """Reads `bench_block.json` in `directory`, writes Markdown, HTML and plots there, and returns their paths.

    keep_plots: where none can be drawn, those that are there stay in the report, as in that of INT8.
    """
    directory = Path(directory)
    document = load(directory)
    if plots.unavailable() is None:
        drawn = block_plots.draw(document, directory)
    else:
        drawn = [path for path in (directory / name for name in block_plots.NAMES) if keep_plots and path.is_file()] or None
    content = contents(document, drawn)
    return [
        write_atomically(directory / BLOCK_MD, blocks.markdown(content)),
        write_atomically(directory / BLOCK_HTML, blocks.page(content, _title(document))),
        *(drawn or []),
    ]


def contents(document: BlockDocument, drawn: list[Path] | None = None) -> list[Block]:
    """The whole report. drawn: the plots beside it; None when they could not be drawn."""
    return [
        Heading(1, _title(document)),
        Command(document.command),
        environment_table(document),
        Text(_method(document)),
        Heading(2, "Summary"),
        Items(summary(document)),
        *_tables(document),
        *([Heading(2, "Where time is not monotone"), Items(lines)] if (lines := drops(document)) else []),
        *_hand_overs(document),
        *what_did_not_run(document, name_of),
        *plots_section(drawn),
    ]


def _title(document: BlockDocument) -> str:
    return f"Block products benchmark: {document.environment.gpu}"


def name_of(case: BlockCaseRecord) -> str:
    return f"{case.fmt} {case.shape} at {case.M} token{'s' * (case.M != 1)}"


def _method(document: BlockDocument) -> str:
    if document.environment.arch == "cpu":
        how = "`time.perf_counter` around passes over rotated weights."
    else:
        how = (
            "CUDA-graph replays between events; the calls of a graph rotate over weights (and outputs) that together exceed the "
            f"L2 cache {CACHE_MULTIPLE} times, so weights come from memory."
        )
        if warm := sorted({f"{case.fmt} {case.shape}" for case in document.cases if not case.cold}):
            how += f" Not so for {', '.join(warm)}: even the rotated weights fit into the cache."
    return (
        f"{how} Normal data, seed {document.settings.seed}; weights quantized by the rule ggml and packed; out float32, no bias. Samples are "
        f"taken in {document.settings.rounds} rounds over all implementations; microseconds per call, median. TB/s are bytes of the "
        f"weight's blocks, TOPS two operations a multiply-add, both of `{OURS}`. {document.llama.told}."
    )


def summary(document: BlockDocument) -> list[str]:
    """The lines that the command prints too."""
    lines = [*_ratios(document), _check(document)]
    lines += [f"**Not within {ERROR_BOUND:g}**: {name_of(case)}, {analysis.check_of(case)}." for case in analysis.wrong_cases(document)]
    count = len(analysis.all_drops(document))
    if count:
        lines.append(f"**Not monotone** within {TOLERANCE:.0%} in {count} place{'s' * (count > 1)}: fewer tokens take longer than more of them.")
    elif document.cases:
        lines.append(f"Monotone within {TOLERANCE:.0%}: nowhere do fewer tokens take longer than more of them.")
    return lines + noise(document.cases, document.environment.arch)


def _ratios(document: BlockDocument) -> list[str]:
    lines = []
    for name in OURS_ALL[:2]:
        found = [(ratio, case) for case in document.cases if (ratio := analysis.llama_ratio(case, name)) is not None]
        if not found:
            continue
        (low, slowest), (high, fastest) = min(found, key=lambda one: one[0]), max(found, key=lambda one: one[0])
        lines.append(
            f"llama.cpp's time over that of `{name}` ({document.llama.status}): **{geometric_mean(ratio for ratio, _ in found):.2f}x** "
            f"(geometric mean of {len(found)} of {len(document.cases)} cases), from {low:.2f}x ({name_of(slowest)}) to {high:.2f}x "
            f"({name_of(fastest)}); above 1 on {sum(ratio > 1 for ratio, _ in found)}."
        )
    return lines or ["No time of llama.cpp to compare with."]


def _check(document: BlockDocument) -> str:
    checked = [case for case in document.cases if analysis.check_of(case) != "not checked"]
    good = len(checked) - len(analysis.wrong_cases(document))
    return f"Within {ERROR_BOUND:g} of the formula in float64, on a slice of rows and tokens: {good} of {len(checked)} checked cases."


def drops(document: BlockDocument) -> list[str]:
    """A line for each place where time is not monotone; the command prints these too."""
    return [_drop(pair) for pair in analysis.all_drops(document)]


def _drop(pair: Pair) -> str:
    def one(case: BlockCaseRecord) -> str:
        return f"{analysis.us_of(case, pair.name):.2f} µs at {case.M} (`{analysis.kernel_of(case, pair.name)}`)"

    return f"{pair.first.fmt} {pair.first.shape}, `{pair.name}`: {one(pair.first)}, {one(pair.second)}: {pair.ratio:.2f}x."


def _tables(document: BlockDocument) -> list[Block]:
    run = [one for one in document.implementations if one.unavailable is None]
    found: list[Block] = [Heading(2, "Microseconds per call"), Items([legend(one) for one in run])]
    for (fmt, shape), cases in analysis.weights(document).items():
        title = f"{fmt} {shape}: N={cases[0].N}, K={cases[0].K}"
        columns = header(document)
        table = Table(columns, [row(document, case) for case in cases], "r" * (len(columns) - 1) + "l")
        found += [Heading(3, title), table]
    return found


def header(document: BlockDocument) -> list[str]:
    """The columns of a table; those of llama.cpp only where there are times of it."""
    names = [one.name for one in document.implementations if one.unavailable is None]
    ours = [name for name in names if name in OURS_ALL[:2]]
    llama = ["llama.cpp", *(f"llama.cpp / {name}" for name in ours)] if document.llama.status != "none" else []
    return ["tokens", *names, "TB/s", "TOPS", *llama, f"within {ERROR_BOUND:g}", "kernel"]


def row(document: BlockDocument, case: BlockCaseRecord) -> list[str]:
    """The cells of a case, in the order of `header`."""
    names = [one.name for one in document.implementations if one.unavailable is None]
    us = analysis.us_of(case, OURS)
    rates = ("—", "—") if us is None else (f"{analysis.terabytes(case, us):.4f}", f"{tops(case.M, case.N, case.K, us):.3f}")
    ratios = [analysis.llama_ratio(case, name) for name in names if name in OURS_ALL[:2]]
    llama = ["—" if case.llama_us is None else f"{case.llama_us:.2f}", *("—" if ratio is None else f"{ratio:.2f}x" for ratio in ratios)]
    return [
        str(case.M),
        *(_time(case, name) for name in names),
        *rates,
        *(llama if document.llama.status != "none" else []),
        analysis.check_of(case),
        "—" if (kernel := analysis.kernel_of(case)) is None else f"`{kernel}`",
    ]


def _time(case: BlockCaseRecord, name: str) -> str:
    if name not in case.results:
        return "—"
    us = analysis.us_of(case, name)
    return "failed" if us is None else f"{us:.2f}"


def _hand_overs(document: BlockDocument) -> list[Block]:
    pairs = analysis.hand_overs(document)
    if not pairs:
        return []
    rows = [
        [
            f"{pair.first.fmt} {pair.first.shape}",
            pair.name,
            f"{pair.first.M}, {pair.second.M}",
            f"`{analysis.kernel_of(pair.first, pair.name)}`, `{analysis.kernel_of(pair.second, pair.name)}`",
            f"{analysis.us_of(pair.first, pair.name):.2f}",
            f"{analysis.us_of(pair.second, pair.name):.2f}",
            f"{1 / pair.ratio:.2f}x",
        ]
        for pair in pairs
    ]
    said = "From one number of tokens to the next. Below 1 the first of the two kernels had better have ended earlier, well above 1 later."
    columns = ["weight", "implementation", "tokens", "kernels", "µs before", "µs after", "step"]
    return [Heading(2, "Where one kernel hands over to another"), Text(said), Table(columns, rows, "llllrrr")]
