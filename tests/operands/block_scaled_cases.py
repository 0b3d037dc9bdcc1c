"""Operands of block-scaled products."""

from __future__ import annotations

import dataclasses

import torch

from scaled_mm import reference

from .cases import poisoned, strided

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# M, N, K: decode, both sides of the edges of tiles and blocks, K and N that end inside a block and inside 16 bytes, sizes of one.
SHAPES = (
    (1, 1, 1),
    (1, 128, 128),
    (1, 256, 512),
    (2, 127, 129),
    (3, 5, 7),
    (7, 129, 127),
    (15, 64, 255),
    (16, 200, 384),
    (17, 96, 256),
    (31, 384, 130),
    (33, 130, 1),
    (63, 257, 144),
    (65, 33, 640),
    (100, 264, 1031),
    (129, 136, 272),
)
ZERO_SHAPES = ((0, 16, 16), (16, 0, 16), (16, 16, 0), (0, 0, 16), (0, 16, 0), (16, 0, 0), (0, 0, 0), (1, 130, 0))
BIASES = (None, "float32", "out", "matrix", "strided")
SCALE_VALUES = ("positive", "signed", "wide", "special")
SCALE_LAYOUTS = ("rows", "columns", "padded", "broadcast")


@dataclasses.dataclass(frozen=True)
class BlockCase:
    """One product; `make` turns it into tensors, the same ones each time. Layouts of a, b, out: those of cases.LAYOUTS.

    pad: rows of a and of b.t() begin on multiples of this many bytes, which replaces their layouts. scale_layout "columns" is that of
    a checkpoint's transposed weight_scale_inv.
    """

    m: int
    n: int
    k: int
    out_dtype: torch.dtype = torch.bfloat16
    a_layout: str = "rows"
    b_layout: str = "columns"
    out_layout: str = "rows"
    pad: int = 0
    own_out: bool = False  # out has out_layout although there is pad
    values: str = "full"
    scale_values: str = "positive"
    scale_layout: str = "rows"
    bias: str | None = None
    seed: int = 0
    block_size: int = 128

    def make(self, device: str | torch.device = "cpu") -> BlockOperands:
        generator = torch.Generator().manual_seed(self.seed)
        shape_k, shape_n = -(-self.k // self.block_size), -(-self.n // self.block_size)
        host = {
            "a": _matrix(self.m, self.k, self.values, self.a_layout, self.pad, generator),
            "b": _matrix(self.n, self.k, self.values, "rows", self.pad, generator).t()
            if self.pad
            else _matrix(self.k, self.n, self.values, self.b_layout, 0, generator),
            "a_scale": _scales(self.m, shape_k, self.scale_values, self.scale_layout, generator),
            "b_scale": _scales(shape_k, shape_n, self.scale_values, self.scale_layout, generator),
            "bias": _bias(self.bias, self.n, self.out_dtype, self.scale_values, generator),
        }
        inputs = {name: None if t is None else _to(t, device) for name, t in host.items()}
        return BlockOperands(self, inputs, torch.device(device))


@dataclasses.dataclass(frozen=True)
class BlockOperands:
    """Tensors of a case. `expected` is the reference's result, `poisoned` an output of the case's layout full of NaN."""

    case: BlockCase
    inputs: dict[str, torch.Tensor | None]
    device: torch.device

    def expected(self) -> torch.Tensor:
        return reference.block_scaled_mm(**self.inputs, out_dtype=self.case.out_dtype)

    def poisoned(self) -> torch.Tensor:
        if self.case.pad and not self.case.own_out:
            wide = -(-self.case.n // 8) * 8 + 8
            return torch.full((self.case.m, wide), float("nan"), dtype=self.case.out_dtype, device=self.device)[:, : self.case.n]
        return poisoned(self.case.m, self.case.n, self.case.out_dtype, self.case.out_layout, self.device)

    def check(self, out: torch.Tensor, what: str = "") -> None:
        expected = self.expected()
        assert reference.same_bits(out, expected), f"{what} {self.case!r}: {reference.describe_difference(out, expected)}"


def _to(t: torch.Tensor, device) -> torch.Tensor:
    """On the device with the same strides, and the same misalignment."""
    if torch.device(device).type == "cpu":
        return t
    storage = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()).to(device)
    return storage.as_strided(t.shape, t.stride(), t.storage_offset())


def _matrix(rows: int, columns: int, values: str, layout: str, pad: int, generator: torch.Generator) -> torch.Tensor:
    if pad:
        out = torch.full((rows, -(-max(columns, 1) // pad) * pad), 113, dtype=torch.int8)[:, :columns]
    else:
        out = strided(rows, columns, layout, torch.int8)
    if values == "minimum":
        return out.fill_(-128)
    if values == "extremes":
        data = torch.where(torch.rand((rows, columns), generator=generator) < 0.5, -128, 127)
    else:
        data = torch.randint(-128, 128, (rows, columns), generator=generator)
    return out.copy_(data)


def _floats(shape: tuple[int, ...], values: str, generator: torch.Generator) -> torch.Tensor:
    data = torch.rand(shape, generator=generator) + 0.01
    if values == "positive":
        return data * 0.01
    if values == "signed":
        return data * torch.where(torch.rand(shape, generator=generator) < 0.5, -1.0, 1.0)
    if values == "wide":
        return data * torch.exp2(torch.randint(-70, 60, shape, generator=generator).float())
    special = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-45, -1e-40, 3e38, 1.0, 0.5, 2.0, -1.0])
    return special[torch.randint(0, len(special), shape, generator=generator)]


def _scales(rows: int, columns: int, values: str, layout: str, generator: torch.Generator) -> torch.Tensor:
    data = _floats((rows, columns), values, generator)
    if layout == "columns":
        return data.t().contiguous().t()
    if layout == "padded":
        wide = torch.full((rows, 2 * columns + 3), 77.0)
        wide[:, 1 : 1 + 2 * columns : 2] = data
        return wide[:, 1 : 1 + 2 * columns : 2]
    if layout == "broadcast" and rows and columns:
        return data[:1, :1].expand(rows, columns)
    return data


def _bias(kind: str | None, n: int, out_dtype: torch.dtype, values: str, generator: torch.Generator) -> torch.Tensor | None:
    if kind is None:
        return None
    data = _floats((n,), "signed" if values == "positive" else values, generator)
    if kind == "float32":
        return data
    if kind == "strided":
        return data.repeat_interleave(3)[::3]
    return data.to(out_dtype).reshape(1, n) if kind == "matrix" else data.to(out_dtype)
