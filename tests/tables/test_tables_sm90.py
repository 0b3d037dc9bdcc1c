"""The SM90 table against the measurements that it was drawn from."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from scaled_mm.kernels.gpu import facts
from scaled_mm.kernels.registry import config_cost
from scaled_mm.measure.shapes import random_cases
from scaled_mm.tables import FASTEST, available_tables, check_table, load_table

DATA = Path(__file__).parent / "data"
H200 = facts("NVIDIA H200", "sm90", 132)


def read(name: str) -> list[dict]:
    return json.loads((DATA / name).read_text())["cases"]


# The grid's products: M <= 128 were timed on a cool H200, M >= 256 on an H200 under load. M >= 256: with constant weights only; no
# kernel config that is chosen for such M loads weights early.
LOADED = [case for case in read("h200_loaded.json") if case["kind"] == "layer"]
CASES = [*(case for case in read("h200_rows.json") if case["M"] <= 128), *LOADED]
STOCK = {(case["M"], case["N"], case["K"]): case["best_us"] for case in json.loads((DATA / "h200_stock_sweep.json").read_text())["cases"]}
# What the table reaches, over the row that is best for constant weights and tensors together: WORST, GEOMETRIC_MEAN.
# Over the best row for each of the two: WORST_OF_KIND, GEOMETRIC_MEAN_OF_KIND.
WORST = 1.01
GEOMETRIC_MEAN = 1.0
WORST_OF_KIND = 1.032
GEOMETRIC_MEAN_OF_KIND = 1.0023
SHORT = {"warp_specialized": "ws", "pingpong": "pp", "cooperative": "co"}


@pytest.fixture(scope="module")
def table():
    return load_table("sm90")


def edges(bounds):
    """Each bound with its neighbours, 1, and a size beyond the last."""
    finite = sorted({bound for bound in bounds if bound is not None})
    return sorted({1, *(size for bound in finite for size in (bound - 1, bound, bound + 1)), 4 * max(finite, default=1)})


def times_of(case, constant_b: bool) -> dict[str, float]:
    return case["us"] if constant_b else case.get("us_tensor", case["us"])


def dispatched_us(table, case, constant_b: bool = True) -> float:
    row, times = table.select(case["M"], case["N"], case["K"], constant_b, gpu=H200).row, times_of(case, constant_b)
    assert row.name in times, f"{row.name} is not among the measured kernels of M={case['M']} N={case['N']} K={case['K']}"
    return times[row.name]


def over_the_best(table, case) -> float:
    """Time of the table's rows over that of the best one; where plain tensors were measured too, they count as much as constant weights."""
    best = min(math.sqrt(case["us"][row] * us) for row, us in times_of(case, constant_b=False).items())
    return math.sqrt(dispatched_us(table, case, True) * dispatched_us(table, case, False)) / best


def geometric_mean(values) -> float:
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['M']}x{case['N']}x{case['K']}")
def test_every_measured_product_gets_a_row_close_to_the_best(table, case):
    assert over_the_best(table, case) <= WORST


def test_the_dispatched_rows_are_close_to_the_best_in_the_geometric_mean(table):
    assert len(CASES) == 99
    assert geometric_mean(over_the_best(table, case) for case in CASES) <= GEOMETRIC_MEAN


@pytest.mark.parametrize("constant_b", [True, False], ids=["constant weights", "tensors"])
def test_every_kind_of_weight_gets_rows_close_to_its_best(table, constant_b):
    ratios = [dispatched_us(table, case, constant_b) / min(times_of(case, constant_b).values()) for case in CASES]
    assert max(ratios) <= WORST_OF_KIND
    assert geometric_mean(ratios) <= GEOMETRIC_MEAN_OF_KIND


def test_decode_rows_are_faster_than_the_best_stock_kernels(table):
    # Only where power does not set the clock can two runs be compared: M <= 64. Stock kernels launch without overlap.
    ratios = [
        STOCK[case["M"], case["N"], case["K"]] / dispatched_us(table, case)
        for case in CASES
        if case["M"] <= 64 and (case["M"], case["N"], case["K"]) in STOCK
    ]
    assert len(ratios) == 32 and geometric_mean(ratios) >= 1.13


def test_every_architecture_table_has_no_problem_and_is_for_the_architecture_it_is_named_for():
    tables = available_tables()
    assert "sm90" in dict(tables)
    for arch, path in tables:
        assert check_table(path, arch) == []
        assert load_table(arch).arch == arch


