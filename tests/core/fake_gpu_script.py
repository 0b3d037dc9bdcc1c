"""What test_core_fake_gpu.py runs in processes of their own, where libcuda.so.1 is the fake driver.

    fake_gpu_script.py FUNCTION ARGUMENTS...     prints one JSON document

Tensors are torch's on the CPU; their pointers go to the C core as if they were a GPU's.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import random
import sys
import threading
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from operands.batched import BATCHES, BIASES, OUT_BATCHES, VECTORS, ZERO_POINTS, BatchCase  # noqa: E402
from operands.cases import INPUT_LAYOUTS, LAYOUTS, Case, Operands, random_case  # noqa: E402

from scaled_mm import TensorDesc, reference  # noqa: E402
from scaled_mm.autotune.write import tuned_table  # noqa: E402
from scaled_mm.core import binding  # noqa: E402
from scaled_mm.errors import ScaledMMError  # noqa: E402
from scaled_mm.products import codes  # noqa: E402
from scaled_mm.tables import Bucket, TileTable, load_table  # noqa: E402

STREAM = 0x5EED0


class Core:
    """The C core with a fake GPU and these kernels; the provider that would build kernels is replaced by `provide`."""

    PRODUCT = codes.GEMM

    def __init__(self, *kernel_libraries: str, arch: str | None = None, provide=None):
        self.lib = binding.library()
        self.lib.scaledMMCalculate.argtypes = [
            ctypes.c_void_p,
            ctypes.c_int32,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_void_p,
            ctypes.c_int32,
            ctypes.c_void_p,
        ]
        self.asked: list[tuple[str, str | None, int]] = []
        self.provide = provide
        self._provider = binding._PROVIDER(self._ask)
        binding.call("scaledMMSetKernelProvider", self._provider, None)
        for path in kernel_libraries:
            binding.call("scaledMMLoadKernels", path.encode())
        self.handle = ctypes.c_void_p()
        encoded = arch.encode() if arch else None
        binding.call("scaledMMCreateHandle", ctypes.byref(self.handle), binding.DEVICE_CUDA, 0, encoded)

    def _ask(self, arch, row, out_dtype, _user) -> int:
        self.asked.append((arch.decode(), row.decode() if row else None, out_dtype))
        return self.provide(*self.asked[-1]) if self.provide else 0

    def create_from(self, descs: list[TensorDesc | None], kernel: str | None = None, option: int = 0) -> ctypes.c_void_p:
        """A descriptor of operands in the order of the C interface."""
        descriptor = ctypes.c_void_p()
        operands = binding.operands([None if desc is None else desc._c() for desc in descs])
        encoded = kernel.encode() if kernel else None
        binding.call("scaledMMCreateDescriptor", self.handle, ctypes.byref(descriptor), self.PRODUCT, *operands, option, encoded)
        return descriptor

    def create(self, kernel: str | None = None, **descs: TensorDesc | None) -> ctypes.c_void_p:
        return self.create_from([descs.get(name) for name in binding.operand_names(self.PRODUCT)], kernel)

    def check(self, descriptor, descs: list[TensorDesc | None]) -> None:
        operands = binding.operands([None if desc is None else desc._c() for desc in descs])
        binding.call("scaledMMCheckTensors", descriptor, self.PRODUCT, *operands)

    def choice(self, descriptor) -> binding.KernelChoiceC:
        choice = binding.KernelChoiceC()
        binding.call("scaledMMGetKernel", descriptor, ctypes.byref(choice))
        return choice

    def workspace_size(self, descriptor) -> int:
        size = ctypes.c_size_t()
        binding.call("scaledMMGetWorkspaceSize", descriptor, ctypes.byref(size))
        return size.value

    def calculate(self, descriptor, out, operands: dict, workspace: torch.Tensor | None, size: int | None = None) -> None:
        tensors = [out, *(operands.get(name) for name in binding.operand_names(self.PRODUCT)[1:])]
        pointers = (ctypes.c_void_p * len(tensors))(*(None if tensor is None else tensor.data_ptr() for tensor in tensors))
        address = workspace.data_ptr() if workspace is not None else None
        bytes_given = size if size is not None else (workspace.numel() if workspace is not None else 0)
        binding.call("scaledMMCalculate", descriptor, self.PRODUCT, address, bytes_given, pointers, len(tensors), STREAM)

    def destroy(self, descriptor) -> None:
        binding.call("scaledMMDestroyDescriptor", descriptor)


def described(operands: Operands, out: torch.Tensor) -> dict[str, TensorDesc | None]:
    tensors = {**operands.inputs, "out": out}
    return {name: None if tensor is None else TensorDesc.of(tensor) for name, tensor in tensors.items()}


def aligned_bytes(size: int) -> torch.Tensor:
    return torch.full((size + 64,), 0xA5, dtype=torch.uint8)[: max(size, 1)]


def status_of(call) -> tuple[str, str]:
    try:
        call()
    except ScaledMMError as error:
        return error.status.name, str(error)
    return "SUCCESS", ""


# ---- every layout ---------------------------------------------------------------------------------------------------------


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
    for case in cases(int(count), int(seed)):
        operands = case.make()
        out = operands.poisoned_out()
        descriptor = core.create(**described(operands, out))
        choice = core.choice(descriptor)
        row, reason = choice.row.decode(), choice.reason.decode()
        if case.k:
            selection = table.select(case.m, case.n, case.k)
            assert choice.bucket == selection.bucket_index, f"{case}: {choice.bucket}, not {selection}"
            assert row in (selection.row.name, table.fallback), f"{case}: {row}, not {selection}"
        if row == table.fallback:
            assert "cannot take this product (" in reason, f"{case}: {reason}"
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
        "a shared weight": choose(3, 100, 64, 128, **shared),
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
        Bucket(m=640, m_min=321, kernel=table.buckets[0].kernel, **near),
        Bucket(m=64, m_min=33, constant_b=True, kernel=table.buckets[0].kernel, **near),
    ]
    tuned = tuned_table(table, "a GPU", table.rows, buckets)
    binding.register_table(tuned)
    again = agreement(core, tuned, [1, 32, 33, 64, 65, 320, 321, 640, 641])
    binding.register_table(table)
    return {**found, "tuned": again["count"], "tuned_unused": [index for index in again["unused"] if index < len(buckets)]}


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

    core = Core(arch="sm90", provide=lambda arch, row, dtype: core.lib.scaledMMSetLastError(13, f"no {row} for {arch}".encode()))
    answers["table refused"] = status_of(lambda: core.create(**product_descs(1, 16, 16)))
    answers["asked for table"] = core.asked[-1]

    core.provide = None
    answers["no table"] = status_of(lambda: core.create(**product_descs(1, 16, 16)))

    binding.call("scaledMMLoadKernels", kernels.encode())
    core.asked.clear()
    core.create(**product_descs(1, 16, 16))
    answers["asked when all is there"] = list(core.asked)
    answers["no kernel"] = status_of(lambda: core.create(**product_descs(1, 16, 16, torch.float16)))
    answers["asked for kernel"] = core.asked[-1]
    core.provide = lambda arch, row, dtype: core.lib.scaledMMSetLastError(13, f"no {row} for {arch}".encode())
    answers["kernel refused"] = status_of(lambda: core.create(**product_descs(1, 16, 16, torch.float16)))
    core.asked.clear()
    core.create(**product_descs(0, 16, 16, torch.float16))  # nothing to launch, so no kernel is needed
    answers["asked for an empty product"] = list(core.asked)

    binding.call("scaledMMSetKernelProvider", binding._PROVIDER(0), None)
    answers["without a provider"] = status_of(lambda: core.create(**product_descs(1, 16, 16, torch.float16)))

    other = Core(arch="sm_other", provide=lambda arch, row, dtype: register(table, arch) or 0)
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
