"""The rules of the C header in Python integers: which products are valid, and what may be said about the others."""

from __future__ import annotations

import dataclasses

import torch

from scaled_mm.errors import Status

NAMES = ("out", "a", "b", "a_scale", "b_scale", "bias", "a_zero_point", "b_zero_point")
ITEM_BYTES = {torch.int8: 1, torch.int32: 4, torch.float16: 2, torch.bfloat16: 2, torch.float32: 4}
FLOATS = (torch.float16, torch.bfloat16, torch.float32)

INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1
FARTHEST = 2**60  # elements from the first to the last


@dataclasses.dataclass(frozen=True)
class Desc:
    """What a TensorDesc says; any Python integers."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]
    alignment: int = 16

    def elements(self) -> int:
        """From the first element in memory to one past the last; 0 without elements."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides))


def violations(descs: dict[str, Desc | None]) -> set[Status]:
    """The status of every rule that the product breaks: a refusal must carry one of them; without any, none is due."""
    found: set[Status] = set()
    for name in NAMES:
        if descs[name] is not None:
            found |= _tensor(descs[name])
    out, a, b = descs["out"], descs["a"], descs["b"]
    for matrix, dtypes in ((out, (*FLOATS, torch.int32)), (a, (torch.int8,)), (b, (torch.int8,))):
        if matrix is None:
            found |= {Status.NULL_POINTER, Status.BAD_PARAM}  # the C interface gets a null pointer, Python a None
            continue
        if matrix.dtype not in dtypes:
            found.add(Status.BAD_TENSOR_DTYPE)
        if len(matrix.shape) != 2:
            found.add(Status.BAD_TENSOR_SHAPE)
    if not all(matrix is not None and len(matrix.shape) == 2 for matrix in (out, a, b)):
        return found
    (m, k), n = a.shape, b.shape[1]
    if b.shape[0] != k or out.shape != (m, n):
        found.add(Status.BAD_TENSOR_SHAPE)
    if len(out.strides) == 2 and _overlaps(out):
        found.add(Status.BAD_TENSOR_STRIDES)

    if out.dtype is torch.int32:
        if any(descs[name] is not None for name in ("a_scale", "b_scale", "bias")):
            found.add(Status.BAD_PARAM)
    else:
        for name, shapes in (("a_scale", ((m,), (m, 1))), ("b_scale", ((n,), (1, n)))):
            found |= (
                _vector(descs[name], shapes, (torch.float32,), one_value=True) if descs[name] else {Status.NULL_POINTER}
            )
        if descs["bias"] is not None:
            found |= _vector(descs["bias"], ((n,), (1, n)), (out.dtype, torch.float32), one_value=False)
    for name, shapes in (("a_zero_point", ((m,), (m, 1))), ("b_zero_point", ((n,), (1, n)))):
        if descs[name] is not None:
            found |= _vector(descs[name], shapes, (torch.int32, torch.int8), one_value=True)

    largest = (255 if descs["a_zero_point"] else 128) * (255 if descs["b_zero_point"] else 128)
    if k * largest >= 2**31:
        found.add(Status.OVERFLOW)
    return found


def _tensor(desc: Desc) -> set[Status]:
    found = set()
    if desc.dtype not in ITEM_BYTES:
        found.add(Status.BAD_TENSOR_DTYPE)
    if len(desc.shape) > 3 or any(not 0 <= size <= INT32_MAX for size in desc.shape):
        found.add(Status.BAD_TENSOR_SHAPE)
    if len(desc.strides) != len(desc.shape) or any(abs(number) > INT64_MAX for number in (*desc.shape, *desc.strides)):
        found.add(Status.BAD_PARAM)  # there is no such C struct
    if any(not 0 <= stride <= INT64_MAX for stride in desc.strides):
        found.add(Status.BAD_TENSOR_STRIDES)
    if sum((size - 1) * stride for size, stride in zip(desc.shape, desc.strides) if size > 1) > FARTHEST:
        found.add(Status.BAD_TENSOR_STRIDES)
    if not 1 <= desc.alignment <= INT64_MAX or desc.alignment & (desc.alignment - 1):
        found.add(Status.BAD_PARAM)
    elif desc.alignment < ITEM_BYTES.get(desc.dtype, 1):
        found.add(Status.BAD_TENSOR_ALIGNMENT)
    return found


def _vector(desc: Desc, shapes, dtypes, one_value: bool) -> set[Status]:
    found = set()
    if desc.dtype not in dtypes:
        found.add(Status.BAD_TENSOR_DTYPE)
    single = all(size == 1 for size in desc.shape)
    if desc.shape not in shapes and not (one_value and single):
        found.add(Status.BAD_TENSOR_SHAPE)
    return found


def _overlaps(out: Desc) -> bool:
    """Whether two elements of a matrix may share memory: neither dimension steps over the whole other one."""
    (m, n), (row, column) = out.shape, out.strides
    if m <= 1 and n <= 1:
        return False
    if m <= 1 or n <= 1:
        return (row if m > 1 else column) < 1
    return not (min(row, column) > 0 and (row > (n - 1) * column or column > (m - 1) * row))
