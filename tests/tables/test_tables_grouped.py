"""The section `grouped` of a tile table: the same rules, its own rows and buckets, and rules of its own."""

from __future__ import annotations

import copy

import pytest
import yaml

from scaled_mm.errors import KernelNotFoundError
from scaled_mm.kernels.sections import OTHER_SECTIONS
from scaled_mm.tables import TableError, available_tables, check_table, load_table

PATHS = dict(available_tables())


@pytest.fixture
def edited(tmp_path):
    """edited(arch, edit): (path, document) of the architecture's table after `edit(document)`."""

    def edited(arch: str, edit):
        document = copy.deepcopy(yaml.safe_load(PATHS[arch].read_text()))
        edit(document)
        path = tmp_path / f"{arch}.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    return edited


def reasons(path) -> list[tuple[str, str]]:
    return [(problem.field, problem.reason) for problem in check_table(path)]


@pytest.mark.parametrize("arch", PATHS)
def test_the_rows_per_expert_choose_the_row(arch):
    table = load_table(arch)
    grouped = table.grouped
    for M in (1, 16, 17, 64, 4096):
        assert grouped.select(M, 4096, 4096).row == grouped.fastest(M, 4096, 4096)[0][1]
    few, many = grouped.select(1, 4096, 4096).row, grouped.select(8192, 8192, 4096).row
    assert (few.tile.n if few.swap_ab else few.tile.m) < (many.tile.n if many.swap_ab else many.tile.m)
    assert grouped.select(16, 4096, 0).row.name == grouped.fallback
    sections = (table, *(getattr(table, name) for name in OTHER_SECTIONS))
    assert [row.name for row in table.all_rows] == [row.name for section in sections for row in section.rows]
    assert table.row(grouped.fallback).section == "grouped" and table.row(table.fallback).section == "gemm"
    with pytest.raises(KernelNotFoundError):
        grouped.row(table.fallback)


def test_a_table_may_do_without_the_section(edited):
    path = edited("sm80", lambda document: document.pop("grouped"))
    table = load_table(path)
    assert table.grouped is None and table.sections == (table, *(getattr(table, name) for name in OTHER_SECTIONS if name != "grouped"))


def c3x_row(section: dict) -> dict:
    return next(row for row in section["rows"] if row["family"] == "c3x")


CASES = [
    ("sm80", lambda g: g["rows"][0].update(split_k=4), ("grouped.rows[0].split_k", "a grouped row has none")),
    ("sm80", lambda g: g["rows"][0].update(stages=50), ("grouped.rows[0].stages", "bytes of shared memory")),
    ("sm80", lambda g: g["rows"][0].update(grouped=True), ("grouped.rows[0].grouped", "the section says which rows are grouped")),
    ("sm80", lambda g: g["rows"][0].update(name="generic_64x64x64"), ("grouped.rows[0].name", "is taken by the row on line")),
    ("sm80", lambda g: g["rows"][0].update(colour="red"), ("grouped.rows[0].colour", "unknown key")),
    ("sm80", lambda g: g["buckets"][0].update(kernel="c2x_16x64x128_w16x64x64_s5"), ("grouped.buckets[0].kernel", "no row is named")),
    ("sm80", lambda g: g["buckets"][0].update(m=16), ("grouped.buckets[0]", "the last bucket must be open")),
    ("sm80", lambda g: g["buckets"][0].update(constant_b=True), ("grouped.buckets[0].constant_b", "take no prepared weight")),
    ("sm80", lambda g: g.update(fallback=g["rows"][0]["name"]), ("grouped.fallback", "the fallback takes any strides")),
    ("sm80", lambda g: g.pop("fallback"), ("grouped.fallback", "required key is missing")),
    ("sm80", lambda g: g.pop("rows"), ("grouped.rows", "required key is missing")),
    ("sm80", lambda g: g.update(arch="sm80"), ("grouped.arch", "unknown key")),
    ("sm90", lambda g: c3x_row(g).update(schedule="warp_specialized"), ("grouped.rows[5].schedule", "counted on the device")),
    ("sm90", lambda g: c3x_row(g).update(prefetch=256), ("grouped.rows[5].prefetch", "a grouped row has none")),
]


@pytest.mark.parametrize("arch, edit, expected", CASES, ids=lambda value: value[0] if isinstance(value, tuple) else "")
def test_what_is_wrong_in_the_section_is_named_with_its_place(edited, arch, edit, expected):
    found = reasons(edited(arch, lambda document: edit(document["grouped"])))
    assert any(field == expected[0] and expected[1] in reason for field, reason in found), found


def test_a_dense_row_does_not_say_that_it_is_grouped(edited):
    path = edited("sm80", lambda document: document["rows"][0].update(grouped=True))
    assert ("rows[0].grouped", "the section says which rows are grouped: leave it out") in reasons(path)
    with pytest.raises(TableError, match=r"sm80.yaml:\d+: rows\[0\].grouped"):
        load_table(path)


def test_a_section_that_is_no_mapping_is_refused(edited):
    assert reasons(edited("sm80", lambda document: document.update(grouped=[1]))) == [("grouped", "expected keys (fallback, rows, buckets), got [1]")]
