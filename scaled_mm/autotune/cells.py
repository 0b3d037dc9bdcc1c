"""Measured times by product and row, from any file that this project writes them to."""

from __future__ import annotations

import json
from pathlib import Path

from scaled_mm.autotune.choose import Cliff, Product, cliffs
from scaled_mm.errors import BadParamError
from scaled_mm.measure.record import describe
from scaled_mm.tables import TileTable
from scaled_mm.tables.tuned import slug


def read_times(path: Path) -> dict[Product, dict[str, float]]:
    """Microseconds by (M, N, K) and row: of `autotune.json`, `bench.json`, `rows.json`, or `{"cases": [{"M", "N", "K", "us"}]}`.

    BadParamError for a file that is none of these, or that has no time.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        times = _times(data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadParamError(f"--cliffs: expected measured times (autotune.json, bench.json or rows.json) in {path}, got {describe(error)}") from error
    if not times:
        raise BadParamError(f"--cliffs: expected measured times in {path}, got none")
    return times


def _times(data: object) -> dict[Product, dict[str, float]]:
    found: dict[Product, dict[str, float]] = {}

    def add(entry: dict, row: str, us: float | None) -> None:
        if us is not None:
            found.setdefault((entry["M"], entry["N"], entry["K"]), {})[row] = float(us)

    if isinstance(data, dict) and "cells" in data:
        for cell in data["cells"]:
            add(cell, cell["row"], cell["us"])
        return found
    for entry in data if isinstance(data, list) else data["cases"]:
        if "results" in entry:  # bench.json: the row that was dispatched then
            ours = entry["results"]["ours"]
            if ours["kernel"]:
                add(entry, ours["kernel"], ours["us"])
        else:
            for row, us in (entry["us"] if "us" in entry else entry["rows"]).items():
                add(entry, row, us)
    return found


def reports_of(table: TileTable, folder: Path) -> list[Path]:
    """The measured times below `folder` that are for a table: of its GPU model if it is tuned, else of any of its architecture."""
    gpu = slug(table.gpu) if table.gpu else "*"
    return [path for name in ("autotune.json", "bench.json", "rows.json") for path in sorted((folder / table.arch).glob(f"{gpu}/{name}"))]


def cliffs_of(table: TileTable, path: Path) -> tuple[list[Cliff], int, int]:
    """(cliffs of a table, as it serves constant weights, by the times in a file, products whose row was timed, products in the file).

    A product whose row was not timed is left out: what is compared then are its measured neighbours.
    """
    times = read_times(path)
    us = {product: rows[row] for product, rows in times.items() if (row := table.select(*product, constant_b=True).row.name) in rows}
    return cliffs(us), len(us), len(times)
