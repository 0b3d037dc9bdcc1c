"""What test_core_grouped_block_scaled.py runs in a process of its own, where libcuda.so.1 is the fake driver.

fake_gpu_grouped_block_scaled.py FUNCTION ARGUMENTS...     prints one JSON document
"""

from __future__ import annotations

import ctypes
import json
import random
import sys

import torch
from fake_gpu_core import Core, status_of  # lets the next line find the tests

from operands.grouped_block_scaled_cases import LAYOUTS, ExpertsCase  # isort: skip

from scaled_mm import TensorDesc, reference
from scaled_mm.products import codes
from scaled_mm.tables import load_table


class ExpertsCore(Core):
    """The C core's functions for grouped block-scaled products, on a fake GPU."""

    PRODUCT = codes.GROUPED_BLOCK_SCALED_GEMM

    def plan(self, out, inputs, kernel: str | None = None) -> ctypes.c_void_p:
        tensors = {**inputs, "out": out}
        return self.create(kernel, **{name: None if tensor is None else TensorDesc.of(tensor) for name, tensor in tensors.items()})


# tokens, E, K, N by seed: for which larger tiles are predicted to be faster
LARGE = {100: (600, 1, 128, 520), 300: (1500, 1, 144, 1032)}


def products(kernels: str, count: str) -> dict:
    """Random products through create and calculate, compared with the reference; the choice with the table's own."""
    core, table, pick, rows = ExpertsCore(kernels), load_table("sm90").grouped_block_scaled, random.Random(1).choice, {}
    for seed in range(int(count)):
        tokens, E, K, N = pick([0, 1, 5, 40, 150]), pick([1, 2, 7, 60]), pick([0, 1, 16, 130, 272]), pick([4, 8, 16, 130])
        usual = pick([True, False])
        if seed in LARGE:
            (tokens, E, K, N), usual = LARGE[seed], True
        case = ExpertsCase(
            tokens,
            E,
            K,
            N,
            pick([torch.bfloat16, torch.float32]),
            offsets=pick(["random", "one", "short", "wild"]),
            b_layout=pick(LAYOUTS[:2]) if usual else pick(LAYOUTS),
            pad=16 if usual else 0,
            scale_values=pick(["positive", "signed", "wide", "special"]),
            scales=pick(["rows", "columns", "spread"]),
            bias=pick([None, "out", "float32"]),
            seed=seed,
            block_size=pick([128, 128, 64]),
        )
        inputs, out = case.make(), case.poisoned()
        descriptor = core.plan(out, inputs)
        choice = core.choice(descriptor)
        active = min(tokens, E) or 1
        row, selection = choice.row.decode(), table.select(-(-tokens // active), N, K, count=active)
        expected = selection.row.name
        if case.block_size == 64 and tokens and K and (K > 64 or N > 64):  # else one scale is of a block of either size
            expected = table.fastest(-(-tokens // active), N, K, count=active, block_size=64)[0][1].name
        assert K == 0 or choice.bucket == selection.bucket_index, f"{case}: {choice.bucket}, not {selection}"
        if tokens and K and (usual or row != table.fallback):
            assert row == expected, f"{case}: {row}, not {expected}, {choice.reason}"
        core.calculate(descriptor, out, inputs, None)
        case.check(out, inputs, row)
        rows[row] = rows.get(row, 0) + 1
        core.destroy(descriptor)
    assert core.asked == [], core.asked
    return {"rows": rows}


def refusals(kernels: str) -> dict:
    """Status and message of what calculate and a forced row refuse."""
    core = ExpertsCore(kernels)
    case, unaligned = ExpertsCase(40, 4, 256, 16, bias="float32"), ExpertsCase(40, 4, 31, 16)
    inputs, out = case.make(), case.poisoned()
    descriptor = core.plan(out, inputs)
    gap = torch.empty(4 * 256 * 16 + 3 * 8, dtype=torch.int8).as_strided((4, 256, 16), (256 * 16 + 8, 1, 256))
    first = load_table("sm90").grouped_block_scaled.rows[0].name
    answer = {}
    for name, call in {
        "no a_scale": lambda: core.calculate(descriptor, out, {**inputs, "a_scale": None}, None),
        "no offsets": lambda: core.calculate(descriptor, out, {**inputs, "expert_offsets": None}, None),
        "odd pointer": lambda: core.calculate(descriptor, out, {**inputs, "a": inputs["a"].view(-1)[1:]}, None),
        "overlap": lambda: core.calculate(descriptor, inputs["a"], inputs, None),  # a has more bytes than out
        "unknown row": lambda: core.plan(out, inputs, "generic_64x64x64"),
        "unaligned K": lambda: core.plan(unaligned.poisoned(), unaligned.make(), first),
        "unaligned experts": lambda: core.plan(out, {**inputs, "b": gap}, first),
        "fine": lambda: core.calculate(descriptor, out, inputs, None),
    }.items():
        answer[name] = status_of(call)
    answer["right"] = reference.same_bits(out, reference.grouped_block_scaled_mm(**inputs))
    return answer


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
