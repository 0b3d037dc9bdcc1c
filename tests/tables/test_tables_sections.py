"""A section of the tile tables is one entry of `scaled_mm.kernels.sections`: it has its words, its place in C, its field and its kernels."""

from __future__ import annotations

import re

import c_header
import pytest
import yaml

from scaled_mm.cli import main
from scaled_mm.kernels.family import FAMILIES
from scaled_mm.kernels.registry import config_findings, families_of
from scaled_mm.kernels.sections import OTHER_SECTIONS, SECTIONS, TOP_LEVEL
from scaled_mm.tables import KernelRow, available_tables, check_table, load_table
from scaled_mm.tables.schema import TileTable

ARCH = "sm80"


def test_the_sections_are_the_kinds_of_table_of_the_c_interface_in_its_order():
    expected = {"SCALED_MM_TABLE_GEMM" if name == TOP_LEVEL else f"SCALED_MM_TABLE_{name.upper()}_GEMM": kind for kind, name in enumerate(SECTIONS)}
    assert c_header.enum("scaledMMTableKind_t") == expected, "scaled_mm.h or scaled_mm/kernels/sections.py"


def test_every_section_is_a_field_of_a_table_and_documented():
    for name in OTHER_SECTIONS:
        assert name in TileTable.model_fields, f"scaled_mm/tables/schema.py: TileTable needs a field {name}"
        assert re.search(rf"^    {name}: ", TileTable.__doc__, re.MULTILINE), f"scaled_mm/tables/schema.py: the docstring of TileTable lacks {name}"


@pytest.mark.parametrize("section", SECTIONS)
def test_every_section_has_kernels_among_them_a_fallback(section):
    assert any(family.alignment == (1, 1, 1) for family in families_of(section)), f"scaled_mm/kernels/registry.py: no fallback for {section}"


@pytest.mark.parametrize("arch", [arch for arch, _ in available_tables()])
def test_the_table_of_every_architecture_has_every_section(arch):
    assert len(load_table(arch).sections) == len(SECTIONS), f"cutlass_configs/{arch}.yaml lacks a section"


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_without_kernels_for_a_section_is_a_problem_of_its_row(tmp_path, section, family):
    def body(name: str, family: str) -> dict:
        return {"fallback": name, "rows": [{"name": name, "family": family, "tile": [64, 64, 64]}], "buckets": [{"kernel": name}]}

    path = tmp_path / "table.yaml"
    whole = {"arch": ARCH, **body("any", family if section == TOP_LEVEL else "generic")}
    path.write_text(yaml.safe_dump(whole if section == TOP_LEVEL else {**whole, section: body("r", family)}))
    place = "rows[0].family" if section == TOP_LEVEL else f"{section}.rows[0].family"
    reasons = [problem.reason for problem in check_table(path) if problem.field == place]
    if section in FAMILIES[family]:
        assert all("wgmma" in reason for reason in reasons)
    else:
        assert len(reasons) == 1 and ("; expected " in reasons[0] or "they stand in the section" in reasons[0]), reasons


def test_a_section_that_no_family_serves_is_a_problem_too(monkeypatch):
    row = KernelRow.model_validate(dict(name="r", family="decode", section="grouped", tile=[64, 64, 64]))
    for of_section in FAMILIES.values():
        monkeypatch.delitem(of_section, "grouped", raising=False)
    assert config_findings(row, ARCH) == [("family", "no family has kernels for the section grouped: scaled_mm/kernels/registry.py registers none")]


def test_show_has_a_heading_for_every_section(capsys):
    assert main(["table", "show", "--arch", ARCH]) == 0
    shown = capsys.readouterr().out
    for name in OTHER_SECTIONS:
        assert f"{SECTIONS[name].heading}, fallback {getattr(load_table(ARCH), name).fallback}" in shown
