"""The oracle of refusals: silent about a valid product, and right about each way to break one."""

from __future__ import annotations

import dataclasses

import torch

from operands.oracle import Desc, violations


def test_the_oracle_knows_a_valid_product_and_each_way_to_break_it():
    valid = {
        "out": Desc((2, 3), torch.float16, (3, 1)),
        "a": Desc((2, 4), torch.int8, (4, 1)),
        "b": Desc((4, 3), torch.int8, (1, 4)),
        "a_scale": Desc((2, 1), torch.float32, (1, 1)),
        "b_scale": Desc((), torch.float32, ()),
        "bias": None,
        "a_zero_point": None,
        "b_zero_point": None,
        "a_row_sums": None,
        "b_column_sums": None,
    }
    assert violations(valid) == set()
    for name, desc, status in [
        ("a", dataclasses.replace(valid["a"], dtype=torch.int32), "BAD_TENSOR_DTYPE"),
        ("b", dataclasses.replace(valid["b"], shape=(5, 3)), "BAD_TENSOR_SHAPE"),
        ("out", dataclasses.replace(valid["out"], strides=(2, 1)), "BAD_TENSOR_STRIDES"),
        ("a_scale", None, "NULL_POINTER"),
        ("a", dataclasses.replace(valid["a"], alignment=6), "BAD_PARAM"),
        ("b_scale", dataclasses.replace(valid["b_scale"], alignment=1), "BAD_TENSOR_ALIGNMENT"),
    ]:
        assert {status} == {found.name for found in violations({**valid, name: desc})}, name
