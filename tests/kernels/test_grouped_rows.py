"""Every grouped kernel config of every table, forced by architecture and name: the bits of the reference.

Kernels of older architectures run through their PTX, those of newer ones are compiled for sm80, as in test_forced_arch.py.
"""

from __future__ import annotations

import functools

import pytest
import torch
from forced import BORROWER, SUFFIXES, TABLES
from operands.grouped_cases import Grouped, grouped, random_offsets

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.core import binding
from scaled_mm.errors import ArchitectureNotSupportedError, BadParamError
from scaled_mm.jit import library
from scaled_mm.kernels.gpu import of_handle

pytestmark = pytest.mark.gpu

ROWS = [(arch, row.name) for arch, table in TABLES.items() for row in table.grouped.rows]
# Every dtype of the architectures that most GPUs have, and elsewhere one of each kind of epilogue: the driver compiles them all.
ALL_DTYPES = ("sm80", "sm90")


def dtypes_of(arch: str) -> list[torch.dtype]:
    return list(SUFFIXES) if arch in ALL_DTYPES else [torch.bfloat16, torch.int32]


# tokens, E, K, N and options. Rows of K and of out end on 16 bytes (pad, padding), the sizes themselves need not.
ALIGNED = [
    ((1, 1, 512, 256), {}),
    ((300, 7, 256, 136), dict(bias="out")),
    ((300, 4, 1040, 520), dict(bias="float32", b_scale="expert", a_scale="one")),
    ((1000, 9, 100, 72), dict(pad=12, offsets="short", b_scale="matrix3")),
    ((60, 9, 100, 72), dict(pad=12, b_scale="column3")),
    ((129, 5, 15, 13), dict(pad=1, padding=3, offsets="wild", bias="out")),
    ((777, 3, 333, 20), dict(pad=3, padding=12, offsets="one", b_scale="one")),
    ((777, 3, 333, 40), dict(pad=3, padding=8, offsets="wild", b_scale="one")),
    ((150, 4, 1040, 520), dict(b_layout="apart", bias="float32")),
    ((2048, 2000, 64, 24), dict(bias="float32")),
    ((40, 300, 512, 392), dict(offsets="short", a_scale="matrix", b_scale="expert3")),
    ((300, 7, 256, 136), dict(a_zero_point="vector", sums=True, bias="float32")),
    ((300, 5, 208, 200), dict(a_zero_point="one", b_zero_point="matrix")),
    ((129, 6, 100, 72), dict(pad=12, offsets="short", b_zero_point="expert3", sums=True)),
    ((90, 40, 1040, 72), dict(offsets="wild", a_zero_point="matrix", b_zero_point="column3", bias="out")),
]
ANY = [
    ((129, 5, 31, 13), dict(bias="out")),
    ((200, 6, 64, 40), dict(b_layout="rows", bias="float32")),
    ((65, 4, 0, 8), dict(bias="out")),
    ((77, 33, 131, 7), dict(offsets="wild", b_scale="strided", pad=1)),
    ((77, 9, 131, 7), dict(a_zero_point="vector", b_zero_point="strided", pad=1, b_layout="rows")),
    ((65, 4, 0, 8), dict(a_zero_point="vector", b_zero_point="matrix", sums=True)),
]


@functools.cache
def made(aligned: bool, index: int, out_dtype: torch.dtype) -> tuple[Grouped, torch.Tensor, int]:
    """(a case on the GPU, what the reference says, the padding of its output's rows)."""
    shape, options = (ALIGNED if aligned else ANY)[index]
    options = dict(options)
    padding = options.pop("padding", 0)
    case = grouped(*shape, out_dtype=out_dtype, seed=index, device="cuda:0", **options)
    on_cpu = {name: None if t is None else t.cpu() for name, t in case.defined_by.items()}
    return case, reference.grouped_scaled_mm(**on_cpu, out_dtype=out_dtype).cuda(), padding


