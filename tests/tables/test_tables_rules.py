"""Each rule refuses the row that breaks it, with file, line and reason, and lets its legal neighbour pass."""

from __future__ import annotations

import pytest

from scaled_mm.kernels.c3x import epilogue_bytes
from scaled_mm.kernels.registry import config_cost, config_findings
from scaled_mm.tables import KernelRow, TableError, load_table

LARGE = "{name: large, family: c3x, tile: [128, 128, 128], schedule: pingpong}"


def large(**changes) -> str:
    row = {"name": "large", "family": "c3x", "tile": [128, 128, 128], "schedule": "pingpong", **changes}
    return "{" + ", ".join(f"{key}: {value}" for key, value in row.items() if value is not None) + "}"


ILLEGAL = {
    "tile m not a multiple of 64": (dict(tile=[96, 128, 128]), "tile", "multiple of 64"),
    "tile m beyond TMA": (dict(tile=[320, 64, 64], schedule="warp_specialized"), "tile", "at most 256"),
    "tile n not a multiple of 8": (dict(tile=[128, 20, 128]), "tile", "multiple of 8"),
    "tile n beyond wgmma": (dict(tile=[64, 264, 128]), "tile", "at most 256"),
    "tile k not a multiple of 32": (dict(tile=[128, 128, 48]), "tile", "multiple of 32"),
    "no schedule": (dict(schedule=None), "schedule", "needs a schedule"),
    "cooperative with tile m 64": (dict(tile=[64, 128, 128], schedule="cooperative"), "schedule", "tile m = 64"),
    "cooperative with tile m 192": (dict(tile=[192, 128, 128], schedule="cooperative"), "schedule", "tile m = 192"),
    "pingpong with tile m 256": (dict(tile=[256, 64, 128]), "schedule", "expected 64 or 128"),
    "stream_k in pingpong": (dict(scheduler="stream_k"), "scheduler", "cooperative kernels; this one is pingpong"),
    "stream_k with prefetch": (dict(schedule="cooperative", scheduler="stream_k", prefetch=1024), "prefetch", "first step of K"),
    "stream_k with a swizzle": (dict(schedule="cooperative", scheduler="stream_k", swizzle=2), "swizzle", "padding tiles of the swizzle"),
    "split_k": (dict(split_k=2), "split_k", "by scheduler: stream_k; leave split_k out"),
    "swizzle without a persistent grid": (dict(schedule="warp_specialized", swizzle=2), "swizzle", "persistent grid"),
    "raster without a persistent grid": (dict(schedule="warp_specialized", raster="along_m"), "raster", "persistent grid"),
    "prefetch of half a tile": (dict(prefetch=192), "prefetch", "whole tiles of 128"),
    "cluster of three": (dict(cluster=[3, 1]), "cluster", "expected one of 1, 2, 4, 8"),
    "cluster of sixteen blocks": (dict(cluster=[4, 4]), "cluster", "16 thread blocks"),
    "multicast parts below the swizzle": (dict(tile=[64, 16, 256], cluster=[4, 1]), "cluster", "multiple of 8 rows"),
    "256 accumulators in pingpong": (dict(tile=[128, 256, 128]), "tile", "256 registers per thread"),
    "256 accumulators in cooperative": (
        dict(tile=[256, 256, 64], schedule="cooperative"),
        "tile",
        "256 registers per thread",
    ),
    "too many stages": (dict(stages=7), "stages", "bytes of shared memory, sm90 has 232448"),
    "a single stage": (dict(stages=1), "stages", "at least 2"),
    "no two stages fit": (dict(tile=[128, 128, 512]), "tile", "a pipeline needs 2"),
    "a warp tile in a c3x row": (dict(warp=[64, 64, 64]), "warp", "leave it out"),
    "generic with a schedule": (dict(family="generic", tile=[64, 64, 64]), "schedule", "leave it out"),
    "generic with prefetch": (
        dict(family="generic", schedule=None, tile=[64, 64, 64], prefetch=64),
        "prefetch",
        "leave it out",
    ),
    "generic with an odd tile": (
        dict(family="generic", schedule=None, tile=[64, 24, 64]),
        "tile",
        "multiple of 16",
    ),
}


@pytest.mark.parametrize("changes, field, reason", ILLEGAL.values(), ids=ILLEGAL)
def test_an_illegal_row_is_refused_with_file_line_field_and_reason(table_file, changes, field, reason):
    table_file.replace(LARGE, large(**changes))
    with pytest.raises(TableError) as caught:
        load_table(table_file.path)
    line = table_file.line_of("name: large")
    matching = [p for p in caught.value.problems if p.field == f"rows[1].{field}" and reason in p.reason]
    assert [(p.file, p.line) for p in matching] == [(str(table_file.path), line)]
    assert f"{table_file.path}:{line}: rows[1].{field}: " in str(caught.value)


LEGAL = {
    "128x192 pingpong: 192 accumulators": dict(tile=[128, 192, 128]),
    "256x192 cooperative: 192 accumulators": dict(tile=[256, 192, 64], schedule="cooperative"),
    "swizzle and raster with pingpong": dict(swizzle=8, raster="along_n"),
    "prefetch of two tiles": dict(prefetch=256),
    "the most stages that fit": dict(stages=6),
    "two stages": dict(stages=2),
    "tile n 8": dict(tile=[64, 8, 256], schedule="warp_specialized", swap_ab="true"),
    "stream_k with cooperative": dict(schedule="cooperative", scheduler="stream_k"),
    "cluster of eight blocks": dict(cluster=[4, 2]),
    "cluster 1x8": dict(tile=[64, 64, 256], cluster=[1, 8]),
}


