"""Times of other libraries that were measured earlier: the files in `data/`."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any


def read_recorded(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(the file's document, its rows as column -> value)."""
    data = json.loads(resources.files("scaled_mm.bench").joinpath("data", name).read_text())
    return data, [dict(zip(data["columns"], row, strict=True)) for row in data["rows"]]


def recorded_path(name: str) -> str:
    """The file as a reader of a report finds it in a checkout."""
    return f"scaled_mm/bench/data/{name}"
