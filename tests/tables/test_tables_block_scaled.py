"""The section `block_scaled` of a tile table: the same rules, its own rows and buckets, and rules of its own."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest
import yaml

from scaled_mm.kernels.arch import ARCHES
from scaled_mm.kernels.gpu import facts
from scaled_mm.kernels.registry import config_cost, config_findings
from scaled_mm.tables import KernelRow, available_tables, check_table, load_table

PATHS = dict(available_tables())
ROW = dict(name="r", family="c2x", tile=[128, 128, 128], warp=[64, 32, 128], stages=3, section="block_scaled")


def reasons(tmp_path, arch: str, edit) -> list[tuple[str, str]]:
    document = copy.deepcopy(yaml.safe_load(PATHS[arch].read_text()))
    edit(document)
    path = tmp_path / f"{arch}.yaml"
    path.write_text(yaml.safe_dump(document))
    return [(problem.field, problem.reason) for problem in check_table(path)]


@pytest.mark.parametrize("arch", PATHS)
def test_m_chooses_the_row(arch):
    section = load_table(arch).block_scaled
    for M in (1, 16, 17, 64, 4096):
        for N in (512, 8192, 57344):
            assert section.select(M, N, 4096).row == section.fastest(M, N, 4096)[0][1]
    assert section.select(1, 4096, 4096).row.tile.m < section.select(8192, 8192, 4096).row.tile.m
    assert section.select(16, 4096, 0).row.name == section.fallback
    for served in load_table(arch).serves:
        for row in section.rows:
            assert config_cost(row, arch).shared_memory <= ARCHES[served].shared_memory


@pytest.mark.parametrize(
    "changed, field, reason",
    [
        (dict(family="c3x", schedule="pingpong"), "family", "expected c2x, wgmma or generic"),
        (dict(tile=[128, 128, 64], warp=[64, 32, 64]), "tile", "tile k = 64, expected 128"),
        (dict(tile=[128, 256, 128]), "tile", "tile n = 256, expected 16, 32, 64 or 128"),
        (dict(tile=[128, 96, 128]), "tile", "tile n = 96"),
        (dict(warp=None), "warp", "needs a warp tile"),
        (dict(warp=[64, 8, 128]), "warp", "warp n = 8, expected a multiple of 16"),
        (dict(warp=[48, 32, 128]), "warp", "warp m = 48 does not divide tile m = 128"),
        (dict(warp=[64, 32, 64]), "warp", "warp k = 64, expected 128"),
        (dict(warp=[32, 16, 128]), "warp", "32 warps, expected an even number of at most 8"),
        (dict(warp=[64, 128, 128]), "warp", "64 threads fetch one row's scale each, and the tile has 128"),
        (dict(warp=[64, 64, 128]), "warp", "256 registers per thread, at most 128"),
        (dict(tile=[16, 128, 128], warp=[16, 16, 128]), "tile", "tile m = 16 rows of 128 bytes; 256 threads load 4096 bytes at a time"),
        (dict(stages=2), "stages", "with asynchronous copies at least 3"),
        (dict(stages="auto"), "stages", "says how many"),
        (dict(stages=6), "stages", "sm80 has 166912"),
        (dict(split_k=2), "split_k", "a block-scaled c2x row has none"),
        (dict(family="generic"), "warp", "a block-scaled generic row has none"),
        (dict(family="generic", warp=None, stages="auto"), "tile", "2 x 2 warps, and 32 or 64 each way"),
    ],
)
def test_what_is_wrong_with_a_row_is_said_with_its_field(changed, field, reason):
    assert config_findings(KernelRow.model_validate(ROW), "sm80") == []
    found = config_findings(KernelRow.model_validate({**ROW, **changed}), "sm80")
    assert any(name == field and reason in text for name, text in found), found


def test_turing_takes_two_stages():
    row = KernelRow.model_validate({**ROW, "tile": [128, 64, 128], "warp": [32, 32, 128]})
    assert any("Turing has no asynchronous copies" in reason for _, reason in config_findings(row, "sm75"))
    assert config_findings(row.model_copy(update={"stages": 2}), "sm75") == []


def test_the_section_is_checked_like_the_table(tmp_path):
    for edit, expected in [
        (lambda s: s["rows"][0].update(stages=2), ("block_scaled.rows[0].stages", "at least 3")),
        (
            lambda s: s["rows"][0].update(block_scaled=True),
            ("block_scaled.rows[0].block_scaled", "the section says which rows are block-scaled: leave it out"),
        ),
        (lambda s: s["rows"][0].update(name="generic_64x64x64"), ("block_scaled.rows[0].name", "is taken by the row on line")),
        (lambda s: s["buckets"][0].update(m=16), ("block_scaled.buckets[0]", "the last bucket must be open")),
        (lambda s: s.update(fallback=s["rows"][0]["name"]), ("block_scaled.fallback", "the fallback takes any strides")),
        (lambda s: s.pop("fallback"), ("block_scaled.fallback", "required key is missing")),
    ]:
        found = reasons(tmp_path, "sm80", lambda document, edit=edit: edit(document["block_scaled"]))
        assert any(field == expected[0] and expected[1] in reason for field, reason in found), found
    found = reasons(tmp_path, "sm80", lambda document: document["rows"][0].update(block_scaled=True))
    assert ("rows[0].block_scaled", "the section says which rows are block-scaled: leave it out") in found


def test_the_choice_of_sm90_is_close_to_the_best_of_the_products_that_its_times_were_fitted_to():
    table, gpu = load_table("sm90"), facts("NVIDIA H200", "sm90", 132)
    cases = json.loads((Path(__file__).parent / "data" / "h200_block_scaled.json").read_text())["cases"]
    rows, ratios = {row.name for row in table.block_scaled.rows}, []
    for case in cases:
        us = {name: time for name, time in case["us"].items() if name in rows}
        picked = table.block_scaled.fastest(case["M"], case["N"], case["K"], constant_b=True, gpu=gpu)
        ratios.append(next(us[row.name] for _, row in picked if row.name in us) / min(case["us"].values()))
    assert len(ratios) == 60
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) <= 1.016 and max(ratios) <= 1.2


@pytest.mark.parametrize(
    "changed, field, reason",
    [
        (dict(tile=[96, 64, 128]), "tile", "has m = 64 or 128"),
        (dict(tile=[64, 96, 128]), "tile", "tile n = 96, expected a divisor of 128"),
        (dict(tile=[64, 64, 384]), "tile", "and k of 128, 256, 512"),
        (dict(tile=[64, 128, 256], stages=2, swap_ab=True), "tile", "needs about 280 registers of a thread's 128"),
        (dict(stages="auto"), "stages", "expected a number of at least 2"),
        (dict(stages=20), "stages", "bytes of shared memory"),
        (dict(tile=[64, 128, 128], stages=2), "tile", "registers of a thread's 96"),
        (dict(warp=[64, 32, 128]), "warp", "leave it out"),
    ],
)
def test_what_is_wrong_with_a_wgmma_row_is_said_with_its_field(changed, field, reason):
    fields = dict(name="r", family="wgmma", tile=[64, 64, 128], stages=4, section="block_scaled")
    assert not config_findings(KernelRow(**fields), "sm90")
    assert config_findings(KernelRow(**fields), "sm80") == [("family", "wgmma rows use wgmma, which sm80 lacks; they run on sm90")]
    found = config_findings(KernelRow(**{**fields, **changed}), "sm90")
    assert any(name == field and reason in text for name, text in found), found
