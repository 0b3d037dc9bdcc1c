"""The section `gguf` of a tile table: its kernel configs, its buckets, and the meaning of mode "auto"."""

from __future__ import annotations

import copy
import json

import pytest
import yaml

from scaled_mm.cli import main
from scaled_mm.errors import BadParamError
from scaled_mm.gguf_formats import WEIGHT_FORMATS
from scaled_mm.kernels.arch import ARCHES
from scaled_mm.kernels.registry import config_cost, config_findings, family_of
from scaled_mm.tables import FASTEST, KernelRow, available_tables, check_table, load_table
from scaled_mm.tables.tuned import with_rows_of

PATHS = dict(available_tables())
MMA = dict(name="r", family="gguf_mma", tile=[8, 16, 256], stages=3, section="gguf")
CLUSTER = dict(name="r", family="gguf_wgmma_cluster", tile=[128, 128, 256], split_k=8, stages=3, section="gguf")
WGMMA = dict(name="r", family="gguf_wgmma", tile=[64, 128, 256], stages=4, section="gguf")


def problems(tmp_path, arch: str, edit):
    document = copy.deepcopy(yaml.safe_load(PATHS[arch].read_text()))
    edit(document)
    path = tmp_path / f"{arch}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path, check_table(path)


@pytest.mark.parametrize("arch", PATHS)
def test_the_tokens_choose_the_row(arch):
    section = load_table(arch).gguf
    for index, bucket in enumerate(section.buckets):
        sizes = [(m, bucket.n or 10**6, k) for m in (bucket.m or 10**6, bucket.m_min) for k in (4096, 256)]
        found = [section.select(*size, mode=bucket.mode, minima=bucket.minima) for size in sizes]
        chosen = next(selection for selection in found if selection.bucket_index == index)  # every bucket is reached
        assert chosen.row.name in section.times if bucket.kernel == FASTEST else chosen.row.name == bucket.kernel
    assert section.select(1, 4096, 0).row.name == section.select(1, 4096, 32).row.name  # K of 0 is a product as any other
    for served in load_table(arch).serves:
        for row in section.rows:
            assert config_cost(row, arch).shared_memory <= ARCHES[served].shared_memory


@pytest.mark.parametrize("row", [row for row in load_table("sm90").gguf.rows if row.family.startswith("gguf_wgmma")], ids=lambda row: row.name)
def test_every_format_of_a_wgmma_row_fits_and_some_format_has_all_its_stages(row):
    limit = ARCHES["sm90"].shared_memory
    counts = {fmt: family_of(row).stages(row, fmt, limit) for fmt in WEIGHT_FORMATS}
    assert max(counts.values()) == row.stages and min(counts.values()) >= 2
    assert all(family_of(row).shared_memory(row, fmt, limit) <= limit for fmt in WEIGHT_FORMATS)
    assert config_cost(row, "sm90").shared_memory == max(family_of(row).shared_memory(row, fmt, limit) for fmt in WEIGHT_FORMATS)


def test_the_shared_memory_of_rows_counts_weights_activations_and_sums():
    for fields, fmt, limit, expected in [
        (MMA, "q4_0", 163 * 1024, 3 * 16 * 2304),
        (MMA, "q4_0", 99 * 1024, 2 * 16 * 2304),
        (MMA, "q8_0", 99 * 1024, 16 * 16 * 8 * 4),  # one stage is none: weights go to registers, sums meet in shared memory
        (dict(MMA, stages=1), "q4_0", 64 * 1024, 16 * 16 * 8 * 4),
        (WGMMA, "q4_0", 227 * 1024, 4 * 2 * (9216 + 128) + 6 * 64 * (128 + 16) + 2048),  # with the powers of rows
        (dict(WGMMA, tile=[256, 128, 256], stages=2), "q8_0", 227 * 1024, 2 * 2 * (17408 + 128) + 4 * 256 * (128 + 16) + 2048),
        (dict(WGMMA, tile=[16, 64, 256], split_k=2, stages=5), "q5_1", 227 * 1024, 5 * (12288 + 16 * 8 * (64 + 8)) + 2048),
        (dict(WGMMA, tile=[32, 64, 256], split_k=2, stages=5), "q5_1", 227 * 1024, 5 * (12288 + 32 * 8 * 8) + 6 * 32 * (128 + 16) + 2048),
        (dict(WGMMA, split_k=2), "q4_1", 227 * 1024, 4 * (2 * 10240 + 64 * 8 * 8) + 6 * 64 * (128 + 16) + 2048),  # sums of a step's blocks
        (dict(MMA, tile=[32, 32, 256], stages=2), "q5_0", 163 * 1024, 2 * 8 * 2 * 2816),
        # Of clusters of two to eight thread blocks, those of six receive most: sums of 16 tokens from each of the five others.
        (dict(CLUSTER, tile=[64, 128, 256]), "q4_0", 227 * 1024, 3 * 2 * (9216 + 128) + 8 * 64 * 128 + 5 * 16 * 128 * 4 + 2048),
        (CLUSTER, "q8_0", 227 * 1024, 227 * 1024),  # as many stages of activations as fit
    ]:
        row = KernelRow.model_validate(fields)
        assert family_of(row).shared_memory(row, fmt, limit) == expected <= limit, (fields, fmt)