@pytest.mark.parametrize("changes", LEGAL.values(), ids=LEGAL)
def test_a_row_on_the_legal_side_of_a_rule_loads(table_file, changes):
    table_file.replace(LARGE, large(**changes))
    row = load_table(table_file.path).row("large")
    assert row.name == "large" and config_findings(row, "sm90") == []


DECODE = dict(family="decode", tile=[64, 16, 128], schedule=None, swap_ab="true", split_k=4, stages=8)
ILLEGAL_DECODE = {
    "another schedule": (dict(schedule="pingpong"), "schedule", "cooperative, a persistent kernel, or none"),
    "a cluster along M": (dict(cluster=[1, 2]), "cluster", "expected m of 1, 2, 4, 8"),
    "three tiles of columns": (dict(cluster=[3, 1]), "cluster", "expected m of 1, 2, 4, 8"),
    "sixteen blocks": (dict(cluster=[4, 1], tile=[64, 32, 128]), "cluster", "a cluster of 8 blocks is the most"),
    "rows that cannot be shared": (dict(cluster=[2, 1], tile=[64, 8, 128]), "cluster", "whole groups of 8"),
    "a prefetch": (dict(prefetch=128), "prefetch", "leave it out"),
    "not swapped": (dict(swap_ab=None), "swap_ab", "swap_ab: true"),
    "a wider tile": (dict(tile=[256, 16, 128]), "tile", "m = 64 or 128 and k = 128"),
    "a longer step": (dict(tile=[64, 16, 256]), "tile", "m = 64 or 128 and k = 128"),
    "rows that are no multiple of 8": (dict(tile=[64, 20, 128]), "tile", "multiple of 8, from 32 on of 16"),
    "40 rows": (dict(tile=[64, 40, 128]), "tile", "multiple of 8, from 32 on of 16"),
    "too many rows": (dict(tile=[64, 272, 128], stages=2), "tile", "at most 256"),
    "a split in three": (dict(split_k=3), "split_k", "expected one of 1, 2, 4, 8"),
    "automatic stages": (dict(stages=None), "stages", "expected a number of at least 2"),
    "one stage": (dict(stages=1), "stages", "expected a number of at least 2"),
    "too many stages": (dict(stages=23), "stages", "bytes of shared memory, there are 232448"),
}


@pytest.mark.parametrize(
    "changes", [dict(cluster=[2, 1]), dict(schedule="cooperative"), dict(cluster=[4, 1], split_k=1, tile=[64, 32, 128])], ids=str
)
def test_a_decode_row_may_share_rows_of_a_and_be_persistent(table_file, changes):
    table_file.replace(LARGE, large(**{**DECODE, **changes}))
    assert load_table(table_file.path).row("large").family == "decode"


@pytest.mark.parametrize("changes, field, reason", ILLEGAL_DECODE.values(), ids=ILLEGAL_DECODE)
def test_an_illegal_decode_row_is_refused_and_its_legal_neighbour_is_not(table_file, changes, field, reason):
    table_file.replace(LARGE, large(**DECODE))
    assert load_table(table_file.path).row("large").family == "decode"
    table_file.replace(large(**DECODE), large(**{**DECODE, **changes}))
    with pytest.raises(TableError) as caught:
        load_table(table_file.path)
    assert [p.field for p in caught.value.problems if reason in p.reason] == [f"rows[1].{field}"]


def test_c3x_rows_are_refused_on_architectures_without_wgmma(table_file):
    table_file.replace("arch: sm90", "arch: sm80")
    with pytest.raises(TableError) as caught:
        load_table(table_file.path)
    assert [problem.field for problem in caught.value.problems] == ["rows[0].family", "rows[1].family"]
    assert all("sm80 lacks" in problem.reason for problem in caught.value.problems)


def make_row(tile, schedule, **changes) -> KernelRow:
    return KernelRow(name="row", family="c3x", tile=tile, schedule=schedule, **changes)


def test_auto_stages_are_what_fits_beside_the_epilogue():
    # A stage: (128 + 128) * 128 + 16 = 32784 bytes; the epilogue: 2 * 64 * 32 * 4 + 4 * 4 * 128 = 18432.
    cost = config_cost(make_row([128, 128, 128], "pingpong"), "sm90")
    assert (cost.stage_bytes, cost.epilogue_bytes) == (32784, 18432)
    assert cost.stages == (227 * 1024 - 18432) // 32784 == 6
    assert cost.shared_memory == 18432 + 6 * 32784


def test_explicit_stages_are_taken_as_they_are():
    cost = config_cost(make_row([128, 128, 128], "pingpong", stages=3), "sm90")
    assert cost.stages == 3 and cost.shared_memory == 18432 + 3 * 32784


def test_the_epilogue_of_a_narrow_tile_has_one_buffer_and_a_2_byte_out_needs_less():
    narrow = make_row([64, 16, 256], "warp_specialized")
    assert epilogue_bytes(narrow) == 64 * 16 * 4 + 4 * 4 * 16
    assert epilogue_bytes(narrow, out_bytes=2) == 64 * 16 * 2 + 4 * 4 * 16
    assert epilogue_bytes(make_row([128, 256, 128], "cooperative")) == 2 * 128 * 32 * 4 + 4 * 4 * 256


@pytest.mark.parametrize(
    "tile, schedule, registers",
    [
        ([128, 128, 128], "pingpong", 128),
        ([128, 192, 128], "pingpong", 192),
        ([128, 256, 128], "cooperative", 128),
        ([256, 128, 128], "cooperative", 128),
        ([64, 256, 128], "warp_specialized", 128),
    ],
)
def test_accumulators_are_spread_over_the_warpgroups_that_share_a_tile(tile, schedule, registers):
    assert config_cost(make_row(tile, schedule), "sm90").accumulators == registers
