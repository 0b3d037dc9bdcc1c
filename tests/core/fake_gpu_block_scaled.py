"""What test_core_block_scaled.py runs in a process of its own, where libcuda.so.1 is the fake driver.

fake_gpu_block_scaled.py FUNCTION ARGUMENTS...     prints one JSON document
"""

from __future__ import annotations

import ctypes
import json
import random
import sys

import torch
from fake_gpu_core import Core, status_of  # lets the next line find the tests

from operands.block_scaled_cases import BIASES, SCALE_LAYOUTS, SCALE_VALUES, BlockCase  # isort: skip
from operands.cases import LAYOUTS  # isort: skip

from scaled_mm import TensorDesc, reference
from scaled_mm.products import codes
from scaled_mm.tables import load_table


class BlockScaledCore(Core):
    """The C core's block-scaled functions, on a fake GPU."""

    PRODUCT = codes.BLOCK_SCALED_GEMM

    def plan(self, out, inputs, kernel: str | None = None) -> ctypes.c_void_p:
        tensors = {**inputs, "out": out}
        return self.create(kernel, **{name: None if tensor is None else TensorDesc.of(tensor) for name, tensor in tensors.items()})


# m, n, k by seed: for which larger tiles are predicted to be faster
LARGE = {100: (1000, 520, 144), 300: (2000, 1000, 128)}


def products(kernels: str, count: str) -> dict:
    """Random products through create and calculate, compared with the reference; the choice with the table's own."""
    core, table, pick, rows = BlockScaledCore(kernels), load_table("sm90").block_scaled, random.Random(1).choice, {}
    for seed in range(int(count)):
        m, n, k = pick([0, 1, 5, 16, 17, 40]), pick([1, 4, 16, 130]), pick([0, 1, 16, 128, 130, 272])
        usual = pick([True, False])
        if seed in LARGE:
            (m, n, k), usual = LARGE[seed], True
        case = BlockCase(
            m,
            n,
            k,
            pick([torch.bfloat16, torch.float32]),
            pad=16 if usual else 0,
            a_layout=pick(LAYOUTS),
            b_layout=pick(LAYOUTS),
            out_layout=pick(LAYOUTS),
            scale_values=pick(SCALE_VALUES),
            scale_layout=pick(SCALE_LAYOUTS),
            bias=pick(BIASES),
            seed=seed,
            block_size=pick([128, 128, 64]),
        )
        operands = case.make()
        out = operands.poisoned()
        descriptor = core.plan(out, operands.inputs)
        choice = core.choice(descriptor)
        row, selection = choice.row.decode(), table.select(m, n, k)
        expected = selection.row.name
        if case.block_size == 64 and m and k and (k > 64 or n > 64):  # else one scale is of a block of either size
            expected = table.fastest(m, n, k, block_size=64)[0][1].name
        assert k == 0 or choice.bucket == selection.bucket_index, f"{case}: {choice.bucket}, not {selection}"
        if m and k and (usual or row != table.fallback):
            assert row == expected, f"{case}: {row}, not {expected}, {choice.reason}"
        core.calculate(descriptor, out, operands.inputs, None)
        operands.check(out, row)
        rows[row] = rows.get(row, 0) + 1
        core.destroy(descriptor)
    assert core.asked == [], core.asked
    return {"rows": rows}


def refusals(kernels: str) -> dict:
    """Status and message of what calculate and a forced row refuse."""
    core = BlockScaledCore(kernels)
    operands = BlockCase(40, 16, 256, bias="float32").make()
    out, inputs = operands.poisoned(), operands.inputs
    descriptor = core.plan(out, inputs)
    unaligned = BlockCase(40, 16, 31).make()
    first = load_table("sm90").block_scaled.rows[0].name
    small = BlockCase(40, 16, 256, block_size=64).make()
    wgmma = next(row.name for row in load_table("sm90").block_scaled.rows if row.block_size == 128)
    answer = {}
    for name, call in {
        "no a_scale": lambda: core.calculate(descriptor, out, {**inputs, "a_scale": None}, None),
        "no bias": lambda: core.calculate(descriptor, out, {**inputs, "bias": None}, None),
        "odd pointer": lambda: core.calculate(descriptor, out, {**inputs, "a": inputs["a"].view(-1)[1:]}, None),
        "overlap": lambda: core.calculate(descriptor, inputs["a"], inputs, None),  # a has more bytes than out
        "unknown row": lambda: core.plan(out, inputs, "generic_64x64x64"),
        "unaligned K": lambda: core.plan(unaligned.poisoned(), unaligned.inputs, first),
        "small blocks": lambda: core.plan(small.poisoned(), small.inputs, wgmma),
        "fine": lambda: core.calculate(descriptor, out, inputs, None),
    }.items():
        answer[name] = status_of(call)
    answer["right"] = reference.same_bits(out, operands.expected())
    return answer


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
