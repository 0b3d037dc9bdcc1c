"""What launches on the fake GPU are handed: what test_core_fake_gpu.py runs in processes of their own.

fake_gpu_script.py FUNCTION ARGUMENTS...     prints one JSON document
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import random
import sys
import threading

import torch
from fake_gpu_core import STREAM, Core, aligned_bytes, described, status_of

from operands.batched import BATCHES, BIASES, OUT_BATCHES, VECTORS, ZERO_POINTS, BatchCase  # isort: skip
from operands.cases import INPUT_LAYOUTS, LAYOUTS, Case, random_case  # isort: skip

from scaled_mm import TensorDesc, reference
from scaled_mm.errors import ScaledMMError
from scaled_mm.tables import FASTEST, load_table


def cases(count: int, seed: int):
    """Random mixes; in two of three with sizes that tensor maps take, in one of these with such layouts too."""
    generator, pick = torch.Generator().manual_seed(seed), random.Random(seed).choice
    for index in range(count):
        case = random_case(generator, max_m=20, max_n=50, max_k=80)
        if case.out_dtype is torch.float16:  # the host kernels do not know it
            case = dataclasses.replace(case, out_dtype=torch.bfloat16)
        if index % 3 > 0:
            case = dataclasses.replace(case, n=(case.n + 15) // 16 * 16, k=(case.k + 15) // 16 * 16)
        if index % 3 > 1:
            case = dataclasses.replace(case, a_layout="padded_rows", b_layout="padded_columns", out_layout="padded_rows")
        elif index % 3 > 0:  # one operand in any layout, the others in one that fits
            fits = {"a_layout": "rows", "b_layout": "columns", "out_layout": "rows"}
            fits.pop(("a_layout", "b_layout", "out_layout")[index // 3 % 3])
            case = dataclasses.replace(case, a_layout=pick(INPUT_LAYOUTS), b_layout=pick(INPUT_LAYOUTS), out_layout=pick(LAYOUTS))
            case = dataclasses.replace(case, **fits)
        yield case


def products(kernels: str, count: str, seed: str) -> dict:
    """Every case through create and calculate, compared with the reference; the choice compared with the table's own."""
    core, table, rows, fallbacks = Core(kernels), load_table("sm90"), {}, 0
    stream = ctypes.c_void_p.in_dll(ctypes.CDLL(kernels), "host_kernels_last_stream")
    names = {each.name for each in table.rows}
    for case in cases(int(count), int(seed)):
        operands = case.make()
        out = operands.poisoned_out()
        descriptor = core.create(**described(operands, out))
        choice = core.choice(descriptor)
        row, reason = choice.row.decode(), choice.reason.decode()
        if case.k:
            selection = table.select(case.m, case.n, case.k)
            assert choice.bucket == selection.bucket_index, f"{case}: {choice.bucket}, not {selection}"
            by_time = table.buckets[choice.bucket].kernel == FASTEST  # of those that these layouts fit
            assert row in (selection.row.name, table.fallback) or (by_time and row in names), f"{case}: {row}, not {selection}"
            assert case.m * case.n or row == selection.row.name == table.fallback or not by_time, f"{case}: {row} for an empty output"
        if row == table.fallback:
            assert "cannot take this product (" in reason or (case.m * case.n == 0 and "nothing to compute" in reason), f"{case}: {reason}"
            fallbacks += 1
        size = core.workspace_size(descriptor)
        has_zero_point = operands.a_zero_point is not None or operands.b_zero_point is not None
        assert (size > 0) == (has_zero_point and case.m * case.n > 0), f"{case}: a workspace of {size} bytes"
        stream.value = 0
        core.calculate(descriptor, out, operands.inputs, aligned_bytes(size) if size else None)
        operands.check(out)
        assert case.m * case.n == 0 or stream.value == STREAM, f"{case}: launched on another stream"
        rows[row] = rows.get(row, 0) + 1
        core.destroy(descriptor)
    assert core.asked == [], core.asked
    return {"rows": rows, "fallbacks": fallbacks}


