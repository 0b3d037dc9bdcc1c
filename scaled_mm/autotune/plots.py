"""PNG plots of a tuning run, by matplotlib; drawn without a display and without global state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from scaled_mm.autotune.choose import CLIFF
from scaled_mm.autotune.record import AutotuneDocument, ProductRecord
from scaled_mm.measure.plots import save, speedup_figure
from scaled_mm.measure.stats import Speedup

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Beside those of a bench in the same folder (bench.int8.plots.NAMES), so under other names.
SHOWN = {
    "tuned.png": "speed-up over the table before",
    "rows.png": "the row of each product",
    "cliffs.png": "time over that of the next larger M",
}


def draw(document: AutotuneDocument, directory: Path) -> list[tuple[Path, str]]:
    """Writes the plots that the document has numbers for; (path, what it shows) of each."""
    drawn = []
    if found := speedups(document):
        figure = speedup_figure(found, f"the table before ({document.base}), both measured in this run", document.environment.gpu)
        drawn.append(_saved(figure, directory / "tuned.png"))
    if any(product.row for product in document.products):
        drawn.append(_saved(rows_figure(document), directory / "rows.png"))
    if any(product.us for product in document.products):
        drawn.append(_saved(cliff_figure(document), directory / "cliffs.png"))
    return drawn


def _saved(figure: Figure, path: Path) -> tuple[Path, str]:
    return save(figure, path), SHOWN[path.name]


def speedups(document: AutotuneDocument) -> list[Speedup]:
    """The tuned row against the base table's, where both were timed."""
    return [
        Speedup(product, product.us, product.base_row, product.base_us)  # a product has the shape and M that a case has
        for product in document.products
        if product.us is not None and product.base_us is not None
    ]


def shapes(document: AutotuneDocument) -> dict[str, list[ProductRecord]]:
    """Shape -> its products, M ascending; shapes in order of appearance."""
    found: dict[str, list[ProductRecord]] = {}
    for product in document.products:
        found.setdefault(product.shape, []).append(product)
    return {shape: sorted(products, key=lambda product: product.M) for shape, products in found.items()}


def rows_figure(document: AutotuneDocument) -> Figure:
    """A map shape x M in which equal colours are equal rows; in each cell the row's tile."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    by_shape = shapes(document)
    ms = sorted({product.M for product in document.products})
    names = sorted({product.row for product in document.products if product.row})
    figure = Figure(figsize=(3.0 + 1.0 * len(ms), 1.8 + 0.45 * len(by_shape) + 0.18 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    colors = colormaps["tab20"]
    for y, products in enumerate(by_shape.values()):
        for product in products:
            if product.row:
                color = colors(names.index(product.row) % 20)
                axes.barh(y, 1, left=ms.index(product.M) - 0.5, height=1, color=color, edgecolor="white")
                label = product.row.split("_")[1] + ("" if product.how == "measured" else f"\n{product.how}")
                axes.text(ms.index(product.M), y, label, ha="center", va="center", fontsize=7)
    axes.set_xticks(range(len(ms)), [str(m) for m in ms])
    axes.set_yticks(range(len(by_shape)), [f"{shape}: N={products[0].N}" for shape, products in by_shape.items()])
    axes.set_xlim(-0.5, len(ms) - 0.5)
    axes.set_ylim(len(by_shape) - 0.5, -0.5)
    axes.set_xlabel("M")
    handles = [axes.barh(0, 0, color=colors(index % 20), label=name) for index, name in enumerate(names)]
    axes.legend(handles=handles, fontsize=7, loc="upper left", bbox_to_anchor=(0, -0.15), ncols=max(1, len(ms) // 3))
    axes.set_title(f"{document.environment.gpu}: the row of each product", fontsize=10, loc="left")
    return figure


def cliff_figure(document: AutotuneDocument) -> Figure:
    """One line a shape: time at M over the time at the next larger M; above the dashed line is a cliff."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for shape, products in shapes(document).items():
        timed = [product for product in products if product.us is not None]
        pairs = list(zip(timed, timed[1:]))
        if pairs:
            axes.plot([a.M for a, _ in pairs], [a.us / b.us for a, b in pairs], marker="o", markersize=3, linewidth=1, label=shape)
    axes.axhline(CLIFF, linestyle="--", color="black", linewidth=1, label=f"cliff: above {CLIFF:g}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("M")
    axes.set_ylabel("time over that of the next larger M")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)
    axes.set_title(f"{document.environment.gpu}: fewer tokens may not take longer", fontsize=10, loc="left")
    return figure
