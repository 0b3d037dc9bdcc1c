"""Decode kernels (csrc/int8/decode) of every kind of tile, split K and pipeline, also those of no table: the bits of the reference."""

from __future__ import annotations

import pytest
import torch
from forced import SUFFIXES
from operands.pairs import pairs
from test_rows import OUT_DTYPES, check, scales

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.core import binding
from scaled_mm.jit import library
from scaled_mm.tables import KernelRow, load_table

pytestmark = pytest.mark.gpu

TABLE = load_table("sm90")
# (columns, rows, blocks that share K, tiles that share rows of a, stages, persistent): a ring that is reused and one that is not, every
# number of blocks, both widths.
ROWS = {
    f"decode_{columns}x{rows}x128{'_co' if persistent else ''}{f'_c{share}1' if share > 1 else ''}_k{split}_x{stages}": dict(
        family="decode",
        tile=[columns, rows, 128],
        swap_ab=True,
        split_k=split,
        cluster=[share, 1],
        stages=stages,
        schedule="cooperative" if persistent else None,
    )
    for columns, rows, split, share, stages, persistent in (
        (64, 8, 1, 1, 12, False),
        (64, 16, 4, 1, 8, False),
        (64, 16, 4, 1, 2, False),
        (64, 24, 2, 1, 3, False),
        (64, 64, 8, 1, 4, False),
        (128, 64, 1, 1, 5, False),
        (128, 128, 4, 1, 4, False),
        (64, 96, 8, 1, 5, False),
        (64, 256, 2, 1, 3, False),
        (64, 16, 1, 2, 8, False),
        (64, 32, 2, 4, 3, False),
        (128, 64, 1, 8, 4, False),
        (64, 64, 4, 2, 4, False),
        (64, 8, 1, 1, 6, True),
        (64, 8, 4, 1, 7, True),
        (128, 16, 4, 2, 5, True),
        (64, 32, 8, 1, 2, True),
        (64, 64, 2, 4, 4, True),
        (128, 64, 1, 2, 3, True),
        (64, 24, 2, 1, 12, True),
        (64, 128, 1, 4, 3, True),
    )
}
# Fewer steps of K than blocks, K and N that end inside a tile, N that ends inside 16 bytes, several tiles of rows, several
# waves; at last several tiles for each persistent cluster, uneven parts of K, and N that ends inside tiles side by side.
SHAPES = [
    (1, 256, 512),
    (7, 13, 48),
    (3, 64, 16),
    (16, 4096, 4096),
    (17, 136, 1040),
    (64, 1000, 3984),
    (130, 72, 272),
    (9, 28672, 256),
    (200, 14000, 1040),
]


@pytest.fixture(scope="module")
def handle():
    handle = sm.Handle("cuda:0")
    if handle.arch != "sm90":
        pytest.skip(f"decode kernels need compute capability 9.0, this GPU is {handle.arch}")
    rows = tuple(KernelRow.model_validate({"name": name, **fields}) for name, fields in ROWS.items())
    merged = TABLE.model_copy(update={"rows": (*TABLE.rows, *(row for row in rows if row.name not in {own.name for own in TABLE.rows}))})
    binding.register_table(merged)
    for path in library.build_kernels(merged, [(row.name, suffix) for row in rows for suffix in SUFFIXES.values()]).values():
        binding.call("scaledMMLoadKernels", str(path).encode())
    yield handle
    binding.register_table(TABLE)


@pytest.mark.parametrize("row", ROWS)
def test_every_decode_kernel_config_is_bit_equal_to_the_reference(handle, row):
    for case in pairs(shape=SHAPES, out_dtype=OUT_DTYPES, points=(None, "a and b")):
        M, N, _ = case["shape"]
        scaled = case["out_dtype"] != torch.int32
        check(handle, row, **case, **({**scales(M, N, "vector"), "bias": torch.randn(N, device="cuda")} if scaled else {}))


@pytest.mark.parametrize("row", ROWS)
def test_every_decode_kernel_config_gives_each_product_of_a_batch_its_bits_beside_nothing_else(handle, row):
    B, M, N, K = 3, 20, 130, 400
    a = torch.randint(-128, 128, (B, M, K), dtype=torch.int8, device="cuda")
    b = torch.randint(-128, 128, (B, N, K), dtype=torch.int8, device="cuda").mT
    options = {
        "a_scale": torch.rand(B, M, 1, device="cuda"),
        "b_scale": torch.rand(B, 1, N, device="cuda"),
        "bias": torch.randn(B, 1, N, device="cuda"),
    }
    around = torch.full((B, M, N + 7), -3.0, device="cuda")
    out = around[:, :, 2 : 2 + N]  # aligned to 8 bytes, rows apart by 4 * 137
    with sm.create_descriptor(handle, out=out, a=a, b=b, kernel=row, **options) as desc:
        desc.calculate(out, a, b, **options)
    assert torch.equal(out, reference.scaled_mm(a, b, **options, out_dtype=torch.float32))
    assert (around[:, :, :2] == -3.0).all() and (around[:, :, 2 + N :] == -3.0).all()


@pytest.mark.parametrize("row", ROWS)
def test_every_decode_kernel_config_follows_its_inputs_from_replay_to_replay(handle, row):
    M, N, K, rounds = 8, 24576, 1024, 16
    x = torch.randint(-128, 128, (rounds, M, K), dtype=torch.int8, device="cuda")
    weights = [sm.prepare_weight(torch.randint(-128, 128, (N, K), dtype=torch.int8, device="cuda").t()) for _ in range(2)]
    scale, b_scale = torch.rand(M, 1, device="cuda"), torch.rand(N, device="cuda")
    a = x[0].clone()
    out = torch.full((rounds, 2, M, N), float("nan"), dtype=torch.bfloat16, device="cuda")
    with sm.create_descriptor(handle, out=out[0, 0], a=a, b=weights[0], a_scale=scale, b_scale=b_scale, kernel=row) as desc:
        desc.calculate(out[0, 0], a, weights[0], scale, b_scale)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(rounds):
                a.copy_(x[i])
                for j in range(2):
                    desc.calculate(out[i, j], a, weights[j], scale, b_scale)
        for _ in range(5):
            out.fill_(float("nan"))
            graph.replay()
        for i in range(rounds):
            for j in range(2):
                assert torch.equal(out[i, j], reference.scaled_mm(x[i], weights[j].b, scale, b_scale)), f"{row}, round {i}, weight {j}"
