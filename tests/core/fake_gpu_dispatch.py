"""Which kernel the core chooses, asks for and refuses on the fake GPU: what test_core_fake_gpu.py runs in processes of their own.

fake_gpu_dispatch.py FUNCTION ARGUMENTS...     prints one JSON document
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys

import torch
from fake_gpu_core import Core, aligned_bytes, described, status_of

from operands.cases import Case  # isort: skip

from scaled_mm import TensorDesc, reference
from scaled_mm.autotune.write import tuned_table
from scaled_mm.core import binding
from scaled_mm.tables import Bucket, TileTable, load_table
from scaled_mm.tables.select import contiguous_row

# ---- dispatch -------------------------------------------------------------------------------------------------------------


def product_descs(M: int, N: int, K: int, dtype=torch.bfloat16, **options) -> dict[str, TensorDesc]:
    descs = {
        "out": TensorDesc((M, N), dtype),
        "a": TensorDesc((M, K), torch.int8),
        "b": TensorDesc((K, N), torch.int8, (1, K)),
        "a_scale": TensorDesc((M, 1), torch.float32),
        "b_scale": TensorDesc((1, N), torch.float32),
    }
    return {**descs, **options}


def edges(values, step: int) -> list[int]:
    """Around every bound, in steps that keep operands aligned; and one past all of them."""
    bounds = sorted({value for value in values if value})
    return sorted({near for bound in bounds for near in (bound - step, bound, bound + step) if near > 0} | {step, 2 * max(bounds, default=step)})


def dispatch(kernels: str) -> dict:
    """The core and the Python table choose the same bucket on both sides of every edge of every bucket, for a constant b and for others.

    Then with a tuned table in its place, whose buckets have lower bounds.
    """
    core, table = Core(kernels), load_table("sm90")
    found = agreement(core, table, edges((bucket.m for bucket in table.buckets), 1))
    near = dict(n=4096, n_min=4096, k=4096, k_min=4096)
    buckets = [
        Bucket(m=640, m_min=321, kernel=table.rows[0].name, **near),
        Bucket(m=64, m_min=33, constant_b=True, kernel=table.rows[0].name, **near),
    ]
    tuned = tuned_table(table, "a GPU", table.rows, buckets)
    binding.register_table(tuned)
    again = agreement(core, tuned, [1, 32, 33, 64, 65, 320, 321, 640, 641])
    binding.register_table(table)
    found["random"] = random_agreement(core, table, 2000)
    found["again"] = agreement_again(core, table, 300)
    named = next(bucket for bucket in table.buckets if bucket.kernel == "c3x_128x128x128_pp_c12_swap")
    descs = product_descs(named.m, named.n, named.k, out=TensorDesc((named.m, named.n), torch.bfloat16, (named.n + 1, 1)))
    choice = core.choice(core.create(**descs))
    found["rows of out apart"] = [choice.row.decode(), choice.reason.decode(), choice.bucket, table.buckets.index(named)]
    return {**found, "tuned": again["count"], "tuned_unused": [index for index in again["unused"] if index < len(buckets)]}


def random_agreement(core: Core, table: TileTable, count: int) -> dict:
    """The core and the Python table choose the same kernel config by predicted time, of rows that contiguous operands fit."""
    dice, chosen = random.Random(29), set()
    for _ in range(count):
        M, N, K = (dice.choice(range(1, 9000)), *(dice.choice((8, 16)) * dice.randrange(1, 1500) for _ in "NK"))
        constant_b, out = dice.random() < 0.5, dice.choice((torch.bfloat16, torch.float32))
        descs = product_descs(M, N, K, out)
        descs["b"] = dataclasses.replace(descs["b"], constant=constant_b)
        descriptor = core.create(**descs)
        row, expected = core.choice(descriptor).row.decode(), contiguous_row(table, M, N, K, constant_b, out.itemsize).name
        assert row == expected, (M, N, K, constant_b, row, expected)
        chosen.add(row)
        core.destroy(descriptor)
    return {"rows": len(chosen)}


def agreement_again(core: Core, table: TileTable, count: int) -> dict:
    """Cached selections: a product called again, in another order, with other layouts and among other products, gets the same kernel config."""
    dice, choices = random.Random(31), {}
    products = [(dice.randrange(1, 600), 8 * dice.randrange(1, 900), 16 * dice.randrange(1, 500), dice.random() < 0.5) for _ in range(count)]
    for turn in range(4):
        for M, N, K, constant_b in dice.sample(products, count):
            for own_rows in dice.sample((False, True), 2):  # rows of out apart: other kernel configs can take them
                out = TensorDesc((M, N), torch.bfloat16, (N + 1, 1) if own_rows else (N, 1))
                descs = product_descs(M, N, K, out=out)
                descs["b"] = dataclasses.replace(descs["b"], constant=constant_b)
                descriptor = core.create(**descs)
                choice = core.choice(descriptor)
                found = choice.row.decode(), choice.reason.decode()
                first = choices.setdefault((M, N, K, constant_b, own_rows), found)
                assert found == first, (turn, M, N, K, constant_b, own_rows, first, found)
                if not own_rows:
                    assert found[0] == contiguous_row(table, M, N, K, constant_b, 2).name, (M, N, K, constant_b, found)
                core.destroy(descriptor)
    return {"products": len(choices), "differ": sum(choices[(*key[:4], True)][0] != choices[key][0] for key in choices if not key[4])}


def agreement(core: Core, table: TileTable, Ms: list[int]) -> dict:
    """How many products were looked at, and the buckets that served none."""
    count, used = 0, set()
    for M in Ms:
        for N in edges((bucket.n for bucket in table.buckets), 16):
            for K in edges((bucket.k for bucket in table.buckets), 16):
                for constant_b in (False, True):
                    descs = product_descs(M, N, K)
                    descs["b"] = dataclasses.replace(descs["b"], constant=constant_b)
                    descriptor = core.create(**descs)
                    choice, selection = core.choice(descriptor), table.select(M, N, K, constant_b)
                    assert choice.bucket == selection.bucket_index and choice.row.decode() == selection.row.name, (M, N, K, constant_b)
                    assert f"bucket {choice.bucket} of" in choice.reason.decode()
                    used.add(choice.bucket)
                    count += 1
                    core.destroy(descriptor)
    return {"count": count, "unused": sorted(set(range(len(table.buckets))) - used)}


def forced(kernels: str) -> dict:
    core, table = Core(kernels), load_table("sm90")
    fast = next(row.name for row in table.rows if row.alignment == (16, 16, 16))
    for row in table.rows:
        choice = core.choice(core.create(row.name, **product_descs(3, 64, 128)))
        assert choice.row.decode() == row.name and choice.bucket == -1 and "forced by name" in choice.reason.decode()
    misfits = {
        "unaligned K": product_descs(3, 64, 100),
        "unaligned N": product_descs(3, 63, 128),
        "end of a row": product_descs(3, 63, 128, out=TensorDesc((3, 63), torch.bfloat16, (64, 1))),
        "end of one row": product_descs(1, 63, 128),
        "K of zero": product_descs(3, 64, 0),
        "row-major b": product_descs(3, 64, 128, b=TensorDesc((128, 64), torch.int8)),
        "pointer of a": product_descs(3, 64, 128, a=TensorDesc((3, 128), torch.int8, alignment=8)),
        "pointer of b": product_descs(3, 64, 128, b=TensorDesc((128, 64), torch.int8, (1, 128), alignment=8)),
        "pointer of out": product_descs(3, 64, 128, out=TensorDesc((3, 64), torch.bfloat16, alignment=8)),
    }
    decode = next(row.name for row in table.rows if row.family == "decode")  # any out that is contiguous along N
    for name in ("unaligned N", "end of a row", "end of one row", "pointer of out"):
        assert core.choice(core.create(decode, **misfits[name])).row.decode() == decode
    return {
        "unknown": status_of(lambda: core.create("c3x_1x1x1", **product_descs(3, 64, 128))),
        **{name: status_of(lambda descs=descs: core.create(fast, **descs)) for name, descs in misfits.items()},
    }


# ---- providers, and what can go wrong -------------------------------------------------------------------------------------


def register(table: TileTable, arch: str) -> None:
    binding.register_table(table.model_copy(update={"arch": arch}))


def providers(kernels: str) -> dict:
    """A provider is asked for what is missing, once it is there no more, and its error is the caller's."""
    table = load_table("sm90")
    answers = {}

    core = Core(arch="sm90", provide=lambda arch, row, dtype, when: core.lib.scaledMMSetLastError(13, f"no {row} for {arch}".encode()))
    answers["table refused"] = status_of(lambda: core.create(**product_descs(1, 16, 16)))
    answers["asked for table"] = core.asked[-1]

    core.provide = None
    answers["no table"] = status_of(lambda: core.create(**product_descs(1, 16, 16)))

    binding.call("scaledMMLoadKernels", kernels.encode())
    core.asked.clear()
    core.create(**product_descs(1, 16, 16))
    answers["asked when all is there"] = list(core.asked)
    answers["no kernel"] = status_of(lambda: core.create(**product_descs(1, 16, 16, torch.float16)))
    answers["asked for kernel"] = list(core.asked)
    core.provide = lambda arch, row, dtype, when: core.lib.scaledMMSetLastError(13, f"no {row} for {arch}".encode())
    answers["kernel refused"] = status_of(lambda: core.create(**product_descs(1, 16, 16, torch.float16)))
    core.asked.clear()
    core.create(**product_descs(0, 16, 16, torch.float16))  # nothing to launch, so no kernel is needed
    answers["asked for an empty product"] = list(core.asked)

    binding.call("scaledMMSetKernelProvider", binding._PROVIDER(0), None)
    answers["without a provider"] = status_of(lambda: core.create(**product_descs(1, 16, 16, torch.float16)))

    other = Core(arch="sm_other", provide=lambda arch, row, dtype, when: register(table, arch) or 0)
    answers["own table"] = status_of(lambda: other.create(**product_descs(1, 16, 16)))[0]
    answers["asked for the rest"] = other.asked
    return answers


