"""A small legal table as text, so that a test can break one thing and look for its line."""

from __future__ import annotations

import pytest

GOOD = """\
arch: sm90
fallback: any
rows:
  - name: small
    family: c3x
    tile: [64, 16, 256]
    cluster: [1, 1]
    schedule: warp_specialized
    scheduler: persistent
    swap_ab: true
    stages: auto
    split_k: 1
  - {name: large, family: c3x, tile: [128, 128, 128], schedule: pingpong}
  - {name: any, family: generic, tile: [64, 64, 64]}
buckets:
  - m: 16
    cases:
      - {n: 8192, k: 4096, kernel: small}
      - {n: 8192, kernel: large}
  - {m: 64, n: 1024, kernel: small}
  - {kernel: large}
"""


class TableFile:
    """A YAML file that tests edit by replacing a piece of its text."""

    def __init__(self, path):
        self.path = path
        self.path.write_text(GOOD)

    def replace(self, old: str, new: str) -> TableFile:
        text = self.path.read_text()
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the table"
        self.path.write_text(text.replace(old, new))
        return self

    def line_of(self, piece: str) -> int:
        lines = [number for number, line in enumerate(self.path.read_text().splitlines(), 1) if piece in line]
        assert len(lines) == 1, f"{piece!r} is on lines {lines}"
        return lines[0]


@pytest.fixture
def table_file(tmp_path) -> TableFile:
    return TableFile(tmp_path / "table.yaml")