@pytest.mark.parametrize(
    "fields, changed, arch, field, reason",
    [
        (MMA, dict(family="c2x"), "sm80", "family", "no GGUF kernel is a c2x one; expected gguf_mma, gguf_wgmma or gguf_wgmma_cluster"),
        (MMA, dict(section="gemm"), "sm80", "family", "they stand in the section gguf"),
        (MMA, dict(stages="auto"), "sm80", "stages", "stages = auto; a gguf_mma row says how many, 1 for none"),
        (
            MMA,
            dict(stages=5),
            "sm80",
            "stages",
            "5 stages of 36864 bytes and 0 beside them, for q4_0, which takes least, are more shared memory than",
        ),
        (MMA, dict(split_k=2), "sm80", "split_k", "a gguf_mma row has none: leave it out"),
        (MMA, dict(section="grouped"), "sm80", "family", "they stand in the section gguf"),
        (MMA, dict(tile=[12, 16, 256]), "sm80", "tile", "tile m = 12 tokens, expected 8, 16, 32"),
        (MMA, dict(tile=[64, 16, 256]), "sm80", "tile", "tile m = 64 tokens, expected 8, 16, 32"),
        (MMA, dict(tile=[8, 64, 256]), "sm80", "tile", "tile n = 64 rows of the weight, expected 16 or 32"),
        (MMA, dict(tile=[8, 16, 128]), "sm80", "tile", "tile k = 128, expected 256"),
        (WGMMA, {}, "sm80", "family", "gguf_wgmma rows use wgmma, which sm80 lacks; they run on sm90"),
        (WGMMA, dict(tile=[64, 96, 256]), "sm90", "tile", "tile n = 96 rows of the weight, expected 64 or 128"),
        (WGMMA, dict(schedule="pingpong"), "sm90", "schedule", "a gguf_wgmma row has none"),
        (WGMMA, dict(stages="auto"), "sm90", "stages", "stages = auto; a gguf_wgmma row says how many, at least 2"),
        (WGMMA, dict(stages=1), "sm90", "stages", "stages = 1; a gguf_wgmma row says how many, at least 2"),
        (WGMMA, dict(split_k=17), "sm90", "split_k", "split_k = 17, expected 1 to 16"),
        (CLUSTER, dict(split_k=5), "sm90", "split_k", "split_k = 5, expected one of 2, 3, 4, 6, 8: the most thread blocks of a cluster"),
        (CLUSTER, dict(tile=[256, 128, 256]), "sm90", "tile", "tile m = 256 tokens, expected 16, 32, 64, 96, 128, 160"),
        (
            WGMMA,
            dict(stages=10),
            "sm90",
            "stages",
            "10 stages of 18688 bytes and 57344 beside them, for q4_0, which takes least, are more shared memory than the 232448",
        ),
        (WGMMA, dict(tile=[176, 128, 256]), "sm90", "tile", "tile m = 176 tokens, expected 8, 16, 32, 64, 96, 128, 144, 160, 192, 224, 256"),
        (
            dict(WGMMA, tile=[256, 128, 256], stages=2),
            dict(stages=5),
            "sm90",
            "stages",
            "5 stages of 18688 bytes and 149504 beside them, for q4_0, which takes least, are more shared memory",
        ),
    ],
)
def test_what_is_wrong_with_a_row_is_said_with_its_field(fields, changed, arch, field, reason):
    assert config_findings(KernelRow.model_validate(fields), "sm90") == []
    found = config_findings(KernelRow.model_validate({**fields, **changed}), arch)
    assert any(name == field and reason in text for name, text in found), found


