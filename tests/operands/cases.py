"""Operands of INT8 products: layouts, values, scales, bias and zero points that are hard to get right.

A `Case` is a frozen description; `case.make(device)` turns it into tensors, the same ones each time. Its repr is valid
Python, so that a failing test prints what repeats it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import torch

from scaled_mm import reference

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OUT_DTYPES = (*FLOAT_DTYPES, torch.int32)

# Largest K whose accumulators fit 32 bits for every input: see docs/design/numerics.md.
MAX_K_SYMMETRIC = 131071
MAX_K_ONE_ZERO_POINT = 65793
MAX_K_BOTH_ZERO_POINTS = 33025

# M, N, K: decode, both sides of every power of two that a tile could end at, odd sizes, sizes of one.
SMALL_SHAPES = (
    (1, 1, 1),
    (1, 16, 16),
    (1, 256, 512),
    (1, 33, 1031),
    (2, 64, 128),
    (3, 5, 7),
    (4, 128, 64),
    (5, 1, 37),
    (8, 8, 4),
    (15, 17, 1),
    (16, 16, 16),
    (17, 48, 96),
    (31, 127, 129),
    (32, 128, 3),
    (33, 129, 255),
    (64, 64, 64),
    (65, 1, 300),
    (127, 100, 50),
    (128, 256, 128),
    (129, 130, 131),
    (200, 7, 77),
)
ZERO_SHAPES = ((0, 16, 16), (16, 0, 16), (16, 16, 0), (0, 0, 16), (0, 16, 0), (16, 0, 0), (0, 0, 0), (1, 1, 0))

# How a matrix lies in memory.
LAYOUTS = (
    "rows",  # contiguous rows
    "columns",  # contiguous columns: a weight's .t()
    "padded_rows",  # a slice of wider rows
    "padded_columns",
    "offset_rows",  # padded, and the first element one byte past an aligned address
    "offset_columns",
    "every_second",  # neither stride is 1
    "every_second_row",
)
INPUT_LAYOUTS = (*LAYOUTS, "broadcast_row", "broadcast_column")

VALUES = ("full", "extremes", "minimum", "small")
SCALES = ("one_0d", "one_1d", "one_2d", "vector", "matrix", "strided")
B_SCALES = (*SCALES, "column", "strided_column")  # [N, 1], as checkpoints store scales of output channels
SCALE_VALUES = ("positive", "signed", "wide", "special")
BIASES = (None, "float32", "out", "matrix", "strided")
ZERO_POINTS = (None, "one_0d_int32", "one_1d_int8", "vector_int32", "vector_int8", "matrix_int32", "matrix_int8")

_POISON_INT32 = -1595877173


@dataclasses.dataclass(frozen=True)
class Case:
    """One product. `scale_values="special"` puts NaN, infinities, zeros and subnormals into scales and bias."""

    m: int
    n: int
    k: int
    out_dtype: torch.dtype = torch.bfloat16
    a_layout: str = "rows"
    b_layout: str = "columns"
    out_layout: str = "rows"
    values: str = "full"
    a_scale: str = "vector"
    b_scale: str = "vector"
    scale_values: str = "positive"
    bias: str | None = None
    a_zero_point: str | None = None
    b_zero_point: str | None = None
    seed: int = 0

    def make(self, device: str | torch.device = "cpu") -> Operands:
        generator = torch.Generator().manual_seed(self.seed)
        scaled = self.out_dtype is not torch.int32
        host = {
            "a": matrix(self.m, self.k, self.a_layout, self.values, generator),
            "b": matrix(self.k, self.n, self.b_layout, self.values, generator),
            "a_scale": scale(self.a_scale, self.m, "column", self.scale_values, generator) if scaled else None,
            "b_scale": scale(self.b_scale, self.n, "row", self.scale_values, generator) if scaled else None,
            "bias": bias(self.bias, self.n, self.out_dtype, self.scale_values, generator) if scaled else None,
            "a_zero_point": zero_point(self.a_zero_point, self.m, "column", generator),
            "b_zero_point": zero_point(self.b_zero_point, self.n, "row", generator),
        }
        return Operands(self, **{name: None if t is None else to_device(t, device) for name, t in host.items()})


@dataclasses.dataclass
class Operands:
    case: Case
    a: torch.Tensor
    b: torch.Tensor
    a_scale: torch.Tensor | None
    b_scale: torch.Tensor | None
    bias: torch.Tensor | None
    a_zero_point: torch.Tensor | None
    b_zero_point: torch.Tensor | None

    @property
    def inputs(self) -> dict[str, torch.Tensor | None]:
        """All inputs by the names that `create_descriptor` and `calculate` share."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "case"}

    @property
    def zero_points(self) -> dict[str, torch.Tensor | None]:
        return {"a_zero_point": self.a_zero_point, "b_zero_point": self.b_zero_point}

    def poisoned_out(self) -> torch.Tensor:
        return poisoned(self.case.m, self.case.n, self.case.out_dtype, self.case.out_layout, self.a.device)

    def expected(self) -> torch.Tensor:
        return reference.scaled_mm(**self.inputs, out_dtype=self.case.out_dtype)

    def check(self, actual: torch.Tensor) -> None:
        """Fails, naming the case and the first difference, unless `actual` holds the reference's bits."""
        expected = self.expected()
        assert reference.same_bits(actual, expected), f"{self.case}: {reference.describe_difference(actual, expected)}"
        left = beside(actual)
        assert reference.same_bits(left, torch.full_like(left, _poison(left.dtype))), f"{self.case}: something was written beside the output"


