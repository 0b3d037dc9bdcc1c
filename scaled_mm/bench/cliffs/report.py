"""`cliffs.json`, `cliffs.md` and `cliffs.png`: time by M for each weight, and products that are slower than one with a larger M.

`cliffs.json` is a list of {"shape", "M", "N", "K", "us", "kernel"}; a product that failed has "failed", the message, in place of the last two.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from scaled_mm.bench.rows.report import as_json, origin
from scaled_mm.measure import plots
from scaled_mm.measure.document import Command, Heading, Image, Items, Part, Table, Text, markdown
from scaled_mm.measure.record import Environment, write_atomically

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CLIFFS_JSON, CLIFFS_MD, CLIFFS_PNG = "cliffs.json", "cliffs.md", "cliffs.png"
LIMIT = 1.05  # of the time of any larger M

HEADER, ALIGN = ("shape", "products", "kernels", "cliffs", "worst", "at", "kernel", "a larger M", "kernel"), "lrrrrllll"
_SHOWN = 40  # cliffs in the report


class Cliff(NamedTuple):
    """A product and the fastest with the same N and K and a larger M. ratio: of their times."""

    product: dict[str, Any]
    larger: dict[str, Any]
    ratio: float


def ratios(entries: list[dict[str, Any]]) -> list[Cliff]:
    """Every product but the largest of a weight, with the fastest of those with a larger M. entries: those of one weight that were timed."""
    found, fastest = [], None
    for entry in sorted(entries, key=lambda entry: -entry["M"]):
        if fastest is not None:
            found.append(Cliff(entry, fastest, entry["us"] / fastest["us"]))
        if fastest is None or entry["us"] < fastest["us"]:
            fastest = entry
    return found


def cliffs(entries: list[dict[str, Any]]) -> list[Cliff]:
    """Products of all weights that take more than `LIMIT` times the time of one with a larger M, the worst first."""
    found = [cliff for weight in by_weight(entries) for cliff in ratios(weight) if cliff.ratio > LIMIT]
    return sorted(found, key=lambda cliff: -cliff.ratio)


def by_weight(entries: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Entries that were timed, those of one weight together."""
    for _, weight in itertools.groupby((entry for entry in entries if "us" in entry), key=lambda entry: (entry["shape"], entry["N"], entry["K"])):
        yield list(weight)


def summary(entries: list[dict[str, Any]]) -> list[list[str]]:
    """Lines of the table of `HEADER`, one for each weight."""
    lines = []
    for weight in by_weight(entries):
        found = ratios(weight)
        counts = [weight[0]["shape"], str(len(weight)), str(len({entry["kernel"] for entry in weight}))]
        if not found:
            lines.append([*counts, "0", "", "", "", "", ""])
            continue
        worst = max(found, key=lambda cliff: cliff.ratio)
        lines.append([*counts, str(sum(cliff.ratio > LIMIT for cliff in found)), *_cells(worst)])
    return lines


def save(entries: list[dict[str, Any]], directory: Path, environment: Environment, command: str) -> Path:
    """Writes the three files; returns the first. The plot is left out without matplotlib, and the report says so."""
    drawn = plots.unavailable() is None and any("us" in entry for entry in entries)
    if drawn:
        directory.mkdir(parents=True, exist_ok=True)
        plots.save(figure(entries, environment.gpu), directory / CLIFFS_PNG)
    write_atomically(directory / CLIFFS_MD, as_markdown(entries, environment, command, drawn))
    return write_atomically(directory / CLIFFS_JSON, as_json(entries))


def as_markdown(entries: list[dict[str, Any]], environment: Environment, command: str, drawn: bool) -> str:
    found, failed = cliffs(entries), [entry for entry in entries if "failed" in entry]
    rule = (
        f"A cliff: a product takes more than {LIMIT:g} times as long as one with the same N and K and a larger M. Each is compared with the fastest."
    )
    parts: list[Part] = [
        Heading(1, f"Time by M: {environment.gpu} ({environment.arch})"),
        Command(command),
        Text(f"{origin(environment)} {rule}"),
        Table(HEADER, summary(entries), ALIGN),
        Image(Path(CLIFFS_PNG), "time by M") if drawn else Text(f"No plot: {plots.unavailable() or 'nothing was timed'}."),
    ]
    if found:
        lines = [[cliff.product["shape"], str(cliff.product["M"]), *_cells(cliff)] for cliff in found[:_SHOWN]]
        title = f"The worst of {len(found)} cliffs" if len(found) > _SHOWN else "Cliffs"
        parts += [Heading(2, title), Table(("shape", "M", *HEADER[4:]), lines, "lr" + ALIGN[4:])]
    if failed:
        parts += [Heading(2, "Failures"), Items([f"{entry['shape']} M={entry['M']}: {entry['failed']}" for entry in failed])]
    return markdown(parts)


def _cells(cliff: Cliff) -> list[str]:
    product, larger = cliff.product, cliff.larger
    return [
        f"{cliff.ratio:.2f}",
        f"M={product['M']}, {product['us']:.2f} µs",
        f"`{product['kernel']}`",
        f"M={larger['M']}, {larger['us']:.2f} µs",
        f"`{larger['kernel']}`",
    ]


def figure(entries: list[dict[str, Any]], gpu: str) -> Figure:
    """A panel a weight."""
    weights = {f"{weight[0]['shape']}: N={weight[0]['N']} K={weight[0]['K']}": weight for weight in by_weight(entries)}
    return plots.panels(f"{gpu}: microseconds by M", weights, _draw)


def _draw(axes: Axes, weight: Sequence[dict[str, Any]]) -> None:
    points = sorted((entry["M"], entry["us"]) for entry in weight)
    axes.plot(*zip(*points, strict=True), linewidth=1)
    plots.log_axes(axes, [2**i for i in range(0, 14, 2)])