def test_the_section_is_checked_like_the_table(tmp_path):
    for edit, expected in [
        (lambda s: s["rows"][0].update(split_k=2), ("gguf.rows[0].split_k", "leave it out")),
        (lambda s: s["rows"][0].update(gguf=True), ("gguf.rows[0].gguf", "the section says which rows are gguf: leave it out")),
        (lambda s: s["rows"][0].update(name="generic_64x64x64"), ("gguf.rows[0].name", "is taken by the row on line")),
        (lambda s: s["buckets"].pop(), ("gguf.buckets[1]", "the last bucket must be open")),
        (lambda s: s["buckets"][-1].update(mode="w4a8"), ("gguf.buckets[2]", "this one takes any M, any N, any K, mode w4a8")),
        (lambda s: s["buckets"][-1].update(minima=True), ("gguf.buckets[2]", "this one takes any M, any N, any K, formats with minima")),
        (lambda s: s["buckets"][0].update(minima=1), ("gguf.buckets[0].minima", "valid boolean")),
        (
            lambda s: s["buckets"].insert(1, {**s["buckets"][0], "minima": True}),
            (
                "gguf.buckets[1]",
                "unreachable: bucket 0 (M <= 8, any N, any K) comes first and takes all of M <= 8, any N, any K, formats with minima",
            ),
        ),
        (lambda s: s["buckets"][0].update(constant_b=True), ("gguf.buckets[0].constant_b", "take no prepared weight")),
        (lambda s: s["buckets"][0].update(mode="auto"), ("gguf.buckets[0].mode", "w4a8")),
        (lambda s: s["buckets"][0].update(activation="q8_1"), ("gguf.buckets[0].activation", "renamed: write mode: w4a8")),
        (lambda s: s.pop("fallback"), ("gguf.fallback", "required key is missing")),
        (lambda s: s.update(fallback="none"), ("gguf.fallback", "no row is named 'none'")),
        (lambda s: s.pop("auto"), ("gguf.auto", "required key is missing")),
        (lambda s: s.update(auto=[]), ("gguf.auto", "the last rule must be open")),
        (lambda s: s["auto"].pop(), ("gguf.auto", "the last rule must be open")),
        (
            lambda s: s["auto"].__setitem__(slice(0, 0), [{"m": 8, "mode": "w4a8"}, {"m": 8, "mode": "w4a8"}]),
            ("gguf.auto[1]", "unreachable: expected more tokens than the rule before, m <= 8"),
        ),
        (
            lambda s: s["auto"].append({"m": 64, "mode": "w4a8"}),
            ("gguf.auto[1]", "unreachable: expected more tokens than the rule before, m <= open"),
        ),
        (lambda s: s["auto"][0].update(mode="auto"), ("gguf.auto[0].mode", "w4a8")),
        (lambda s: s["auto"][0].update(n=8), ("gguf.auto[0].n", "unknown key; known keys: m, mode")),
        (lambda s: s.update(auto={"mode": "w4a8"}), ("gguf.auto", "expected a list")),
    ]:
        path, found = problems(tmp_path, "sm80", lambda document, edit=edit: edit(document["gguf"]))
        assert any(problem.field == expected[0] and expected[1] in problem.reason for problem in found), (expected, found)
        assert all(problem.line for problem in found) and all(problem.file == str(path) for problem in found)
    for key, value in (("mode", "w4a8"), ("minima", True)):
        _, found = problems(tmp_path, "sm80", lambda document, entry={key: value}: document["buckets"][-1].update(entry))
        assert any(p.field.endswith(f".{key}") and p.reason == "of GGUF products alone: leave it out" for p in found), found


def test_a_bucket_of_a_mode_serves_that_mode_alone(tmp_path):
    def edit(document):
        document["gguf"]["buckets"].insert(0, {"m": 8, "mode": "w4a8", "kernel": "gguf_mma_32x32_x2"})

    path, found = problems(tmp_path, "sm80", edit)
    assert found == []
    section = load_table(path).gguf
    assert section.buckets[0].flags == 2
    assert section.select(8, 4096, 4096, mode="w4a8").row.name == "gguf_mma_32x32_x2"
    assert section.select(8, 4096, 4096).row.name == section.select(8, 4096, 4096, mode="w16a16").row.name == "gguf_mma_16x8_x2"
    assert section.select(8, 4096, 4096, mode="w4a8").reason.startswith("bucket 0 (M <= 8, any N, any K, mode w4a8) of ")


