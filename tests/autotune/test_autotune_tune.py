"""A whole run, with stand-ins for compiler, GPU and clock."""

from __future__ import annotations

import pytest
from autotune_data import H200, Clock, Kernels, Measurer, Silent

from scaled_mm.autotune.choose import CLIFF, cliffs
from scaled_mm.autotune.state import Journal
from scaled_mm.autotune.tune import Settings, chosen_us, make_plan, tune
from scaled_mm.autotune.write import tuned_table, write_table
from scaled_mm.errors import BadParamError
from scaled_mm.tables import check_table, load_table

PRODUCTS = [(M, N, 4096) for N in (4096, 14336) for M in (1, 64, 1024)]
BASE = load_table("sm90")
PLAN = make_plan(BASE, PRODUCTS, H200, 6)


class Setting:
    """Everything a run needs; `run` may be called again, as a user would call the command again."""

    def __init__(self, folder, budget_s=1e6, build_s=0.0, broken=(), **measurer):
        self.clock = Clock()
        self.path = folder / "journal.jsonl"
        self.kernels = Kernels(self.clock, build_s, broken)
        self.measurer = Measurer(PLAN.rows, self.clock, **measurer)
        self.budget_s = budget_s

    def run(self):
        settings = Settings(self.budget_s, "one GPU", top=6, jobs=1)
        return tune(BASE, PRODUCTS, H200, settings, Journal(self.path), self.kernels, self.measurer, Silent(), self.clock, PLAN)


def cells_wanted() -> int:
    return sum(map(len, PLAN.wanted.values()))


def test_the_plan_has_the_tables_row_and_the_models_best_for_every_product():
    assert set(PLAN.wanted) == set(PRODUCTS) and PLAN.legal > 5000
    for product, names in PLAN.wanted.items():
        assert names[0] == BASE.select(*product, constant_b=True, gpu=H200).row.name and 6 <= len(names) <= 7
        assert len(set(names)) == len(names)


def test_a_product_that_only_the_fallback_takes_is_refused_by_name():
    with pytest.raises(BadParamError, match="--shapes: expected sizes that tuned rows take, got 1x4096x1000.*16"):
        make_plan(BASE, [(1, 4096, 1000)], H200, 6)


def test_a_whole_run_chooses_the_fastest_row_of_every_product(tmp_path):
    setting = Setting(tmp_path)
    outcome = setting.run()
    assert len(outcome.cells) == len(setting.measurer.asked) == cells_wanted()
    times = outcome.times()
    for product, us in chosen_us(outcome).items():
        assert us <= 1.01 * min(times[product].values())
    assert set(chosen_us(outcome)) == set(PRODUCTS) and outcome.left_out == [] and outcome.ended is None
    assert {choice.product for choice in outcome.choices} == set(PRODUCTS)


def test_a_candidate_is_spared_further_rounds_beyond_the_best_time_so_far_and_ten_percent(tmp_path):
    setting = Setting(tmp_path)
    cells = setting.run().cells
    best = {}
    for (row, product), limit in zip(setting.measurer.asked, setting.measurer.limits):
        assert limit == (pytest.approx(1.1 * best[product]) if product in best else None)
        best[product] = min(best.get(product, float("inf")), cells[product, row].us)


def test_the_table_of_a_run_loads_and_dispatches_what_was_chosen(tmp_path):
    outcome = Setting(tmp_path).run()
    path = tmp_path / "gpu.yaml"
    table = write_table(tuned_table(BASE, "one GPU", list(PLAN.rows.values()), outcome.buckets), path, ["a test"])
    assert check_table(path) == [] and table.tuned
    times = outcome.times()
    for choice in outcome.choices:
        served = table.select(*choice.product, constant_b=True).row.name
        assert served == choice.row or times[choice.product][served] <= times[choice.product][choice.row]


def test_a_run_that_is_called_again_measures_and_compiles_nothing_twice(tmp_path):
    first, second = Setting(tmp_path), Setting(tmp_path)
    before, after = first.run(), second.run()
    assert second.measurer.asked == [] and second.kernels.built == []
    assert after.resumed == cells_wanted() and after.choices == before.choices


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path):
    first = Setting(tmp_path)
    first.measurer.factor = lambda row, product: interrupt_at(first, 7)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    second = Setting(tmp_path)
    outcome = second.run()
    assert outcome.resumed == 6 and len(second.measurer.asked) == cells_wanted() - 6
    assert len(outcome.cells) == cells_wanted()


def interrupt_at(setting, count):
    if len(setting.measurer.asked) == count:
        raise KeyboardInterrupt
    return 1.0


