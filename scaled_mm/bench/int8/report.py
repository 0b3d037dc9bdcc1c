"""Renders the INT8 report from `bench.json`, and from nothing else: the same file gives the same report."""

from __future__ import annotations

from pathlib import Path

from scaled_mm.bench.analysis import names_run, of_roof, us_of, wrong_cases
from scaled_mm.bench.goals import ALIGN, HEADER, cells, count
from scaled_mm.bench.int8 import analysis, goals, plots
from scaled_mm.bench.int8.analysis import RECORDED_FILE, Recorded
from scaled_mm.bench.int8.inputs import GAUSS, INT8_STD, UNIFORM
from scaled_mm.bench.int8.libraries import Sgl
from scaled_mm.bench.int8.peers import RIVALS
from scaled_mm.bench.int8.record import Int8CaseRecord, Int8Document
from scaled_mm.bench.overhead import overhead_section
from scaled_mm.bench.report import head, how_timed, kernel_cell, mean_tables, noise, plots_section, tables, time_cell, what_did_not_run, write
from scaled_mm.measure.document import Heading, Items, Part, Table, Text
from scaled_mm.measure.peer import OURS
from scaled_mm.measure.regime import REGIMES
from scaled_mm.measure.stats import Speedup, geometric_mean

BENCH_MD = "bench.md"
_DATA = {UNIFORM: "uniform int8", GAUSS: f"rounded normal numbers, sigma {INT8_STD[GAUSS]:g}"}


def render(directory: Path, keep_plots: bool = False) -> list[Path]:
    """Reads `bench.json` in `directory`, writes `bench.md`, `bench.html` and the PNG plots there, and returns their paths.

    Without matplotlib the plots are left out and the report says so. keep_plots: see `scaled_mm.bench.report.write`.
    """
    directory = Path(directory)
    document = Int8Document.load(directory)
    recorded = analysis.load_recorded()
    return write(
        directory / BENCH_MD,
        _title(document),
        lambda drawn: contents(document, recorded, drawn),
        lambda: plots.draw(document, headline(document, recorded), directory),
        plots.NAMES,
        keep_plots,
    )


def headline(document: Int8Document, recorded: Recorded) -> tuple[str, list[Speedup]]:
    """(what ours is compared with, the speed-ups): rivals of this run, else the recorded ones, else nothing."""
    if measured := analysis.measured_speedups(document):
        rivals = _rivals_run(document)
        return f"{'the better of ' if len(rivals) > 1 else ''}{' and '.join(rivals)}, measured in this run", measured
    if earlier := analysis.recorded_speedups(document, recorded):
        return f"the recorded microseconds in {RECORDED_FILE}, not measured in this run", earlier
    return "neither vLLM nor SGLang has a time, measured or recorded", []


def contents(document: Int8Document, recorded: Recorded, drawn: list[Path] | None = None) -> list[Part]:
    """The whole report. drawn: the plots beside it; None when they could not be drawn."""
    return [
        *head(document, _title(document), _method(document)),
        *_summary(document, recorded),
        *_tables(document),
        *mean_tables("Speed-up measured in this run", analysis.measured_speedups(document)),
        *_goals_section(document, recorded),
        *_energy_section(document),
        *_recorded_section(document, recorded),
        *overhead_section(document.overhead, document.environment.arch),
        *what_did_not_run(document),
        *plots_section(drawn),
    ]


def _title(document: Int8Document) -> str:
    return f"INT8 GEMM benchmark: {document.environment.gpu}"


def _method(document: Int8Document) -> str:
    settings = document.settings
    return (
        f"{how_timed(document, 'weight sets')} Random data ({_DATA[settings.data]}), seed {settings.seed}; out bfloat16, no bias, one scale "
        f"per row of a and column of b. Every implementation gets the same inputs; samples are taken in {settings.rounds} rounds over all "
        "implementations. Microseconds per call, median."
    )


def _summary(document: Int8Document, recorded: Recorded) -> list[Part]:
    against, speedups = headline(document, recorded)
    lines = []
    if speedups:
        slowest, fastest = min(speedups, key=lambda s: s.factor), max(speedups, key=lambda s: s.factor)
        overall = geometric_mean(one.factor for one in speedups)
        lines.append(
            f"Speed-up over {against}: **{overall:.3f}x** (geometric mean of {len(speedups)} of "
            f"{len(document.cases)} cases), from {slowest.factor:.2f}x ({slowest.case.label}) to "
            f"{fastest.factor:.2f}x ({fastest.case.label}); faster on {sum(one.factor > 1 for one in speedups)}."
        )
    else:
        lines.append(f"No speed-up: {against}.")
    roofs = [fraction for case in document.cases if (fraction := of_roof(case)) is not None]
    if roofs:
        mean = geometric_mean(roofs)
        lines.append(f"Fraction of the roof: {mean:.2f} (geometric mean), best {max(roofs):.2f}.")
    checked = [case for case in document.cases if OURS in case.results and case.results[OURS].bit_equal is not None]
    wrong = wrong_cases(document)
    lines.append(f"Bit-equal with the reference: {len(checked) - len(wrong)} of {len(checked)} checked cases.")
    lines += [f"**Wrong bits**: {case.label}." for case in wrong]
    unchecked: dict[str, int] = {}
    for case in document.cases:
        if case.check != "checked":
            unchecked[case.check] = unchecked.get(case.check, 0) + 1
    lines += [f"{count} cases {reason}." for reason, count in unchecked.items()]
    return [Heading(2, "Summary"), Items(lines + noise(document.cases, document.environment.arch))]


