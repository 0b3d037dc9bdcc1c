"""From measured times to buckets, and the cliff rule."""

from __future__ import annotations

import random

import pytest
from autotune_data import H200

from scaled_mm.autotune.choose import CLIFF, Choice, buckets, choose, cliffs, few_rows
from scaled_mm.autotune.write import present_table, table_text, tuned_table, write_table
from scaled_mm.tables import Bucket, TableError, TileTable, available_tables, check_table, load_table

ROWS = ("c3x_64x16x256_pp_swap", "c3x_64x32x256_pp_swap", "c3x_64x80x256_ws_p1024", "c3x_256x192x128_co")


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
    choices = choose(times, times)
    assert by_product(choices) == {(16, 64, 64): ("a", "measured"), (32, 64, 64): ("b", "measured")}
    assert [choice.us for choice in choices] == [5.0, 6.0]


def test_few_rows_within_one_percent_of_the_best_are_kept():
    times = {(m, 64, 64): {"common": 10.05, f"only {m}": 10.0, "slow": 10.2} for m in (1, 2, 3)}
    assert few_rows(times) == ["common"]
    assert few_rows({**times, (4, 64, 64): {"common": 11.0, "best": 10.0}}) == ["common", "best"]


def test_a_cliff_takes_the_row_of_the_next_m_where_that_was_not_measured():
    times = {(16, 64, 64): {"a": 12.0}, (32, 64, 64): {"b": 10.0}}
    choices = choose(times, times)
    assert choices[0] == Choice((16, 64, 64), "b", None, "inherited")
    measured = {(16, 64, 64): {"a": 12.0, "b": 13.0}, (32, 64, 64): {"b": 10.0}}
    assert by_product(choose(measured, measured))[16, 64, 64] == ("a", "measured")


def test_a_product_that_nobody_measured_gets_no_row():
    times = {(16, 64, 64): {"b": 5.0, "c": 9.0}, (32, 64, 64): {}}
    assert by_product(choose(times, times)) == {(16, 64, 64): ("b", "measured")}
    assert choose({}, [(1, 2, 3)]) == []


# ---- buckets ----------------------------------------------------------------------------------------------------------


BASE = load_table("sm90")


def tuned(chosen: dict, us: float = 1.0, base_us: float = 2.0) -> TileTable:
    """The table after these rows were measured to win: product -> row."""
    choices = [Choice(product, row, us, "measured") for product, row in chosen.items()]
    times = {product: {BASE.select(*product, constant_b=True, gpu=H200).row.name: base_us, row: us} for product, row in chosen.items()}
    return tuned_table(BASE, "a GPU", BASE.rows, buckets(choices, BASE, BASE.rows, times, H200))


def random_products(dice: random.Random, count: int) -> dict:
    groups = [(dice.choice((512, 1024, 4096, 11008)), dice.choice((512, 2048, 4096))) for _ in range(count)]
    return {
        (M, N, K): dice.choice([row.name for row in BASE.rows if row.family in ("c3x", "decode")])
        for N, K in groups
        for M in dice.sample((1, 8, 16, 17, 64, 100, 640, 4096), dice.randint(1, 5))
    }


def test_every_product_is_served_by_the_row_that_was_chosen_for_it():
    dice = random.Random(0)
    for _ in range(30):
        chosen = random_products(dice, dice.randint(1, 5))
        table = tuned(chosen)
        for product, row in chosen.items():
            assert table.select(*product, constant_b=True, gpu=H200).row.name == row, (product, chosen)


def test_tuning_changes_nothing_but_what_lies_near_what_was_tuned():
    """Same N and K, M down to half, where the architecture's table has the row that was beaten: four products used to serve every M."""
    dice = random.Random(1)
    for _ in range(8):
        chosen = random_products(dice, 4)
        table = tuned(chosen)
        sample = [(M, N, K) for _, N, K in chosen for M in range(1, 5000, 97)]
        sample += [(dice.randint(0, 9000), 64 * dice.randint(1, 400), 64 * dice.randint(1, 400)) for _ in range(300)]
        for M, N, K in sample:
            for constant_b in (False, True):
                now, before = (one.select(M, N, K, constant_b=constant_b, gpu=H200).row.name for one in (table, BASE))
                if now != before:
                    above = min(m for m, n, k in chosen if (n, k) == (N, K) and m >= M)
                    assert now == chosen[above, N, K] and 2 * M > above, (M, N, K)
                    for kind in {True, constant_b}:
                        of_above, of_here = (BASE.select(m, N, K, constant_b=kind, gpu=H200).row.name for m in (above, M))
                        assert of_above == of_here
                    assert before == BASE.select(above, N, K, constant_b=True, gpu=H200).row.name  # which was measured to be slower


