"""The smoke set names tests that exist, and some of every room."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from smoke import SMOKE

HERE = Path(__file__).parent
FILES = {path.name: path for path in HERE.rglob("test_*.py")}
# Rooms whose tests all need a GPU.
WITHOUT = {"kernels"}


@pytest.mark.parametrize("file", SMOKE)
def test_what_the_smoke_set_names_exists(file):
    assert file in FILES, f"tests/smoke.py names {file}, which is not there"
    defined = {node.name for node in ast.parse(FILES[file].read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}
    assert SMOKE[file] and set(SMOKE[file]) <= defined, set(SMOKE[file]) - defined


def test_every_room_has_a_test_in_the_smoke_set():
    rooms = {path.relative_to(HERE).parts[0] for path in FILES.values() if path.parent != HERE}
    smoky = {FILES[file].relative_to(HERE).parts[0] for file in SMOKE if file in FILES}
    assert rooms - smoky == WITHOUT
