"""What test_core_moe_launch.py runs in a process of its own, where libcuda.so.1 is the fake driver.

fake_gpu_moe.py operators KERNELS MOE COUNT     prints one JSON document
"""

from __future__ import annotations

import json
import random
import sys

import torch
from fake_gpu_core import STREAM
from fake_gpu_rowwise import FLOATS, LAYOUTS, Operands, RowwiseCore, laid_out, same, whole

from scaled_mm.rowwise import moe, reference
from scaled_mm.rowwise.kernels import Kind


class Draw:
    """Random sizes and dtypes of one calculation, and a source of its random tensors."""

    def __init__(self, seed: int):
        self.pick, self.generator = random.Random(seed).choice, torch.Generator().manual_seed(seed)
        self.tokens, self.choices, self.experts = self.pick([0, 1, 5, 33, 700]), self.pick([0, 1, 2, 8]), self.pick([1, 6, 200, 1024])
        self.k = self.pick([0, 1, 7, 8, 127, 128, 136, 1032, 2100])
        self.dtype = self.pick(FLOATS)

    def ids(self) -> torch.Tensor:
        return torch.randint(-2, self.experts + 2, (self.tokens, self.choices), generator=self.generator)

    def floats(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        return laid_out(torch.randn(rows, columns, generator=self.generator).to(dtype), self.pick(LAYOUTS))


def sort(draw: Draw) -> tuple[Kind, int, Operands, Operands]:
    """(kind, function, operands, the expected outputs)."""
    ids, expert_map, here = draw.ids(), None, draw.experts
    if draw.pick([False, True]):
        here = draw.pick([1, max(1, draw.experts // 2)])
        expert_map = torch.randint(-2, here + 2, (draw.experts,), generator=draw.generator, dtype=torch.int32)
    operands = {
        "topk_ids": laid_out(ids.to(draw.pick([torch.int32, torch.int64])), draw.pick(LAYOUTS)),
        "out": torch.full((ids.numel(),), 77, dtype=torch.int32),
        "ends": torch.full((here,), 77, dtype=torch.int32),
        "inverse": torch.full((draw.tokens, draw.choices), 77, dtype=torch.int32),
    }
    if expert_map is not None:
        operands["expert_map"] = laid_out(expert_map[None], draw.pick(["contiguous", "columns apart", "unaligned"]))[0]
    return Kind.MOE_SORT, 0, operands, dict(zip(("out", "ends", "inverse"), reference.moe_sort(ids, here, expert_map)))


def quantize(draw: Draw) -> tuple[Kind, int, Operands, Operands]:
    """To more rows than there are copies. Unassigned rows stay as they are."""
    draw.tokens = min(draw.tokens, 33)
    block, inverse = draw.pick([False, True]), reference.moe_sort(draw.ids(), draw.experts)[2]
    count = inverse.numel() + draw.pick([0, 3])
    operands = {
        "x": draw.floats(draw.tokens, draw.k, draw.dtype),
        "rows": torch.where(inverse >= 0, inverse + (count - inverse.numel()), -1).to(torch.int32),
        "out": laid_out(torch.full((count, draw.k), 77, dtype=torch.int8), draw.pick(LAYOUTS)),
        "out_scale": laid_out(torch.full((count, -(-draw.k // 128) if block else 1), -7.0), draw.pick(LAYOUTS)),
    }
    expected = dict(zip(("out", "out_scale"), moe.quantize_to_rows_on_cpu(count, operands["x"], operands["rows"], block)))
    unnamed = torch.ones(count, dtype=torch.bool)
    unnamed[operands["rows"][operands["rows"] >= 0].long()] = False
    expected["out"][unnamed], expected["out_scale"][unnamed] = 77, -7.0
    return Kind.MOE_QUANTIZE, int(block), operands, expected


def combine(draw: Draw) -> tuple[Kind, int, Operands, Operands]:
    draw.tokens = min(draw.tokens, 33)
    inverse = reference.moe_sort(draw.ids(), draw.experts)[2]
    operands = {
        "y": draw.floats(max(1, inverse.numel()), draw.k, draw.dtype),
        "topk_weights": draw.floats(draw.tokens, draw.choices, draw.pick(FLOATS)),
        "rows": inverse,
        "out": laid_out(torch.full((draw.tokens, draw.k), 77, dtype=draw.dtype), draw.pick(LAYOUTS)),
    }
    return Kind.MOE_COMBINE, 0, operands, {"out": moe._combine(operands["y"], operands["topk_weights"], inverse)}


def route(draw: Draw) -> tuple[Kind, int, Operands, Operands]:
    draw.tokens, renormalize, k = min(draw.tokens, 33), draw.pick([False, True]), draw.pick([1, 2, 8, 32])
    logits, shape = draw.floats(draw.tokens, draw.experts, draw.dtype), (draw.tokens, min(k, draw.experts))
    operands = {
        "logits": logits,
        "out": laid_out(torch.full(shape, 77.0), draw.pick(LAYOUTS)),
        "ids": laid_out(torch.full(shape, 77, dtype=torch.int32), draw.pick(LAYOUTS)),
    }
    return Kind.TOPK_SOFTMAX, int(renormalize), operands, dict(zip(("out", "ids"), reference.topk_softmax(logits, shape[1], renormalize)))


def operators(kernels: str, library: str, count: str) -> dict:
    """Random operators through create and calculate, bit for bit against the CPU operators."""
    core, met = RowwiseCore(kernels, library), {}
    for seed in range(int(count)):
        draw = Draw(seed)
        kind, function, operands, expected = (sort, quantize, combine, route)[seed % 4](draw)
        what = f"seed {seed}: {kind.name} {function}: " + ", ".join(f"{n} {t.dtype} {list(t.shape)} {list(t.stride())}" for n, t in operands.items())
        before = {name: (whole(t), t.clone()) for name, t in operands.items()}
        core.stream.value, launches = 0, core.launches.value
        try:
            core.run(kind, function, 0, 0.0, operands)
        except Exception as error:
            raise AssertionError(what) from error
        for name, values in expected.items():
            assert same(operands[name], values), f"{name} of {what}"
        without = {  # what leaves nothing to write; a row without elements has a scale, but no block scales
            Kind.MOE_SORT: False,
            Kind.MOE_QUANTIZE: draw.choices == 0 or (draw.k == 0 and function == 1),
            Kind.MOE_COMBINE: draw.k == 0,
            Kind.TOPK_SOFTMAX: False,
        }
        nothing = without[kind] or (draw.tokens == 0 and kind is not Kind.MOE_SORT)
        assert core.launches.value - launches == (not nothing), what
        assert nothing or core.stream.value == STREAM, f"launched on another stream: {what}"
        for name, (memory, values) in before.items():  # nothing but the elements of outputs was written
            if name in expected:
                operands[name].copy_(values)
            assert torch.equal(whole(operands[name]), memory), f"{name} was written, or what lies between its elements: {what}"
        met[kind.name] = met.get(kind.name, 0) + 1
    assert core.asked == [], core.asked
    return met


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({"operators": operators}[sys.argv[1]](*sys.argv[2:])))