def broken(kernels: str) -> dict:
    """Kernels that do not fit, do not prepare or do not launch, from a library that was made for it."""
    core = Core(kernels, arch="sm_broken")
    operands = Case(2, 16, 16, out_dtype=torch.float32).make()
    out = operands.poisoned_out()
    descs = described(operands, out)
    runs = core.create("launch_fails", **descs)
    zero_points = Case(2, 16, 16, out_dtype=torch.float32, a_zero_point="vector_int32").make()
    fine = core.create(None, **described(zero_points, out))
    size = core.workspace_size(fine)
    return {
        "too large": status_of(lambda: core.create("too_large", **descs)),
        "prepare": status_of(lambda: core.create("prepare_fails", **descs)),
        "launch": status_of(lambda: core.calculate(runs, out, operands.inputs, None)),
        "no workspace": status_of(lambda: core.calculate(fine, out, zero_points.inputs, None)),
        "small workspace": status_of(lambda: core.calculate(fine, out, zero_points.inputs, aligned_bytes(size), size - 1)),
        "unaligned workspace": status_of(lambda: core.calculate(fine, out, zero_points.inputs, aligned_bytes(size + 8)[8:])),
        "workspace": status_of(lambda: core.calculate(fine, out, zero_points.inputs, aligned_bytes(size))),
        "size": size,
        "not written": bool(out.isnan().all()) is False,
    }


def workspaces(kernels: str) -> list[dict]:
    """A kernel that asks for a workspace, without and with zero points, whose terms lie before it."""
    core = Core(kernels, arch="sm_broken")
    answers = []
    for zero_point in (None, "vector_int32"):
        operands = Case(3, 15, 16, out_dtype=torch.float32, a_zero_point=zero_point, b_zero_point=zero_point).make()
        out = operands.poisoned_out()
        plan = core.create("with_workspace", **described(operands, out))
        size = core.workspace_size(plan)
        small = status_of(lambda: core.calculate(plan, out, operands.inputs, aligned_bytes(size), size - 1))  # noqa: B023
        missing = status_of(lambda: core.calculate(plan, out, operands.inputs, None))  # noqa: B023
        core.calculate(plan, out, operands.inputs, aligned_bytes(size))
        answers.append({"size": size, "small": small, "missing": missing, "right": reference.same_bits(out, operands.expected())})
    return answers


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
