"""Renders the report of simulated or measured parallelism from `parallel.json`, and from nothing else: the same file gives the same report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from scaled_mm.bench.parallel.record import LinearRecord, MeasuredRecord, ParallelDocument, WayRecord
from scaled_mm.bench.report import commit, plots_section, write
from scaled_mm.measure import plots
from scaled_mm.measure.document import Command, Heading, Items, Part, Table, Text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARALLEL_MD, PARALLEL_PNG = "parallel.md", "parallel.png"
BF16, EXACT = "bf16", "exact"
WAYS: dict[str, str] = {
    BF16: "each rank quantizes by itself, bfloat16 all-reduce, as engines do; not the bits of one GPU",
    EXACT: "int32 reduce-scatter, scaled once, bfloat16 all-gather",
    "exact_int8": "int32 reduce-scatter; residual, norm and quantizer on the rank's rows; int8 all-gather",
    "exact_all_reduce": "int32 all-reduce, scaled on every rank",
    "gather": "the bfloat16 input is gathered, each rank computes a block of the outputs, bfloat16 all-gather of these",
    "gather_int8": "`gather`, but each rank quantizes its part with the scale of whole rows, and int8 is gathered",
    "exact_static": "`exact` with a static scale of the activation: no maxima of rows are reduced",
    "exact_int8_static": "`exact_int8` with a static scale of the activation",
    "exact_all_reduce_static": "`exact_all_reduce` with a static scale of the activation",
    "gather_static": "`gather` with a static scale of the activation: the same time",
    "gather_int8_static": "`gather_int8` with a static scale of the activation: no maxima of rows are reduced",
}
NOTHING_MEASURED = "**Nothing was measured.** All times are predictions of a cost model; no collective and no product ran."


def render(directory: Path, keep_plots: bool = False) -> list[Path]:
    """Reads `parallel.json` in `directory`, writes `parallel.md`, `parallel.html` and the plot there, and returns their paths."""
    directory = Path(directory)
    document = ParallelDocument.load(directory)
    draw = lambda: [plots.save(figure(document), directory / PARALLEL_PNG)]  # noqa: E731
    return write(directory / PARALLEL_MD, _title(document), lambda drawn: contents(document, drawn), draw, (PARALLEL_PNG,), keep_plots)


def contents(document: ParallelDocument, drawn: list[Path] | None = None) -> list[Part]:
    """The whole report. drawn: the plots beside it; None when they could not be drawn."""
    said = document.settings
    if not said.simulated:
        return [*_measured(document), *plots_section(drawn)]
    made = f"link {said.link}, {said.gpus_per_node} GPUs a node, {said.network} for each GPU between nodes; commit {commit(document.environment)}"
    return [
        Heading(1, _title(document)),
        Text(f"{NOTHING_MEASURED} {said.gpu}, {made}, {document.created}."),
        Command(document.command),
        Text(
            "The model and its sources: `scaled_mm/parallel/cost`. Products: the time model of kernels, which is fitted to one GPU. Collectives: "
            "NCCL's own tuning model, without NVLink multicast; engines have an all-reduce of their own for few tokens, which is faster. "
            "Microseconds of a layer with M tokens whose input is divided along K, from its float input to the int8 input of the next layer on every "
            "rank. Not in it: the host's time, ranks that arrive late, and memory traffic of a collective beside a product."
        ),
        Items([f"`{way}`: {what}" for way, what in _ways(document).items()]),
        *_linear(document),
        *_decoders(document),
        *_experts(document),
        *plots_section(drawn),
    ]


def _ways(document: ParallelDocument) -> dict[str, str]:
    """Those of WAYS that were simulated: earlier reports lack the ways that gather the input."""
    return {way: what for way, what in WAYS.items() if all(way in one.ways for one in document.linear)}


def _title(document: ParallelDocument) -> str:
    said = document.settings
    return f"Several GPUs, simulated: {said.gpu}" if said.simulated else f"Several GPUs: {said.gpus_per_node} ranks, {said.gpu}"


MEASURED_HEADER = ("M", "way", "chunks", "us", "over bf16", "predicted", "measured over predicted", "bits of one GPU")


def measured_rows(layer: MeasuredRecord) -> Iterator[list[str]]:
    """A row for each way, by MEASURED_HEADER."""
    usual = next(way.us for way in layer.ways if way.name == BF16)
    for way in layer.ways:
        predicted = way.predicted_us
        yield [
            str(layer.M),
            f"{way.name}{', static' if way.static else ''}{'' if way.graph else ', no graph'}",
            str(way.chunks),
            f"{way.us:.1f}",
            f"{way.us / usual:.2f}",
            "—" if predicted is None else f"{predicted:.1f}",
            "—" if predicted is None else f"{way.us / predicted:.2f}",
            {True: "yes", False: "**no**", None: "—"}[way.bit_equal],
        ]


def _measured(document: ParallelDocument) -> Iterator[Part]:
    said, environment = document.settings, document.environment
    yield Heading(1, _title(document))
    yield Text(
        f"{said.link}; torch {environment.torch}, driver {environment.driver}; commit {commit(environment)}, {document.created}. Each time is the "
        "median of 15 replays of a CUDA graph (no graph: of a loop on the host), from where all ranks are ready, on the slowest rank. A linear layer "
        "goes from the rank's part of the float input to the int8 input of the next layer on every rank. Experts go from float tokens to the "
        "results of all tokens on every rank. Weights of linear layers rotate, so they come from memory; those of experts that few tokens choose may "
        "stay in L2. Predicted: by the cost model of `scaled_mm/parallel/cost`."
    )
    yield Command(document.command)
    kinds = {
        **WAYS,
        "one_gpu": "the whole layer on one GPU",
        "torch_async": "torch's product and reduce-scatter in one operator, in bfloat16; norm and quantizer on the rank's rows; int8 all-gather",
        "replicated": "experts: all ranks have all tokens; results are reduce-scattered, sums gathered",
        "all_to_all": "experts: each rank has its tokens, which go to the ranks of their experts; then a gather, to compare",
    }
    found = {way.name for layer in document.measured for way in layer.ways}
    yield Items([f"`{way}`: {what}" for way, what in kinds.items() if way in found])
    for shape, layers in groupby(document.measured, lambda one: one.shape):
        records = list(layers)
        yield Heading(2, f"{shape}: N={records[0].N}, K={records[0].K}")
        yield Table(list(MEASURED_HEADER), [row for layer in records for row in measured_rows(layer)], "rl" + "r" * (len(MEASURED_HEADER) - 2))


def _linear(document: ParallelDocument) -> Iterator[Part]:
    yield Heading(2, "Linear layers whose input is divided")
    yield Text(
        "Microseconds with the best number of chunks of M, in brackets if there are several. Speed-up: of `exact` over one GPU. Gain: of the "
        "chunks of `exact`. Over bf16: the time of `exact`, and of the fastest exact way, over that of `bf16`; above 1 it is slower."
    )
    ways = list(_ways(document))
    header = ["ranks", "M", "one GPU", *ways, "speed-up", "gain", "over bf16", "fastest over bf16", "fastest exact way"]
    for shape, found in groupby(document.linear, lambda one: one.shape):
        layers = list(found)
        yield Heading(3, f"{shape}: N={layers[0].N}, K={layers[0].K}")
        yield Table(header, [_row(one, ways) for one in layers], "r" * (len(header) - 1) + "l")


def _row(one: LinearRecord, ways: Sequence[str]) -> list[str]:
    exact, bf16 = one.ways[EXACT], one.ways[BF16]
    fastest = min((way for way in ways if way != BF16), key=lambda way: one.ways[way].us)
    return [
        str(one.ranks),
        str(one.M),
        f"{one.single_us:.1f}",
        *(_cell(one.ways[way]) for way in ways),
        f"{one.single_us / exact.us:.2f}x",
        "—" if exact.chunks == 1 else f"{exact.plain_us / exact.us - 1:.1%}",
        f"{exact.us / bf16.us:.2f}",
        f"{one.ways[fastest].us / bf16.us:.2f}",
        f"`{fastest}`",
    ]


def _cell(way: WayRecord) -> str:
    return f"{way.us:.1f}" if way.chunks == 1 else f"{way.us:.1f} ({way.chunks})"


def _decoders(document: ParallelDocument) -> list[Part]:
    ways = list(_ways(document))
    header = ["model", "ranks", "M", "one GPU", *ways, "speed-up", "exact over bf16"]
    rows = [
        [
            one.model,
            str(one.ranks),
            str(one.M),
            f"{one.single_us:.0f}",
            *(f"{one.us[way]:.0f}" for way in ways),
            f"{one.single_us / one.us[EXACT]:.2f}x",
            f"{one.us[EXACT] / one.us[BF16]:.2f}",
        ]
        for one in document.decoders
    ]
    said = "Microseconds of the four linear layers of a decoder layer and what follows `o` and `down`, without attention and activation."
    return [Heading(2, "Decoder layers"), Text(said), Table(header, rows, "l" + "r" * (len(header) - 1))]


def _experts(document: ParallelDocument) -> list[Part]:
    if not document.experts:
        return []
    first = document.experts[0]
    header = ["ranks", "M", *first.all_to_all, "all-to-all", *first.replicated, "replicated", "replicated over all-to-all"]
    rows = []
    for one in document.experts:
        ways = (one.all_to_all, one.replicated)
        sent, replicated = (sum(parts.values()) for parts in ways)
        cells = [cell for parts in ways for cell in (*(f"{us:.1f}" for us in parts.values()), f"**{sum(parts.values()):.1f}**")]
        rows.append([str(one.ranks), str(one.M), *cells, f"{replicated / sent:.2f}" if sent else "—"])
    said = (
        f"Microseconds of what travels for a layer of experts ({first.model}), M tokens of all ranks together, uniform routing. Products are the "
        "same in both ways and not counted. All-to-all: tokens go to the ranks of their experts, rows of choices come back; that the host must "
        "know their number is not counted. Replicated: every rank gets all tokens; the rows of choices are reduce-scattered, all ranks but one "
        "having zeros. Both end with an all-gather of the results."
    )
    return [Heading(2, "Experts"), Text(said), Table(header, rows, "r" * len(header))]


def figure(document: ParallelDocument):
    """A panel for each layer, by M. Simulated: the speed-up of each way over one GPU, on the most ranks of one node, or the fewest of several.
    Measured: of each way with the best number of chunks over bf16."""
    if not document.settings.simulated:
        panels = {shape: list(found) for shape, found in groupby(document.measured, lambda one: one.shape)}
        return plots.panels(f"{document.settings.gpu}, {document.settings.gpus_per_node} ranks: speed-up over bf16 by M", panels, _draw_measured)
    inside = [one.ranks for one in document.linear if one.ranks <= document.settings.gpus_per_node]
    ranks = max(inside) if inside else min(one.ranks for one in document.linear)
    panels = {shape: list(found) for shape, found in groupby((one for one in document.linear if one.ranks == ranks), lambda one: one.shape)}
    return plots.panels(f"{document.settings.gpu}, {ranks} ranks, simulated: speed-up over one GPU by M", panels, _draw)


def _draw(axes: Axes, layers: Sequence[LinearRecord]) -> None:
    ms = [one.M for one in layers]
    for way in (way for way in WAYS if all(way in one.ways for one in layers)):
        axes.plot(ms, [one.single_us / one.ways[way].us for one in layers], marker=".", linewidth=1, label=way)
    axes.axhline(1, color="black", linewidth=0.5)
    plots.log_axes(axes, ms)
    axes.set_yscale("linear")


def _draw_measured(axes: Axes, layers: Sequence[MeasuredRecord]) -> None:
    ms = [one.M for one in layers]
    best = [{} for _ in layers]
    for found, layer in zip(best, layers):
        for way in layer.ways:
            name = f"{way.name}{' static' if way.static else ''}"
            found[name] = min(way.us, found.get(name, way.us))
    for name in dict.fromkeys(name for found in best for name in found):
        points = [(m, found[BF16] / found[name]) for m, found in zip(ms, best) if name in found]
        axes.plot(*zip(*points), marker=".", linewidth=1, label=name)
    axes.axhline(1, color="black", linewidth=0.5)
    plots.log_axes(axes, ms)
    axes.set_yscale("linear")
