"""The pairwise grids that other tests stand on: no pair is missing, and a case is not drawn anew each time."""

from __future__ import annotations

import pytest
import torch

from operands.pairs import missing, pairs, pairwise

GRIDS = {
    "strings and none": dict(bias=(None, "float32", "out"), scale=("one", "vector"), layout=("rows", "columns", "padded")),
    "values that compare equal": dict(flag=(False, True), size=(0, 1), value=(0.0, 1.0)),
    "tuples and dtypes": dict(shape=((1, 2), (3, 4), (5, 6), (7, 8)), dtype=(torch.int8, torch.int32), sums=(None, "given"), seed=(0, 1, 2)),
    "many dimensions": {f"d{i}": [f"{i}.{j}" for j in range(2 + i)] for i in range(8)},
    "a dimension of one value": dict(only=("value",), other=(1, 2, 3)),
}


@pytest.mark.parametrize("name", GRIDS)
def test_every_pair_of_values_occurs(name):
    assert missing(pairs(**GRIDS[name]), **GRIDS[name]) == []


@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_is_the_same_each_time(name):
    assert pairs(**GRIDS[name]) == pairs(**GRIDS[name])


def test_a_grid_of_many_dimensions_is_close_to_its_two_largest():
    cases = pairs(**GRIDS["many dimensions"])
    assert 8 * 9 <= len(cases) <= 8 * 9 * 1.5  # the whole product has 362,880


def test_one_dimension_gives_its_values():
    assert pairs(dtype=("a", "b")) == [{"dtype": "a"}, {"dtype": "b"}]


def test_a_pair_that_is_left_out_is_found_missing():
    grid = GRIDS["strings and none"]
    cases = [case for case in pairs(**grid) if not (case["bias"] is None and case["scale"] == "one")]
    assert "bias=None with scale='one'" in missing(cases, **grid)


@pairwise(dtype=(torch.int8, torch.int32), bias=(None, "out"))
def test_a_case_arrives_by_name_and_by_options(request, dtype, **options):
    assert dtype in (torch.int8, torch.int32) and options.keys() == {"bias"}
    assert request.node.name.endswith(f"[{str(dtype).removeprefix('torch.')}-{options['bias']}]")


def test_each_case_is_a_test_of_its_own():
    (mark,) = test_a_case_arrives_by_name_and_by_options.pytestmark
    assert sorted(case.id for case in mark.args[1]) == ["int32-None", "int32-out", "int8-None", "int8-out"]
