"""Row-wise operators on rows of every length class, for tools that watch the kernels: `python every_rowwise.py`.

Aligned and unaligned rows, one and several of them. Results are compared with those of the CPU. Prints the number of calls; exits 1 if a result
differs, or if a call was not served by a kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch

import scaled_mm as sm
from scaled_mm.reference import same_bits
from scaled_mm.rowwise import kernels, moe

LENGTHS = (7, 96, 1027, 2048, 2560, 4096, 4099, 9000, 20003)
MANY_ROWS, LONG = 1100, (2560, 5000, 9000, 13000)  # beyond what kernels for few rows serve
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Tensors = dict[str, torch.Tensor]
CALLS: dict[str, Callable[[Tensors], object]] = {
    "token": lambda t: sm.quantize_int8(t["x"]),
    "smooth": lambda t: sm.quantize_int8(t["x"], smooth_scale=t["weight"]),
    "asymmetric": lambda t: sm.quantize_int8(t["x"], symmetric=False),
    "dynamic": lambda t: sm.dynamic_quant(t["x"]),
    "static scale": lambda t: sm.quantize_int8(t["x"], scale=t["scale"]),
    "static": lambda t: sm.quantize_int8(t["x"], scale=t["scale"], zero_point=t["point"]),
    "multiply": lambda t: sm.quantize(t["x"], t["weight"], t["weight"]),
    "norm": lambda t: sm.rms_norm(t["x"], t["weight"]),
    "norm token": lambda t: sm.rms_norm(t["x"], t["weight"], quantize="token"),
    "add": lambda t: sm.add_rms_norm(t["x"], t["residual"], t["weight"]),
    "add token": lambda t: sm.add_rms_norm(t["x"], t["residual"], t["weight"], quantize="token"),
    "silu": lambda t: sm.silu_and_mul(t["gated"]),
    "silu token": lambda t: sm.silu_and_mul(t["gated"], quantize="token"),
    "gelu": lambda t: sm.gelu_and_mul(t["gated"]),
    "gelu static": lambda t: sm.gelu_and_mul(t["gated"], quantize=t["scale"]),
    "int8 blocks": lambda t: sm.quantize_int8_block(t["x"]),
    "q4_0": lambda t: sm.quantize_block(t["blocks"], "q4_0"),
    "q8_1": lambda t: sm.quantize_q8_1(t["blocks"]),
    "sort by expert": lambda t: tuple(sm.moe_sort(t["ids"], 4)),
    "to rows of experts": lambda t: moe.quantize_to_rows(t["x"], t["rows"], False),
    "blocks to rows of experts": lambda t: moe.quantize_to_rows(t["x"], t["rows"], True),
    "weighted sum": lambda t: moe.combine(t["copies"], t["topk_weights"], t["some_rows"]),
    "router": lambda t: sm.topk_softmax(t["logits"], 6, renormalize=False),
    "rope": lambda t: sm.rope(t["query"], t["key"], t["cos"], t["sin"]),
}


def unaligned(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)


def operands(m: int, k: int, dtype: torch.dtype) -> Tensors:
    generator = torch.Generator().manual_seed(m + k)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    named = {"x": random(m, k), "residual": random(m, k), "weight": random(k), "gated": random(m, 2 * k), "blocks": random(m, -(-k // 32) * 32)}
    named |= {"query": random(m, 4, 128), "key": random(m, 2, 128), "cos": random(m, 64), "sin": random(m, 64)}
    named |= {"copies": random(2 * m, k), "topk_weights": random(m, 2), "ids": torch.randint(-1, 4, (m, 2), generator=generator)}
    named["logits"] = random(m, min(max(k, 6), 1024))
    named["rows"] = torch.randperm(2 * m, generator=generator).to(torch.int32).view(m, 2)
    named["some_rows"] = torch.where(named["ids"] < 0, -1, named["rows"])
    return named | {"scale": torch.tensor([0.02]), "point": torch.tensor([3], dtype=torch.int32)}


def tensors(result: object) -> Iterator[torch.Tensor]:
    """The tensors of nested tuples."""
    if isinstance(result, tuple):
        for one in result:
            yield from tensors(one)
    elif isinstance(result, torch.Tensor):
        yield result


def main() -> int:
    answers, launch = [], kernels.launch
    kernels.launch = lambda *args: answers.append(launch(*args)) or answers[-1]
    calls = wrong = 0
    cases = [(m, k, dtype, moved) for dtype in DTYPES for k in LENGTHS for m, moved in ((1, False), (5, False), (5, True))]
    for m, k, dtype, moved in [*cases, *((MANY_ROWS, k, torch.bfloat16, False) for k in LONG)]:
        named = operands(m, k, dtype)
        on_gpu = {name: t.cuda() for name, t in named.items()}
        if moved:
            on_gpu = {name: unaligned(t) if t.is_floating_point() and t.numel() > 1 else t for name, t in on_gpu.items()}
        for name, call in CALLS.items():
            answers.clear()
            pairs = zip(tensors(call(on_gpu)), tensors(call(named)), strict=True)
            right = all([same_bits(got.cpu(), expected) for got, expected in pairs])
            calls += 1
            if not right or not answers or False in answers:
                wrong += 1
                print(f"{name} of {m} x {k} {dtype}: {'no kernel served' if right else 'differs from the CPU'}", file=sys.stderr)
    print(f"{calls} calls, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
