"""Adds files outside of docs/ to the site: pages link to reports, schemas and sources, which GitHub shows directly.

Each linked file outside of docs/ becomes a file of the site below tree/, at its path in the repository. Links of linked Markdown pages
are followed too.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(\]\()([^)\s#:]+)([^)\s]*\))")
TREE = "tree/"


def on_files(files, config):
    queue = [(f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    while queue:
        place, text = queue.pop()
        for target in _outside(place, text):
            uri = TREE + target
            if files.get_file_from_path(uri) is not None:
                continue
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / target)))
            if target.endswith(".md"):
                queue.append((target, (ROOT / target).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrites links between pages of the repository to links between pages of the site."""
    uri = page.file.src_uri
    place = uri.removeprefix(TREE) if uri.startswith(TREE) else f"docs/{uri}"

    def replaced(match: re.Match) -> str:
        target = _target(place, match.group(2))
        if target is None:
            return match.group()
        wanted = target.removeprefix("docs/") if target.startswith("docs/") else TREE + target
        return match.group(1) + posixpath.relpath(wanted, posixpath.dirname(uri) or ".") + match.group(3)

    return LINK.sub(replaced, markdown)


def _outside(place: str, text: str) -> Iterator[str]:
    for match in LINK.finditer(text):
        target = _target(place, match.group(2))
        if target is not None and not target.startswith("docs/"):
            yield target


def _target(place: str, link: str) -> str | None:
    """The target, as a path in the repository, of a link on the page at `place`; None if the target is not a file of the repository."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(place), link))
    return target if not target.startswith("..") and (ROOT / target).is_file() else None
