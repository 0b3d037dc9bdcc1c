"""The pages: where they are, and what is taken out of them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "schemas" / "README.md", *sorted(DOCS.rglob("*.md"))]

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_PYTHON = re.compile(r"^(?:```python|<!-- hidden)\n(.*?)^(?:```|-->)", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"(?:^ {4}.*\n?)+", re.MULTILINE)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(language: str, page: Path) -> list[str]:
    """The fenced blocks of a language, in order."""
    return [text for found, text in _BLOCK.findall(page.read_text()) if found == language]


def snippets(page: Path) -> list[tuple[int, str]]:
    """(line, Python) of what runs on a page, in order: its python blocks, and `<!-- hidden` comments, which readers do not see."""
    text = page.read_text()
    return [(text.count("\n", 0, match.start(1)), match.group(1)) for match in _PYTHON.finditer(text)]


def needs(page: Path) -> list[str]:
    """The packages beside torch that a page's Python needs: `<!-- needs: gguf -->`."""
    return re.findall(r"<!-- needs: (\w+) -->", page.read_text())


def run(page: Path) -> dict:
    """Runs a page's Python in order, in one namespace, which is returned. A traceback has the page's own lines."""
    names: dict = {"ROOT": ROOT}
    for line, text in snippets(page):
        exec(compile("\n" * line + text, str(page), "exec"), names)
    return names


def shell_lines(page: Path) -> list[str]:
    """The lines of shell blocks, fenced or indented."""
    found = [*blocks("", page), *blocks("bash", page), *_INDENTED.findall(_BLOCK.sub("", page.read_text()))]
    return [line.strip() for text in found for line in text.splitlines()]


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`|<!--.*?-->", "", _BLOCK.sub("", text), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page may name, as GitHub and the site spell it."""
    headings = re.findall(r"^#+ (.+)$", _BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)).strip().lower()) for heading in headings}


def first_cells(page: Path) -> set[str]:
    """Every code word in the first column of the page's tables."""
    rows = re.findall(r"^\|([^|]*)\|", page.read_text(), re.MULTILINE)
    return {word for row in rows for word in re.findall(r"`([^`]+)`", row)}