@pytest.fixture(scope="module")
def handle_for():
    """handle_for(arch, row): a handle that has the grouped row, of its architecture or of sm80. Kernels are built when it is first asked for."""
    handles = {}
    borrower = TABLES[BORROWER]
    own = {row.name for row in borrower.grouped.rows}
    extra = {row.name: row for table in TABLES.values() for row in table.grouped.rows if row.family == "c2x" and row.name not in own}
    merged = borrower.model_copy(update={"grouped": borrower.grouped.model_copy(update={"rows": (*borrower.grouped.rows, *extra.values())})})

    def build(table, rows, suffixes) -> None:
        if library.arch_library(table) is not None:
            return  # it has them
        names = [(row, suffix) for row in rows for suffix in suffixes]
        for path in library.build_kernels(table, names).values():
            binding.call("scaledMMLoadKernels", str(path).encode())

    def handle_for(arch: str, row: str) -> sm.Handle:
        if arch not in handles:
            suffixes = [SUFFIXES[out_dtype] for out_dtype in dtypes_of(arch)]
            try:
                handles[arch] = sm.Handle("cuda:0", arch=arch)
                build(TABLES[arch], [row.name for row in TABLES[arch].grouped.rows], suffixes)
            except ArchitectureNotSupportedError:
                handles[arch] = sm.Handle("cuda:0", arch=BORROWER)
                binding.register_table(merged)
                build(merged, [row.name for row in TABLES[arch].grouped.rows], suffixes)
        return handles[arch]

    yield handle_for
    binding.register_table(borrower)


def run(handle: sm.Handle, row: str, case: Grouped, padding: int) -> torch.Tensor:
    """The product by one row, twice, into a poisoned output; nothing beside it may change."""
    out = case.poisoned(padding)
    around = torch.empty(0, dtype=out.dtype, device=out.device).set_(out.untyped_storage()).view(case.a.shape[0], -1)
    before = around.clone()
    with sm.create_grouped_descriptor(handle, out=out, **case.inputs, kernel=row) as desc:
        assert desc.kernel.row == row
        workspace = torch.full((desc.workspace_size,), 255, dtype=torch.uint8, device="cuda") if desc.workspace_size else None
        results = []
        for _ in range(2):  # the second finds what the first left in the workspace
            out.fill_(-77777 if out.dtype == torch.int32 else float("nan"))
            desc.calculate(out, **case.inputs, workspace=workspace)
            results.append(out.clone())
    assert reference.same_bits(*results), f"{row}: the second launch differs: {reference.describe_difference(*results)}"
    n = out.shape[1]
    assert torch.equal(around[:, n:].nan_to_num(-3.0), before[:, n:].nan_to_num(-3.0)), f"{row} wrote beside its output"
    return out


def check(handle: sm.Handle, arch: str, row: str, aligned: bool, index: int, out_dtype: torch.dtype) -> None:
    """arch: that of the row's table, which the handle of a borrowed row is not of."""
    case, expected, padding = made(aligned, index, out_dtype)
    if expected.shape[1] * out_dtype.itemsize % TABLES[arch].row(row).store_bytes:
        with pytest.raises(BadParamError, match="whole vectors"):
            run(handle, row, case, padding)
        return
    out = run(handle, row, case, padding)
    what = (ALIGNED if aligned else ANY)[index]
    assert reference.same_bits(out, expected), f"{arch} {row} {out_dtype} {what}: {reference.describe_difference(out, expected)}"


@pytest.mark.parametrize("arch, row", ROWS, ids=str)
def test_every_grouped_kernel_config_has_the_bits_of_the_reference(handle_for, arch, row):
    handle = handle_for(arch, row)
    for out_dtype in dtypes_of(arch):
        for index in range(len(ALIGNED)):
            check(handle, arch, row, True, index, out_dtype)
        if TABLES[arch].row(row).family == "generic":
            for index in range(len(ANY)):
                check(handle, arch, row, False, index, out_dtype)


@pytest.mark.parametrize("arch, row", ROWS, ids=str)
def test_every_grouped_kernel_config_follows_offsets_that_change_between_replays_of_a_graph(handle_for, arch, row):
    handle = handle_for(arch, row)
    case = grouped(500, 20, 128, 136, bias="float32", device="cuda:0")
    out = case.poisoned()
    generator = torch.Generator().manual_seed(0)
    with sm.create_grouped_descriptor(handle, out=out, **case.inputs, kernel=row) as desc:
        workspace = torch.full((desc.workspace_size,), 255, dtype=torch.uint8, device="cuda") if desc.workspace_size else None
        desc.calculate(out, **case.inputs, workspace=workspace)  # loads what is loaded lazily
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):  # back to back: the workspace is written while the product before may still run
                desc.calculate(out, **case.inputs, workspace=workspace)
        for kind in ("random", "one", "short", "wild", "random"):
            case.expert_offsets.copy_(random_offsets(500, 20, generator, kind))
            case.a.copy_(torch.randint(-128, 128, case.a.shape, dtype=torch.int8, device="cuda"))
            out.fill_(float("nan"))
            graph.replay()
            expected = reference.grouped_scaled_mm(**case.defined_by)
            assert reference.same_bits(out, expected), f"{row} {kind}: {reference.describe_difference(out, expected)}"


