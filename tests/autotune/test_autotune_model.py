"""The model of a row's time against the times that were measured on an H200."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from autotune_data import H200
from fit_times import H100, read

from scaled_mm.autotune import model
from scaled_mm.autotune.candidates import candidates
from scaled_mm.autotune.model import accuracy, predict, shortlist
from scaled_mm.errors import BadParamError
from scaled_mm.kernels.c3x import C3x
from scaled_mm.kernels.gpu import facts, typical
from scaled_mm.kernels.time_model import estimate
from scaled_mm.kernels.wgmma import USUAL_WIDTHS
from scaled_mm.tables import available_tables, load_table

DATA = Path(__file__).parents[1] / "tables" / "data" / "h200_rows.json"
TIMES = {(case["M"], case["N"], case["K"]): case["us"] for case in json.loads(DATA.read_text())["cases"]}


@pytest.fixture
def narrow_instructions(monkeypatch):
    """The kernels were timed when c3x used the usual widths of wgmma alone."""
    monkeypatch.setattr(C3x, "mma_widths", USUAL_WIDTHS)
    monkeypatch.setattr(model, "_estimate", estimate)  # without its cache


@pytest.fixture(scope="module")
def rows():
    return {row.name: row for row in candidates(load_table("sm90"))}


def test_the_model_predicts_the_winners_of_the_h200_as_well_as_the_docs_say(rows, narrow_instructions):
    found = accuracy(TIMES, rows, H200)
    assert found.products == 99
    assert (found.top1, found.top3) == (37, 67)
    assert found.median_loss == pytest.approx(0.0122, abs=5e-5)
    assert found.mean_loss == pytest.approx(0.0230, abs=5e-5)
    assert found.chance == pytest.approx(0.0621, abs=5e-5)


def test_the_model_predicts_what_the_autotuner_measured_as_well_as_the_docs_say(rows, narrow_instructions):
    cells = json.loads((Path(__file__).parents[2] / "reports" / "sm90" / "h200" / "autotune.json").read_text())["cells"]
    times = {}
    for cell in cells:
        times.setdefault((cell["M"], cell["N"], cell["K"]), {})[cell["row"]] = cell["us"]
    found = accuracy(times, rows, H200)
    assert (len(cells), found.products, found.top1, found.top3) == (1194, 99, 29, 63)
    assert found.median_loss == pytest.approx(0.0131, abs=5e-5)
    assert found.mean_loss == pytest.approx(0.0373, abs=5e-5)
    assert found.chance == pytest.approx(0.0873, abs=5e-5)


def test_the_accuracy_of_a_model_does_not_depend_on_the_order_of_the_rows(rows):
    backwards = {product: dict(reversed(us.items())) for product, us in TIMES.items()}
    assert accuracy(backwards, rows, H200) == accuracy(TIMES, rows, H200)


def test_products_with_one_row_say_nothing_about_the_model(rows):
    assert accuracy({(1, 4096, 4096): {"c3x_64x16x256_pp_swap": 6.0}}, rows, H200) is None


def test_predicted_times_are_within_a_factor_of_three_of_the_measured_ones(rows):
    ratios = [predict(rows[name], product, H200) / us for product, times in TIMES.items() for name, us in times.items()]
    assert all(1 / 3 < ratio < 3 for ratio in ratios)
    assert math.sqrt(sum(math.log(ratio) ** 2 for ratio in ratios) / len(ratios)) < 0.16


def test_twelve_candidates_of_ten_thousand_nearly_always_have_one_close_to_the_best(rows):
    """The grid's products: M <= 128 as timed on an H200, M = 256 on an H100, M >= 512 on an H200 under load."""
    timed = {product: (us, H200) for product, us in TIMES.items() if product[0] <= 128}
    timed |= {product: (us, H100) for product, us in read(40).items() if product[0] == 256}
    loaded = json.loads((DATA.parent / "h200_loaded.json").read_text())["cases"]
    timed |= {(case["M"], case["N"], case["K"]): (case["us"], H200) for case in loaded if case["kind"] == "layer"}
    base = load_table("sm90")
    assert len(timed) == 99
    near = 0
    for product, (us, gpu) in timed.items():
        names = {row.name for row in shortlist(list(rows.values()), base, product, gpu, 12)}
        assert len(names) == 12
        near += any(us.get(name, math.inf) <= 1.02 * min(us.values()) for name in names)
    assert near >= 94


@pytest.mark.parametrize("arch", [arch for arch, _ in available_tables()])
def test_every_row_of_every_table_has_a_positive_time_that_grows_with_the_product(arch):
    gpu = typical(arch)
    for row in load_table(arch).rows:
        if row.family != "generic":
            small, large = predict(row, (1, 1024, 1024), gpu), predict(row, (4096, 8192, 8192), gpu)
            assert 0 < small < large < 1e6


def test_an_unknown_gpu_has_the_rates_of_a_common_one_of_its_table_by_its_multiprocessors():
    common, half = typical("sm89"), facts("NVIDIA GPU of tomorrow", "sm89", 71)
    assert half.operations == pytest.approx(common.operations / 2) and half.bandwidth == pytest.approx(common.bandwidth / 2)
    with pytest.raises(BadParamError, match="arch: expected one of sm75, .*, got 'sm70'"):
        facts("NVIDIA GPU of yesterday", "sm70", 80)


def test_a_tuned_table_predicts_for_the_gpu_that_it_was_tuned_on():
    table = load_table("sm90")
    product = (1, 28672, 8192)  # bound by memory, of which an H200 has more bandwidth than the common GPU, an H100
    (h100, _), (h200, _) = (one.fastest(*product)[0] for one in (table, table.model_copy(update={"tuned": True, "gpu": "NVIDIA H200"})))
    assert 1.2 < h100 / h200 < 4.8 / 3.35 + 0.01
    assert table.model_copy(update={"gpu": "NVIDIA GPU of tomorrow"}).fastest(*product)[0][0] == h100