def test_a_changed_kernel_is_measured_again(tmp_path):
    Setting(tmp_path).run()
    second = Setting(tmp_path)
    second.kernels.version = "2"
    assert second.run().resumed == 0 and len(second.measurer.asked) == cells_wanted()


@pytest.mark.parametrize("outcome", ["wrong", "crashed", "hung"])
def test_a_row_with_wrong_bits_or_that_crashes_or_hangs_never_wins_anywhere_and_is_not_tried_again(tmp_path, outcome):
    bad = PLAN.wanted[PRODUCTS[0]][1]
    setting = Setting(tmp_path, outcomes={bad: outcome}, factor=lambda row, product: 0.1 if row == bad else 1.0)
    found = setting.run()
    assert bad in found.bad_rows() and sum(row == bad for row, _ in setting.measurer.asked) == 1
    assert bad not in {choice.row for choice in found.choices} and bad not in {bucket.kernel for bucket in found.buckets}
    assert set(chosen_us(found)) == set(PRODUCTS)


def test_a_row_whose_bits_are_wrong_on_one_product_loses_the_others_that_it_had_won(tmp_path):
    bad = next(row for row in PLAN.rows if sum(row in names for names in PLAN.wanted.values()) > 1)
    setting = Setting(tmp_path, factor=lambda row, product: 0.1 if row == bad else 1.0)
    plain = setting.measurer.measure

    def measure(request):
        answer = plain(request)
        second = [row for row, _ in setting.measurer.asked].count(bad) == 2
        return {"outcome": "wrong", "message": "relative error 0.1"} if request["row"] == bad and second else answer

    setting.measurer.measure = measure
    found = setting.run()
    assert [cell.outcome for cell in found.cells.values() if cell.row == bad] == ["timed", "wrong"]
    assert bad not in {choice.row for choice in found.choices}


def test_a_row_that_does_not_compile_is_reported_and_the_others_are_measured(tmp_path):
    broken = PLAN.wanted[PRODUCTS[0]][1]
    found = Setting(tmp_path, broken=(broken,)).run()
    assert found.unbuilt == {broken: f"KernelNotBuiltError: {broken}: the compiler failed"}
    assert broken not in {cell.row for cell in found.cells.values()} and found.left_out == []
    assert set(chosen_us(found)) == set(PRODUCTS)


def test_compiling_takes_at_most_half_of_the_budget_and_what_is_left_out_is_named(tmp_path):
    setting = Setting(tmp_path, budget_s=100, build_s=10)
    found = setting.run()
    assert len(setting.kernels.built) == 5
    assert {row for _, row in found.left_out}.isdisjoint(setting.kernels.built)
    assert len(found.left_out) + len(found.cells) == cells_wanted()


def test_a_spent_budget_stops_timing_and_the_table_serves_what_is_left(tmp_path):
    setting = Setting(tmp_path, budget_s=35, seconds=10)
    found = setting.run()
    assert len(setting.measurer.asked) == 4 and len(found.left_out) == cells_wanted() - 4
    assert [choice.how for choice in found.choices] == ["measured"]
    assert {choice.row for choice in found.choices} <= {row for row, _ in setting.measurer.asked}


def test_the_first_pass_reaches_every_product_before_the_second_begins(tmp_path):
    setting = Setting(tmp_path)
    setting.run()
    first_pass = [product for _, product in setting.measurer.asked[: 4 * len(PRODUCTS)]]
    assert set(first_pass) == set(PRODUCTS)


def test_a_gpu_that_is_lost_ends_the_timing_and_what_was_measured_is_used(tmp_path):
    found = Setting(tmp_path, die_after=9).run()
    assert found.ended.endswith("no such GPU") and len(found.cells) == 9 and found.choices


def test_nothing_timed_gives_no_choices(tmp_path):
    found = Setting(tmp_path, die_after=0).run()
    assert found.choices == [] and found.buckets == []


def test_a_cliff_is_closed_by_timing_the_row_of_the_next_larger_m(tmp_path):
    # At M = 64 everything is slow but the row that wins at M = 1024, which the plan did not want there.
    winner = next(row for row in PLAN.wanted[1024, 4096, 4096] if row not in PLAN.wanted[64, 4096, 4096])

    def factor(row, product):
        if product == (64, 4096, 4096):
            return 0.05 if row == winner else 50.0
        return 0.2 if row == winner and product == (1024, 4096, 4096) else 1.0

    setting = Setting(tmp_path, factor=factor)
    found = setting.run()
    assert (winner, (64, 4096, 4096)) in setting.measurer.asked
    us = chosen_us(found)
    assert us[64, 4096, 4096] <= CLIFF * us[1024, 4096, 4096]
    assert [cliff.M for cliff in cliffs(us) if cliff.N == 4096 and cliff.M == 64] == []