def test_a_row_that_is_no_faster_than_the_tables_own_changes_nothing():
    chosen = {(640, 4096, 4096): ROWS[3], (64, 4096, 4096): BASE.select(64, 4096, 4096, constant_b=True, gpu=H200).row.name}
    assert tuned(chosen, us=2.0, base_us=2.0).buckets == BASE.buckets
    assert len(tuned(chosen, us=1.9, base_us=2.0).buckets) == len(BASE.buckets) + 1


def test_rows_that_load_weights_early_serve_constant_weights_alone():
    early = next(row.name for row in BASE.rows if row.family == "decode")
    table = tuned({(2, 5120, 5120): early})
    assert table.select(2, 5120, 5120, constant_b=True).row.name == early
    assert table.select(2, 5120, 5120).row.name == BASE.select(2, 5120, 5120).row.name


def test_no_product_is_predicted_to_be_slower_after_tuning_than_before():
    """On a GPU on which some kernel configs are faster, and others slower, than the table says, by a factor of their own."""
    dice = random.Random(2)
    factors = {row.name: dice.uniform(0.7, 1.4) for row in BASE.rows}
    models = {row.name: BASE.time_model(row) for row in BASE.rows if row.name != BASE.fallback}

    def time(name: str, product: tuple[int, int, int]) -> float:
        return factors[name] * models[name].us(*product, H200)

    changed = 0
    for _ in range(12):
        products = [(M, N, K) for N, K in ((1408, 4096), (11008, 2048)) for M in dice.sample((1, 16, 40, 100, 257, 640, 4096), 4)]
        times = {product: {name: time(name, product) for name in models} for product in products}
        choices = choose(times, products)
        table = tuned_table(BASE, "a GPU", BASE.rows, buckets(choices, BASE, BASE.rows, times, H200))
        sample = [(M, N, K) for _, N, K in products for M in dice.sample(range(1, 5000), 40)] + products
        sample += [(dice.randint(1, 9000), 64 * dice.randint(8, 400), 64 * dice.randint(8, 400)) for _ in range(50)]
        for product in sample:
            after, before = (one.select(*product, constant_b=True, gpu=H200).row.name for one in (table, BASE))
            changed += after != before
            assert time(after, product) <= time(before, product) * (1 + 1e-9), (product, after, before)
    assert changed > 100


# ---- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [arch for arch, _ in available_tables()])
def test_a_written_table_reads_back_as_it_was_and_keeps_the_sections_of_its_base(arch, tmp_path):
    base = load_table(arch)
    path = tmp_path / "gpu.yaml"
    table = tuned_table(base, "NVIDIA: GPU #1", base.rows, [Bucket(m=64, m_min=33, n=5120, n_min=5120, k=5120, k_min=5120, kernel=base.rows[0].name)])
    written = write_table(table, path, ["two", "lines"])
    assert check_table(path) == [] and path.read_text().startswith("# two\n# lines\n")
    assert (written.rows, written.buckets, written.fallback) == (base.rows, table.buckets, base.fallback)
    assert len(table.buckets) == len(base.buckets) + 1 and "m_min: 33" in path.read_text()
    assert (written.arch, written.serves, written.tuned, written.gpu) == (base.arch, base.serves, True, "NVIDIA: GPU #1")
    for section, of_base in zip(written.sections[1:], base.sections[1:], strict=True):
        assert (section.rows, section.buckets, section.fallback) == (of_base.rows, of_base.buckets, of_base.fallback)
        assert section.auto == of_base.auto
        assert section.tuned is False  # nobody measured it
    assert [p.name for p in tmp_path.iterdir()] == ["gpu.yaml"]


