"""Goals: a mean of each group, or each case; those of INT8 products."""

import math

import pytest

from scaled_mm.bench.goals import Goal, cells, count, outcome
from scaled_mm.bench.int8 import goals
from scaled_mm.bench.int8.goals import Timed


def test_a_goal_is_on_the_mean_of_each_group_or_on_each_case():
    cases = [("a", 1.0), ("a", 4.0), ("b", 1.5), ("c", None), ("d", 0.1)]
    value, covers = (lambda case: case[1]), (lambda case: case[0] != "d")
    mean = outcome(Goal("mean", value, 1.6, covers, group=lambda case: case[0]), cases, label=str)
    assert (mean.met, mean.reached, mean.worst, mean.at, mean.count) == (False, 1.5, 1.0, "('a', 1.0)", 3)  # of a 2.0, of b 1.5
    assert outcome(Goal("mean", value, 1.5, covers, group=lambda case: case[0]), cases, label=str).met is True
    each = outcome(Goal("each", value, 1.0, covers), cases, label=str)
    assert (each.met, each.reached) == (True, 1.0) and cells(each) == ["each", "1.00x", "1.00x", "yes", "1.00x at ('a', 1.0)", "3"]
    none = outcome(Goal("none", value, 1.0, lambda case: case[0] == "c"), cases, label=str)
    assert none.met is None and cells(none)[2:] == ["—", "not measured", "—", "0"]
    assert count([mean, each, none]) == "1 of 2 met; 1 not measured in this run."


def product(m: int, ours: float | None, recorded=None, **us: float) -> Timed:
    return Timed(f"M={m}", m, ours, us, recorded or {})


def test_sglang_that_was_not_timed_is_estimated_from_vllm_by_the_recorded_ratio():
    recorded = {"vllm": 10.0, "sgl": 8.0}
    assert goals.over_int8(product(1, 2.0, vllm=5.0)) == 2.5
    assert goals.over_int8(product(1, 2.0, recorded, vllm=5.0)) == pytest.approx(2.0)  # 5 * 8 / 10 = 4
    assert goals.over_int8(product(1, 2.0, recorded, vllm=5.0, sgl=4.8)) == 2.4  # timed: nothing is estimated
    assert goals.over_int8(product(1, 2.0, recorded)) is None and goals.over_int8(product(1, None, vllm=5.0)) is None
    assert goals.over_fp8(product(1, 2.0, fp8row=5.0, fp8=3.0)) == 1.5 and goals.over_fp8(product(1, 2.0, vllm=1.0)) is None


def test_every_m_has_one_mean_and_products_count_where_they_were_timed():
    products = [product(m, 1.0, vllm=1.0 + 1 / m, fp8row=2.0) for m in (1, 16, 17, 256, 300, 8192)]
    found = {one.goal.what: one for one in goals.outcomes(products)}
    few = found["over the faster of vLLM and SGLang, M of 1 to 16, mean"]
    assert few.count == 2 and few.reached == pytest.approx(math.sqrt(2 * 17 / 16)) and few.met
    assert "over the faster of vLLM and SGLang, M of 513 to 4096, mean" not in found  # none was timed
    assert found["over the faster of vLLM and SGLang, M of 4097 to 8192, mean"].met is False
    assert found["over the faster of vLLM and SGLang, each"].met and found["over the faster of vLLM and SGLang, each"].count == 6
    assert found["over the faster of FP8 with scales for rows and with one scale, each"].reached == 2.0
    edges = [edge for least, most, _ in goals.BANDS for edge in (least, most)]
    assert edges == sorted(edges) and edges[0] == 1 and edges[-1] == 8192
    assert all(after == before + 1 for before, after in zip(edges[1:-1:2], edges[2::2]))  # no M between two bands


def test_an_entry_of_random_json_counts_by_its_dispatched_row():
    entry = {"shape": "s", "M": 5, "dispatched": "b", "rows": {"a": 1.0, "b": 2.0}, "peers": {"vllm": 3.0}, "failed": {}}
    assert goals.over_int8(goals.of_entry(entry)) == 1.5 and goals.of_entry(entry).label == "s M=5"
    assert goals.over_int8(goals.of_entry(entry | {"dispatched": "failed"})) is None
    assert goals.over_int8(goals.of_entry({key: value for key, value in entry.items() if key != "peers"})) is None
