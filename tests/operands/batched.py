"""Operands of batched products: cases.py with three dimensions."""

from __future__ import annotations

import dataclasses

import torch

from scaled_mm import reference

from . import cases

# How the products of an operand lie in memory. "matrix": two dimensions; "one": a batch of 1; both serve every product.
BATCHES = ("each", "padded", "odd", "stepped", "sliding", "expanded", "one", "matrix")
SHARED = ("expanded", "one", "matrix")
OUT_BATCHES = ("each", "padded", "odd", "stepped", "interleaved")
# What varies along M or N: one value, as for a plain product, or for each product of the batch.
VECTORS = ("one", "one_3d", "vector", "matrix", "shared_3d", "each", "each_one", "each_expanded")
B_SCALES = (*VECTORS, "column", "each_column")
BIASES = (None, "vector", "matrix", "shared_3d", "each")
ZERO_POINTS = (None, "one", "vector", "each", "each_one")


@dataclasses.dataclass(frozen=True)
class BatchCase:
    """One batch. `sums`: give the row and column sums to the call."""

    batch: int
    m: int
    n: int
    k: int
    out_dtype: torch.dtype = torch.bfloat16
    a_batch: str = "each"
    b_batch: str = "each"
    out_batch: str = "each"
    a_layout: str = "rows"
    b_layout: str = "columns"
    out_layout: str = "rows"
    a_scale: str = "each"
    b_scale: str = "each"
    bias: str | None = None
    bias_dtype: str = "out"
    a_zero_point: str | None = None
    b_zero_point: str | None = None
    zero_point_dtype: torch.dtype = torch.int32
    sums: bool = False
    seed: int = 0

    def make(self, device: str | torch.device = "cpu") -> BatchOperands:
        generator = torch.Generator().manual_seed(self.seed)
        scaled = self.out_dtype is not torch.int32
        a = operand(self.batch, self.m, self.k, self.a_layout, self.a_batch, generator)
        b = operand(self.batch, self.k, self.n, self.b_layout, self.b_batch, generator)
        bias_dtype = self.out_dtype if self.bias_dtype == "out" else torch.float32

        def floats(kind, size, along, dtype=torch.float32):
            return vector(kind, self.batched, size, along, generator, dtype) if scaled and kind else None

        def points(kind, size, along):
            return vector(kind, self.batched, size, along, generator, self.zero_point_dtype) if kind else None

        made = {
            "a": a,
            "b": b,
            "a_scale": floats(self.a_scale, self.m, "column"),
            "b_scale": floats(self.b_scale, self.n, "row"),
            "bias": floats(self.bias, self.n, "row", bias_dtype),
            "a_zero_point": points(self.a_zero_point, self.m, "column"),
            "b_zero_point": points(self.b_zero_point, self.n, "row"),
        }
        if self.sums:
            made["a_row_sums"] = a.sum(-1, keepdim=True, dtype=torch.int32)
            made["b_column_sums"] = b.sum(-2, keepdim=True, dtype=torch.int32)
        return BatchOperands(self, {name: None if t is None else cases.to_device(t, device) for name, t in made.items()}, torch.device(device))

    @property
    def batched(self) -> int | None:
        """Products of the output; None: it has two dimensions."""
        kinds = {self.a_batch, self.b_batch}
        if kinds == {"matrix"}:
            return None
        return 1 if kinds <= {"one", "matrix"} else self.batch


@dataclasses.dataclass
class BatchOperands:
    case: BatchCase
    inputs: dict[str, torch.Tensor | None]
    device: torch.device

    def poisoned_out(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, and the memory that it lies in, both full of NaN (an unlikely number for int32)."""
        case = self.case
        if case.batched is None:
            out = lay_out(1, case.m, case.n, case.out_layout, "one", case.out_dtype)[0]
        else:
            out = lay_out(case.batched, case.m, case.n, case.out_layout, case.out_batch, case.out_dtype)
        whole(out).fill_(POISON[case.out_dtype])
        out = cases.to_device(out, self.device)
        return out, whole(out)

    def expected(self) -> torch.Tensor:
        inputs = {name: t for name, t in self.inputs.items() if not name.endswith("sums")}
        return reference.scaled_mm(**inputs, out_dtype=self.case.out_dtype)

    def check(self, actual: torch.Tensor, expected: torch.Tensor | None = None) -> None:
        expected = self.expected() if expected is None else expected
        assert reference.same_bits(actual, expected), f"{self.case}: {reference.describe_difference(actual, expected)}"

    def check_poison_around(self, out: torch.Tensor, memory: torch.Tensor) -> None:
        """Fails if anything was written beside `out`."""
        untouched = torch.ones(memory.shape, dtype=torch.bool, device=memory.device)
        untouched.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(False)
        left = memory[untouched]
        poison = torch.full_like(left, POISON[out.dtype])
        assert reference.same_bits(left, poison), f"{self.case}: something was written beside the output"


POISON = {torch.int32: -1595877173, torch.float32: float("nan"), torch.float16: float("nan"), torch.bfloat16: float("nan")}


def whole(t: torch.Tensor) -> torch.Tensor:
    """All of the memory that a tensor is a view of."""
    return t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)


def lay_out(batch: int, rows: int, columns: int, layout: str, how: str, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised [batch, rows, columns] view: each product lies as `layout` says, and they follow each other as `how` says."""
    if how == "interleaved":  # the products' rows side by side: the batch stride is smaller than the row stride
        return torch.empty((rows, batch, columns), dtype=dtype).permute(1, 0, 2)
    one = cases.strided(rows, columns, layout, dtype)
    span = one.untyped_storage().nbytes() // one.element_size()
    aligned = (span + 15) // 16 * 16
    stride = {"each": span, "padded": aligned + 32, "odd": span + 5, "stepped": 2 * aligned, "sliding": 16, "expanded": 0, "one": span}[how]
    memory = torch.empty(max(batch - 1, 0) * stride + span, dtype=dtype)
    return memory.as_strided((batch, rows, columns), (stride, *one.stride()), one.storage_offset())


def operand(batch: int, rows: int, columns: int, layout: str, how: str, generator: torch.Generator) -> torch.Tensor:
    """int8 [batch, rows, columns], [1, rows, columns] or [rows, columns], every byte of its memory random."""
    made = lay_out(1 if how in ("one", "matrix") else batch, rows, columns, layout, "one" if how == "matrix" else how, torch.int8)
    memory = whole(made)
    memory.copy_(torch.randint(-128, 128, memory.shape, dtype=torch.int8, generator=generator))
    return made[0] if how == "matrix" else made


def vector(kind: str, batch: int | None, size: int, along: str, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """A scale, bias or vector of zero points; for a plain product (batch None) the nearest kind that it takes."""
    if batch is None:
        kind = {"one_3d": "one", "each_one": "one", "shared_3d": "vector", "each": "vector", "each_expanded": "vector", "each_column": "column"}.get(
            kind, kind
        )
    length = 1 if kind in ("one", "one_3d", "each_one") else size
    count = batch if kind in ("each", "each_one", "each_column") else 1
    if dtype.is_floating_point:
        data = (torch.randn((count, length), generator=generator) * 0.02).to(dtype)
    else:
        data = torch.randint(-128, 128, (count, length), generator=generator).to(dtype)
    if kind in ("one", "vector"):
        return data[0]
    data = data.unsqueeze(-1 if along == "column" or "column" in kind else 1)
    if kind in ("matrix", "column"):
        return data[0]
    return data.expand(batch, -1, -1) if kind == "each_expanded" else data
