"""Every grouped block-scaled kernel config of every table, forced by architecture and name: the bits of the reference.

Kernels of older architectures run through their PTX, those of newer ones are compiled for sm80, as in test_forced_arch.py.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from forced import BORROWER, SUFFIXES, TABLES
from operands.grouped_block_scaled_cases import OUT_DTYPES, ExpertsCase
from operands.grouped_cases import random_offsets

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.core import binding
from scaled_mm.errors import ArchitectureNotSupportedError, BadParamError
from scaled_mm.jit import library
from scaled_mm.kernels.gpu import of_handle

pytestmark = pytest.mark.gpu

SECTION = "grouped_block_scaled"
ROWS = [(arch, row.name) for arch, table in TABLES.items() for row in getattr(table, SECTION).rows]

# Rows of K and of out begin on 16 bytes; the sizes themselves need not.
ALIGNED = [
    ExpertsCase(*shape, pad=16, seed=seed, **options)
    for seed, (shape, options) in enumerate(
        [
            ((1, 1, 512, 256), {}),
            ((300, 7, 256, 136), dict(bias="out")),
            ((300, 4, 1040, 520), dict(bias="float32", scales="columns", scale_values="signed")),
            ((1000, 9, 100, 72), dict(offsets="short", scales="spread")),
            ((129, 5, 15, 13), dict(offsets="wild", bias="out")),
            ((777, 3, 333, 40), dict(offsets="one", scale_values="special")),
            ((150, 4, 1040, 520), dict(b_layout="apart", bias="float32", scale_values="wide")),
            ((2048, 2000, 128, 24), dict(bias="float32")),
            ((40, 300, 512, 392), dict(offsets="short")),
            ((1500, 8, 2048, 768), dict(scales="columns")),
        ]
    )
]
# For kernel configs that take blocks of 64.
SMALL_BLOCKS = [
    ExpertsCase(*shape, pad=16, bias="out", scales="columns", block_size=64, seed=seed)
    for seed, shape in enumerate(((1, 1, 512, 256), (300, 7, 1040, 136), (1000, 9, 100, 72), (1500, 8, 2048, 768)))
]
ANY = [
    ExpertsCase(129, 5, 31, 13, bias="out"),
    ExpertsCase(200, 6, 264, 40, b_layout="rows", bias="float32"),
    ExpertsCase(65, 4, 0, 8, bias="out"),
    ExpertsCase(77, 33, 131, 7, offsets="wild", scales="spread"),
]


@functools.cache
def made(case: ExpertsCase) -> tuple[dict[str, torch.Tensor | None], torch.Tensor]:
    """(the case's operands on the GPU, what the reference says, computed on the CPU)."""
    return case.make("cuda:0"), reference.grouped_block_scaled_mm(**case.make(), out_dtype=case.out_dtype).cuda()


@pytest.fixture(scope="module")
def handle_for():
    """handle_for(arch): a handle that has the architecture's rows of the section, its own or sm80's. They are built when first asked for."""
    handles = {}
    borrower = TABLES[BORROWER]
    section = getattr(borrower, SECTION)
    own = {row.name for row in section.rows}
    extra = {row.name: row for table in TABLES.values() for row in getattr(table, SECTION).rows if row.family == "c2x" and row.name not in own}
    merged = borrower.model_copy(update={SECTION: section.model_copy(update={"rows": (*section.rows, *extra.values())})})

    def build(table, arch: str) -> None:
        if library.arch_library(table) is not None:
            return  # it has them
        names = [(row.name, SUFFIXES[out_dtype]) for row in getattr(TABLES[arch], SECTION).rows for out_dtype in OUT_DTYPES]
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


def run(handle: sm.Handle, row: str, case: ExpertsCase) -> torch.Tensor:
    """The product by one row, twice, into a poisoned output; nothing beside it may change."""
    inputs, out = made(case)[0], case.poisoned("cuda:0")
    around = torch.empty(0, dtype=out.dtype, device=out.device).set_(out.untyped_storage())
    results = []
    with sm.create_grouped_block_scaled_descriptor(handle, out=out, **inputs, kernel=row) as desc:
        assert desc.kernel.row == row
        for _ in range(2):
            out.fill_(float("nan"))
            desc.calculate(out, **inputs)
            results.append(out.clone())
    assert reference.same_bits(*results), f"{row}: the second launch differs: {reference.describe_difference(*results)}"
    out.fill_(float("nan"))
    assert around.isnan().all(), f"{row} {case}: wrote beside its output"
    return results[0]


@pytest.mark.parametrize("arch, row", ROWS, ids=str)
def test_every_kernel_config_has_the_bits_of_the_reference(handle_for, arch, row):
    handle = handle_for(arch)
    config = TABLES[arch].row(row)
    for case in ALIGNED + (ANY if config.family == "generic" else []) + (SMALL_BLOCKS if config.block_size <= 64 else []):
        for out_dtype in OUT_DTYPES:
            case = dataclasses.replace(case, out_dtype=out_dtype)
            out, expected = run(handle, row, case), made(case)[1]
            assert reference.same_bits(out, expected), f"{handle.arch} {row} {case}: {reference.describe_difference(out, expected)}"


@pytest.mark.parametrize("arch, row", ROWS, ids=str)
def test_every_kernel_config_sums_the_largest_values_exactly(handle_for, arch, row):
    for values in ("minimum", "extremes"):
        case = ExpertsCase(130, 3, 1024, 136, torch.float32, pad=16, values=values)
        assert reference.same_bits(run(handle_for(arch), row, case), made(case)[1])


@pytest.mark.parametrize("arch, row", ROWS, ids=str)
def test_every_kernel_config_follows_offsets_that_change_between_replays_of_a_graph(handle_for, arch, row):
    case = ExpertsCase(500, 20, 256, 136, bias="float32")
    inputs, out = case.make("cuda:0"), case.poisoned("cuda:0")
    generator = torch.Generator().manual_seed(0)
    with sm.create_grouped_block_scaled_descriptor(handle_for(arch), out=out, **inputs, kernel=row) as desc:
        desc.calculate(out, **inputs)  # loads what is loaded lazily
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                desc.calculate(out, **inputs)
        for kind in ("random", "one", "short", "wild", "random"):
            inputs["expert_offsets"].copy_(random_offsets(500, 20, generator, kind))
            inputs["a"].copy_(torch.randint(-128, 128, inputs["a"].shape, dtype=torch.int8, device="cuda"))
            out.fill_(float("nan"))
            graph.replay()
            case.check(out, inputs, f"{row} {kind}")


@pytest.mark.parametrize("arch", TABLES)
def test_a_product_is_dispatched_by_its_rows_per_expert(handle_for, arch):
    handle, table = handle_for(arch), getattr(TABLES[arch], SECTION)
    if handle.arch != arch:
        pytest.skip(f"{arch} is newer than this GPU")
    binding.register_table(TABLES[arch])  # `handle_for` leaves one with the kernel configs of other tables
    for m in (1, 16, 17, 40, 300, 1500):
        case = ExpertsCase(3 * m, 3, 128, 512)
        with sm.create_grouped_block_scaled_descriptor(handle, out=case.poisoned("cuda:0"), **case.make("cuda:0")) as desc:
            expected = table.select(m, 512, 128, gpu=of_handle(handle), count=3).row.name
            assert desc.kernel.row == expected and "grouped block-scaled bucket" in desc.kernel.reason


def test_operands_that_a_fast_kernel_config_cannot_take_run_on_the_fallback_or_are_refused_when_it_is_forced(handle_for):
    handle = sm.Handle("cuda:0")
    table = getattr(TABLES[handle.arch], SECTION)
    handle_for(handle.arch)
    case = ExpertsCase(129, 5, 31, 13)
    inputs, out = case.make("cuda:0"), case.poisoned("cuda:0")
    with sm.create_grouped_block_scaled_descriptor(handle, out=out, **inputs) as desc:
        assert desc.kernel.row == table.fallback and "cannot take this product (" in desc.kernel.reason
    with pytest.raises(BadParamError, match="^kernel: row .* cannot take this product: the row stride of a"):
        sm.create_grouped_block_scaled_descriptor(handle, out=out, **inputs, kernel=table.rows[0].name)
