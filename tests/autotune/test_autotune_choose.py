"""From measured times to buckets, and the cliff rule."""

from __future__ import annotations

import random

import pytest

from scaled_mm.autotune.choose import CLIFF, Choice, buckets, choose, cliffs, few_rows
from scaled_mm.autotune.write import table_text, tuned_table, write_table
from scaled_mm.errors import BadParamError
from scaled_mm.tables import Bucket, TableError, available_tables, check_table, load_table

ROWS = ("c3x_64x16x256_pp_swap", "c3x_64x32x256_pp_swap", "c3x_64x80x256_ws_p1024", "c3x_256x192x128_co")


def first(names, product):
    return min(names)


def by_product(choices):
    return {choice.product: (choice.row, choice.how) for choice in choices}


# ---- cliffs -----------------------------------------------------------------------------------------------------------


def test_a_product_slower_than_the_next_larger_m_by_more_than_five_percent_is_a_cliff():
    us = {(16, 64, 64): 10.0, (32, 64, 64): 10.6, (64, 64, 64): 10.0, (128, 64, 64): 20.0}
    [cliff] = cliffs(us)
    assert (cliff.M, cliff.next_M, cliff.us, cliff.next_us) == (32, 64, 10.6, 10.0)
    assert str(cliff) == "N=64 K=64: M=32 takes 10.60 us, 6.0% more than M=64 with 10.00 us"
    assert cliffs({**us, (32, 64, 64): 10.0 * CLIFF}) == []


def test_only_neighbours_of_one_n_and_k_are_compared():
    assert cliffs({(1, 64, 64): 50.0, (2, 64, 128): 10.0, (2, 128, 64): 10.0}) == []
    assert [cliff.M for cliff in cliffs({(1, 64, 64): 50.0, (9, 64, 64): 48.0, (99, 64, 64): 10.0})] == [9]


def test_a_small_m_may_be_slower_per_token():
    assert cliffs({(1, 64, 64): 10.0, (16, 64, 64): 10.0, (17, 64, 64): 10.0}) == []


# ---- choosing ---------------------------------------------------------------------------------------------------------


def test_every_product_gets_its_fastest_row():
    times = {(16, 64, 64): {"a": 5.0, "b": 9.0}, (32, 64, 64): {"a": 9.0, "b": 6.0}}
    choices = choose(times, times, first)
    assert by_product(choices) == {(16, 64, 64): ("a", "measured"), (32, 64, 64): ("b", "measured")}
    assert [choice.us for choice in choices] == [5.0, 6.0]


def test_few_rows_within_one_percent_of_the_best_are_kept():
    times = {(m, 64, 64): {"common": 10.05, f"only {m}": 10.0, "slow": 10.2} for m in (1, 2, 3)}
    assert few_rows(times) == ["common"]
    assert few_rows({**times, (4, 64, 64): {"common": 11.0, "best": 10.0}}) == ["common", "best"]


def test_a_cliff_takes_the_row_of_the_next_m_where_that_was_not_measured():
    times = {(16, 64, 64): {"a": 12.0}, (32, 64, 64): {"b": 10.0}}
    choices = choose(times, times, first)
    assert choices[0] == Choice((16, 64, 64), "b", None, "inherited")
    measured = {(16, 64, 64): {"a": 12.0, "b": 13.0}, (32, 64, 64): {"b": 10.0}}
    assert by_product(choose(measured, measured, first))[16, 64, 64] == ("a", "measured")


def test_a_product_that_nobody_measured_gets_the_models_row_out_of_those_that_others_need():
    times = {(16, 64, 64): {"b": 5.0, "c": 9.0}, (32, 64, 64): {}}
    assert by_product(choose(times, times, first))[32, 64, 64] == ("b", "predicted")
    assert by_product(choose({}, [(1, 2, 3)], first, rows=("z", "y"))) == {(1, 2, 3): ("y", "predicted")}


# ---- buckets ----------------------------------------------------------------------------------------------------------


def choices_of(rows: dict) -> list[Choice]:
    return [Choice(product, row, 1.0, "measured") for product, row in rows.items()]


