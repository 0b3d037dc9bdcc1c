"""The makers of operands: a case says all that there is to say."""

from __future__ import annotations

import dataclasses

import torch

from operands.cases import Case


def test_cases_with_the_same_seed_hold_the_same_numbers():
    case = Case(4, 5, 6, bias="out", a_zero_point="vector_int8")
    first, second = case.make(), dataclasses.replace(case).make()
    for name, t in first.inputs.items():
        assert t is second.inputs[name] is None or torch.equal(t, second.inputs[name])
