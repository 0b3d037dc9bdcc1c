"""Operands of grouped products."""

from __future__ import annotations

import dataclasses

import torch

import scaled_mm as sm

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int32)


@dataclasses.dataclass
class Grouped:
    """One grouped product. `a_scale` and `b_scale` are None for an int32 out."""

    a: torch.Tensor
    b: torch.Tensor
    a_scale: torch.Tensor | None
    b_scale: torch.Tensor | None
    expert_offsets: torch.Tensor
    bias: torch.Tensor | None
    out_dtype: torch.dtype
    a_zero_point: torch.Tensor | None = None
    b_zero_point: torch.Tensor | None = None
    a_row_sums: torch.Tensor | None = None
    b_column_sums: torch.Tensor | None = None

    @property
    def inputs(self) -> dict[str, torch.Tensor | None]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "out_dtype"}

    @property
    def defined_by(self) -> dict[str, torch.Tensor | None]:
        """What the result depends on: the inputs of the reference."""
        return {name: tensor for name, tensor in self.inputs.items() if name not in ("a_row_sums", "b_column_sums")}

    def poisoned(self, padding: int = 0) -> torch.Tensor:
        """An output [tokens, N] that nobody has written to, in rows of N + padding elements."""
        poison = -77777 if self.out_dtype == torch.int32 else float("nan")
        shape = (self.a.shape[0], self.b.shape[2] + padding)
        return torch.full(shape, poison, dtype=self.out_dtype, device=self.a.device)[:, : self.b.shape[2]]

    def loop(self) -> torch.Tensor:
        """The product as a loop of `scaled_mm` over the experts, with the clamping that the documentation gives."""
        tokens, out, begin = self.a.shape[0], torch.zeros_like(self.poisoned()), 0
        for expert, offset in enumerate(self.expert_offsets.tolist()):
            end = max(begin, min(offset, tokens))
            rows = slice(begin, end)
            options = {}
            if self.a_scale is not None:
                experts = self.b.shape[0]
                options["a_scale"] = self.a_scale if self.a_scale.numel() == 1 else self.a_scale.reshape(tokens)[rows]
                options["b_scale"] = self.b_scale if self.b_scale.numel() == 1 else self.b_scale.reshape(experts, -1)[expert]
            if self.bias is not None:
                options["bias"] = self.bias[expert]
            if (zero := self.a_zero_point) is not None:
                options["a_zero_point"] = zero if zero.numel() == 1 else zero.reshape(tokens)[rows]
            if (zero := self.b_zero_point) is not None:
                options["b_zero_point"] = zero.reshape(1) if zero.numel() == 1 else zero.reshape(self.b.shape[0], -1)[expert]
            if end > begin:
                out[rows] = sm.scaled_mm(self.a[rows], self.b[expert], out_dtype=self.out_dtype, **options)
            begin = end
        return out


def random_offsets(tokens: int, experts: int, generator: torch.Generator, kind: str = "random") -> torch.Tensor:
    """int32 [experts]. random: some experts are empty; one: a single expert has all tokens; short: rows are left over;
    wild: out of order, negative, past the end."""
    if kind == "one":
        chosen = int(torch.randint(0, max(experts, 1), (1,), generator=generator))
        return torch.tensor([0] * chosen + [tokens] * (experts - chosen), dtype=torch.int32)
    if kind == "wild":
        return torch.randint(-3, tokens + 4, (experts,), generator=generator, dtype=torch.int32)
    offsets = torch.randint(0, tokens + 1, (experts,), generator=generator, dtype=torch.int32).sort().values
    if kind == "random" and experts:
        offsets[-1] = tokens
    return offsets


def grouped(
    tokens: int,
    E: int,
    K: int,
    N: int,
    *,
    out_dtype=torch.bfloat16,
    offsets="random",
    a_scale="vector",
    b_scale="matrix",
    bias=None,
    b_layout="columns",
    pad=0,
    a_zero_point=None,
    b_zero_point=None,
    sums=False,
    seed=0,
    device="cpu",
) -> Grouped:
    """A grouped product of random numbers.

    a_scale: one, vector, matrix; b_scale: one, expert, expert3, matrix, matrix3, column3, strided; bias: None, out, float32.
    b_layout: columns (a weight's transpose), apart (the same, with a gap between the experts) or rows.
    a_zero_point: None, or a value of a_scale; b_zero_point: None, or a value of b_scale. sums: those of a's rows and of b's columns are given.
    pad: bytes after each row of K, which are not zero.
    """
    generator = torch.Generator().manual_seed(seed)
    integers = lambda *shape: torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)  # noqa: E731
    a, weight = integers(tokens, K + pad)[:, :K], integers(E, N + (b_layout == "apart"), K + pad)[:, :N, :K]
    b = weight.transpose(1, 2)
    scales_a = {"one": (), "vector": (tokens,), "matrix": (tokens, 1)}
    scales_b = {
        "one": (1,),
        "expert": (E,),
        "expert3": (E, 1, 1),
        "matrix": (E, N),
        "matrix3": (E, 1, N),
        "column3": (E, N, 1),
        "strided": (E, 2 * N),
    }
    made = dict(a=a, b=b, a_scale=None, b_scale=None, bias=None)
    if out_dtype is not torch.int32:
        made["a_scale"] = torch.rand(scales_a[a_scale], generator=generator) + 0.01
        made["b_scale"] = torch.randn(scales_b[b_scale], generator=generator)
        if bias is not None:
            made["bias"] = torch.randn(E, N, generator=generator).to(out_dtype if bias == "out" else torch.float32)
    zero_points = lambda shape, dtype: torch.randint(-128, 128, shape, dtype=dtype, generator=generator)  # noqa: E731
    if a_zero_point is not None:
        made["a_zero_point"] = zero_points(scales_a[a_zero_point], torch.int32)
    if b_zero_point is not None:
        made["b_zero_point"] = zero_points(scales_b[b_zero_point], torch.int8)
    if sums:
        made["a_row_sums"], made["b_column_sums"] = a.sum(1, dtype=torch.int32), b.sum(1, dtype=torch.int32)
    made["expert_offsets"] = random_offsets(tokens, E, generator, offsets)

    def to_device(t: torch.Tensor | None) -> torch.Tensor | None:
        if t is None or torch.device(device).type == "cpu":
            return t
        storage = torch.empty(t.untyped_storage().nbytes() // t.element_size(), dtype=t.dtype, device=device)
        storage.copy_(torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()))
        return storage.as_strided(t.shape, t.stride(), t.storage_offset())

    made = {name: to_device(t) for name, t in made.items()}
    if b_layout == "rows":
        made["b"] = made["b"].contiguous()
    for name, form in (("b_scale", b_scale), ("b_zero_point", b_zero_point)):
        if made.get(name) is not None and form == "strided":
            made[name] = made[name][:, ::2]
    return Grouped(**made, out_dtype=out_dtype)
