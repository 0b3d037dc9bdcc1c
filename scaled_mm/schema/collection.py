"""Loads a folder of schema files, links them to each other, and reports every problem with file, field and reason.

definitions/<op_type>/<name>.json
solutions/<author>/<op_type>/<definition>/<name>.json
workloads/<op_type>/<definition>.jsonl
traces/<author>/<op_type>/<definition>.jsonl, or traces/<op_type>/<definition>.jsonl
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from scaled_mm.schema.inputs import elements
from scaled_mm.schema.model import Definition, SchemaError, Solution, Trace, Workload, parse

_PACKAGE = Path(__file__).resolve().parent.parent


def schemas_dir() -> Path:
    """The folder of this package's schemas: inside the installed package, or beside it in a checkout."""
    installed = _PACKAGE / "schemas"
    return installed if installed.is_dir() else _PACKAGE.parent / "schemas"


@dataclasses.dataclass(frozen=True)
class Collection:
    """The contents of a folder. Definitions by name; solutions, workloads and traces by definition, in the order of files and lines."""

    root: Path
    definitions: dict[str, Definition] = dataclasses.field(default_factory=dict)
    solutions: dict[str, list[Solution]] = dataclasses.field(default_factory=dict)
    workloads: dict[str, list[Workload]] = dataclasses.field(default_factory=dict)
    traces: dict[str, list[Trace]] = dataclasses.field(default_factory=dict)

    def definition(self, name: str) -> Definition:
        """The definition of that name. SchemaError with similar names if there is none."""
        return _named(name, self.definitions, "definition")

    def solution(self, name: str) -> Solution:
        """The solution of that name, which is unique among all definitions."""
        return _named(name, {one.name: one for several in self.solutions.values() for one in several}, "solution")

    def references(self) -> list[tuple[Definition, Workload]]:
        """Each distinct reference (text, inputs and outputs) once, with the smallest workload of its definitions."""
        smallest: dict[str, tuple[int, Definition, Workload]] = {}
        for name, workloads in self.workloads.items():
            definition = self.definitions[name]
            key = repr((definition.reference, definition.inputs, definition.outputs, definition.logical))
            for workload in workloads:
                size = elements(definition, workload)
                if key not in smallest or size < smallest[key][0]:
                    smallest[key] = (size, definition, workload)
        return [(definition, workload) for _, definition, workload in smallest.values()]


def load(root: str | os.PathLike | None = None) -> Collection:
    """The collection of a folder; None: this package's. Raises SchemaError with the first problem, or if there is no definition."""
    collection, problems = read(root)
    if problems:
        more = f" ({len(problems) - 1} more problems: scaled-mm schema validate --root {collection.root})" if len(problems) > 1 else ""
        raise SchemaError(f"{problems[0]}{more}")
    return collection


def read(root: str | os.PathLike | None = None) -> tuple[Collection, list[SchemaError]]:
    """(collection of valid files, all problems) of a folder. An invalid file is omitted, so that references to it are reported too."""
    collection = Collection(Path(schemas_dir() if root is None else root))
    if not collection.root.is_dir():
        return collection, [SchemaError(f"{collection.root}: expected a folder with definitions/, there is none")]
    problems: list[SchemaError] = []
    for folder, suffix, take in (
        ("definitions", ".json", _definition),
        ("solutions", ".json", _solution),
        ("workloads", ".jsonl", _workloads),
        ("traces", ".jsonl", _traces),
    ):
        for path in _files(collection, folder, suffix, problems) if (collection.root / folder).exists() else ():
            try:
                problems.extend(_at(path, collection, error) for error in take(collection, path))
            except (SchemaError, OSError, UnicodeDecodeError) as error:
                problems.append(_at(path, collection, error))
    if not collection.definitions and not problems:
        problems.append(SchemaError(f"{collection.root}: expected definitions/<op_type>/<name>.json, there is no definition"))
    return collection, problems


def append(trace: Trace, author: str, op_type: str, root: Path) -> Path:
    """Appends a trace to its file below `root`. Returns the file."""
    path = root / "traces" / author / op_type / f"{trace.definition}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    newline = "\n" if path.is_file() and path.read_bytes()[-1:] not in (b"", b"\n") else ""  # the last line may lack a line break
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{newline}{trace.model_dump_json(exclude_unset=True)}\n")
    return path


def _files(collection: Collection, folder: str, suffix: str, problems: list[SchemaError]) -> list[Path]:
    """The files below a folder, sorted. Anything other than a readable regular file or folder is a problem."""

    def problem(path: Path, why: str) -> None:
        problems.append(_at(path, collection, SchemaError(why)))

    found = []
    for place, folders, files in os.walk(collection.root / folder, onerror=lambda error: problem(Path(error.filename), f"path: {error.strerror}")):
        folders.sort()
        for name in folders:
            path = Path(place, name)
            if path.is_symlink() or path.suffix in (".json", ".jsonl"):
                problem(path, f"path: expected a folder that is no link and is not named *{path.suffix or suffix}")
        for name in sorted(files):
            path = Path(place, name)
            if not path.is_file():
                problem(path, "path: expected a file, got a link to nothing or a device")
            elif path.suffix != suffix:
                problem(path, f"name: expected *{suffix} in {folder}/, got {name!r}")
            else:
                found.append(path)
    return found


