"""The journal of measured cells."""

from __future__ import annotations

import pytest

from scaled_mm.autotune.state import Cell, Journal, cell_key
from scaled_mm.errors import BadParamError


def cell(row: str, us: float | None = 5.0, outcome: str = "timed") -> Cell:
    key = cell_key("a GPU", f"kernel of {row}", (1, 2, 3))
    return Cell(key=key, row=row, M=1, N=2, K=3, outcome=outcome, us=us, samples=(us,) if us else (), message=None if us else "why")


def test_cells_are_found_again_by_their_keys(tmp_path):
    path = tmp_path / "below" / "journal.jsonl"
    journal = Journal(path)
    for one in (cell("a"), cell("b", None, "hung")):
        journal.add(one)
    again = Journal(path)
    assert again.cells == journal.cells and again.skipped == 0
    assert again.get(cell("b").key).message == "why"
    assert again.get("other") is None


def test_a_half_written_last_line_is_skipped_and_what_follows_starts_a_line_of_its_own(tmp_path):
    path = tmp_path / "journal.jsonl"
    for row in ("a", "b"):
        Journal(path).add(cell(row))
    whole = path.read_text()
    path.write_text(whole[:-20])
    broken = Journal(path)
    assert [one.row for one in broken.cells.values()] == ["a"] and broken.skipped == 1
    broken.add(cell("c"))
    assert [one.row for one in Journal(path).cells.values()] == ["a", "c"]


def test_another_machine_kernel_or_product_is_another_cell():
    base = ("a GPU", "a kernel", (1, 2, 3))
    keys = {cell_key(*base), cell_key("another", *base[1:]), cell_key("a GPU", "another", (1, 2, 3)), cell_key("a GPU", "a kernel", (1, 23, 3))}
    assert len(keys) == 4


def test_a_cell_has_a_time_if_and_only_if_it_was_timed():
    for us, outcome in ((5.0, "wrong"), (None, "timed"), (0.0, "timed")):
        with pytest.raises(ValueError, match="if and only if"):
            cell("a", us, outcome)


def test_a_journal_that_is_no_text_is_refused_with_its_name(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadParamError, match="--out: expected a journal of an earlier run, got .*journal.jsonl"):
        Journal(path)
