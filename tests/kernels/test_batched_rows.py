"""Batches on every kernel config of every table, forced by architecture and name: one launch, the bits of a loop over products.

Kernels of older architectures run through their PTX, those of newer ones are compiled for sm80, as in test_forced_arch.py.
"""

from __future__ import annotations

import functools

import pytest
import torch
from forced import TABLES
from operands.batched import BatchCase, BatchOperands

import scaled_mm as sm
from scaled_mm.core import binding
from scaled_mm.errors import ArchitectureNotSupportedError, BadParamError
from scaled_mm.tables import load_table

pytestmark = pytest.mark.gpu

ROWS = [(arch, row.name) for arch, table in TABLES.items() for row in table.rows]
BF16, INT32 = torch.bfloat16, torch.int32
POINTS = {"a_zero_point": "each", "b_zero_point": "each"}
TAILS = {"a_layout": "aligned_rows", "b_layout": "aligned_columns", "out_layout": "aligned_rows"}
# What a row of a tensor map takes: every stride a multiple of 16 bytes. Hardly any of it folds into one product.
ALIGNED = {
    "a batch of one": BatchCase(1, 70, 144, 272, bias="each", **POINTS),
    "a batch of three": BatchCase(3, 130, 272, 528, bias="each", bias_dtype="float32"),
    "a batch of seventeen": BatchCase(17, 33, 144, 272),
    "raw accumulators": BatchCase(17, 33, 144, 272, INT32, zero_point_dtype=torch.int8, **POINTS),
    "zero points of each product": BatchCase(3, 130, 272, 528, **POINTS),
    "zero points that are shared": BatchCase(3, 70, 144, 272, a_zero_point="vector", b_zero_point="one", bias="vector"),
    "sums that are given": BatchCase(3, 70, 144, 272, sums=True, **POINTS),
    "padded batches": BatchCase(3, 70, 144, 272, a_batch="padded", b_batch="stepped", out_batch="padded", bias="each"),
    "batches side by side": BatchCase(3, 70, 144, 272, out_batch="interleaved", a_scale="each_one", b_scale="each_one"),
    "overlapping inputs": BatchCase(3, 70, 144, 272, a_batch="sliding", b_batch="sliding", a_scale="one", b_scale="vector"),
    "a shared a": BatchCase(17, 70, 144, 272, a_batch="matrix", a_scale="vector", **POINTS),
    "an expanded a": BatchCase(3, 70, 144, 272, a_batch="expanded", a_scale="each"),
    "a shared b": BatchCase(17, 70, 144, 272, b_batch="one", a_scale="vector", b_scale="each", bias="vector", a_zero_point="vector"),
    "an expanded b": BatchCase(3, 70, 144, 272, b_batch="expanded", bias="each", a_zero_point="one", b_zero_point="vector"),
    "tails of K and N": BatchCase(3, 70, 141, 269, bias="each", **TAILS, **POINTS),
    "a K within a vector": BatchCase(3, 33, 141, 15, bias="vector", **TAILS),
    "a tail of K alone": BatchCase(3, 70, 136, 269, bias="each", **TAILS, **POINTS),
    "a K of fifteen": BatchCase(3, 33, 136, 15, bias="vector", **TAILS),
    "one row each": BatchCase(17, 1, 144, 272, bias="vector", b_zero_point="each_one"),
    "a tall product of a shared b": BatchCase(17, 9, 144, 272, b_batch="matrix", b_scale="vector", bias="vector", a_zero_point="each"),
}


@functools.cache
def made(name: str) -> tuple[BatchOperands, torch.Tensor]:
    """Operands and what they should give, computed once for all rows."""
    operands = ALIGNED[name].make("cuda:0")
    return operands, operands.expected()


def own_handle(arch: str) -> sm.Handle:
    binding.register_table(TABLES[arch])  # `handle_for` leaves one with the kernel configs of other tables, which are not built
    return _handle(arch)


@functools.cache
def _handle(arch: str) -> sm.Handle:
    try:
        return sm.Handle("cuda:0", arch=arch)
    except ArchitectureNotSupportedError as error:
        pytest.skip(str(error))


def check(handle: sm.Handle, row: str | None, operands: BatchOperands, expected: torch.Tensor) -> str:
    """Two launches of one descriptor into poisoned memory; the row that ran."""
    out, memory = operands.poisoned_out()
    with sm.create_descriptor(handle, out=out, **operands.inputs, kernel=row) as descriptor:
        workspace = torch.full((descriptor.workspace_size,), 255, dtype=torch.uint8, device="cuda")
        descriptor.calculate(out, **operands.inputs, workspace=workspace)
        operands.check(out, expected)
        operands.check_poison_around(out, memory)
        out.fill_(7)
        descriptor.calculate(out, **operands.inputs, workspace=workspace)
        operands.check(out, expected)
        return descriptor.kernel.row


