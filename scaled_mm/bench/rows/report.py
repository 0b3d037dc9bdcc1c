"""`rows.json` and `rows.md`: the best row of each case, and what the table loses against it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scaled_mm.bench.report import commit
from scaled_mm.measure.document import Command, Heading, Items, Part, Table, Text, markdown
from scaled_mm.measure.record import Environment, write_atomically
from scaled_mm.measure.stats import geometric_mean

ROWS_JSON = "rows.json"
ROWS_MD = "rows.md"

HEADER, ALIGN = ("shape", "M", "best row", "µs", "dispatched row", "µs", "loss", "failed"), "lrlrlrrr"
FALLBACK_HEADER, FALLBACK_ALIGN = ("M", "products", "geometric mean", "lowest", "at"), "rrrrl"


def best(entry: dict[str, Any]) -> tuple[str, float] | None:
    """(row, microseconds) of the fastest row; None when every row failed."""
    return min(entry["rows"].items(), key=lambda item: item[1], default=None)


def loss(entry: dict[str, Any]) -> float | None:
    """Time of the dispatched row over the best one's, minus one; None when the dispatched row was not timed."""
    fastest = best(entry)
    us = entry["rows"].get(entry["dispatched"])
    return None if fastest is None or us is None else us / fastest[1] - 1


def fallback_speed(entry: dict[str, Any]) -> float | None:
    """Time of the dispatched row over the fallback's; None when one of them was not timed, or they are the same row."""
    dispatched, fallback = (entry["rows"].get(entry[key]) for key in ("dispatched", "fallback"))
    return None if dispatched is None or fallback is None or entry["dispatched"] == entry["fallback"] else dispatched / fallback


def fallback_table(entries: list[dict[str, Any]]) -> list[list[str]]:
    """Lines of the table of `FALLBACK_HEADER`, one for each M that has a speed."""
    found: dict[int, list[tuple[float, str]]] = {}
    for entry in entries:
        if (speed := fallback_speed(entry)) is not None:
            found.setdefault(entry["M"], []).append((speed, entry["shape"]))
    return [
        [str(m), str(len(speeds)), f"{geometric_mean([speed for speed, _ in speeds]):.2f}", f"{min(speeds)[0]:.2f}", min(speeds)[1]]
        for m, speeds in sorted(found.items())
    ]


def save_rows(entries: list[dict[str, Any]], directory: Path, environment: Environment, command: str) -> Path:
    """Writes `rows.json` and `rows.md` (the same by case, with the environment and the command); returns the first."""
    write_atomically(directory / ROWS_MD, rows_markdown(entries, environment, command))
    return write_atomically(directory / ROWS_JSON, as_json(entries))


def as_json(entries: list[dict[str, Any]]) -> str:
    """A list, an entry on each line."""
    return "[\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]\n"


def origin(environment: Environment) -> str:
    """What the times are of, in sentences."""
    return (
        f"torch {environment.torch}, CUDA {environment.cuda or 'none'}, driver {environment.driver or 'unknown'}, "
        f"CUTLASS {environment.cutlass or 'unknown'}, commit {commit(environment)}. Median microseconds per call."
    )


def rows_markdown(entries: list[dict[str, Any]], environment: Environment, command: str) -> str:
    """The best row of each case, what the table picks today and what that costs."""
    title = Heading(1, f"Every row of the tile table: {environment.gpu} ({environment.arch})")
    parts: list[Part] = [title, Command(command), Text(origin(environment)), Table(HEADER, [cells(entry) for entry in entries], ALIGN)]
    if speeds := fallback_table(entries):
        what = "Time of the dispatched row over the fallback's. The fallback serves a product as long as no other row that can take it is built."
        parts += [Heading(2, "The fallback"), Text(what), Table(FALLBACK_HEADER, speeds, FALLBACK_ALIGN)]
    if found := messages(entries):
        parts += [Heading(2, "Failures"), Items([f"`{name}`: {message}" for name, message in found])]
    return markdown(parts)


def cells(entry: dict[str, Any]) -> list[str]:
    """A line of the table, in the order of `HEADER`."""
    fastest, cost = best(entry), loss(entry)
    picked = entry["rows"].get(entry["dispatched"])
    return [
        entry["shape"],
        str(entry["M"]),
        *((fastest[0], f"{fastest[1]:.2f}") if fastest else ("every row failed", "")),
        entry["dispatched"],
        "failed" if picked is None else f"{picked:.2f}",
        "" if cost is None else f"{cost:.1%}",
        str(len(entry["failed"])),
    ]


def messages(entries: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(row, message) of all failures, without repeats."""
    return sorted({(name, message) for entry in entries for name, message in entry["failed"].items()})