def _at(path: Path, collection: Collection, error: Exception) -> SchemaError:
    return SchemaError(f"{path.relative_to(collection.root)}: {error}")


def _expect_place(path: Path, collection: Collection, *expected: str) -> None:
    """Checks that the path of a file matches its contents."""
    got = path.relative_to(collection.root).with_suffix("").parts[1:]
    if got != expected:
        fields = {2: ("op_type", "name"), 3: ("author", "op_type", "definition"), 4: ("author", "op_type", "definition", "name")}[len(expected)]
        wrong = next((name for name, a, b in zip(fields, expected, got) if a != b), "path")
        raise SchemaError(f"{wrong}: expected the file of this to be {'/'.join(expected)}, got {'/'.join(got)}")


def _definition(collection: Collection, path: Path) -> list[SchemaError]:
    one = parse(Definition, path.read_text(encoding="utf-8"))
    _expect_place(path, collection, one.op_type, one.name)
    collection.definitions[one.name] = one
    return []


def _solution(collection: Collection, path: Path) -> list[SchemaError]:
    one = parse(Solution, path.read_text(encoding="utf-8"))
    definition = _defined("definition", one.definition, collection)
    _expect_place(path, collection, one.author, definition.op_type, one.definition, one.name)
    if any(one.name == other.name for several in collection.solutions.values() for other in several):
        raise SchemaError(f"name: expected one solution of a name, {one.name} is there already")
    collection.solutions.setdefault(one.definition, []).append(one)
    return []


def _workloads(collection: Collection, path: Path) -> list[SchemaError]:
    def take(trace: Trace) -> None:
        if trace.solution is not None:
            raise SchemaError(f"solution: expected null in workloads/, got {trace.solution!r}")
        definition = _defined("definition", trace.definition, collection)
        _expect_place(path, collection, definition.op_type, trace.definition)
        trace.workload.check(definition)
        known = collection.workloads.setdefault(trace.definition, [])
        if any(trace.workload.uuid == other.uuid for other in known):
            raise SchemaError(f"workload.uuid: expected one workload of an uuid, {trace.workload.uuid} is there already")
        known.append(trace.workload)

    return _lines(path, take)


def _traces(collection: Collection, path: Path) -> list[SchemaError]:
    def take(trace: Trace) -> None:
        if trace.solution is None:
            raise SchemaError("solution: expected the name of one in traces/, got null")
        definition = _defined("definition", trace.definition, collection)
        solution = next((one for one in collection.solutions.get(trace.definition, ()) if one.name == trace.solution), None)
        if solution is None:
            raise SchemaError(f"solution: expected a solution of {trace.definition}, got {trace.solution!r}")
        if len(path.relative_to(collection.root).parts) == 3:  # as written by flashinfer-bench's benchmark
            _expect_place(path, collection, definition.op_type, trace.definition)
        else:
            _expect_place(path, collection, solution.author, definition.op_type, trace.definition)
        trace.workload.check(definition)
        if trace.workload not in collection.workloads.get(trace.definition, ()):
            raise SchemaError(f"workload: expected one of {trace.definition}'s, as it is in workloads/, got uuid {trace.workload.uuid!r}")
        collection.traces.setdefault(trace.definition, []).append(trace)

    return _lines(path, take)


def _lines(path: Path, take) -> list[SchemaError]:
    """Passes the trace of every line to `take`. Returns the problems by line."""
    problems, empty = [], True
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):  # not splitlines: a log may contain other line separators
        if not line.strip():
            continue
        empty = False
        try:
            take(parse(Trace, line))
        except SchemaError as error:
            hint = "; a line holds a whole object" if "Invalid JSON" in str(error) else ""
            problems.append(SchemaError(f"line {number}: {error}{hint}"))
    return [SchemaError("expected a line for each, the file is empty")] if empty else problems


def _defined(field: str, name: str, collection: Collection) -> Definition:
    if name not in collection.definitions:
        raise SchemaError(f"{field}: expected the name of a definition that is there and right, got {name!r}")
    return collection.definitions[name]


def _named(name: str, known: dict, kind: str):
    import difflib

    if name not in known:
        alike = ", ".join(difflib.get_close_matches(name, known, 5, 0.5)) or f"{len(known)} {kind}s: scaled-mm schema list"
        raise SchemaError(f"{kind}: expected the name of one, got {name!r}; there are {alike}")
    return known[name]