def test_a_bucket_of_formats_with_minima_serves_those_alone(tmp_path):
    def edit(document):
        document["gguf"]["buckets"].insert(0, {"m": 8, "minima": True, "kernel": "gguf_mma_32x32_x2"})
        document["gguf"]["buckets"].insert(0, {"m": 4, "mode": "w4a8", "minima": True, "kernel": "gguf_mma_16x16_x2"})

    path, found = problems(tmp_path, "sm80", edit)
    assert found == []
    section = load_table(path).gguf
    assert [bucket.flags for bucket in section.buckets[:2]] == [18, 16]
    assert section.select(8, 4096, 4096, mode="w4a16", minima=True).row.name == "gguf_mma_32x32_x2"
    assert section.select(4, 4096, 4096, mode="w4a8", minima=True).row.name == "gguf_mma_16x16_x2"
    assert section.select(4, 4096, 4096, mode="w4a8").row.name == section.select(8, 4096, 4096, mode="w4a16").row.name == "gguf_mma_16x8_x2"
    reason = section.select(4, 4096, 4096, mode="w4a8", minima=True).reason
    assert reason.startswith("bucket 0 (M <= 4, any N, any K, mode w4a8, formats with minima) of ")


SHARED = {"start": 1.5, "step": 2.8, "tile": 3.0, "sharing": 6.0, "two_tiles": 12.0}
WIDEST = "gguf_wgmma_128x256_k16_x2"


def of_other_modes(buckets: list[dict]) -> list[dict]:
    return [bucket for bucket in buckets if bucket.get("mode") != "w16a16"]


def test_a_bucket_of_rounded_weights_may_take_the_fastest_kernel_config(tmp_path):
    def edit(document):
        section = document["gguf"]
        section["times"] = {WIDEST: SHARED, "gguf_wgmma_128x32_k16_x2": {**SHARED, "step": 1.5, "two_tiles": 0.0}}
        section["buckets"] = [{"m_min": 17, "mode": "w16a16", "kernel": "fastest"}, *of_other_modes(section["buckets"])]

    path, found = problems(tmp_path, "sm90", edit)
    assert found == []
    section = load_table(path).gguf
    assert section.select(20, 4096, 4096, mode="w16a16").row.name == "gguf_wgmma_128x32_k16_x2"
    chosen = section.select(4000, 4096, 4096, mode="w16a16")
    assert (chosen.row.name, chosen.bucket_index) == (WIDEST, 0) and "; the fastest by prediction, " in chosen.reason
    assert section.select(4000, 4096, 4096, mode="w4a16").bucket_index > 0 and section.select(16, 4096, 4096, mode="w16a16").bucket_index > 0
    assert [row.name for _, row in section.fastest(4000, 4096, 4096)] == [WIDEST, "gguf_wgmma_128x32_k16_x2"]


@pytest.mark.parametrize(
    "edit, field, reason",
    [
        (lambda s: s["buckets"].insert(0, {"mode": "w4a16", "kernel": "fastest"}), "gguf.buckets[0].kernel", "only mode w16a16 has predicted times"),
        (lambda s: s.pop("times"), "gguf.buckets[0].kernel", "no kernel config of this section has times: name one"),
        (lambda s: s["times"].update(none=SHARED), "gguf.times.none", "no row is named 'none'"),
        (
            lambda s: s["times"].update(gguf_mma_16x8_x2=SHARED),
            "gguf.times.gguf_mma_16x8_x2",
            "only gguf_wgmma_cluster kernel configs, and gguf_wgmma ones of 32 or more tokens, have times",
        ),
        (lambda s: s["times"][WIDEST].update(memory=0.9), f"gguf.times.{WIDEST}.memory", "have none: leave it out"),
        (
            lambda s: s["times"].update(gguf_wgmma_cluster_128x64_k8_x4=SHARED),
            "gguf.times.gguf_wgmma_cluster_128x64_k8_x4.sharing",
            "of gguf_wgmma kernel configs alone: leave it out",
        ),
        (lambda s: s["times"][WIDEST].update(wait=1.5), f"gguf.times.{WIDEST}.wait", "have none: leave it out"),
        (lambda s: s["times"].update(gguf_wgmma_128x16_k16_x3=SHARED), "gguf.times.gguf_wgmma_128x16_k16_x3", "gguf_wgmma ones of 32 or more tokens"),
        (lambda s: s["times"][WIDEST].update(step=1e155), f"gguf.times.{WIDEST}.step", "less than or equal to 1000000000"),
        (lambda s: s["times"][WIDEST].update(start=True), f"gguf.times.{WIDEST}.start", "expected a number, got True"),
        (lambda s: s["times"][WIDEST].update(sharing=-1), f"gguf.times.{WIDEST}.sharing", "greater than or equal to 0"),
    ],
)
def test_what_is_wrong_with_the_times_is_said_with_its_field(tmp_path, edit, field, reason):
    def change(document):
        document["gguf"]["times"] = {WIDEST: dict(SHARED)}
        document["gguf"]["buckets"] = [{"m_min": 17, "mode": "w16a16", "kernel": "fastest"}, *of_other_modes(document["gguf"]["buckets"])]
        edit(document["gguf"])

    _, found = problems(tmp_path, "sm90", change)
    assert any(problem.field == field and reason in problem.reason for problem in found), found