def _tables(document: Int8Document) -> list[Part]:
    names = names_run(document)
    factors = {id(one.case): one for one in analysis.measured_speedups(document)}
    notes: list[str] = []

    def row(case: Int8CaseRecord) -> list[str]:
        speedup, roof = factors.get(id(case)), of_roof(case)
        return [
            str(case.M),
            *(_cell(case, name, notes) for name in names),
            "—" if speedup is None else f"{speedup.factor:.2f}x",
            "—" if roof is None else f"{roof:.2f}",
            bits(case),
            kernel_cell(case),
        ]

    found = tables(document, ["M", *names, "speed-up", "of roof", "bits", "kernel"], row)
    return found + ([Items([f"({i + 1}) {note}" for i, note in enumerate(notes)])] if notes else [])


def _cell(case: Int8CaseRecord, name: str, notes: list[str]) -> str:
    """`time_cell`, with the number of the note on the result."""
    result = case.results.get(name)
    if result is None or result.us is None or result.note is None:
        return time_cell(case, name)
    note = f"`{name}`: {result.note}"
    if note not in notes:
        notes.append(note)
    return f"{result.us:.2f} ({notes.index(note) + 1})"


def bits(case: Int8CaseRecord) -> str:
    """Whether ours equals the reference on a case: "equal", "WRONG", or "not checked"."""
    result = case.results.get(OURS)
    if result is None or result.bit_equal is None:
        return "not checked"
    return "equal" if result.bit_equal else "WRONG"


def _goals_section(document: Int8Document, recorded: Recorded) -> list[Part]:
    if document.environment.arch == "cpu":
        return []  # the goals are for GPUs
    found = goals.outcomes([goals.of_case(case, recorded) for case in document.cases])
    if not found:
        return []
    estimated = Sgl.name not in names_run(document)
    of_sgl = f" SGLang was not timed: its time is vLLM's by the ratio of their recorded times on an {recorded.gpu}." if estimated else ""
    said = f"{count(found)} Means are geometric.{of_sgl}"
    return [Heading(2, "Goals"), Text(said), Table(HEADER, [cells(one) for one in found], ALIGN)]


def _energy_section(document: Int8Document) -> list[Part]:
    """Picojoules an operation, of which a product has 2 M N K, and the clock after the metered replays, by case and implementation."""
    names = [name for name in names_run(document) if any((one := case.results.get(name)) and one.joules is not None for case in document.cases)]
    if not names:
        metered = REGIMES[document.settings.regime].meter_ms > 0 and document.environment.arch != "cpu"
        return [Heading(2, "Energy"), Text("Not metered in this run. It takes `pip install nvidia-ml-py`, and NVML.")] if metered else []

    def cell(case: Int8CaseRecord, name: str) -> str:
        result = case.results.get(name)
        if result is None or result.joules is None:
            return "—"
        return f"{result.joules / (2 * case.M * case.N * case.K) * 1e12:.2f} at {result.sm_mhz:.0f}"

    lines = [[case.shape, str(case.M), *(cell(case, name) for name in names)] for case in document.cases]
    what = "Picojoules for each of a product's 2 M N K operations, the whole GPU's, and the SM clock in MHz just after the metered replays."
    return [Heading(2, "Energy"), Text(what), Table(["shape", "M", *names], lines, "lr" + "r" * len(names))]


def _recorded_section(document: Int8Document, recorded: Recorded) -> list[Part]:
    missing = analysis.incomplete_rivals(document)
    if not missing:
        return []
    total = len(document.cases)
    absent = " and ".join(f"`{name}` has no time on {count} of {total} cases" for name, count in missing.items())
    title = Heading(2, "Recorded microseconds")
    if document.environment.gpu != recorded.gpu:
        told = f"from an {recorded.gpu} and are not compared with this machine's"
        return [title, Text(f"{absent}. The recorded microseconds in `{RECORDED_FILE}` are {told}.")]
    speedups = analysis.recorded_speedups(document, recorded)
    if not speedups:
        return [title, Text(f"{absent}, and `{RECORDED_FILE}` has none of the cases of this run.")]
    said = [
        f"{absent}. This table compares ours against the recorded microseconds in `{RECORDED_FILE}`: the better of "
        f"{' and '.join(recorded.labels[name] for name in RIVALS)}, measured earlier on another {recorded.gpu}, not in "
        f"this run ({recorded.method})."
    ]
    if moved := analysis.drift(document, recorded):
        ratios = ", ".join(f"`{name}` {ratio:.3f}" for name, ratio in moved.items())
        said.append(f"This run's time over the recorded time, for what ran in both (geometric mean): {ratios}.")
    heading, *table = mean_tables("Speed-up against recorded microseconds", speedups)
    return [heading, Text(" ".join(said)), *table]


def _rivals_run(document: Int8Document) -> list[str]:
    return [name for name in RIVALS if any(us_of(case, name) is not None for case in document.cases)]
