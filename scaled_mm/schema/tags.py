"""The tags that programs interpret: `logical:<tensor>=<format>` and `compare:bits` or `compare:norm=<bound>`.

Tags are the only part of a definition that flashinfer-bench stores without interpreting. All other tags are for readers.
"""

from __future__ import annotations

import dataclasses
import math
import re


@dataclasses.dataclass(frozen=True)
class Compare:
    """norm None: outputs must be equal bit for bit. Otherwise ||output - reference|| / ||reference|| <= norm, in float64, for each output."""

    norm: float | None = None

    def __str__(self) -> str:
        return "bit by bit" if self.norm is None else f"||out - ref|| / ||ref|| <= {self.norm:g}"


def compare_of(tags: list[str]) -> Compare:
    """The comparison in a definition's tags. Raises ValueError unless exactly one tag gives it."""
    found = [tag.removeprefix("compare:") for tag in tags if tag.startswith("compare:")]
    if len(found) != 1:
        raise ValueError(f"tags: expected one compare:bits or compare:norm=<bound>, got {len(found)}")
    if found[0] == "bits":
        return Compare()
    match = re.fullmatch(r"norm=(.+)", found[0])
    try:
        bound = float(match.group(1)) if match else math.nan
    except ValueError:
        bound = math.nan
    if not 0 < bound < 1:
        raise ValueError(f"tags: expected compare:bits or compare:norm=<bound between 0 and 1>, got compare:{found[0]}")
    return Compare(bound)


def logical_of(tags: list[str]) -> dict[str, str]:
    """GGUF format by tensor name. Raises ValueError for an invalid tag, or a tensor with two formats."""
    formats: dict[str, str] = {}
    for tag in tags:
        if not tag.startswith("logical:"):
            continue
        match = re.fullmatch(r"logical:(\w+)=(\w+)", tag)
        if not match:
            raise ValueError(f"tags: expected logical:<tensor>=<format>, got {tag!r}")
        name, fmt = match.groups()
        if name in formats:
            raise ValueError(f"tags: expected one format of {name}, got {formats[name]} and {fmt}")
        formats[name] = fmt
    return formats