def test_every_product_is_served_by_the_row_that_was_chosen_for_it():
    base = load_table("sm90")
    dice = random.Random(0)
    for _ in range(200):
        groups = [(dice.choice((512, 1024, 4096)), dice.choice((64, 128, 256))) for _ in range(dice.randint(1, 5))]
        chosen = {
            (M, N, K): dice.choice(ROWS) for N, K in groups for M in dice.sample((1, 8, 16, 17, 64, 100, 4096), dice.randint(1, 5))
        }  # fmt: skip
        table = tuned_table(base, "a GPU", base.rows, buckets(choices_of(chosen)))
        for product, row in chosen.items():
            assert table.select(*product).row.name == row, (product, chosen)


def test_sizes_between_measured_ones_take_the_row_of_the_next_larger():
    base = load_table("sm90")
    chosen = {(16, 1024, 64): ROWS[0], (64, 1024, 64): ROWS[1], (16, 4096, 64): ROWS[2], (64, 4096, 64): ROWS[3]}
    table = tuned_table(base, "a GPU", base.rows, buckets(choices_of(chosen)))
    for product, row in {(17, 1024, 64): 1, (1, 1, 1): 0, (16, 1025, 64): 2, (65, 9999, 9999): 3, (9999, 1024, 9999): 1}.items():
        assert table.select(*product).row.name == ROWS[row]


def test_edges_that_change_nothing_are_left_out():
    same = {(M, N, 64): "a" for M in (1, 16, 64) for N in (64, 128)}
    assert buckets(choices_of(same)) == [Bucket(kernel="a")]
    assert buckets(choices_of({**same, (16, 128, 64): "b"})) == [
        Bucket(m=1, kernel="a"),
        Bucket(m=16, n=64, kernel="a"),
        Bucket(m=16, kernel="b"),
        Bucket(kernel="a"),
    ]


# ---- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [arch for arch, _ in available_tables()])
def test_a_written_table_reads_back_as_it_was_and_keeps_the_sections_of_its_base(arch, tmp_path):
    base = load_table(arch)
    path = tmp_path / "gpu.yaml"
    table = tuned_table(base, "NVIDIA: GPU #1", base.rows, base.buckets)
    written = write_table(table, path, ["two", "lines"])
    assert check_table(path) == [] and path.read_text().startswith("# two\n# lines\n")
    assert (written.rows, written.buckets, written.fallback) == (base.rows, base.buckets, base.fallback)
    assert (written.arch, written.serves, written.tuned, written.gpu) == (base.arch, base.serves, True, "NVIDIA: GPU #1")
    for section, of_base in zip(written.sections[1:], base.sections[1:], strict=True):
        assert (section.rows, section.buckets, section.fallback) == (of_base.rows, of_base.buckets, of_base.fallback)
        assert section.auto == of_base.auto
        assert section.tuned is False  # nobody measured it
    assert [p.name for p in tmp_path.iterdir()] == ["gpu.yaml"]


def test_a_written_table_has_the_rows_that_are_used_and_the_fallback():
    base = load_table("sm90")
    table = tuned_table(base, "a GPU", base.rows, [Bucket(m=16, kernel=ROWS[1]), Bucket(kernel=ROWS[3])])
    assert [row.name for row in table.rows] == [ROWS[1], ROWS[3], base.fallback]


def test_a_table_that_would_not_load_leaves_what_was_there(tmp_path):
    base = load_table("sm90")
    path = tmp_path / "gpu.yaml"
    path.write_text("what was there")
    with pytest.raises(TableError, match="the last bucket must be open"):
        write_table(tuned_table(base, "a GPU", base.rows, [Bucket(m=16, kernel=ROWS[0])]), path, [])
    assert path.read_text() == "what was there" and len(list(tmp_path.iterdir())) == 1


def test_tuned_and_what_it_was_measured_with_go_together(tmp_path):
    text = table_text(load_table("sm90"))
    for new, field in (
        ("tuned: true\nversion: 0.1.0", "tuned"), ("tuned: true\ngpu: NVIDIA H200", "tuned"),
        ("tuned: false\ngpu: NVIDIA H200", "gpu"), ("tuned: false\nversion: 0.1.0", "version"),
    ):  # fmt: skip
        path = tmp_path / "table.yaml"
        path.write_text(text.replace("tuned: false", new))
        [problem] = check_table(path)
        assert problem.field == field and "a tuned" in problem.reason


def test_nothing_measured_and_no_rows_is_an_error_of_the_caller():
    with pytest.raises(BadParamError, match="rows: expected"):
        choose({}, [(1, 2, 3)], first)
