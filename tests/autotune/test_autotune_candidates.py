"""Which rows the autotuner may try."""

from __future__ import annotations

import pytest

from scaled_mm.autotune.candidates import candidates, row_name
from scaled_mm.autotune.workbench import WORKBENCHES
from scaled_mm.jit.codegen import kernel_source
from scaled_mm.kernels.c3x import early_weights
from scaled_mm.kernels.registry import config_findings
from scaled_mm.tables import available_tables, load_table

ARCHES = [arch for arch, _ in available_tables()]


@pytest.fixture(scope="module", params=[(arch, section) for arch in ARCHES for section in WORKBENCHES], ids="-".join)
def table(request):
    """The table of an architecture, or its section."""
    arch, section = request.param
    return load_table(arch) if section == "gemm" else getattr(load_table(arch), section)


@pytest.fixture(scope="module")
def rows(table):
    return candidates(table)


def test_every_candidate_is_legal_on_every_architecture_that_the_table_serves(table, rows):
    least = {"gemm": 500, "grouped": 150}.get(table.section, 40)
    assert len(rows) > least and {row.section for row in rows} == {table.section}
    for arch in table.serves:
        assert [row.name for row in rows if config_findings(row, arch)] == []


def test_every_candidate_has_the_canonical_name_of_its_fields_and_no_two_the_same(table, rows):
    assert [row.name for row in rows if row.name != row_name(row)] == []
    assert len({row.name for row in rows}) == len(rows)
    unnamed = {row.model_copy(update={"name": "x"}) for row in rows}
    assert len(unnamed) == len(rows)


def test_every_row_of_the_table_is_a_candidate_with_all_of_its_fields(table, rows):
    own = [row for row in table.rows if row.family != "generic"]
    assert rows[: len(own)] == own


def test_every_candidate_has_a_translation_unit(table, rows):
    for row in rows[:: max(1, len(rows) // 50)]:
        assert row.name in kernel_source(row, "bf16")


def test_a_name_means_the_same_row_on_every_architecture():
    parts = [part for arch in ARCHES for part in load_table(arch).sections if part.section in WORKBENCHES]
    everywhere = [row for part in parts for row in candidates(part)]
    assert len(set(everywhere)) == len({row.name for row in everywhere})


def test_early_weights_follow_the_habit_of_the_sm90_table():
    own = [row for row in load_table("sm90").rows if row.family == "c3x"]
    other = [row.name for row in own if row.early_weights != early_weights(row.tile.m, row.tile.n, row.swap_ab, row.prefetch)]
    assert other == ["c3x_128x128x128_co_c41_swap"]
