"""Reads a tile table from YAML. An invalid table is refused with file, line, field and reason.

Nothing is cached, so an edited table takes effect the next time it is loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, StrictBool, StrictStr, ValidationError

from scaled_mm.errors import ArchitectureNotSupportedError
from scaled_mm.kernels.arch import ARCHES
from scaled_mm.kernels.config import KernelConfig
from scaled_mm.kernels.registry import config_findings
from scaled_mm.kernels.sections import OTHER_SECTIONS, SECTIONS, TOP_LEVEL
from scaled_mm.tables import rules
from scaled_mm.tables.document import Document, NodePath, field_name, read_document
from scaled_mm.tables.schema import Bucket, ModeRule, Problem, TableError, TileTable, Times

_ARCH_NAME = re.compile(r"sm\d+")
_PACKAGE = Path(__file__).resolve().parents[1]


class _Header(BaseModel):
    model_config = ConfigDict(extra="forbid")

    arch: StrictStr
    serves: list[StrictStr] | None = None
    tuned: StrictBool = False
    gpu: StrictStr | None = None
    version: StrictStr | None = None
    fallback: StrictStr


class _SectionHeader(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tuned: StrictBool = False
    fallback: StrictStr


# Names of earlier versions: keys of the file, keys of a kernel config, and families.
_RENAMED_SECTIONS = {"block": "gguf"}
_RENAMED_KEYS = {"generation": "family"}
_RENAMED_FAMILIES = {"block_mma": "gguf_mma", "block_wgmma": "gguf_wgmma"}


def configs_dir() -> Path:
    """The folder of the tile tables: `cutlass_configs/` of a checkout, else `configs/` inside the installed package.

    The checkout comes first: a copy that a build left inside the package must not hide an edited table.
    ArchitectureNotSupportedError if there is neither.
    """
    candidates = (_PACKAGE.parent / "cutlass_configs", _PACKAGE / "configs")
    for folder in candidates:
        if any(folder.glob("sm*.yaml")):
            return folder
    raise ArchitectureNotSupportedError(f"no tile tables: looked for sm*.yaml in {' and '.join(map(str, candidates))}")


def available_tables() -> list[tuple[str, Path]]:
    """(arch, path) of every architecture's table, in the order of the compute capability."""
    tables = [(path.stem, path) for path in configs_dir().glob("sm*.yaml") if _ARCH_NAME.fullmatch(path.stem)]
    return sorted(tables, key=lambda table: int(table[0][2:]))


def table_of(arch: str) -> str:
    """The name of the table that serves an architecture: "sm89" for "sm86". The name itself if no table lists it."""
    for table, path in available_tables():
        header = read_document(path).value
        listed = header.get("serves") if isinstance(header, dict) else None
        if isinstance(listed, list) and arch in listed:
            return table
    return arch


def load_table(arch_or_path: str | os.PathLike[str]) -> TileTable:
    """The table that serves an architecture ("sm86" has sm89's), or the table of a YAML file.

    Raises TableError with every problem of the file; ArchitectureNotSupportedError for an architecture without a table.
    """
    if isinstance(arch_or_path, str) and _ARCH_NAME.fullmatch(arch_or_path):
        tables = dict(available_tables())
        name = arch_or_path if arch_or_path in tables else table_of(arch_or_path)
        if name not in tables:
            raise ArchitectureNotSupportedError(f"arch: no tile table for {arch_or_path!r}; there are: {', '.join(tables)}")
        return _Loader(tables[name], expected_arch=name).load()
    return _Loader(Path(arch_or_path)).load()


def check_table(path: str | os.PathLike[str], expected_arch: str | None = None) -> list[Problem]:
    """Every problem of one file, in the order of its lines; empty for a valid table."""
    try:
        _Loader(Path(path), expected_arch).load()
    except TableError as error:
        return list(error.problems)
    return []


