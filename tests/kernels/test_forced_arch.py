"""Every kernel config of every table, forced by architecture and name: the bits of the reference.

Kernels of older architectures run here through their PTX, which the driver compiles. Those of newer ones, which no driver could
run here, are compiled for compute capability 8.0 instead: the sources are the same. That shows that the kernels are correct. It does not
show how fast they are on the GPUs that they are made for.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from forced import TABLES
from operands.cases import FLOAT_DTYPES, OUT_DTYPES
from operands.pairs import pairs

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.core import binding
from scaled_mm.errors import ArchitectureNotSupportedError
from scaled_mm.kernels.gpu import of_handle

pytestmark = pytest.mark.gpu

ROWS = [(arch, row.name) for arch, table in TABLES.items() if arch != "sm90" for row in table.rows]
# M around the tiles' edges; N and K that end inside a tile, K inside a 16-byte vector too (with padded rows); several tiles each way.
SHAPES = [
    (1, 256, 512),
    (7, 128, 16),
    (17, 4096, 256),
    (16, 136, 1040),
    (33, 264, 4096),
    (65, 392, 144),
    (130, 520, 2000),
    (257, 1000, 784),
    (333, 1096, 100),
    (64, 72, 15),
    (1024, 1024, 1024),
    (3, 20, 8),
    (129, 4100, 333),
    (1, 64, 64),
    (130, 520, 333),
    (257, 264, 4096),
]


def padded(rows: int, columns: int, multiple: int) -> torch.Tensor:
    """An uninitialised int8 [rows, columns] whose rows start on `multiple` bytes; what lies between them is not zero."""
    whole = torch.full((rows, -(-columns // multiple) * multiple), 113, dtype=torch.int8, device="cuda")
    return whole[:, :columns]


def operands(M: int, N: int, K: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    a, weight = padded(M, K, 16), padded(N, K, 16)
    for matrix in (a, weight):
        matrix.copy_(torch.randint(-128, 128, matrix.shape, dtype=torch.int8, device="cuda", generator=generator))
    return a, weight.t()


def poisoned(M: int, N: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """An output with rows of a multiple of 16 bytes, and the memory around it: what is not written, or written beside it, shows."""
    around = torch.full((M + 1, (N + 15) // 16 * 16 + 16), -77777 if dtype == torch.int32 else float("nan"), dtype=dtype, device="cuda")
    return around[:M, :N], around


def run(handle: sm.Handle, row: str, a, b, out_dtype, **options) -> torch.Tensor:
    out, around = poisoned(a.shape[0], b.shape[1], out_dtype)
    before = around.clone()
    with sm.create_descriptor(handle, out=out, a=a, b=b, kernel=row, **options) as desc:
        assert desc.kernel.row == row
        workspace = torch.full((desc.workspace_size,), 255, dtype=torch.uint8, device="cuda") if desc.workspace_size else None
        for _ in range(2):  # a split row finds what its first run left in the workspace
            desc.calculate(out, a, b, workspace=workspace, **options)
    torch.cuda.synchronize()
    result = out.clone()
    out.copy_(before[: a.shape[0], : b.shape[1]])
    assert torch.equal(around.nan_to_num(-3.0), before.nan_to_num(-3.0)), f"{row} wrote beside its output"
    return result


SCALINGS = ("vector", "vector and bias", "scalar and float32 bias", "scalar", "mixed")
ZERO_POINTS = (None, "a", "b", "one of a, and b", "a and b")


def scaling(M: int, N: int, out_dtype: torch.dtype, kind: str = "vector") -> dict[str, torch.Tensor]:
    """Scales and bias; none for raw sums."""
    if out_dtype == torch.int32:
        return {}
    kind, _, bias = kind.partition(" and ")
    a_scale = torch.rand((M, 1) if kind == "vector" else (1,), device="cuda") + 0.01
    b_scale = torch.rand((), device="cuda") - 0.5 if kind == "scalar" else torch.randn(N, device="cuda")
    made = {"a_scale": a_scale, "b_scale": b_scale}
    return {**made, "bias": torch.randn(N, device="cuda").to(torch.float32 if "float32" in bias else out_dtype)} if bias else made


def zero_points(M: int, N: int, which: str | None) -> dict[str, torch.Tensor]:
    a = {"a_zero_point": torch.randint(-128, 128, (M, 1), dtype=torch.int32, device="cuda")}
    b = {"b_zero_point": torch.randint(-128, 128, (N,), dtype=torch.int8, device="cuda")}
    one = {"a_zero_point": torch.tensor([-128], dtype=torch.int8, device="cuda")}
    return {None: {}, "a": a, "b": b, "one of a, and b": {**one, **b}, "a and b": {**a, **b}}[which]


def check(handle, row: str, shape: tuple[int, int, int], out_dtype: torch.dtype, points: str | None, kind: str = "vector") -> None:
    M, N, K = shape
    torch.manual_seed(M + N + K)
    a, b = operands(M, N, K, M + N + K)
    options = {**scaling(M, N, out_dtype, kind), **zero_points(M, N, points)}
    expected = reference.scaled_mm(a, b, out_dtype=out_dtype, **{"a_scale": None, "b_scale": None, **options})
    out = run(handle, row, a, b, out_dtype, **options)
    assert reference.same_bits(out, expected), (
        f"{handle.arch} {row} {out_dtype} M={M} N={N} K={K} {kind} {points}: {reference.describe_difference(out, expected)}"
    )


@pytest.mark.parametrize("arch, row", ROWS, ids=str)
def test_every_kernel_config_of_every_architecture_has_the_bits_of_the_reference(handle_for, arch, row):
    """Every pair of shape, dtype, scales, bias and zero points: scaled products, and raw sums."""
    handles = {out_dtype: handle_for(arch, row, out_dtype) for out_dtype in OUT_DTYPES}
    for case in pairs(shape=SHAPES, out_dtype=FLOAT_DTYPES, kind=SCALINGS, points=ZERO_POINTS):
        check(handles[case["out_dtype"]], row, **case)
    for case in pairs(shape=SHAPES, points=ZERO_POINTS):
        check(handles[torch.int32], row, out_dtype=torch.int32, **case)


@pytest.mark.parametrize("arch, row", ROWS, ids=str)
def test_sums_close_to_the_end_of_int32_are_exact_and_do_not_saturate(handle_for, arch, row):
    handle, K = handle_for(arch, row, torch.int32), 131071
    a, b = torch.empty(33, K + 1, dtype=torch.int8, device="cuda")[:, :K], torch.empty(72, K + 1, dtype=torch.int8, device="cuda")[:, :K].t()
    a.fill_(-128)
    b.fill_(-128)
    assert (run(handle, row, a, b, torch.int32) == 128 * 128 * K).all()
    K = 2**15
    a, b = torch.full((33, K), 127, dtype=torch.int8, device="cuda"), torch.full((72, K), 127, dtype=torch.int8, device="cuda").t()
    zeros = {
        "a_zero_point": torch.tensor([-128], dtype=torch.int8, device="cuda"),
        "b_zero_point": torch.tensor([-128], dtype=torch.int8, device="cuda"),
    }
    assert (run(handle, row, a, b, torch.int32, **zeros) == 255 * 255 * K).all()


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.int32], ids=str)
@pytest.mark.parametrize("arch", TABLES)
def test_every_architecture_takes_any_stride_and_alignment_on_its_fallback(handle_for, arch, out_dtype):
    handle, row = handle_for(arch, TABLES[arch].fallback, out_dtype), TABLES[arch].fallback
    for seed, (M, N, K) in enumerate([(1, 7, 5), (33, 65, 100), (70, 130, 333)]):
        torch.manual_seed(seed)
        dense = torch.randint(-128, 128, (2 * M + 1, 2 * K + 1), dtype=torch.int8, device="cuda")
        weight = torch.randint(-128, 128, (2 * N + 1, 2 * K + 1), dtype=torch.int8, device="cuda")
        whole = torch.empty(2 * N + 1, 2 * M + 1, dtype=out_dtype, device="cuda")
        for name, a, b, out in [
            ("rows of b", dense[:M, :K], weight[:N, :K].t().contiguous(), whole.t()[:M, :N]),
            ("odd columns and addresses", dense[1 : M + 1, 1 : K + 1], weight[1 : N + 1, 1 : K + 1].t(), whole[:N, :M].t()),
            ("every other element", dense[: 2 * M : 2, : 2 * K : 2], weight[: 2 * N : 2, : 2 * K : 2].t(), whole[: 2 * N : 2, : 2 * M : 2].t()),
            ("columns of a", dense[:M, :K].t().contiguous().t(), weight[:N, :K].t(), whole.flatten()[: M * N].view(M, N)),
        ]:
            whole.fill_(-77777 if out_dtype == torch.int32 else float("nan"))
            options = {**scaling(M, N, out_dtype), **zero_points(M, N, "a and b")}
            with sm.create_descriptor(handle, out=out, a=a, b=b, kernel=row, **options) as desc:
                workspace = torch.empty(desc.workspace_size, dtype=torch.uint8, device="cuda")
                desc.calculate(out, a, b, workspace=workspace, **options)
            expected = reference.scaled_mm(a, b, out_dtype=out_dtype, **{"a_scale": None, "b_scale": None, **options})
            assert reference.same_bits(out, expected), f"{arch} {name} {M}x{N}x{K}: {reference.describe_difference(out, expected)}"
            out.zero_()
            untouched = whole == -77777 if out_dtype == torch.int32 else whole.isnan()
            assert int(untouched.sum()) == whole.numel() - M * N, f"{arch} {name}: wrote beside its output"


@pytest.mark.parametrize("arch", [arch for arch in TABLES if arch != "sm90"])
def test_a_forced_architecture_dispatches_by_its_own_table(handle_of, arch):
    try:
        handle, table = handle_of(arch), TABLES[arch]
    except ArchitectureNotSupportedError as error:
        pytest.skip(str(error))
    binding.register_table(table)  # `handle_for` leaves one with the kernel configs of other tables
    for M in (1, 16, 17, 33, 65, 129, 300, 1025):
        a, b = operands(M, 256, 128, M)
        out = torch.empty(M, 256, dtype=torch.int32, device="cuda")
        with sm.create_descriptor(handle, out=out, a=a, b=b) as desc:
            assert desc.kernel.row == table.select(M, 256, 128, gpu=of_handle(handle)).row.name and f"{arch}.yaml" in desc.kernel.reason
            desc.calculate(out, a, b)
        assert torch.equal(out, reference.scaled_mm(a, b, None, None, out_dtype=torch.int32))


@pytest.mark.parametrize("arch", ["sm80", "sm89"])
def test_a_product_that_splits_k_runs_in_one_call_and_in_a_graph(handle_of, arch):
    handle = handle_of(arch)
    binding.register_table(TABLES[arch])  # `handle_for` leaves one with the kernel configs of other tables
    a, b = operands(17, 260, 28680, 0)
    expected = reference.scaled_mm(a, b, None, None, out_dtype=torch.int32)
    out = torch.empty(17, 260, dtype=torch.int32, device="cuda")
    with sm.create_descriptor(handle, out=out, a=a, b=b) as desc:
        assert desc.kernel.row.endswith("_k4") and desc.workspace_size > 0
        workspace = torch.full((desc.workspace_size,), 255, dtype=torch.uint8, device="cuda")
        desc.calculate(out, a, b, workspace=workspace)
        assert torch.equal(out, expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            desc.calculate(out, a, b, workspace=workspace)
        for _ in range(20):
            out.fill_(-1)
            graph.replay()
            assert torch.equal(out, expected)


def test_the_environment_forces_an_architecture_for_every_way_of_calling(handle_of):
    handle_of("sm80")
    program = (
        "import torch, scaled_mm as sm\n"
        "from scaled_mm import reference\n"
        "from scaled_mm.core import fast\n"
        "assert sm.Handle('cuda:0').arch == 'sm80'\n"
        "one = torch.ones(1, device='cuda')\n"
        "for K in (256, 8192):  # the second splits K, so it needs a workspace\n"
        "    a = torch.randint(-128, 128, (17, K), dtype=torch.int8, device='cuda')\n"
        "    b = torch.randint(-128, 128, (128, K), dtype=torch.int8, device='cuda').t()\n"
        "    expected = reference.scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)\n"
        "    for _ in range(2):\n"
        "        assert torch.equal(sm.scaled_mm(a, b, one, one), expected)\n"
        "    assert torch.equal(torch.ops.scaled_mm.scaled_mm(a, b, one, one, *[None] * 5, torch.bfloat16, False), expected)\n"
        "assert all(handle.arch == 'sm80' for handle, _ in fast._handles.values())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "SCALED_MM_ARCH": "sm80"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
