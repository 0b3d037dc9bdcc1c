"""The frame of a suite's report: where the numbers come from, how they were taken, tables by weight, what did not run, plots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from scaled_mm.bench import analysis, goals
from scaled_mm.bench.goals import Outcome
from scaled_mm.measure import document as parts
from scaled_mm.measure import plots
from scaled_mm.measure.document import Command, Heading, Image, Items, Part, Table, Text
from scaled_mm.measure.environment import BUSY_CPU
from scaled_mm.measure.record import CaseRecord, Clocks, Document, Environment, Implementation, write_atomically
from scaled_mm.measure.regime import REGIMES, STANDARD
from scaled_mm.measure.rotation import CACHE_MULTIPLE
from scaled_mm.measure.stats import Speedup, geometric_mean, mean_by_m, mean_by_shape


def write(
    path: Path,
    title: str,
    contents: Callable[[list[Path] | None], list[Part]],
    draw: Callable[[], list[Path]],
    names: Iterable[str],
    keep_plots: bool,
) -> list[Path]:
    """Draws the plots, writes `path` as Markdown and the HTML beside it, and returns the paths.

    contents: the report around the plots that `draw` made, None where they could not be drawn. names: files that `draw` may write.
    keep_plots: where none can be drawn, those that are there are of this very run and stay in the report.
    """
    if plots.unavailable() is None:
        drawn = draw()
    else:
        drawn = [file for file in map(path.with_name, names) if keep_plots and file.is_file()] or None
    content = contents(drawn)
    return [
        write_atomically(path, parts.markdown(content)),
        write_atomically(path.with_suffix(".html"), parts.page(content, title)),
        *(drawn or []),
    ]


def head(document: Document, title: str, method: str) -> list[Part]:
    """Title, command, environment and method."""
    return [Heading(1, title), Command(document.command), environment_table(document), Text(method)]


def commit(environment: Environment) -> str:
    """The commit, and whether the sources differ from it."""
    return (environment.git_commit or "none") + (" with changes" if environment.git_dirty else "")


def environment_table(document: Document) -> Table:
    """Where the numbers of a document come from."""
    env = document.environment
    rows = [
        ("GPU" if env.arch != "cpu" else "CPU", f"{env.gpu} ({env.arch})"),
        ("driver, CUDA", f"{env.driver or 'unknown'}, {env.cuda or 'none'}"),
        ("torch, Python", f"{env.torch}, {env.python}"),
        ("CUTLASS, scaled_mm", f"{env.cutlass or 'unknown'}, {env.scaled_mm or 'not installed'}"),
        ("commit", commit(env)),
        ("L2 or last-level cache", f"{env.cache_bytes / 2**20:.0f} MiB"),
        ("nvidia-smi", env.nvidia_smi),
        ("made", document.created),
        *((f"clocks {when}", _clocks(readings)) for when, readings in _by_time(document.clocks).items()),
    ]
    return Table(["", ""], rows, "ll")


def _by_time(clocks: Iterable[Clocks]) -> dict[str, list[Clocks]]:
    """Readings with the same `when`: one after each group of cases of an operator, for instance."""
    found: dict[str, list[Clocks]] = {}
    for reading in clocks:
        found.setdefault(reading.when, []).append(reading)
    return found


def _clocks(readings: Sequence[Clocks]) -> str:
    """The range of each quantity."""
    shown = []
    for name, unit in (("sm_mhz", "MHz SM"), ("mem_mhz", "MHz memory"), ("power_w", "W"), ("temperature_c", "°C")):
        values = [value for reading in readings if (value := getattr(reading, name)) is not None]
        if values:
            low, high = min(values), max(values)
            shown.append(f"{low:g} {unit}" if low == high else f"{low:g} to {high:g} {unit}")
    return ", ".join(shown) or "not reported"


def how_timed(document: Document, rotated: str) -> str:
    """The way times were taken, in sentences. rotated: what the calls go through, "weights" for one."""
    if document.environment.arch == "cpu":
        return "`time.perf_counter` around passes over rotated weights."
    text = (
        f"CUDA-graph replays between events; the calls of a graph rotate over {rotated} (and outputs) that together "
        f"exceed the L2 cache {CACHE_MULTIPLE} times, so weights come from memory."
    )
    if warm := analysis.warm_weights(document):
        text += f" Not so for {', '.join(warm)}: even the rotated weights fit into the cache."
    return text + regime_of(document)


def regime_of(document: Document) -> str:
    """A sentence on the state of the GPU, after a space; empty for the standard one and on a CPU."""
    regime = document.settings.regime
    return "" if regime == STANDARD or document.environment.arch == "cpu" else f" {REGIMES[regime].describe()}"


def noise(cases: Iterable[CaseRecord], arch: str) -> list[str]:
    """A line on how far the rounds of one implementation are apart, on a CPU with advice; none without times."""
    spreads = sorted(r.spread for case in cases for r in case.results.values() if r.spread is not None)
    if not spreads:
        return []
    median, high = spreads[len(spreads) // 2], spreads[int(len(spreads) * 0.95)]
    advice = f" By so much: {BUSY_CPU}." if arch == "cpu" and high > 0.5 else ""
    return [
        f"Noise: the rounds of one implementation differ by {median:.1%} (median), "
        f"{high:.1%} (95th percentile); smaller differences mean nothing.{advice}"
    ]


def tables(document: Document, header: Sequence[str], row: Callable[[CaseRecord], list[str]]) -> list[Part]:
    """A legend, and a table a weight, whose last column is a name."""
    known = {one.name: one for one in document.implementations}
    found: list[Part] = [Heading(2, "Microseconds per call"), Items([legend(known[name]) for name in analysis.names_run(document)])]
    for weight, cases in analysis.by_weight(document).items():
        rows = [row(case) for case in cases]
        found += [Heading(3, f"{weight}: N={cases[0].N}, K={cases[0].K}"), Table(header, rows, "r" * (len(header) - 1) + "l")]
    return found


def legend(one: Implementation) -> str:
    """`name`: what it is, and of which library."""
    origin = ", ".join(part for part in (one.version, one.library) if part is not None)
    return f"`{one.name}`: {one.label}{f' ({origin})' if origin else ''}"


def time_cell(case: CaseRecord, name: str) -> str:
    """Microseconds, "failed", or a dash for what was not run."""
    if name not in case.results:
        return "—"
    us = analysis.us_of(case, name)
    return "failed" if us is None else f"{us:.2f}"


def kernel_cell(case: CaseRecord) -> str:
    """The tile configuration that served ours."""
    kernel = analysis.kernel_of(case)
    return "—" if kernel is None else f"`{kernel}`"


def mean_tables(title: str, speedups: list[Speedup]) -> list[Part]:
    """Shape x M with their geometric means; nothing without speed-ups."""
    if not speedups:
        return []
    by_m, by_shape = mean_by_m(speedups), mean_by_shape(speedups)
    overall = geometric_mean(one.factor for one in speedups)
    factors = {(one.case.shape, one.case.M): f"{one.factor:.2f}" for one in speedups}
    header = ["shape", *(str(m) for m in by_m), "mean"]
    rows = [[s, *(factors.get((s, m), "—") for m in by_m), f"**{mean:.3f}**"] for s, mean in by_shape.items()]
    rows.append(["mean", *(f"**{mean:.3f}**" for mean in by_m.values()), f"**{overall:.3f}**"])
    said = "By shape and M; means are geometric; above 1 ours is faster."
    return [Heading(2, title), Text(said), Table(header, rows, "l" + "r" * (len(header) - 1))]


def what_did_not_run(document: Document, more: Sequence[str] = ()) -> list[Part]:
    """Implementations that could not run, `more` lines, and cases on which one failed."""
    lines = [f"`{one.name}` ({one.label}): {one.unavailable}" for one in document.implementations if one.unavailable is not None]
    lines += more
    grouped: dict[tuple[str, str], list[str]] = {}
    for case, name, message in analysis.failures(document):
        grouped.setdefault((name, message), []).append(case.label)
    lines += [f"`{name}` failed on {'; '.join(cases)}: {message}" for (name, message), cases in grouped.items()]
    return [Heading(2, "What did not run"), Items(lines)] if lines else []


def goals_section(found: Sequence[Outcome]) -> list[Part]:
    """How many goals are met, and a table; nothing without goals."""
    if not found:
        return []
    return [Heading(2, "Goals"), Text(goals.count(found)), Table(goals.HEADER, [goals.cells(one) for one in found], goals.ALIGN)]


def plots_section(drawn: list[Path] | None) -> list[Part]:
    """The plots; why there are none where `drawn` is None."""
    if drawn is None:
        return [Heading(2, "Plots"), Text(f"Not drawn: {plots.unavailable()}.")]
    return [Heading(2, "Plots"), *(Image(path, path.stem) for path in drawn)] if drawn else []