def batch_cases(count: int, seed: int):
    """Random batches; in two of three with sizes that tensor maps take, in one of these with such layouts too."""
    pick = random.Random(seed).choice
    for index in range(count):
        layouts = dict(a_layout=pick(LAYOUTS), b_layout=pick(LAYOUTS), out_layout=pick(LAYOUTS))
        m, n, k = pick(range(12)), pick(range(40)), pick(range(70))
        if index % 3:
            n, k = (n + 15) // 16 * 16, (k + 15) // 16 * 16
        if index % 3 > 1:
            layouts = dict(a_layout=pick(("rows", "padded_rows")), b_layout="columns", out_layout="rows")
        yield BatchCase(
            pick((0, 1, 2, 3, 5)),
            m,
            n,
            k,
            pick((torch.bfloat16, torch.float32, torch.int32)),
            a_batch=pick(BATCHES),
            b_batch=pick(BATCHES),
            out_batch=pick(OUT_BATCHES),
            a_scale=pick(VECTORS),
            b_scale=pick(VECTORS),
            bias=pick(BIASES),
            bias_dtype=pick(("out", "float32")),
            a_zero_point=pick(ZERO_POINTS),
            b_zero_point=pick(ZERO_POINTS),
            zero_point_dtype=pick((torch.int32, torch.int8)),
            sums=pick((False, True)),
            seed=index,
            **layouts,
        )


def batches(kernels: str, count: str, seed: str) -> dict:
    """Every batch through create and calculate, compared with the reference, and nothing written beside the output."""
    core, table, fast, several = Core(kernels), load_table("sm90"), 0, 0
    for case in batch_cases(int(count), int(seed)):
        operands = case.make()
        out, memory = operands.poisoned_out()
        tensors = {**operands.inputs, "out": out}
        descriptor = core.create(**{name: None if t is None else TensorDesc.of(t) for name, t in tensors.items()})
        ran_fast = core.choice(descriptor).row.decode() != table.fallback
        size = core.workspace_size(descriptor)
        core.calculate(descriptor, out, operands.inputs, aligned_bytes(size) if size else None)
        operands.check(out)
        operands.check_poison_around(out, memory)
        fast += ran_fast and out.numel() > 0
        several += ran_fast and out.numel() > 0 and out.dim() == 3 and out.shape[0] > 1
        core.destroy(descriptor)
    assert core.asked == [], core.asked
    return {"fast": fast, "several": several}


def batch_choices(kernels: str) -> dict:
    """How a batch is dispatched: (row, reason, bytes of workspace) by what is special about it."""
    core = Core(kernels)

    def choose(B, M, N, K, **options):
        descs = {
            "out": TensorDesc((B, M, N), torch.bfloat16),
            "a": TensorDesc((B, M, K), torch.int8),
            "b": TensorDesc((B, K, N), torch.int8, (K * N, 1, K)),
            "a_scale": TensorDesc((B, M, 1), torch.float32),
            "b_scale": TensorDesc((1,), torch.float32),
            **options,
        }
        descriptor = core.create(**descs)
        choice = core.choice(descriptor)
        return [choice.row.decode(), choice.reason.decode(), core.workspace_size(descriptor)]

    shared = {"b": TensorDesc((128, 64), torch.int8, (1, 128))}
    point_a, point_b = TensorDesc((1,), torch.int8), TensorDesc((3, 1, 64), torch.int8)
    return {
        "own weights": choose(3, 100, 64, 128),
        "no matrices": choose(0, 100, 64, 128),
        "a shared weight": choose(3, 100, 64, 128, **shared),
        "many own weights": choose(5000, 1, 64, 128),
        "many, a shared weight": choose(5000, 1, 64, 128, **shared),
        "a shared weight, rows apart": choose(3, 100, 64, 128, **shared, a=TensorDesc((3, 100, 128), torch.int8, (16384, 128, 1))),
        "a shared weight, biases apart": choose(3, 100, 64, 128, **shared, bias=TensorDesc((3, 1, 64), torch.float32)),
        "zero points": choose(3, 100, 64, 128, a_zero_point=point_a, b_zero_point=point_b),
        "zero points of a shared b": choose(3, 100, 64, 128, **shared, a_zero_point=TensorDesc((3, 1, 1), torch.int8)),
        "batch stride of a": choose(3, 100, 64, 128, a=TensorDesc((3, 100, 128), torch.int8, (12801, 128, 1))),
        "batch stride of b": choose(3, 100, 64, 128, b=TensorDesc((3, 128, 64), torch.int8, (8193, 1, 128))),
        "batch stride of out": choose(3, 100, 64, 128, out=TensorDesc((3, 100, 64), torch.bfloat16, (6401, 64, 1))),
        "far apart": choose(3, 100, 64, 128, a=TensorDesc((3, 100, 128), torch.int8, (1 << 40, 128, 1))),
        "65535": choose(65535, 1, 64, 128),
        "65536": choose(65536, 1, 64, 128),
        "forced": status_of(
            lambda: core.create(
                "c3x_256x192x128_co",
                out=TensorDesc((65536, 1, 64), torch.int32),
                a=TensorDesc((65536, 1, 128), torch.int8),
                b=TensorDesc((65536, 128, 64), torch.int8, (8192, 1, 128)),
            )
        ),
    }


