"""GGUF products through the C core on a machine that pretends to have a GPU: dispatch, modes, workspaces, launches and refusals."""

from __future__ import annotations

import json

import pytest
from fake_gpu import host_library

from scaled_mm.autotune.write import table_text
from scaled_mm.gguf_formats import WEIGHT_FORMATS
from scaled_mm.tables import FASTEST, Bucket, Times, available_tables, check_table, load_table
from scaled_mm.tables.schema import ModeRule


@pytest.fixture
def ask(fake_gpu):
    def ask(function: str, *arguments):
        done = fake_gpu.python(function, *arguments, script="fake_gpu_gguf.py")
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout)

    return ask


def test_every_gguf_product_is_launched_with_what_gives_the_value_of_the_formula(ask, fake_gpu):
    answer = ask("products", fake_gpu.kernels, 600)
    table = load_table("sm90").gguf
    assert sum(answer["rows"].values()) == 600 and set(answer["rows"]) == {row.name for row in table.rows}, answer
    assert set(answer["modes"]) == {"auto w4a8", "auto w4a16", "auto w16a16", "w4a8 w4a8", "w4a16 w4a16", "w16a16 w16a16"}, answer


def test_a_kernel_may_read_a_weight_early_only_where_the_caller_says_that_it_is_constant(ask, fake_gpu):
    assert ask("told", fake_gpu.kernels) == {"True": [True, True], "False": [False, True]}


def test_a_bucket_of_a_mode_or_of_formats_with_minima_serves_nothing_else(ask, tmp_path):
    whole = load_table("sm90")
    generic = whole.row(whole.fallback)
    rows = whole.gguf.rows[:2]
    few = (dict(m=8, mode="w4a8"), dict(m=6, minima=True))
    chosen = (*(Bucket(**one, kernel=rows[0].name) for one in few), Bucket(kernel=rows[1].name))
    modes = (ModeRule(m=7, mode="w4a8"), ModeRule(mode="w4a16"))
    block = whole.gguf.model_copy(update={"rows": rows, "buckets": chosen, "fallback": rows[1].name, "auto": modes})
    last = whole.buckets[-1].model_copy(update={"kernel": generic.name})
    table = whole.model_copy(update={"rows": (generic,), "buckets": (last,), "grouped": None, "block_scaled": None, "gguf": block})
    answer = ask("buckets", host_library(tmp_path / "library", table))
    for case, row in answer.items():
        served = "q8_1" in case or "w4a8" in case or case in ("6 q4_1", "6 q5_1")
        assert row == rows[not served].name, (case, row)
    assert len(answer) == 13 + len(WEIGHT_FORMATS)


def test_the_fastest_kernel_config_is_the_same_in_c_and_in_python(ask, tmp_path):
    whole = load_table("sm90")
    tiles = {
        32: dict(start=0, step=1.55, tile=1.02, sharing=4.01),
        128: dict(start=0, step=1.61, tile=1, sharing=5.57),
        192: dict(start=0, step=2.06, tile=3.2, sharing=5.26, two_tiles=6.13),
        256: dict(start=0, step=2.77, tile=2.99, sharing=6.28, two_tiles=11.8),
    }
    times = {row.name: Times(**tiles[row.tile.m]) for row in whole.gguf.rows if row.family == "gguf_wgmma" and row.tile.m in tiles}
    times["gguf_wgmma_cluster_128x64_k8_x4"] = Times(start=0.9, step=1.1, tile=1.6)
    buckets = (whole.gguf.buckets[0], Bucket(mode="w16a16", kernel=FASTEST), Bucket(kernel=whole.gguf.rows[-1].name))
    section = whole.gguf.model_copy(update={"times": times, "buckets": buckets})
    table = whole.model_copy(update={"gguf": section})
    path = tmp_path / "sm90.yaml"
    path.write_text(table_text(table))
    assert load_table(path).gguf.buckets == buckets and check_table(path) == []
    chosen = ask("fastest", host_library(tmp_path / "library", table), path)["rows"]
    assert len(chosen) == len(times) and min(chosen.values()) > 20, chosen


def test_the_fastest_kernel_config_of_sm90_s_table_follows_the_number_of_sms_in_c_and_in_python(fake_gpu):
    path, found = dict(available_tables())["sm90"], []
    for sms in (132, 78):
        done = fake_gpu.python("fastest", fake_gpu.kernels, path, script="fake_gpu_gguf.py", FAKE_SMS=str(sms))
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    section = load_table("sm90").gguf
    assert set(found[0]["rows"]) == set(section.times) and found[0]["rows"] != found[1]["rows"], found
    of_conditions = [index for index, bucket in enumerate(section.buckets) if bucket.minima]
    assert of_conditions and set(of_conditions) <= set(found[0]["buckets"]), found


def test_predicted_times_order_the_stand_ins_of_products_whose_bucket_takes_the_fastest_and_no_others(ask, tmp_path):
    whole = load_table("sm90")
    names = {"gguf_mma_16x16_x2", "gguf_wgmma_128x32_k16_x2", "gguf_wgmma_128x128_k16_x3", "gguf_wgmma_128x256_k16_x2"}
    few, many = (whole.gguf.select(m, 4096, 4096, mode=mode).row.name for m, mode in ((1, "w4a16"), (200, "w16a16")))
    assert not {few, many} & names
    built = whole.gguf.model_copy(update={"rows": tuple(row for row in whole.gguf.rows if row.name in names)})
    others = {"grouped": None, "block_scaled": None, "grouped_block_scaled": None}
    partial = whole.model_copy(update={"rows": (whole.row(whole.fallback),), "gguf": built, **others})
    nearest = next(row.name for _, row in whole.gguf.fastest(200, 4096, 4096) if row.name in names)
    answer = ask("stand_ins", host_library(tmp_path / "library", partial, index_table=whole))
    assert answer == [["gguf_mma_16x16_x2", few], [nearest, many]]  # the first of the table; the fastest that is built


