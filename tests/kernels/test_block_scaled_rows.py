"""Every block-scaled kernel config of every table, forced by architecture and name: the bits of the reference.

Kernels of older architectures run through their PTX, those of newer ones are compiled for sm80, as in test_forced_arch.py.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import torch
from forced import BORROWER, SUFFIXES, TABLES
from operands.block_scaled_cases import OUT_DTYPES, BlockCase, BlockOperands

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.core import binding
from scaled_mm.errors import ArchitectureNotSupportedError, BadParamError
from scaled_mm.jit import library
from scaled_mm.kernels.gpu import of_handle

pytestmark = pytest.mark.gpu

ROWS = [(arch, row.name) for arch, table in TABLES.items() for row in table.block_scaled.rows]

# Rows of K and of out begin on 16 bytes; the sizes themselves need not. M around the tiles' edges, K and N that end inside a block.
ALIGNED = [
    BlockCase(m, n, k, pad=16, bias=bias, scale_layout=scale_layout, scale_values=scale_values, seed=m)
    for (m, n, k), bias, scale_layout, scale_values in (
        ((1, 256, 512), None, "rows", "positive"),
        ((7, 128, 16), "out", "columns", "signed"),
        ((16, 4096, 256), "float32", "rows", "positive"),
        ((17, 136, 1040), "matrix", "columns", "positive"),
        ((33, 392, 100), None, "padded", "signed"),
        ((65, 1000, 1300), "strided", "rows", "wide"),
        ((130, 520, 2000), "out", "broadcast", "positive"),
        ((257, 72, 15), "float32", "rows", "special"),
        ((333, 1096, 333), None, "columns", "special"),
        ((1024, 1024, 1024), "out", "columns", "positive"),
        ((4096, 264, 384), "float32", "rows", "signed"),
        ((3, 7, 7168), None, "columns", "positive"),
        ((4096, 1160, 384), "out", "rows", "signed"),
        ((2100, 2190, 1100), None, "columns", "positive"),
    )
]
# For kernel configs that take blocks of 64.
SMALL_BLOCKS = [
    BlockCase(m, n, k, pad=16, bias="out", scale_layout="columns", block_size=64, seed=m)
    for m, n, k in ((1, 256, 512), (17, 136, 1040), (65, 1000, 1300), (257, 72, 15), (333, 1096, 333), (1024, 1024, 1024))
]
# Rows of out that begin anywhere, for kernel configs that take them.
UNALIGNED_OUT = [
    BlockCase(m, n, 300, pad=16, bias="out", out_layout="offset_rows", own_out=True, seed=m)
    for m, n in ((1, 1), (1, 130), (70, 71), (64, 128), (130, 1), (257, 333))
]
ANY = [
    BlockCase(1, 1, 1),
    BlockCase(65, 130, 31, bias="out"),
    BlockCase(70, 129, 300, b_layout="rows", bias="float32", scale_layout="columns"),
    BlockCase(33, 70, 257, a_layout="offset_rows", b_layout="offset_columns", out_layout="offset_rows", bias="strided"),
    BlockCase(64, 64, 256, a_layout="every_second", b_layout="every_second", out_layout="columns"),
    BlockCase(20, 140, 0, bias="out"),
    BlockCase(1000, 333, 1031, a_layout="columns", out_layout="every_second", scale_values="special"),
]


@functools.cache
def made(case: BlockCase) -> tuple[BlockOperands, torch.Tensor]:
    """(the case's operands on the GPU, what the reference says, computed on the CPU)."""
    return case.make("cuda:0"), case.make().expected().cuda()


@pytest.fixture(scope="module")
def handle_for():
    """handle_for(arch): a handle that has the architecture's block-scaled rows, its own or sm80's. They are built when first asked for."""
    handles = {}
    borrower = TABLES[BORROWER]
    own = {row.name for row in borrower.block_scaled.rows}
    every = [row for table in TABLES.values() for row in table.block_scaled.rows]
    extra = {row.name: row for row in every if row.family == "c2x" and row.name not in own}
    section = borrower.block_scaled.model_copy(update={"rows": (*borrower.block_scaled.rows, *extra.values())})
    merged = borrower.model_copy(update={"block_scaled": section})

    def build(table, arch: str) -> None:
        if library.arch_library(table) is not None:
            return  # it has them
        names = [(row.name, SUFFIXES[out_dtype]) for row in TABLES[arch].block_scaled.rows for out_dtype in OUT_DTYPES]
        for path in library.build_kernels(table, names).values():
            binding.call("scaledMMLoadKernels", str(path).encode())

    def handle_for(arch: str) -> sm.Handle:
        if arch not in handles:
            try:
                handles[arch] = sm.Handle("cuda:0", arch=arch)
                build(TABLES[arch], arch)
            except ArchitectureNotSupportedError:
                handles[arch] = sm.Handle("cuda:0", arch=BORROWER)
                binding.register_table(merged)
                build(merged, arch)
        return handles[arch]

    yield handle_for
    binding.register_table(borrower)


def run(handle: sm.Handle, row: str, operands: BlockOperands) -> torch.Tensor:
    """The product by one row into a poisoned output; nothing beside it may change."""
    out = operands.poisoned()
    around = torch.empty(0, dtype=out.dtype, device=out.device).set_(out.untyped_storage())
    around.fill_(float("nan"))
    with sm.create_block_scaled_descriptor(handle, out=out, **operands.inputs, kernel=row) as desc:
        assert desc.kernel.row == row
        desc.calculate(out, **operands.inputs)
    result = out.clone()
    out.fill_(float("nan"))
    assert around.isnan().all(), f"{row} {operands.case}: wrote beside its output"
    return result


@pytest.mark.parametrize("arch, row", ROWS, ids=str)
def test_every_kernel_config_has_the_bits_of_the_reference(handle_for, arch, row):
    handle = handle_for(arch)
    config = TABLES[arch].row(row)
    cases = ALIGNED + (UNALIGNED_OUT if config.alignment[2] == 1 else []) + (ANY if config.family == "generic" else [])
    cases = cases + (SMALL_BLOCKS if config.block_size <= 64 else [])
    for case, out_dtype in itertools.product(cases, OUT_DTYPES):
        case = dataclasses.replace(case, out_dtype=out_dtype)
        operands, expected = made(case)
        out = run(handle, row, operands)
        assert reference.same_bits(out, expected), f"{handle.arch} {row} {case}: {reference.describe_difference(out, expected)}"


@pytest.mark.parametrize("arch, row", ROWS, ids=str)
def test_every_kernel_config_sums_the_largest_values_exactly(handle_for, arch, row):
    for values in ("minimum", "extremes"):
        operands, expected = made(BlockCase(130, 136, 1024, torch.float32, pad=16, values=values))
        assert reference.same_bits(run(handle_for(arch), row, operands), expected)


@pytest.mark.parametrize("arch, row", ROWS, ids=str)
def test_every_kernel_config_runs_again_in_a_graph(handle_for, arch, row):
    operands = BlockCase(100, 264, 1008, pad=16, bias="float32").make("cuda:0")
    t, out = operands.inputs, operands.poisoned()
    with sm.create_block_scaled_descriptor(handle_for(arch), out=out, **t, kernel=row) as desc:
        desc.calculate(out, **t)  # loaded before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                desc.calculate(out, **t)
        for _ in range(3):
            t["a"].copy_(torch.randint(-128, 128, t["a"].shape, dtype=torch.int8, device="cuda"))
            t["a_scale"].copy_(torch.rand(t["a_scale"].shape, device="cuda"))
            out.fill_(float("nan"))
            graph.replay()
            operands.check(out, row)


@pytest.mark.parametrize("arch", TABLES)
def test_an_architecture_dispatches_by_its_own_buckets(handle_for, arch):
    handle, table = handle_for(arch), TABLES[arch].block_scaled
    if handle.arch != arch:
        pytest.skip(f"{arch} is newer than this GPU")
    binding.register_table(TABLES[arch])  # `handle_for` leaves one with the kernel configs of other tables
    for m in (1, 16, 17, 40, 300, 1500):
        operands = BlockCase(m, 256, 256, pad=16).make("cuda:0")
        out = operands.poisoned()
        with sm.create_block_scaled_descriptor(handle, out=out, **operands.inputs) as desc:
            expected = table.select(m, 256, 256, gpu=of_handle(handle)).row.name
            assert desc.kernel.row == expected and "block-scaled bucket" in desc.kernel.reason
            desc.calculate(out, **operands.inputs)
        operands.check(out)


def test_operands_that_a_fast_kernel_config_cannot_take_run_on_the_fallback_or_are_refused_when_it_is_forced(handle_for):
    handle = sm.Handle("cuda:0")
    table = TABLES[handle.arch].block_scaled
    handle_for(handle.arch)
    operands = BlockCase(20, 140, 131).make("cuda:0")
    with sm.create_block_scaled_descriptor(handle, out=operands.poisoned(), **operands.inputs) as desc:
        assert desc.kernel.row == table.fallback and "cannot take this product (" in desc.kernel.reason
    with pytest.raises(BadParamError, match="^kernel: row .* cannot take this product: the row stride of a"):
        sm.create_block_scaled_descriptor(handle, out=operands.poisoned(), **operands.inputs, kernel=table.rows[0].name)


def test_one_call_is_captured_in_a_graph_and_neither_waits_nor_runs_on_another_stream():
    operands = BlockCase(64, 1024, 1024, bias="float32").make("cuda:0")
    t = operands.inputs
    out = sm.block_scaled_mm(**t)  # the kernel is built and loaded
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sm.block_scaled_mm(**t, out=out)
    out.fill_(float("nan"))
    graph.replay()
    operands.check(out)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        t["a"].neg_()  # torch loads its kernel, and a stream may get what it needs
        sm.block_scaled_mm(**t)
        stream.synchronize()
        torch.cuda._sleep(200_000_000)  # 0.1 s
        t["a"].neg_()
        late = sm.block_scaled_mm(**t)
        assert not stream.query(), "the call waited for the GPU"
    stream.synchronize()
    operands.check(late)


def test_torch_compile_with_inductor_has_the_bits_of_eager():
    weight, scale = sm.quantize_int8_block(torch.randn(384, 512, device="cuda"), dim="weight")

    def layer(a, a_scale):
        return sm.block_scaled_mm(a, weight.t(), a_scale, scale.t()) + 1

    compiled = torch.compile(layer, fullgraph=True)
    for tokens in (1, 17, 130):
        a, a_scale = sm.quantize_int8_block(torch.randn(tokens, 512, device="cuda"))
        assert torch.equal(compiled(a, a_scale), layer(a, a_scale))