class _Loader:
    """Collects all problems of a file instead of stopping at the first."""

    def __init__(self, path: Path, expected_arch: str | None = None):
        self.path = path
        self.expected_arch = expected_arch
        self.problems: list[Problem] = []
        self.first_line: dict[str, int] = {}  # of the name of each kernel config, in all sections

    def load(self) -> TileTable:
        self.document: Document = read_document(self.path)
        data = self.document.value
        if not isinstance(data, dict):
            raise TableError([Problem(str(self.path), self.document.line(()), "", "expected keys: arch, fallback, rows, buckets")])
        for old, new in _RENAMED_SECTIONS.items():
            if old in data:
                self._problem((old,), f"renamed to {new}", of_key=True)
        lists = ("rows", "times", "buckets", *OTHER_SECTIONS, *_RENAMED_SECTIONS)
        header = self._validate(_Header, {k: v for k, v in data.items() if k not in lists}, ())
        arch = self._arch(header)
        section = self._section(data, header, arch, ())
        others = {key: self._other(key, data[key], arch) for key in OTHER_SECTIONS if key in data}
        if self.problems:
            raise TableError(sorted(self.problems, key=lambda problem: problem.line or 0))
        common = dict(
            arch=header.arch,
            serves=tuple(header.serves or [header.arch]),
            source=str(self.path),
            tuned=header.tuned,
            gpu=header.gpu,
            version=header.version,
        )
        plain = common | dict(tuned=False, gpu=None, version=None)
        made = {key: TileTable(**(common if data[key].get("tuned") else plain), **other) for key, other in others.items()}
        return TileTable(**common, **section, **made)

    def _section(self, data: Mapping[str, Any], header: Any, arch: str | None, at: NodePath) -> dict[str, Any]:
        """Kernel configs, buckets and fallback of the top level (`at` is empty) or of a section."""
        row_entries, bucket_entries = self._list(data, "rows", at), self._list(data, "buckets", at)
        rows, names = self._rows(row_entries or [], arch, at)
        if row_entries == []:
            self._problem((*at, "rows"), "a table needs at least one row")
        buckets, paths = self._buckets(bucket_entries or [], at)
        times = self._times(data, at)
        # If a bucket is invalid, indices would be off by one. It has already been reported.
        if bucket_entries is not None and len(buckets) == len(paths):
            given = data.get("times") or ()
            for finding in rules.bucket_findings(buckets, names, has_modes=bool(at) and SECTIONS[str(at[0])].has_modes, times=given):
                where = (*paths[finding.where[1]], *finding.where[2:]) if len(finding.where) > 1 else (*at, *finding.where)
                self._problem(where, finding.reason)
        if header is not None:
            sound = [row for row in rows if arch is not None and not config_findings(row, arch)]
            for finding in (*rules.fallback_findings(header.fallback, rows, names), *rules.times_findings(times, header.fallback, sound, names)):
                self._problem((*at, *finding.where), finding.reason)
        return dict(rows=tuple(rows), times=times, buckets=tuple(buckets), fallback=header.fallback if header is not None else "")

    def _other(self, key: str, data: Any, arch: str | None) -> dict[str, Any] | None:
        path: NodePath = (key,)
        if not isinstance(data, dict):
            self._problem(path, f"expected keys (fallback, rows, buckets), got {data!r}")
            return None
        has_modes = SECTIONS[key].has_modes
        lists = ("rows", "times", "buckets", *(("auto",) if has_modes else ()))
        header = self._validate(_SectionHeader, {k: v for k, v in data.items() if k not in lists}, path)
        if header is not None and header.tuned and not self.document.value.get("tuned"):
            self._problem((*path, "tuned"), "a section is tuned in a tuned table only: add tuned: true, gpu and version at the top")
        section = self._section(data, header, arch, path)
        return section | dict(auto=self._modes(data, path)) if has_modes else section

    def _times(self, data: Mapping[str, Any], at: NodePath) -> dict[str, Times]:
        entries = data.get("times") or {}
        if not isinstance(entries, dict):
            self._problem((*at, "times"), f"expected kernel configs with their coefficients, got {entries!r}")
            return {}
        times = {name: self._validate(Times, entry, (*at, "times", name)) for name, entry in entries.items()}
        return {name: entry for name, entry in times.items() if entry is not None}

    def _modes(self, data: Mapping[str, Any], at: NodePath) -> tuple[ModeRule, ...]:
        entries = self._list(data, "auto", at)
        modes = [self._validate(ModeRule, entry, (*at, "auto", index)) for index, entry in enumerate(entries or [])]
        if entries is None or None in modes:
            return ()  # already reported
        for finding in rules.mode_findings(modes):
            self._problem((*at, *finding.where), finding.reason)
        return tuple(modes)

    def _arch(self, header: _Header | None) -> str | None:
        if header is None:
            return None
        if header.tuned != (header.gpu is not None):
            what = (
                "a tuned table says which GPU it was measured on: add gpu" if header.tuned else "a table with a gpu is a tuned one: add tuned: true"
            )
            self._problem(("tuned" if header.tuned else "gpu",), what)
        if header.tuned != (header.version is not None):
            what = (
                "a tuned table says which scaled_mm measured it: add version"
                if header.tuned
                else "a table with a version is a tuned one: add tuned: true"
            )
            self._problem(("tuned" if header.tuned else "version",), what)
        if header.arch not in ARCHES:
            self._problem(("arch",), f"unknown architecture {header.arch!r}; known: {', '.join(ARCHES)}")
            return None
        if self.expected_arch is not None and header.arch != self.expected_arch:
            self._problem(("arch",), f"{header.arch!r} in the file that is named for {self.expected_arch!r}")
        for index, reason in rules.serves_findings(header.arch, header.serves):
            self._problem(("serves",) if index is None else ("serves", index), reason)
        return header.arch

    def _rows(self, entries: list[Any], arch: str | None, at: NodePath) -> tuple[list[KernelConfig], list[str]]:
        """The valid kernel configs, and the names of all: a bucket that names an invalid kernel config is not wrong itself."""
        rows: list[KernelConfig] = []
        names: dict[str, None] = {}
        for index, entry in enumerate(entries):
            path: NodePath = (*at, "rows", index)
            name = entry.get("name") if isinstance(entry, dict) else None
            if isinstance(name, str):
                if name in self.first_line:
                    self._problem((*path, "name"), f"{name!r} is taken by the row on line {self.first_line[name]}")
                self.first_line.setdefault(name, self.document.line((*path, "name")))
                names[name] = None
            if isinstance(entry, dict):
                entry = self._row_keys(entry, path) | {"section": str(at[0]) if at else TOP_LEVEL}
            row = self._validate(KernelConfig, entry, path)
            if row is not None:
                rows.append(row)
                for field, reason in config_findings(row, arch) if arch is not None else ():
                    self._problem((*path, field), reason)
        return rows, list(names)

    def _row_keys(self, entry: dict[str, Any], path: NodePath) -> dict[str, Any]:
        """A kernel config without the keys that a file may not contain, and with earlier names replaced by present ones; a problem for each."""
        kept = {}
        for key, value in entry.items():
            new = _RENAMED_KEYS.get(key)
            if key in OTHER_SECTIONS:
                self._problem((*path, key), f"the section says which rows are {key.replace('_', '-')}: leave it out", of_key=True)
            elif key == "section":
                self._problem((*path, key), "the section that a row stands in says it: leave it out", of_key=True)
            elif new and new not in entry:
                self._problem((*path, key), f"renamed to {new}", of_key=True)
                kept[new] = value
            else:
                kept[key] = value
        family = kept.get("family")
        if isinstance(family, str) and family in _RENAMED_FAMILIES:
            self._problem((*path, "family"), f"{family} is renamed to {_RENAMED_FAMILIES[family]}")
            kept["family"] = _RENAMED_FAMILIES[family]
        return kept

    def _buckets(self, entries: list[Any], at: NodePath) -> tuple[list[Bucket], list[NodePath]]:
        """Flattens `{m, cases: [{n, k, kernel}]}` and `{m, n, k, kernel}` entries, in the order of the file."""
        flat: list[tuple[NodePath, Any, dict[str, Any]]] = []
        for index, entry in enumerate(entries):
            path: NodePath = (*at, "buckets", index)
            if not isinstance(entry, dict) or "cases" not in entry:
                flat.append((path, entry, {}))
                continue
            for key in entry:
                if key not in ("m", "cases"):
                    self._problem((*path, key), "unknown key; next to cases there is only m", of_key=True)
            cases = entry["cases"]
            if not isinstance(cases, list) or not cases:
                self._problem((*path, "cases"), "expected a list of at least one case")
                continue
            shared = {"m": entry["m"]} if "m" in entry else {}
            flat += [((*path, "cases", number), case, shared) for number, case in enumerate(cases)]
        buckets = []
        for path, entry, shared in flat:
            if shared and isinstance(entry, dict):
                if "m" in entry:
                    self._problem((*path, "m"), "the group already has an m", of_key=True)
                entry = {**entry, **shared}
            if at and isinstance(entry, dict) and entry.get("activation") == "q8_1":
                self._problem((*path, "activation"), "renamed: write mode: w4a8", of_key=True)
                entry = {key: value for key, value in entry.items() if key != "activation"} | {"mode": "w4a8"}
            for bound in ("m", "n", "k"):
                if isinstance(entry, dict) and entry.get(bound, 0) is None:
                    self._problem((*path, bound), "empty: write a positive integer or open")
            bucket = self._validate(Bucket, entry, path)
            if bucket is not None:
                buckets.append(bucket)
                if bucket.constant_b and at:
                    self._problem((*path, "constant_b"), "products of this section take no prepared weight: leave it out")
                for key in ("mode", "minima"):
                    if getattr(bucket, key) and not (at and SECTIONS[str(at[0])].has_modes):
                        self._problem((*path, key), "of GGUF products alone: leave it out")
        return buckets, [path for path, _, _ in flat]

    def _list(self, data: Mapping[str, Any], key: str, at: NodePath) -> list[Any] | None:
        """The list under `key`, [] for an empty one. None, with a problem added, if there is no list."""
        if key not in data:
            self._problem((*at, key), "required key is missing")
            return None
        if data[key] is not None and not isinstance(data[key], list):
            self._problem((*at, key), f"expected a list, got {data[key]!r}")
            return None
        return data[key] or []

    def _validate(self, model: type[BaseModel], entry: Any, path: NodePath) -> Any:
        """A model, or None with its errors added to the problems."""
        if not isinstance(entry, dict):
            self._problem(path, f"expected keys ({', '.join(_keys(model))}), got {entry!r}")
            return None
        try:
            return model.model_validate(entry)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                self._problem((*path, *detail["loc"]), _reason(detail, model), of_key=detail["type"] == "extra_forbidden")
            return None

    def _problem(self, path: NodePath, reason: str, of_key: bool = False) -> None:
        # The m of a case is written in its group: show that line.
        if path[-1:] == ("m",) and path not in self.document.values and path[:-1][-2:-1] == ("cases",):
            path = (*path[:-3], "m")
        problem = Problem(str(self.path), self.document.line(path, of_key), field_name(path), reason)
        if problem not in self.problems:
            self.problems.append(problem)


def _keys(model: type[BaseModel]) -> list[str]:
    """The keys that a file may contain for a model. `section` follows from the place in the file."""
    return [key for key in model.model_fields if key != "section"]


def _reason(detail: Mapping[str, Any], model: type[BaseModel]) -> str:
    kind = detail["type"]
    if kind == "extra_forbidden":
        return f"unknown key; known keys: {', '.join(_keys(model))}"
    if kind.startswith("missing"):  # of a list (tile, cluster) the location is an index
        return "a value is missing" if isinstance(detail["loc"][-1], int) else "required key is missing"
    if kind == "too_long":
        return f"too many values, got {detail['input']!r}"
    message = detail["msg"].removeprefix("Value error, ")
    return f"{message}, got {detail['input']!r}"
