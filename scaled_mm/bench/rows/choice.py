"""`random.json` and `random.md`: how far the dispatched row is from the best one on random products, by M."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scaled_mm.bench.goals import ALIGN as GOAL_ALIGN
from scaled_mm.bench.goals import HEADER as GOAL_HEADER
from scaled_mm.bench.goals import cells, count
from scaled_mm.bench.int8 import goals
from scaled_mm.bench.rows import report
from scaled_mm.measure.document import Command, Heading, Items, Part, Table, Text, markdown
from scaled_mm.measure.record import Environment, write_atomically
from scaled_mm.measure.stats import geometric_mean

RANDOM_JSON = "random.json"
RANDOM_MD = "random.md"

HEADER, ALIGN = ("products", "count", "geometric mean", "worst", "at", "within 3 %", "within 15 %"), "lrrrlrr"
SPEED_HEADER, SPEED_ALIGN = ("products", "over", "count", "geometric mean", "slowest", "at", "slower"), "llrrrlr"
_SPEED_BANDS = ((1, 16), (17, 128), (129, 256), (257, 512), (513, 4096), (4097, 8192))
_BANDS = ((1, 16), (17, 128), (129, 512), (513, 8192))
_ALIGNED = 16


def ratio(entry: dict[str, Any]) -> float | None:
    """Time of the dispatched row over the best one's; None when it was not timed, or no other row was."""
    loss = report.loss(entry) if len(entry["rows"]) > 1 else None
    return None if loss is None else 1 + loss


def has_choice(entries: list[dict[str, Any]]) -> bool:
    """Whether a product has a ratio: not in a run of the dispatched rows alone."""
    return any(ratio(entry) is not None for entry in entries)


def is_aligned(entry: dict[str, Any]) -> bool:
    return entry["N"] % _ALIGNED == 0 and entry["K"] % _ALIGNED == 0


def summary(entries: list[dict[str, Any]]) -> list[list[str]]:
    """Lines of the table of `HEADER`: all products, those of each band of M, and those with N or K not a multiple of 16."""
    groups = {"all": entries}
    groups |= {f"M of {least} to {most}, aligned": [e for e in entries if least <= e["M"] <= most and is_aligned(e)] for least, most in _BANDS}
    groups["N or K not a multiple of 16"] = [e for e in entries if not is_aligned(e)]
    return [_line(name, group) for name, group in groups.items()]


def speeds(entries: list[dict[str, Any]]) -> list[list[str]]:
    """Lines of the table of `SPEED_HEADER`: time of each peer over the dispatched row's, for all products and by M."""
    peers = list(dict.fromkeys(name for entry in entries for name in entry.get("peers", {})))
    groups = {"all": entries} | {f"M of {least} to {most}": [e for e in entries if least <= e["M"] <= most] for least, most in _SPEED_BANDS}
    groups["N or K not a multiple of 16"] = [e for e in entries if not is_aligned(e)]
    lines = [_speed_line(name, group, peer) for peer in peers for name, group in groups.items()]
    return [line for line in lines if line is not None]


def _speed_line(name: str, entries: list[dict[str, Any]], peer: str) -> list[str] | None:
    timed = []
    for entry in entries:
        us, ours = entry.get("peers", {}).get(peer), entry["rows"].get(entry["dispatched"])
        if us is not None and ours is not None:
            timed.append((us / ours, entry))
    if not timed:
        return None
    slowest, at = min(timed, key=lambda pair: pair[0])
    mean, slower = geometric_mean([speed for speed, _ in timed]), sum(speed < 1 for speed, _ in timed)
    return [name, peer, str(len(timed)), f"{mean:.3f}", f"{slowest:.2f}", f"{at['shape']} M={at['M']}", str(slower)]


def _line(name: str, entries: list[dict[str, Any]]) -> list[str]:
    timed = [(value, entry) for entry in entries if (value := ratio(entry)) is not None]
    if not timed:
        return [name, "0", "", "", "", "", ""]
    worst, at = max(timed, key=lambda pair: pair[0])
    within = [f"{sum(value <= most for value, _ in timed) / len(timed):.0%}" for most in (1.03, 1.15)]
    mean = geometric_mean([value for value, _ in timed])
    return [name, str(len(timed)), f"{mean:.3f}", f"{worst:.2f}", f"{at['shape']} M={at['M']}", *within]


def save(entries: list[dict[str, Any]], directory: Path, environment: Environment, command: str) -> Path:
    """Writes `random.json`, whose entries are those of `rows.json`, and `random.md`; returns the first."""
    write_atomically(directory / RANDOM_MD, as_markdown(entries, environment, command))
    return write_atomically(directory / RANDOM_JSON, report.as_json(entries))


def as_markdown(entries: list[dict[str, Any]], environment: Environment, command: str) -> str:
    """The summary, and each product with its best and its dispatched row, the largest loss first."""
    by_loss = sorted(entries, key=lambda entry: -(ratio(entry) or 0))
    parts: list[Part] = [
        Heading(1, f"{'The choice of kernel on random' if has_choice(entries) else 'Random'} products: {environment.gpu} ({environment.arch})"),
        Command(command),
        Text(report.origin(environment)),
        *_choice_parts(entries),
        *_speed_parts(entries),
        Heading(2, "Products"),
        Table(report.HEADER, [report.cells(entry) for entry in by_loss], report.ALIGN),
    ]
    if found := report.messages([entry for entry in entries if is_aligned(entry)]):  # of the others most rows refuse the sizes
        parts += [Heading(2, "Failures"), Items([f"`{name}`: {message}" for name, message in found])]
    return markdown(parts)


def _choice_parts(entries: list[dict[str, Any]]) -> list[Part]:
    what = "Time of the dispatched row over that of the best of all rows that can take the product."
    return [Text(what), Table(HEADER, summary(entries), ALIGN)] if has_choice(entries) else []


def _speed_parts(entries: list[dict[str, Any]]) -> list[Part]:
    lines = speeds(entries)
    what = "Time of each peer over that of the dispatched row; slower: the products on which the dispatched row takes longer."
    if not lines:
        return []
    found = goals.outcomes([goals.of_entry(entry) for entry in entries])
    said = f"{count(found)} SGLang counts only where it was timed."
    reached: list[Part] = [Heading(2, "Goals"), Text(said), Table(GOAL_HEADER, [cells(one) for one in found], GOAL_ALIGN)] if found else []
    return [Heading(2, "Other libraries"), Text(what), Table(SPEED_HEADER, lines, SPEED_ALIGN), *reached]