@pytest.mark.parametrize("arch, row", ROWS, ids=str)
def test_every_grouped_kernel_config_is_one_launch(handle_for, arch, row):
    case = grouped(500, 20, 128, 136, device="cuda:0")
    out = case.poisoned()
    with sm.create_grouped_descriptor(handle_for(arch, row), out=out, **case.inputs, kernel=row) as desc:
        workspace = torch.empty(desc.workspace_size, dtype=torch.uint8, device="cuda") if desc.workspace_size else None
        desc.calculate(out, **case.inputs, workspace=workspace)  # loads what is loaded lazily
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            desc.calculate(out, **case.inputs, workspace=workspace)
            torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1, kernels


@pytest.mark.parametrize("arch, row", ROWS, ids=str)
def test_every_grouped_kernel_config_sums_without_saturating(handle_for, arch, row):
    K = 131056  # the largest multiple of 16 below the bound
    a, weight = torch.full((3, K), -128, dtype=torch.int8, device="cuda"), torch.full((2, 16, K), -128, dtype=torch.int8, device="cuda")
    offsets = torch.tensor([2, 3], dtype=torch.int32, device="cuda")
    case = Grouped(a, weight.transpose(1, 2), None, None, offsets, None, torch.int32)
    assert (run(handle_for(arch, row), row, case, 0) == K * 16384).all()


@pytest.mark.parametrize("arch", TABLES)
def test_a_grouped_product_is_dispatched_by_its_rows_per_expert(handle_for, arch):
    table = TABLES[arch].grouped
    handle = handle_for(arch, table.fallback)
    if handle.arch != arch:
        pytest.skip(f"{arch} is newer than this GPU")
    binding.register_table(TABLES[arch])  # `handle_for` leaves one with the kernel configs of other tables
    for m in (1, 16, 17, 40, 300, 1500):
        case = grouped(3 * m, 3, 64, 512, out_dtype=torch.bfloat16, device="cuda:0")
        with sm.create_grouped_descriptor(handle, out=case.poisoned(), **case.inputs) as desc:
            expected = table.select(m, 512, 64, gpu=of_handle(handle), count=3).row.name
            assert desc.kernel.row == expected and "grouped bucket" in desc.kernel.reason


def test_operands_that_a_fast_kernel_config_cannot_take_run_on_the_fallback_or_are_refused_when_it_is_forced(handle_for):
    handle = sm.Handle("cuda:0")
    table = TABLES[handle.arch].grouped
    handle_for(handle.arch, table.fallback)
    case = grouped(129, 5, 31, 13, device="cuda:0")
    with sm.create_grouped_descriptor(handle, out=case.poisoned(), **case.inputs) as desc:
        assert desc.kernel.row == table.fallback and "cannot take this product (" in desc.kernel.reason
    with pytest.raises(BadParamError, match="^kernel: row .* cannot take this product: the row stride of a"):
        sm.create_grouped_descriptor(handle, out=case.poisoned(), **case.inputs, kernel=table.rows[0].name)


def test_one_call_on_a_side_stream_neither_waits_nor_reads_offsets_early():
    case = grouped(500, 20, 128, 136, device="cuda:0")
    offsets = case.expert_offsets.clone()
    sm.grouped_scaled_mm(**case.inputs)  # kernels are built and loaded
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        case.expert_offsets.zero_()
        torch.cuda._sleep(50_000_000)
        case.expert_offsets.copy_(offsets, non_blocking=True)
        out = sm.grouped_scaled_mm(**case.inputs)
        assert not stream.query(), "the call waited for the GPU"
    stream.synchronize()
    assert reference.same_bits(out, reference.grouped_scaled_mm(**case.defined_by))
