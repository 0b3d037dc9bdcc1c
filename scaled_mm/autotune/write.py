"""A tile table as YAML, in the form of those in `cutlass_configs`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from scaled_mm import __version__
from scaled_mm.errors import ScaledMMError
from scaled_mm.kernels.config import KernelConfig
from scaled_mm.kernels.sections import OTHER_SECTIONS, TOP_LEVEL
from scaled_mm.measure.record import write_atomically
from scaled_mm.tables import Bucket, TileTable, load_table
from scaled_mm.tables.rules import contains


def tuned_table(
    base: TileTable, gpu: str, rows: Sequence[KernelConfig], buckets: Sequence[Bucket], section: str = TOP_LEVEL, others: TileTable | None = None
) -> TileTable:
    """The table of one GPU model: `buckets` and their rows, and behind them what the base has, but for buckets that they replace as a whole.

    rows: at least those that buckets name. section: the one that was tuned. others: the table that has the other sections, default base.
    """
    part = base if section == TOP_LEVEL else getattr(base, section)
    more = {bucket.kernel for bucket in buckets} - {row.name for row in part.rows}
    added = tuple(row for row in rows if row.name in more)
    kept = tuple(bucket for bucket in part.buckets if not any(contains(new, bucket) for new in buckets))
    tuned = dict(tuned=True, gpu=gpu, version=__version__)
    part = part.model_copy(update=dict(rows=(*part.rows, *added), buckets=(*buckets, *kept), **tuned))
    others = others or base
    if section == TOP_LEVEL:
        whole = part.model_copy(update={name: getattr(others, name) for name in OTHER_SECTIONS})
    else:
        whole = others.model_copy(update={section: part})
    return whole.model_copy(update=tuned)


def present_table(path: Path, base: TileTable, gpu: str) -> TileTable:
    """The table that an earlier run wrote to `path`; a new table keeps its other sections. `base` if the file is missing, does not load, or is for
    another architecture or GPU model."""
    try:
        found = load_table(path)
    except (OSError, ScaledMMError):
        return base
    return found if (found.arch, found.gpu) == (base.arch, gpu) else base


def write_table(table: TileTable, path: Path, comment: Sequence[str]) -> TileTable:
    """Writes a table with lines of comment above it, whole or not at all, and returns it as it is read back.

    TableError, with nothing at `path` touched, if the text would not load.
    """
    text = table_text(table, comment)
    trial = path.with_name(f".{path.name}.new")
    write_atomically(trial, text)
    try:
        load_table(trial)
    finally:
        trial.unlink()
    write_atomically(path, text)
    return load_table(path)


def table_text(table: TileTable, comment: Sequence[str] = ()) -> str:
    """The table as YAML text."""
    head: dict[str, Any] = {"arch": table.arch}
    if table.serves and table.serves != (table.arch,):
        head["serves"] = list(table.serves)
    head |= {"tuned": table.tuned}
    if table.gpu is not None:
        head["gpu"] = table.gpu
    if table.version is not None:
        head["version"] = table.version
    lines = [f"# {line}".rstrip() for line in comment] + ([""] if comment else [])
    lines += [f"{key}: {_flow(value)}" for key, value in head.items()]
    lines += _section(table, "")
    for name in OTHER_SECTIONS:
        if (section := getattr(table, name)) is not None:
            lines += ["", f"{name}:", *_section(section, "  ")]
    return "\n".join(lines) + "\n"


def _section(table: TileTable, indent: str) -> list[str]:
    gap = [""] if not indent else []
    lines = ["tuned: true"] if indent and table.tuned else []
    lines += [f"fallback: {table.fallback}"]
    if table.auto:
        lines += ["auto:", *(f"  - {_flow(rule.model_dump(exclude_defaults=True))}" for rule in table.auto)]
    lines += [*gap, "rows:"]
    lines += [f"  - {_flow(row.model_dump(mode='json', exclude_defaults=True, exclude={'section'}))}" for row in table.rows]
    if table.times:
        lines += [*gap, "times:", *(f"  {name}: {_flow(times.model_dump(exclude_defaults=True))}" for name, times in table.times.items())]
    lines += [*gap, "buckets:"]
    edges: dict[int | None, list[Bucket]] = {}
    for bucket in table.buckets:
        edges.setdefault(bucket.m, []).append(bucket)
    together = [bucket for cases in edges.values() for bucket in cases] == list(table.buckets)
    for m, cases in edges.items() if together else [(bucket.m, [bucket]) for bucket in table.buckets]:
        if m is None or len(cases) == 1:
            lines += [f"  - {_flow(_bounds(case))}" for case in cases]
        else:
            lines += [f"  - m: {m}", "    cases:", *(f"      - {_flow(_bounds(case, without=('m',)))}" for case in cases)]
    return [indent + line if line else line for line in lines]


def _bounds(bucket: Bucket, without: Sequence[str] = ()) -> dict[str, Any]:
    return bucket.model_dump(exclude_defaults=True, exclude=set(without))


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6).strip()
    return text.removesuffix("\n...").strip()