@pytest.mark.parametrize("arch", [arch for arch, _ in available_tables()])
def test_m_swept_across_every_bucket_edge_always_finds_the_first_bucket_that_fits(arch):
    table = load_table(arch)
    names = {row.name for row in table.rows}
    for M in edges(bucket.m for bucket in table.buckets):
        for N in edges(bucket.n for bucket in table.buckets):
            for K in edges(bucket.k for bucket in table.buckets):
                for constant_b in (False, True):
                    selection = table.select(M, N, K, constant_b)
                    assert selection.row.name in names
                    chosen = table.buckets[selection.bucket_index]
                    assert chosen.kernel in (FASTEST, selection.row.name) and chosen.covers(M, N, K, constant_b)
                    assert not any(bucket.covers(M, N, K, constant_b) for bucket in table.buckets[: selection.bucket_index])


@pytest.mark.parametrize("arch", [arch for arch, _ in available_tables()])
def test_the_last_bucket_is_open_and_takes_what_no_other_does(arch):
    table = load_table(arch)
    last = table.buckets[-1]
    assert (last.m, last.n, last.k, last.constant_b) == (None, None, None, False)
    assert table.select(2**40, 2**40, 2**40).bucket_index == len(table.buckets) - 1


@pytest.mark.parametrize("arch", [arch for arch, _ in available_tables()])
def test_every_row_is_used(arch):
    table = load_table(arch)
    used = {bucket.kernel for bucket in table.buckets} | {table.fallback}
    if FASTEST in used:
        used |= set(table.times)  # chosen by a time that was measured
        used |= {table.fastest(case.M, case.N // 16 * 16, case.K // 16 * 16)[0][1].name for case in random_cases(1500, 1)}
    assert [row.name for row in table.rows if row.name not in used] == []


def test_every_row_fits_an_h200_with_room_for_two_stages(table):
    for row in table.rows:
        cost = config_cost(row, "sm90")
        assert cost.shared_memory <= 227 * 1024
        if row.family == "c3x":
            assert cost.stages >= 2 and cost.accumulators <= 224


def test_every_row_name_describes_its_row(table):
    for row in table.rows:
        if row.family == "generic":
            assert row.name == f"generic_{row.tile}"
            continue
        if row.family == "decode":
            share = "" if row.cluster.m == 1 else f"_c{row.cluster.m}1"
            assert row.name == f"decode_{row.tile}{'_co' if row.schedule else ''}{share}_k{row.split_k}_x{row.stages}"
            continue
        cluster = "" if row.cluster == (1, 1) else f"_c{row.cluster.m}{row.cluster.n}"
        swizzle = "" if row.swizzle == 1 else f"_s{row.swizzle}"
        prefetch = "" if row.prefetch == 0 else f"_p{row.prefetch}"
        swap = "_swap" if row.swap_ab else ""
        stages = "" if row.stages == "auto" else f"_x{row.stages}"
        schedule = "sk" if row.scheduler == "stream_k" else SHORT[row.schedule]
        assert row.name == f"c3x_{row.tile}_{schedule}{cluster}{swap}{swizzle}{prefetch}{stages}"


def test_the_fallback_takes_any_alignment_and_k_of_zero(table):
    fallback = table.row(table.fallback)
    assert fallback.family == "generic" and fallback.alignment == (1, 1, 1)
    selection = table.select(7, 11, 0)
    assert selection.row == fallback and selection.bucket_index == -1 and "K = 0" in selection.reason


@pytest.mark.parametrize("product", [(349, 832, 43200), (254, 2304, 27264), (675, 1344, 31616), (2653, 576, 63104)])
def test_few_tiles_with_a_long_k_are_divided_along_k(table, product):
    """Products of docs/decisions/0022-stream-k.md, on which stream-K is at least 1.25 times as fast."""
    row = table.select(*product, constant_b=True).row
    assert row.scheduler == "stream_k" and row.schedule == "cooperative"


@pytest.mark.parametrize("product", [(4096, 4096, 4096), (16, 4096, 4096), (8192, 57344, 8192)])
def test_tiles_that_fill_waves_or_have_a_short_k_are_not_divided(table, product):
    assert table.select(*product, constant_b=True).row.scheduler == "persistent"
