"""The smoke set names tests that exist, and some of every room."""

from __future__ import annotations

import ast
from pathlib import Path

from smoke import SMOKE

HERE = Path(__file__).parent
FILES = {path.name: path for path in HERE.rglob("test_*.py")}
# Rooms whose tests all need a GPU.
WITHOUT = {"kernels"}


def test_what_the_smoke_set_names_exists():
    assert set(SMOKE) <= set(FILES), "tests/smoke.py names files that are not there"
    for file, names in SMOKE.items():
        defined = {node.name for node in ast.parse(FILES[file].read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}
        assert names and set(names) <= defined, (file, set(names) - defined)


def test_every_room_has_a_test_in_the_smoke_set():
    rooms = {path.relative_to(HERE).parts[0] for path in FILES.values() if path.parent != HERE}
    smoky = {FILES[file].relative_to(HERE).parts[0] for file in SMOKE if file in FILES}
    assert rooms - smoky == WITHOUT
