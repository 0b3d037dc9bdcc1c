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

    @property
    def inputs(self) -> dict[str, torch.Tensor | None]:
        return {name: getattr(self, name) for name in ("a", "b", "a_scale", "b_scale", "expert_offsets", "bias")}

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
    seed=0,
    device="cpu",
) -> Grouped:
    """A grouped product of random numbers.

    a_scale: one, vector, matrix; b_scale: one, expert, expert3, matrix, matrix3, column3, strided; bias: None, out, float32.
    b_layout: columns (a weight's transpose), apart (the same, with a gap between the experts) or rows.
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
    if made["b_scale"] is not None and b_scale == "strided":
        made["b_scale"] = made["b_scale"][:, ::2]
    return Grouped(**made, out_dtype=out_dtype)