def test_a_section_that_was_tuned_is_in_its_place_and_the_rest_is_that_of_the_other_table(tmp_path):
    base = load_table("sm90")
    first = tuned_table(base, "a GPU", base.rows, [Bucket(m=64, m_min=33, n=5120, n_min=5120, k=5120, k_min=5120, kernel=ROWS[1])])
    part = base.block_scaled
    new = part.rows[0].model_copy(update={"name": "block_scaled_new"})
    bucket = Bucket(m=64, m_min=33, n=512, n_min=512, k=512, k_min=512, kernel=new.name)
    whole = tuned_table(base, "a GPU", [*part.rows, new], [bucket], "block_scaled", first)
    written = write_table(whole, tmp_path / "gpu.yaml", [])
    assert (written.rows, written.buckets) == (first.rows, first.buckets) and written.tuned
    assert written.block_scaled.rows == (*part.rows, new) and written.block_scaled.buckets == (bucket, *part.buckets)
    assert written.block_scaled.tuned and written.block_scaled.gpu == "a GPU" and not written.grouped.tuned
    assert present_table(tmp_path / "gpu.yaml", base, "a GPU") == written
    assert present_table(tmp_path / "gpu.yaml", base, "another GPU") is base and present_table(tmp_path / "none.yaml", base, "a GPU") is base
    plain_again = tuned_table(base, "a GPU", base.rows, [], others=written)
    assert plain_again.buckets == base.buckets and plain_again.block_scaled == written.block_scaled


def test_a_section_is_tuned_in_a_tuned_table_only(tmp_path):
    path = tmp_path / "table.yaml"
    path.write_text(table_text(load_table("sm90")).replace("block_scaled:\n  fallback", "block_scaled:\n  tuned: true\n  fallback", 1))
    [problem] = check_table(path)
    assert problem.field.endswith("tuned") and "a section is tuned in a tuned table only" in problem.reason


@pytest.mark.parametrize("section, experts", [("block_scaled", 1), ("grouped", 32), ("grouped_block_scaled", 8)])
def test_no_product_of_a_section_is_predicted_to_be_slower_after_tuning_than_before(section, experts):
    base, dice = getattr(load_table("sm90"), section), random.Random(3)
    factors = {row.name: dice.uniform(0.7, 1.4) for row in base.rows}

    def time(name: str, product: tuple[int, int, int]) -> float:
        return factors[name] * base.predicted_us(base.row(name), *product, H200, count=experts)

    products = [(M, N, K) for N, K in ((1408, 4096), (7168, 2048)) for M in (1, 16, 40, 257, 1024)]
    times = {product: {row.name: time(row.name, product) for row in base.rows if row.name != base.fallback} for product in products}
    found = buckets(choose(times, products), base, base.rows, times, H200, experts)
    assert found and not any(bucket.constant_b for bucket in found)
    tuned = base.model_copy(update={"buckets": (*found, *base.buckets)})
    for product in products + [(M, N, K) for _, N, K in products for M in dice.sample(range(1, 2000), 30)]:
        after, before = (one.select(*product, constant_b=True, gpu=H200, count=experts).row.name for one in (tuned, base))
        assert time(after, product) <= time(before, product) * (1 + 1e-9), (product, after, before)


def test_a_written_table_has_the_rows_that_are_used_behind_those_of_its_base():
    base = load_table("sm90")
    new = [base.row(ROWS[1]).model_copy(update={"name": name}) for name in ("c3x_new", "c3x_unused")]
    table = tuned_table(base, "a GPU", [*base.rows, *new], [Bucket(m=16, m_min=9, n=64, n_min=64, k=64, k_min=64, kernel="c3x_new")])
    assert [row.name for row in table.rows] == [*(row.name for row in base.rows), "c3x_new"]


def test_a_table_that_would_not_load_leaves_what_was_there(tmp_path):
    base = load_table("sm90")
    path = tmp_path / "gpu.yaml"
    path.write_text("what was there")
    with pytest.raises(TableError, match="unreachable: bucket 0"):
        write_table(tuned_table(base, "a GPU", base.rows, [Bucket(kernel=ROWS[0]), Bucket(m=16, kernel=ROWS[0])]), path, [])
    assert path.read_text() == "what was there" and len(list(tmp_path.iterdir())) == 1


def test_tuned_and_what_it_was_measured_with_go_together(tmp_path):
    text = table_text(load_table("sm90"))
    for new, field in (
        ("tuned: true\nversion: 0.1.0", "tuned"),
        ("tuned: true\ngpu: NVIDIA H200", "tuned"),
        ("tuned: false\ngpu: NVIDIA H200", "gpu"),
        ("tuned: false\nversion: 0.1.0", "version"),
    ):
        path = tmp_path / "table.yaml"
        path.write_text(text.replace("tuned: false", new))
        [problem] = check_table(path)
        assert problem.field == field and "a tuned" in problem.reason
