"""A report as parts, written as Markdown and as one HTML file from the same content."""

from __future__ import annotations

import base64
import dataclasses
import html
import re
from collections.abc import Sequence
from pathlib import Path

_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px; }
th, td { border-bottom: 1px solid #ddd; padding: 2px 10px; text-align: left; }
td.r, th.r { text-align: right; font-variant-numeric: tabular-nums; }
pre { background: #f4f4f4; padding: 8px; overflow-x: auto; }
img { max-width: 100%; }
"""


@dataclasses.dataclass(frozen=True)
class Heading:
    level: int
    text: str


@dataclasses.dataclass(frozen=True)
class Text:
    text: str


@dataclasses.dataclass(frozen=True)
class Command:
    text: str


@dataclasses.dataclass(frozen=True)
class Items:
    items: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Table:
    """align: one of l and r a column."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    align: str


@dataclasses.dataclass(frozen=True)
class Image:
    path: Path
    alt: str


Part = Heading | Text | Command | Items | Table | Image


def markdown(parts: Sequence[Part]) -> str:
    """As Markdown; images are linked by their file names, to stand beside it."""
    return "\n\n".join(map(_markdown, parts)) + "\n"


def _markdown(part: Part) -> str:
    if isinstance(part, Heading):
        return f"{'#' * part.level} {part.text}"
    if isinstance(part, Text):
        return part.text
    if isinstance(part, Command):
        return f"`{part.text}`"
    if isinstance(part, Items):
        return "\n".join(f"- {item}" for item in part.items)
    if isinstance(part, Image):
        return f"![{part.alt}]({part.path.name})"
    rule = ["---:" if side == "r" else "---" for side in part.align]
    return "\n".join("| " + " | ".join(map(_cell, row)) + " |" for row in [part.header, rule, *part.rows])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def page(parts: Sequence[Part], title: str) -> str:
    """As one HTML file that needs nothing else: styles and images are inside."""
    head = f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title><style>{_CSS}</style></head>'
    return "\n".join([head, "<body>", *map(_html, parts), "</body></html>"]) + "\n"


_MARKS = {re.compile(r"`([^`]+)`"): r"<code>\1</code>", re.compile(r"\*\*([^*]+)\*\*"): r"<strong>\1</strong>"}


def _inline(text: str) -> str:
    """Text with the two marks of Markdown that reports use, code and strong, as HTML."""
    text = html.escape(text)
    for mark, replacement in _MARKS.items():
        text = mark.sub(replacement, text)
    return text


def _html(part: Part) -> str:
    if isinstance(part, Heading):
        return f"<h{part.level}>{html.escape(part.text)}</h{part.level}>"
    if isinstance(part, Text):
        return f"<p>{_inline(part.text)}</p>"
    if isinstance(part, Command):
        return f"<pre>{html.escape(part.text)}</pre>"
    if isinstance(part, Items):
        return "<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in part.items) + "</ul>"
    if isinstance(part, Image):
        data = base64.b64encode(part.path.read_bytes()).decode()
        return f'<p><img alt="{html.escape(part.alt)}" src="data:image/png;base64,{data}"></p>'
    rows = [_row("th", part.header, part.align), *(_row("td", row, part.align) for row in part.rows)]
    return "<table>" + "\n".join(rows) + "</table>"


def _row(tag: str, cells: Sequence[str], align: str) -> str:
    return "<tr>" + "".join(f"<{tag} class={side}>{_inline(cell)}</{tag}>" for cell, side in zip(cells, align)) + "</tr>"
