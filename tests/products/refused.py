"""A small valid product, and the check that changing it is refused."""

from __future__ import annotations

import pytest
import torch
from operands.cases import Case

import scaled_mm as sm
from scaled_mm.errors import ScaledMMError

M, N, K = 6, 16, 32


def tensors(device: str, **replaced) -> dict:
    operands = Case(M, N, K, bias="out", a_zero_point="vector_int32", b_zero_point="vector_int32").make(device)
    return {**operands.inputs, **replaced}


def refused(device: str, error: type[ScaledMMError], match: str, out_dtype=torch.bfloat16, **replaced) -> None:
    inputs = tensors(device, **replaced)
    out = inputs.pop("out", None)
    with pytest.raises(error, match=match) as caught:
        sm.scaled_mm(**inputs, out_dtype=out_dtype, out=out)
    assert caught.value.status is error.status


def zeros(*shape, dtype=torch.int8, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)
