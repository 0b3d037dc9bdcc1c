"""The rules of the C header in Python integers: which products are valid, and which statuses the others may have."""

from __future__ import annotations

import dataclasses

import torch

from scaled_mm.errors import Status

NAMES = ("out", "a", "b", "a_scale", "b_scale", "bias", "a_zero_point", "b_zero_point", "a_row_sums", "b_column_sums")
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
        if len(matrix.shape) not in (2, 3):
            found.add(Status.BAD_TENSOR_SHAPE)
    if not all(matrix is not None and len(matrix.shape) in (2, 3) for matrix in (out, a, b)):
        return found
    (m, k), n = a.shape[-2:], b.shape[-1]
    batches = {matrix.shape[0] for matrix in (a, b) if len(matrix.shape) == 3}
    batch = max(batches - {1}, default=1) if batches else None  # None: a plain product
    if b.shape[-2] != k or out.shape != ((m, n) if batch is None else (batch, m, n)) or len(batches - {1}) > 1:
        found.add(Status.BAD_TENSOR_SHAPE)
    if len(out.strides) == len(out.shape) and _overlaps(out):
        found.add(Status.BAD_TENSOR_STRIDES)
    one = {1} if batch is None else {1, batch}
    of_rows = ((m,), (m, 1), *((i, m, 1) for i in one if batch is not None))
    of_columns = ((n,), (1, n), *((i, 1, n) for i in one if batch is not None))
    of_channels = (*of_columns, (n, 1), *((i, n, 1) for i in one if batch is not None))
    one_each = tuple((i, 1, 1) for i in one if batch is not None)

    if out.dtype is torch.int32:
        if any(descs[name] is not None for name in ("a_scale", "b_scale", "bias")):
            found.add(Status.BAD_PARAM)
    else:
        for name, shapes in (("a_scale", of_rows), ("b_scale", of_channels)):
            found |= _vector(descs[name], (*shapes, *one_each), (torch.float32,), one_value=True) if descs[name] else {Status.NULL_POINTER}
        if descs["bias"] is not None:
            found |= _vector(descs["bias"], of_columns, (out.dtype, torch.float32), one_value=False)
    for name, shapes in (("a_zero_point", of_rows), ("b_zero_point", of_columns)):
        if descs[name] is not None:
            found |= _vector(descs[name], (*shapes, *one_each), (torch.int32, torch.int8), one_value=True)
    for name, shapes in (("a_row_sums", of_rows), ("b_column_sums", of_columns)):
        if descs[name] is not None:
            found |= _vector(descs[name], shapes, (torch.int32,), one_value=False)

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
    """Whether two elements may share memory: some dimension does not step over all that the finer ones reach."""
    if 0 in out.shape:
        return False
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(out.shape, out.strides) if size > 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False
