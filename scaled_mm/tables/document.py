"""YAML with line numbers: plain values, and the line of every node."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from scaled_mm.tables.schema import Problem, TableError

NodePath = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class Document:
    """value: the content of the file. values, keys: the line, from 1, of a value and of its key, by path, such as ("rows", 2, "tile")."""

    file: str
    value: Any
    values: dict[NodePath, int]
    keys: dict[NodePath, int]

    def line(self, path: NodePath, of_key: bool = False) -> int:
        """The line of the node at `path`, or of its nearest ancestor if the file has no such node."""
        if of_key and path in self.keys:
            return self.keys[path]
        while path not in self.values:
            path = path[:-1]
        return self.values[path]


class _Reader:
    """Turns composed nodes into values. safe_load would drop the lines, and silently keep the last of two equal keys."""

    def __init__(self, file: str, loader: yaml.SafeLoader):
        self.file = file
        self.loader = loader
        self.values: dict[NodePath, int] = {}
        self.keys: dict[NodePath, int] = {}
        self.problems: list[Problem] = []
        self.seen: set[int] = set()

    def read(self, node: yaml.Node, path: NodePath) -> Any:
        self.values[path] = node.start_mark.line + 1
        if id(node) in self.seen:  # an alias; inside its own anchor it would recurse without end
            self._problem(node, path, "YAML aliases are not supported: write the value out")
            return None
        self.seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        try:
            return self.loader.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            self._problem(node, path, f"not a plain YAML value ({getattr(error, 'problem', None) or error})")
            return None

    def _mapping(self, node: yaml.MappingNode, path: NodePath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(key_node, path, "a key must be a word")
                continue
            key = key_node.value
            if key in result:
                self._problem(key_node, (*path, key), f"the key {key!r} stands twice, first on line {self.keys[(*path, key)]}")
                continue
            self.keys[(*path, key)] = key_node.start_mark.line + 1
            result[key] = self.read(value_node, (*path, key))
        return result

    def _problem(self, node: yaml.Node, path: NodePath, reason: str) -> None:
        self.problems.append(Problem(self.file, node.start_mark.line + 1, field_name(path), reason))


def field_name(path: NodePath) -> str:
    """`rows[2].tile`"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def read_document(path: Path) -> Document:
    """Parses one YAML file. TableError if it cannot be read or is not well-formed YAML."""
    file = str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8: {error}"
        raise TableError([Problem(file, None, "", f"cannot be read: {reason}")]) from error
    try:
        return _parse(file, text)
    except RecursionError as error:  # PyYAML and _Reader recurse once per level
        raise TableError([Problem(file, None, "yaml", "expected a table, got lists or keys that are nested too deeply")]) from error


def _parse(file: str, text: str) -> Document:
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise TableError([Problem(file, mark.line + 1, "yaml", error.problem or str(error))]) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise TableError([Problem(file, line, "yaml", error.reason)]) from error
    if node is None:
        raise TableError([Problem(file, 1, "", "the file is empty")])
    reader = _Reader(file, loader)
    value = reader.read(node, ())
    if reader.problems:
        raise TableError(reader.problems)
    return Document(file, value, reader.values, reader.keys)