def test_a_kernel_config_of_the_wrong_family_is_refused_whether_it_has_times_or_not(tmp_path):
    def edit(document):
        name = next(iter(document["times"]))
        next(row for row in document["rows"] if row["name"] == name)["family"] = "wgmma"

    _, found = problems(tmp_path, "sm90", edit)
    assert len(found) == 1 and found[0].field == "rows[0].family" and found[0].line, found


def test_a_mode_that_is_none_is_refused():
    with pytest.raises(BadParamError, match="mode: expected w4a8, w4a16, w16a16 or None, got 'auto'"):
        load_table("sm90").gguf.select(10, 4096, 4096, mode="auto")


def test_a_bucket_of_a_former_version_has_one_problem(tmp_path):
    def edit(document):
        bucket = next(bucket for bucket in document["gguf"]["buckets"] if bucket.get("mode") == "w4a8")
        bucket["activation"] = {"w4a8": "q8_1"}[bucket.pop("mode")]

    _, found = problems(tmp_path, "sm90", edit)
    assert [problem.reason for problem in found] == ["renamed: write mode: w4a8"], found


def test_times_of_other_sections_need_the_memory_and_share_nothing(tmp_path):
    def edit(document):
        name = next(iter(document["times"]))
        document["times"][name] = {"start": 1.0, "step": 0.1, "tile": 1.0}
        document["times"]["c3x_256x192x128_co"] = {"start": 1.0, "step": 0.1, "tile": 1.0, "memory": 0.9, "sharing": 1.0}

    _, found = problems(tmp_path, "sm90", edit)
    assert sorted(problem.reason for problem in found) == ["of gguf_wgmma kernel configs alone: leave it out", "required key is missing"]


def test_a_tuned_table_without_the_section_has_that_of_its_architecture():
    base = load_table("sm90")
    older = base.gguf.model_copy(update={"buckets": base.gguf.buckets[-1:]})
    for section in (None, older):  # a tuned table has a copy of the section of its time
        assert with_rows_of(base.model_copy(update={"gguf": section}), base).gguf == base.gguf


def test_show_has_the_section(capsys):
    assert main(["table", "show", "--arch", "sm80"]) == 0
    shown = capsys.readouterr().out
    assert "GGUF formats (M: tokens, N: rows of the weight), fallback gguf_mma_32x32_x2; mode auto: w4a16" in shown
    assert main(["table", "show", "--arch", "sm80", "--json"]) == 0
    section = json.loads(capsys.readouterr().out)["gguf"]
    assert section["auto"] == [{"m": None, "mode": "w4a16"}]
    assert [row["name"] for row in section["rows"]] == ["gguf_mma_16x8_x2", "gguf_mma_16x16_x2", "gguf_mma_32x32_x2"] and section[
        "fallback"
    ] == "gguf_mma_32x32_x2"


def test_stages_of_large_tiles_leave_room_for_the_kernel_of_smaller_ones_inside():
    """A kernel config of 192 tokens contains one of 128 with a stage more: 4 stages of q8_0 would need more than 227 KiB."""
    row = KernelRow.model_validate(dict(WGMMA, tile=[192, 128, 256], stages=3))
    counts = {fmt: family_of(row).stages(row, fmt, 227 * 1024) for fmt in WEIGHT_FORMATS}
    assert counts["q8_0"] == 2 and counts["q4_0"] == 3