# ---- tensors ---------------------------------------------------------------------------------------------------------


def strided(rows: int, columns: int, layout: str, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised [rows, columns] view that lies in memory as `layout` says (no broadcast here)."""
    if layout.endswith("columns"):
        return strided(columns, rows, layout.replace("columns", "rows"), dtype).t()
    if layout == "rows":
        return torch.empty((rows, columns), dtype=dtype)
    if layout == "padded_rows":
        return torch.empty((rows, columns + 16), dtype=dtype)[:, :columns]
    if layout == "aligned_rows":  # each starts on 16 elements
        return torch.empty((rows, (columns + 15) // 16 * 16), dtype=dtype)[:, :columns]
    if layout == "offset_rows":
        return torch.empty((rows, columns + 5), dtype=dtype)[:, 1 : 1 + columns]
    if layout == "every_second":
        return torch.empty((2 * rows, 2 * columns), dtype=dtype)[::2, ::2]
    if layout == "every_second_row":
        return torch.empty((2 * rows, columns), dtype=dtype)[::2]
    raise ValueError(f"layout {layout!r}")


def to_device(t: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """A copy on `device` with the same strides and offset, which `Tensor.to` would not keep."""
    if torch.device(device).type == "cpu":
        return t
    storage = t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0).to(device)
    return storage.as_strided(t.shape, t.stride(), t.storage_offset())


def matrix(rows: int, columns: int, layout: str, values: str, generator: torch.Generator) -> torch.Tensor:
    """int8 [rows, columns]; `values`: "full" -128..127, "extremes" those two, "minimum" -128, "small" -3..3."""
    if layout == "broadcast_row":
        return matrix(1, columns, "rows", values, generator).expand(rows, columns)
    if layout == "broadcast_column":
        return matrix(rows, 1, "rows", values, generator).expand(rows, columns)
    shape = (rows, columns)
    if values == "full":
        data = torch.randint(-128, 128, shape, generator=generator)
    elif values == "extremes":
        data = torch.randint(0, 2, shape, generator=generator) * 255 - 128
    elif values == "minimum":
        data = torch.full(shape, -128)
    elif values == "small":
        data = torch.randint(-3, 4, shape, generator=generator)
    else:
        raise ValueError(f"values {values!r}")
    out = strided(rows, columns, layout, torch.int8)
    out.copy_(data)
    return out


def _floats(size: int, values: str, generator: torch.Generator) -> torch.Tensor:
    base = torch.rand(size, generator=generator) * 0.02 + 1e-4
    if values == "positive":
        return base
    if values == "signed":
        return torch.randn(size, generator=generator) * 0.01
    if values == "wide":  # 30 decades: overflow to infinity and underflow to subnormals and zero in the cast
        return torch.randn(size, generator=generator) * 10.0 ** torch.randint(-18, 13, (size,), generator=generator)
    if values == "special":
        specials = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-45, -1e-40, 3e38])
        mixed = torch.cat([specials, torch.randn(len(specials), generator=generator)])
        return mixed[torch.randint(0, len(mixed), (size,), generator=generator)]
    raise ValueError(f"scale values {values!r}")


def scale(kind: str, size: int, along: str, values: str, generator: torch.Generator) -> torch.Tensor:
    """float32 scale for `size` rows (`along="column"`: [M] or [M, 1]) or columns ("row": [N] or [1, N])."""
    return _shaped(kind, _floats(1 if kind.startswith("one") else size, values, generator), along)


def bias(kind: str | None, n: int, out_dtype: torch.dtype, values: str, generator: torch.Generator) -> torch.Tensor | None:
    if kind is None:
        return None
    data = _floats(n, values, generator) * (1.0 if values == "special" else 100.0)
    if kind in ("float32", "strided"):
        return _shaped("strided" if kind == "strided" else "vector", data, "row")
    return _shaped("matrix" if kind == "matrix" else "vector", data.to(out_dtype), "row")


def zero_point(kind: str | None, size: int, along: str, generator: torch.Generator) -> torch.Tensor | None:
    if kind is None:
        return None
    shape, _, dtype = kind.rpartition("_")
    data = torch.randint(-128, 128, (1 if shape.startswith("one") else size,), generator=generator)
    return _shaped(shape, data.to(getattr(torch, dtype)), along)


def _shaped(kind: str, data: torch.Tensor, along: str) -> torch.Tensor:
    if kind == "one_0d":
        return data.reshape(())
    if kind in ("one_1d", "vector"):
        return data
    if kind in ("one_2d", "matrix"):
        return data.reshape(-1, 1) if along == "column" else data.reshape(1, -1)
    if kind == "column":
        return data.reshape(-1, 1)
    if kind == "strided_column":
        return torch.stack([data, torch.full_like(data, 77)], 1)[:, :1]
    if kind == "strided":
        wide = data.repeat_interleave(3)
        wide[1::3] = wide[2::3] = 77
        return wide[::3]
    raise ValueError(f"kind {kind!r}")


def poisoned(m: int, n: int, dtype: torch.dtype, layout: str = "rows", device: str | torch.device = "cpu") -> torch.Tensor:
    """[m, n] full of NaN (an unlikely number for int32), so that an element nobody writes shows; so is the memory between and behind."""
    view = strided(m, n, layout, dtype)
    memory = torch.full((view.untyped_storage().nbytes() // view.element_size() + 16,), _poison(dtype), dtype=dtype)
    return to_device(memory.as_strided(view.shape, view.stride(), view.storage_offset()), device)


def _poison(dtype: torch.dtype) -> float:
    return _POISON_INT32 if dtype is torch.int32 else float("nan")


def beside(t: torch.Tensor) -> torch.Tensor:
    """The elements of a view's memory that it does not show."""
    memory = t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
    hidden = torch.ones(memory.shape, dtype=torch.bool, device=t.device)
    hidden.as_strided(t.shape, t.stride(), t.storage_offset()).fill_(False)
    return memory[hidden]


# ---- lists of cases --------------------------------------------------------------------------------------------------


def every_shape(**fields) -> Iterator[Case]:
    for (m, n, k), dtype in itertools.product(SMALL_SHAPES + ZERO_SHAPES, OUT_DTYPES):
        yield Case(m, n, k, out_dtype=dtype, bias="out", seed=m + n + k, **fields)


def random_case(generator: torch.Generator, max_m: int = 80, max_n: int = 150, max_k: int = 300) -> Case:
    """Any mix of everything, sizes from 0 on; three in four inputs have the layouts that fast kernels take."""

    def pick(options):
        return options[int(torch.randint(len(options), (), generator=generator))]

    def size(limit):
        return int(torch.randint(limit + 1, (), generator=generator))

    usual = size(3) > 0
    return Case(
        *(size(limit) for limit in (max_m, max_n, max_k)),
        out_dtype=pick(OUT_DTYPES),
        a_layout="rows" if usual else pick(INPUT_LAYOUTS),
        b_layout="columns" if usual else pick(INPUT_LAYOUTS),
        out_layout="rows" if usual else pick(LAYOUTS),
        values=pick(VALUES),
        a_scale=pick(SCALES),
        b_scale=pick(B_SCALES),
        scale_values=pick(SCALE_VALUES),
        bias=pick(BIASES),
        a_zero_point=pick(ZERO_POINTS),
        b_zero_point=pick(ZERO_POINTS),
        seed=size(1 << 30),
    )