@pytest.mark.parametrize("arch, row", ROWS, ids=str)
def test_every_kernel_config_gives_each_product_of_a_batch_its_bits(handle_for, arch, row):
    for name in ALIGNED:
        case = ALIGNED[name]
        handle = handle_for(arch, row, case.out_dtype)
        if case.n * case.out_dtype.itemsize % TABLES[arch].row(row).store_bytes:
            with pytest.raises(BadParamError, match="whole vectors"):
                check(handle, row, *made(name))
        else:
            assert check(handle, row, *made(name)) == row


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("arch", ["sm90", "sm80", "sm75"])
def test_the_other_output_dtypes_have_batches_too(arch, out_dtype):
    for a_batch, b_batch in [("each", "padded"), ("each", "expanded")]:
        operands = BatchCase(3, 70, 144, 272, out_dtype, a_batch=a_batch, b_batch=b_batch, bias="each", **POINTS).make("cuda:0")
        check(own_handle(arch), None, operands, operands.expected())


@pytest.mark.parametrize("m, n, k", [(1, 144, 272), (70, 144, 272), (17, 33, 37), (5, 1, 1), (70, 144, 0)])
def test_a_batch_of_one_is_the_plain_product(m, n, k):
    operands = BatchCase(1, m, n, k, bias="vector", **POINTS).make("cuda:0")
    plain = {name: t[0] if t is not None and t.dim() == 3 else t for name, t in operands.inputs.items()}
    operands.check(sm.scaled_mm(**operands.inputs), sm.scaled_mm(**plain).unsqueeze(0))


@pytest.mark.parametrize(
    "why, case",
    [
        ("batch stride of a", BatchCase(3, 5, 32, 48, a_batch="odd")),
        ("batch stride of b", BatchCase(3, 5, 32, 48, b_batch="odd")),
        ("more than 65535 products", BatchCase(65536, 1, 16, 16, torch.int32)),
    ],
)
def test_a_batch_that_a_tensor_map_cannot_take_runs_on_the_generic_row_and_says_why(why, case):
    operands, handle = case.make("cuda:0"), own_handle("sm90")
    out, memory = operands.poisoned_out()
    with sm.create_descriptor(handle, out=out, **operands.inputs) as descriptor:
        assert descriptor.kernel.row == load_table("sm90").fallback and why in descriptor.kernel.reason
        descriptor.calculate(out, **operands.inputs)
    if case.batch < 100:
        operands.check(out)
    else:  # the reference's loop over so many products would take minutes
        a, b = operands.inputs["a"].float(), operands.inputs["b"].float()
        assert torch.equal(out, torch.bmm(a, b).to(torch.int32))  # below 2^24, so float32 is exact
    operands.check_poison_around(out, memory)


def test_a_batch_whose_output_a_tensor_map_cannot_take_runs_on_a_kernel_config_that_stores_any_way():
    operands = BatchCase(3, 70, 32, 48, out_batch="odd").make("cuda:0")
    out, memory = operands.poisoned_out()
    with sm.create_descriptor(own_handle("sm90"), out=out, **operands.inputs) as descriptor:
        assert load_table("sm90").row(descriptor.kernel.row).family == "decode"
        descriptor.calculate(out, **operands.inputs)
    operands.check(out)
    operands.check_poison_around(out, memory)


def test_a_batch_is_captured_in_a_graph_and_replayed_with_new_contents():
    operands, _ = made("zero points of each product")
    inputs = {name: None if t is None else t.clone() for name, t in operands.inputs.items()}
    inputs["b"] = operands.inputs["b"].mT.contiguous().mT
    out = torch.empty(3, 130, 272, dtype=BF16, device="cuda")
    fresh = BatchOperands(operands.case, inputs, operands.device)
    with sm.create_descriptor(own_handle("sm90"), out=out, **inputs) as descriptor:
        workspace = torch.empty(descriptor.workspace_size, dtype=torch.uint8, device="cuda")
        descriptor.calculate(out, **inputs, workspace=workspace)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            descriptor.calculate(out, **inputs, workspace=workspace)
        for _ in range(2):
            inputs["a"].random_(-128, 128)
            out.fill_(float("nan"))
            graph.replay()
            fresh.check(out)