def sums(kernels: str) -> dict:
    """Sums that are given are used instead of reading the operand: wrong ones show, and only where they are needed."""
    core, answers = Core(kernels), {}
    for points in ("a", "b", "ab"):
        case = BatchCase(
            3, 5, 32, 48, torch.float32, sums=True, a_zero_point="each" if "a" in points else None, b_zero_point="each" if "b" in points else None
        )
        operands = case.make()
        out, _ = operands.poisoned_out()
        expected = operands.expected()
        for wrong in (None, "a_row_sums", "b_column_sums"):
            inputs = {**operands.inputs}
            if wrong:
                inputs[wrong] = inputs[wrong] + 1
            descriptor = core.create(**{name: None if t is None else TensorDesc.of(t) for name, t in {**inputs, "out": out}.items()})
            core.calculate(descriptor, out, inputs, aligned_bytes(core.workspace_size(descriptor)))
            answers[f"{points} {wrong}"] = reference.same_bits(out, expected)
    return answers


def constant_weights(kernels: str) -> dict:
    """Whether a launch was told that b is constant, of a descriptor whose b was and of one whose b was not."""
    core, told = Core(kernels), ctypes.c_bool.in_dll(ctypes.CDLL(kernels), "host_kernels_last_constant_b")
    operands = Case(4, 32, 64, out_dtype=torch.float32).make()
    out = operands.poisoned_out()
    answers = {}
    for constant in (True, False):
        descs = described(operands, out)
        descs["b"] = dataclasses.replace(descs["b"], constant=constant)
        descriptor = core.create(**descs)
        core.calculate(descriptor, out, operands.inputs, None)
        operands.check(out)
        answers[str(constant)] = told.value
    return answers


def threads(kernels: str) -> dict:
    """One descriptor used by many threads at once."""
    core = Core(kernels)
    operands = Case(64, 128, 256, out_dtype=torch.float32, bias="float32", a_zero_point="vector_int32").make()
    outs = [operands.poisoned_out() for _ in range(8)]
    descriptor = core.create(**described(operands, outs[0]))
    size = core.workspace_size(descriptor)
    failed = []

    def work(out: torch.Tensor) -> None:
        workspace = aligned_bytes(size)
        for _ in range(20):
            out.fill_(float("nan"))
            try:
                core.calculate(descriptor, out, operands.inputs, workspace)
                operands.check(out)
            except (AssertionError, ScaledMMError) as error:
                failed.append(str(error))

    workers = [threading.Thread(target=work, args=(out,)) for out in outs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return {"failed": failed}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
