"""Renders a report directory from its `bench.json`, and from nothing else: the same file gives the same report."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from scaled_mm.bench.int8 import analysis
from scaled_mm.bench.int8.analysis import RECORDED_FILE, Recorded, Speedup
from scaled_mm.bench.int8.peers import OURS, RIVALS
from scaled_mm.measure import document as blocks
from scaled_mm.measure.document import Block, Command, Heading, Image, Items, Table, Text
from scaled_mm.measure.environment import BUSY_CPU
from scaled_mm.measure.record import BenchDocument, CaseRecord, Clocks, Implementation, load, write_atomically
from scaled_mm.measure.timing import CACHE_MULTIPLE

BENCH_MD, BENCH_HTML = "bench.md", "bench.html"


def render(directory: Path, keep_plots: bool = False) -> list[Path]:
    """Reads `bench.json` in `directory`, writes `bench.md`, `bench.html` and the PNG plots there, and returns their paths.

    Without matplotlib the plots are left out and the report says so. keep_plots: they are of this very `bench.json`, so those that
    are there stay in the report.
    """
    from scaled_mm.bench.int8 import plots

    directory = Path(directory)
    document = load(directory)
    recorded = analysis.load_recorded()
    if plots.unavailable() is None:
        drawn = plots.draw(document, headline(document, recorded), directory)
    else:
        drawn = [path for path in (directory / name for name in plots.NAMES) if keep_plots and path.is_file()] or None
    content = contents(document, recorded, drawn)
    return [
        write_atomically(directory / BENCH_MD, blocks.markdown(content)),
        write_atomically(directory / BENCH_HTML, blocks.page(content, _title(document))),
        *(drawn or []),
    ]


def headline(document: BenchDocument, recorded: Recorded) -> tuple[str, list[Speedup]]:
    """(what ours is compared with, the speed-ups): rivals of this run, else the recorded ones, else nothing."""
    if measured := analysis.measured_speedups(document):
        rivals = _rivals_run(document)
        return f"{'the better of ' if len(rivals) > 1 else ''}{' and '.join(rivals)}, measured in this run", measured
    if earlier := analysis.recorded_speedups(document, recorded):
        return f"the recorded microseconds in {RECORDED_FILE}, not measured in this run", earlier
    return "neither vLLM nor SGLang has a time, measured or recorded", []


def contents(document: BenchDocument, recorded: Recorded, drawn: list[Path] | None = None) -> list[Block]:
    """The whole report. drawn: the plots beside it; None when they could not be drawn."""
    return [
        *_head(document),
        *_summary(document, recorded),
        *_shape_tables(document),
        *_mean_tables("Speed-up measured in this run", analysis.measured_speedups(document)),
        *_recorded_section(document, recorded),
        *_overhead_table(document),
        *what_did_not_run(document, _name),
        *plots_section(drawn),
    ]


def _title(document: BenchDocument) -> str:
    return f"INT8 GEMM benchmark: {document.environment.gpu}"


def _head(document: BenchDocument) -> list[Block]:
    return [Heading(1, _title(document)), Command(document.command), environment_table(document), Text(_method(document))]


def environment_table(document) -> Table:
    """Where the numbers of a document come from; it has `environment`, `created` and `clocks`."""
    env = document.environment
    commit = (env.git_commit or "none") + (" with changes" if env.git_dirty else "")
    rows = [
        ("GPU" if env.arch != "cpu" else "CPU", f"{env.gpu} ({env.arch})"),
        ("driver, CUDA", f"{env.driver or 'unknown'}, {env.cuda or 'none'}"),
        ("torch, Python", f"{env.torch}, {env.python}"),
        ("CUTLASS, scaled_mm", f"{env.cutlass or 'unknown'}, {env.scaled_mm or 'not installed'}"),
        ("commit", commit),
        ("L2 or last-level cache", f"{env.cache_bytes / 2**20:.0f} MiB"),
        ("nvidia-smi", env.nvidia_smi),
        ("made", document.created),
        *((f"clocks {clocks.when}", _clocks(clocks)) for clocks in document.clocks),
    ]
    return Table(["", ""], rows, "ll")


def _clocks(clocks: Clocks) -> str:
    parts = [
        (clocks.sm_mhz, "MHz SM"),
        (clocks.mem_mhz, "MHz memory"),
        (clocks.power_w, "W"),
        (clocks.temperature_c, "°C"),
    ]
    return ", ".join(f"{value:g} {unit}" for value, unit in parts if value is not None) or "not reported"


def _method(document: BenchDocument) -> str:
    common = (
        f"Random data, seed {document.settings.seed}; out bfloat16, no bias, one scale per row of a and column of b. "
        f"Every implementation gets the same inputs; samples are taken in {document.settings.rounds} rounds over all "
        "implementations. Microseconds per call, median."
    )
    if document.environment.arch == "cpu":
        return f"`time.perf_counter` around passes over rotated weights. {common}"
    text = (
        "CUDA-graph replays between events; the calls of a graph rotate over weight sets (and outputs) that together "
        f"exceed the L2 cache {CACHE_MULTIPLE} times, so weights come from memory. {common}"
    )
    warm = [str(case.shape) for case in document.cases if not case.cold]
    if warm:
        text += f" Not so for {', '.join(sorted(set(warm)))}: even the rotated weights fit into the cache."
    return text


def _summary(document: BenchDocument, recorded: Recorded) -> list[Block]:
    against, speedups = headline(document, recorded)
    lines = []
    if speedups:
        slowest, fastest = min(speedups, key=lambda s: s.factor), max(speedups, key=lambda s: s.factor)
        overall = analysis.geometric_mean(one.factor for one in speedups)
        lines.append(
            f"Speed-up over {against}: **{overall:.3f}x** (geometric mean of {len(speedups)} of "
            f"{len(document.cases)} cases), from {slowest.factor:.2f}x ({_name(slowest.case)}) to "
            f"{fastest.factor:.2f}x ({_name(fastest.case)}); faster on {sum(one.factor > 1 for one in speedups)}."
        )
    else:
        lines.append(f"No speed-up: {against}.")
    roofs = [fraction for case in document.cases if (fraction := analysis.of_roof(case)) is not None]
    if roofs:
        mean = analysis.geometric_mean(roofs)
        lines.append(f"Fraction of the roof: {mean:.2f} (geometric mean), best {max(roofs):.2f}.")
    checked = [case for case in document.cases if OURS in case.results and case.results[OURS].bit_equal is not None]
    wrong = analysis.wrong_cases(document)
    lines.append(f"Bit-equal with the reference: {len(checked) - len(wrong)} of {len(checked)} checked cases.")
    lines += [f"**Wrong bits**: {_name(case)}." for case in wrong]
    unchecked: dict[str, int] = {}
    for case in document.cases:
        if case.check != "checked":
            unchecked[case.check] = unchecked.get(case.check, 0) + 1
    lines += [f"{count} cases {reason}." for reason, count in unchecked.items()]
    return [Heading(2, "Summary"), Items(lines + noise(document.cases, document.environment.arch))]


def noise(cases: Iterable, arch: str) -> list[str]:
    """A line on how far the rounds of one implementation are apart, on a CPU with advice; none without times. A case has `results`."""
    spreads = sorted(r.spread for case in cases for r in case.results.values() if r.spread is not None)
    if not spreads:
        return []
    median, high = spreads[len(spreads) // 2], spreads[int(len(spreads) * 0.95)]
    advice = f" By so much: {BUSY_CPU}." if arch == "cpu" and high > 0.5 else ""
    return [
        f"Noise: the rounds of one implementation differ by {median:.1%} (median), "
        f"{high:.1%} (95th percentile); smaller differences mean nothing.{advice}"
    ]


def _shape_tables(document: BenchDocument) -> list[Block]:
    names = analysis.names_run(document)
    factors = {id(one.case): one for one in analysis.measured_speedups(document)}
    known = {one.name: one for one in document.implementations}
    found: list[Block] = [Heading(2, "Microseconds per call"), Items([legend(known[name]) for name in names])]
    notes: list[str] = []
    for shape, cases in analysis.shapes(document).items():
        header = ["M", *names, "speed-up", "of roof", "bits", "kernel"]
        rows = []
        for case in cases:
            ours = case.results.get(OURS)
            speedup = factors.get(id(case))
            roof = analysis.of_roof(case)
            rows.append(
                [
                    str(case.M),
                    *(_cell(case, name, notes) for name in names),
                    "—" if speedup is None else f"{speedup.factor:.2f}x",
                    "—" if roof is None else f"{roof:.2f}",
                    bits(case),
                    "—" if ours is None or ours.kernel is None else f"`{ours.kernel}`",
                ]
            )
        align = "r" * (len(header) - 1) + "l"
        found += [Heading(3, f"{shape}: N={cases[0].N}, K={cases[0].K}"), Table(header, rows, align)]
    if notes:
        found.append(Items([f"({i + 1}) {note}" for i, note in enumerate(notes)]))
    return found


def legend(one: Implementation) -> str:
    """`name`: what it is, and of which library."""
    origin = ", ".join(part for part in (one.version, one.library) if part is not None)
    return f"`{one.name}`: {one.label}{f' ({origin})' if origin else ''}"


def _cell(case: CaseRecord, name: str, notes: list[str]) -> str:
    result = case.results.get(name)
    if result is None:
        return "—"
    if result.us is None:
        return "failed"
    if result.note is None:
        return f"{result.us:.2f}"
    note = f"`{name}`: {result.note}"
    if note not in notes:
        notes.append(note)
    return f"{result.us:.2f} ({notes.index(note) + 1})"


def bits(case: CaseRecord) -> str:
    """Whether ours equals the reference on a case: "equal", "WRONG", or "not checked"."""
    result = case.results.get(OURS)
    if result is None or result.bit_equal is None:
        return "not checked"
    return "equal" if result.bit_equal else "WRONG"


def _mean_tables(title: str, speedups: list[Speedup]) -> list[Block]:
    if not speedups:
        return []
    by_m, by_shape = analysis.mean_by_m(speedups), analysis.mean_by_shape(speedups)
    overall = analysis.geometric_mean(one.factor for one in speedups)
    factors = {(one.case.shape, one.case.M): f"{one.factor:.2f}" for one in speedups}
    header = ["shape", *(str(m) for m in by_m), "mean"]
    rows = [[s, *(factors.get((s, m), "—") for m in by_m), f"**{mean:.3f}**"] for s, mean in by_shape.items()]
    rows.append(["mean", *(f"**{mean:.3f}**" for mean in by_m.values()), f"**{overall:.3f}**"])
    said = "By shape and M; means are geometric; above 1 ours is faster."
    return [Heading(2, title), Text(said), Table(header, rows, "l" + "r" * (len(header) - 1))]


def _recorded_section(document: BenchDocument, recorded: Recorded) -> list[Block]:
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
    heading, *table = _mean_tables("Speed-up against recorded microseconds", speedups)
    return [heading, Text(" ".join(said)), *table]


def _overhead_table(document: BenchDocument) -> list[Block]:
    if not document.overhead:
        return []
    rows = [[f"`{one.name}`", f"failed: {one.failed}" if one.us is None else f"{one.us:.2f}"] for one in document.overhead]
    what = "the whole call, there is no queue" if document.environment.arch == "cpu" else "the GPU's work not included"
    said = f"Microseconds per call on the host, {what}."
    return [Heading(2, "Host overhead"), Text(said), Table(["call", "µs"], rows, "lr")]


def what_did_not_run(document, name_of: Callable[[object], str]) -> list[Block]:
    """Implementations that could not run, and cases, named by `name_of`, on which one failed."""
    lines = [f"`{one.name}` ({one.label}): {one.unavailable}" for one in document.implementations if one.unavailable is not None]
    grouped: dict[tuple[str, str], list[str]] = {}
    for case, name, message in analysis.failures(document):
        grouped.setdefault((name, message), []).append(name_of(case))
    lines += [f"`{name}` failed on {'; '.join(cases)}: {message}" for (name, message), cases in grouped.items()]
    return [Heading(2, "What did not run"), Items(lines)] if lines else []


def plots_section(drawn: list[Path] | None) -> list[Block]:
    """The plots; why there are none where `drawn` is None."""
    if drawn is None:
        from scaled_mm.bench.int8 import plots

        return [Heading(2, "Plots"), Text(f"Not drawn: {plots.unavailable()}.")]
    return [Heading(2, "Plots"), *(Image(path, path.stem) for path in drawn)] if drawn else []


def _rivals_run(document: BenchDocument) -> list[str]:
    return [name for name in RIVALS if any(analysis.us_of(case, name) is not None for case in document.cases)]


def _name(case: CaseRecord) -> str:
    return f"{case.shape} M={case.M}"