def test_what_create_check_and_calculate_refuse(ask, fake_gpu):
    answer = ask("refusals", fake_gpu.kernels)
    size = answer.pop("size")
    *others, last = WEIGHT_FORMATS
    weights = f"weight: expected {', '.join(others)} or {last}, got "
    activations = "activation: expected q8_1, float16, bfloat16 or float32, got "
    expected = {
        "fine": ("SUCCESS", ""),
        "no weight": ("NULL_POINTER", "weight: expected a tensor [N, K], got none"),
        "weight of q8_1": ("BAD_TENSOR_DTYPE", weights + "q8_1"),
        "weight of floats": ("BAD_TENSOR_DTYPE", weights + "float32"),
        "K of 48": ("BAD_TENSOR_SHAPE", "weight: expected K a multiple of 32, the values of a block, got [64, 48]"),
        "blocks apart": ("BAD_TENSOR_STRIDES", "weight: expected stride 1 in dimension 1, for the blocks of a row lie one after the other, got 2"),
        "tiles of odd addresses": ("BAD_TENSOR_ALIGNMENT", "weight: expected an alignment of at least 16 bytes for packed tiles, got 8"),
        "weight of three": ("BAD_TENSOR_DTYPE", weights + "float32"),
        "activation of q8_0": ("BAD_TENSOR_DTYPE", activations + "q8_0"),
        "activation of int8": ("BAD_TENSOR_DTYPE", activations + "int8"),
        "another K": ("BAD_TENSOR_SHAPE", "activation: expected [M, K] with K = 256 as in weight [N, K], got [9, 288]"),
        "packed activations": ("BAD_PARAM", "activation: expected flags 0, got 2"),
        "out of int32": ("BAD_TENSOR_DTYPE", "out: expected float16, bfloat16 or float32, got int32"),
        "out transposed": ("BAD_TENSOR_SHAPE", "out: expected [N, M] = [64, 9], got [9, 64]"),
        "out that overlaps": ("BAD_TENSOR_STRIDES", "out: expected strides under which no two elements overlap"),
        "bias of another dtype": ("BAD_TENSOR_DTYPE", "bias: expected out's dtype float32 or float32, got float16"),
        "bias of another size": ("BAD_TENSOR_SHAPE", "bias: expected [N] with N = 64 as in weight [N, K], got [63]"),
        "bias of two dimensions": ("BAD_TENSOR_SHAPE", "bias: expected 1 dimension [N], got 2: [1, 64]"),
        "w4a16 of q8_1": ("BAD_PARAM", "mode: expected auto or w4a8 with q8_1 activations, got w4a16"),
        "w4a16 of float32": ("BAD_PARAM", "mode: expected auto, w4a8 or w16a16 with float32 activations, got w4a16"),
        "a row of another table": ("KERNEL_NOT_FOUND", "kernel: expected a GGUF row of sm90 (sm90.yaml (built in)), got generic_64x64x64"),
        "no data of weight": ("NULL_POINTER", "weight: expected a data pointer, got null"),
        "no bias": ("NULL_POINTER", "bias: expected a data pointer, got null"),
        "odd tiles": ("BAD_TENSOR_ALIGNMENT", "weight: expected a data pointer aligned to 16 bytes as the descriptor says, got "),
        "odd activation": ("BAD_TENSOR_ALIGNMENT", "activation: expected a data pointer aligned to "),
        "out in the weight": ("BAD_PARAM", "out: expected memory apart from every input, got an overlap with weight"),
        "no workspace": ("INSUFFICIENT_WORKSPACE", f"workspace: expected at least {size} bytes, got 0"),
        "small workspace": ("INSUFFICIENT_WORKSPACE", f"workspace: expected at least {size} bytes, got {size - 1}"),
        "unaligned workspace": ("BAD_TENSOR_ALIGNMENT", "workspace: expected a pointer aligned to 16 bytes, got "),
        "workspace in the weight": ("BAD_PARAM", "workspace: expected memory apart from every tensor, got an overlap with weight"),
        "workspace in the last powers": ("BAD_PARAM", "workspace: expected memory apart from every tensor, got an overlap with weight"),
        "launched": ("SUCCESS", ""),
        "the same": ("SUCCESS", ""),
        "the same, constant": ("SUCCESS", ""),
        "blocks for tiles": ("BAD_PARAM", "weight: expected packed tiles as the descriptor was created, got blocks"),
        "another format": ("BAD_TENSOR_DTYPE", "as the descriptor was created, got q"),
        "a bias less": ("BAD_PARAM", "bias: expected a tensor as the descriptor was created, got none"),
    }
    assert answer.keys() == expected.keys()
    for name, (status, message) in answer.items():
        assert status == expected[name][0] and expected[name][1] in message, (name, status, message)


@pytest.mark.parametrize("arch", [arch for arch, _ in available_tables()])
def test_every_architecture_has_gguf_kernels_that_take_anything(arch):
    table = load_table(arch).gguf
    assert {bucket.kernel for bucket in table.buckets} - {FASTEST} <= {row.name for row in table.rows}
    assert all(row.section == "gguf" and row.alignment == (1, 1, 1) and row.store_bytes == 1 for row in table.rows)
    assert table.auto[-1].m is None
