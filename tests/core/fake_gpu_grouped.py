"""What test_core_grouped.py runs in processes of their own, where libcuda.so.1 is the fake driver.

fake_gpu_grouped.py FUNCTION ARGUMENTS...     prints one JSON document
"""

from __future__ import annotations

import ctypes
import json
import random
import re
import sys

import torch
from fake_gpu_core import STREAM, Core, aligned_bytes, status_of  # lets the next line find the tests

from operands.grouped_cases import grouped  # isort: skip

from scaled_mm import TensorDesc, reference
from scaled_mm.core import binding
from scaled_mm.products import codes
from scaled_mm.tables import load_table


class GroupedCore(Core):
    """The C core's grouped functions, on a fake GPU."""

    PRODUCT = codes.GROUPED_GEMM

    def plan(self, out, inputs, kernel: str | None = None) -> ctypes.c_void_p:
        tensors = {**inputs, "out": out}
        return self.create(kernel, **{name: None if tensor is None else TensorDesc.of(tensor) for name, tensor in tensors.items()})


# tokens, E, K, N by seed: for which larger tiles are predicted to be faster
LARGE = {100: (600, 1, 32, 520), 300: (1500, 1, 16, 1032)}


def grouped_products(kernels: str, count: str) -> dict:
    """Random grouped products through create and calculate, compared with the reference; the choice with the table's own."""
    core, table, pick, rows = GroupedCore(kernels), load_table("sm90").grouped, random.Random(1).choice, {}
    stream = ctypes.c_void_p.in_dll(ctypes.CDLL(kernels), "host_kernels_last_stream")
    for seed in range(int(count)):
        tokens, E, K, N = pick([0, 1, 5, 40, 150]), pick([1, 2, 7, 60]), pick([1, 16, 32, 33]), pick([4, 8, 16, 19])
        if seed in LARGE:
            tokens, E, K, N = LARGE[seed]
        case = grouped(
            tokens,
            E,
            K,
            N,
            seed=seed,
            out_dtype=pick([torch.bfloat16, torch.float32, torch.int32]),
            bias=pick([None, "out", "float32"]),
            offsets=pick(["random", "one", "short", "wild"]),
            a_scale=pick(["one", "vector", "matrix"]),
            pad=pick([0, 0, -K % 16]),
            b_scale=pick(["one", "expert", "expert3", "matrix", "matrix3", "strided"]),
            b_layout=pick(["columns", "columns", "rows"]),
            a_zero_point=pick([None, None, "one", "vector", "matrix"]),
            b_zero_point=pick([None, None, "one", "expert", "matrix3", "strided"]),
            sums=pick([False, True]),
        )
        out = case.poisoned(pick([0, -N % 16]))
        descriptor = core.plan(out, case.inputs)
        choice = core.choice(descriptor)
        row, selection = choice.row.decode(), table.select(-(-tokens // E), N, K, count=E)
        assert choice.bucket == selection.bucket_index, f"{case}: {choice.bucket}, not {selection}"
        if tokens and row != table.fallback:  # all others need the same of a and b
            active = min(tokens, E)
            predicted = [one for _, one in table.fastest(-(-tokens // active), N, K, out_bytes=16, count=active)]
            fit = [one.name for one in predicted if one.alignment[2] == 1 or out.stride(0) * out.itemsize % one.alignment[2] == 0]
            assert row == fit[0], f"{case}: {row}, not {fit[0]}"
            us = next(us for us, one in table.fastest(-(-tokens // active), N, K, out_bytes=16, count=active) if one.name == row)
            told = float(re.search(r"by prediction, ([0-9.]+) us", choice.reason.decode())[1])
            assert abs(told - us) <= 0.006 or told == round(us), f"{case}: {told} us, not {us}"
        size = core.workspace_size(descriptor)
        stream.value = 0
        core.calculate(descriptor, out, case.inputs, aligned_bytes(size) if size else None, size)
        expected = reference.grouped_scaled_mm(**case.defined_by, out_dtype=case.out_dtype)
        assert reference.same_bits(out, expected), f"{case}: {reference.describe_difference(out, expected)}"
        begins = case.expert_offsets.max().item() > 0 and tokens > 0
        assert not begins or stream.value == STREAM, f"{case}: launched on another stream"
        rows[row] = rows.get(row, 0) + 1
        core.destroy(descriptor)
    assert core.asked == [], core.asked
    return {"rows": rows}


def expected_rows(kernels: str) -> dict:
    """The kernel config for 4096 rows of 32 experts by the number of rows that are expected, and what the table selects for so many."""
    core, table = GroupedCore(kernels), load_table("sm90").grouped
    tokens, E, N, K = 4096, 32, 7168, 2048
    given = {
        "out": TensorDesc((tokens, N), torch.bfloat16),
        "a": TensorDesc((tokens, K), torch.int8),
        "b": TensorDesc((E, K, N), torch.int8, (N * K, 1, K)),
        "a_scale": TensorDesc((tokens, 1), torch.float32),
        "b_scale": TensorDesc((E, N), torch.float32),
        "expert_offsets": TensorDesc((E,), torch.int32),
    }
    descs, answer = [given.get(name) for name in binding.operand_names(core.PRODUCT)], {}
    for option in (0, 1, 64, 512, 4096, 5000, 2**30 - 1):
        descriptor = core.create_from(descs, option=option)
        rows = min(option or tokens, tokens)
        active = min(E, rows)
        wanted = table.fastest(-(-rows // active), N, K, out_bytes=16, count=active)[0][1].name
        answer[option] = core.choice(descriptor).row.decode(), wanted
        core.destroy(descriptor)
    with_flag = core.create_from(descs, option=64 | 1 << 30)  # SCALED_MM_UNASSIGNED_ROWS_ANY
    answer["with the other flag"] = core.choice(with_flag).row.decode()
    core.destroy(with_flag)
    answer["negative"] = status_of(lambda: core.create_from(descs, option=-1))
    return answer


def grouped_refusals(kernels: str) -> dict:
    """Status and message of what calculate and a forced row refuse."""
    core = GroupedCore(kernels)
    case = grouped(40, 4, 32, 16, bias="float32")
    out = case.poisoned()
    descriptor = core.plan(out, case.inputs)
    size = core.workspace_size(descriptor)
    workspace = aligned_bytes(size)
    unaligned = grouped(40, 4, 31, 16)
    answer = {"size": size}
    for name, call in {
        "no workspace": lambda: core.calculate(descriptor, out, case.inputs, None, 0),
        "small workspace": lambda: core.calculate(descriptor, out, case.inputs, workspace, size - 1),
        "workspace in a": lambda: core.calculate(descriptor, out, case.inputs, case.a.view(torch.uint8), size),
        "no offsets": lambda: core.calculate(descriptor, out, {**case.inputs, "expert_offsets": None}, workspace, size),
        "no bias": lambda: core.calculate(descriptor, out, {**case.inputs, "bias": None}, workspace, size),
        "odd pointer": lambda: core.calculate(descriptor, out, {**case.inputs, "a": case.a.view(-1)[1:]}, workspace, size),
        "unknown row": lambda: core.plan(out, case.inputs, "generic_64x64x64"),
        "unaligned K": lambda: core.plan(unaligned.poisoned(), unaligned.inputs, load_table("sm90").grouped.rows[0].name),
        "fine": lambda: core.calculate(descriptor, out, case.inputs, workspace, size),
    }.items():
        answer[name] = status_of(call)
    return answer


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
