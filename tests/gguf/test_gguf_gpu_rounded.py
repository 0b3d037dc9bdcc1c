"""Mode w16a16 on a GPU: values of packed weights rounded to 16 bits, float32 activations to float16, and nothing else."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from gguf_data import WEIGHTS, relative_error, seeded
from gguf_gpu import BOUND, FLOATS, compute, operands, rounded_rows, rows_here
from operands.pairs import pairs

import scaled_mm as sm
from scaled_mm.gguf import reference
from scaled_mm.kernels.arch import ARCHES
from scaled_mm.kernels.registry import config_cost, family_of
from scaled_mm.kernels.sharing import SHARING_CLUSTERS, cluster_blocks
from scaled_mm.tables import load_table

pytestmark = pytest.mark.gpu

SHAPES = [
    (1, 17, 32),
    (64, 32, 256),
    (65, 33, 288),
    (127, 1, 2048),
    (129, 63, 320),
    (257, 130, 1056),
    (300, 257, 2080),
    (255, 300, 4064),
    (64, 97, 544),
    (192, 161, 512),
]
LARGE = [(4096, 64, 4096), (4096, 300, 1024), (1152, 520, 8192), (256, 40, 28672)]  # tiles that several thread blocks share
#: The most of LARGE, whose parts are summed apart; for a sum over all of K it would be 2e-9 * K.
LONG_BOUND = 1e-5


def rounds(arch: str, kernel: str) -> bool:
    """Whether a kernel config rounds weights: those that multiply by wgmma."""
    row = next(row for row in load_table(arch).gguf.rows if row.name == kernel)
    return row.family == "gguf_wgmma_cluster" or (row.family == "gguf_wgmma" and row.tile.m > 16)


def want(weight_q, fmt, x, rounding: bool) -> torch.Tensor:
    """float64 [N, M]."""
    exact = sm.dequantize_block(weight_q.cpu(), fmt).double()
    rounds_to = torch.bfloat16 if x.dtype is torch.bfloat16 else torch.float16
    weight = reference.rounded(weight_q.cpu(), fmt, rounds_to) if rounding else exact
    return weight @ (rounded_rows(x) if x.dtype is torch.float32 else x.cpu().double()).t()


@pytest.mark.parametrize("arch, kernel", rows_here())
@pytest.mark.parametrize("fmt", WEIGHTS)
def test_every_kernel_config_is_within_the_bound_of_the_rounded_formula(arch, kernel, fmt):
    handle = sm.Handle("cuda", arch=arch)
    for case in pairs(shape=SHAPES, dtype=FLOATS):
        (m, n, k), dtype = case["shape"], case["dtype"]
        weight_q, x = operands(fmt, m, n, k)
        x, bias = x.to(dtype), torch.randn(m, generator=seeded(n)).cuda()
        out = compute(handle, fmt, sm.pack_block_weight(weight_q, fmt), x, m, n, bias=bias, mode="w16a16", kernel=kernel)
        expected = want(weight_q, fmt, x, rounds(arch, kernel)) + bias.cpu().double()[:, None]
        assert relative_error(out.cpu(), expected) <= BOUND, case


@pytest.mark.parametrize("fmt", WEIGHTS)
@pytest.mark.parametrize("tokens", [8, 9, 16, 17])
def test_weights_of_formats_with_minima_round_from_9_tokens_on_and_others_from_17(fmt, tokens):
    handle = sm.Handle("cuda")
    if handle.arch != "sm90":
        pytest.skip("SM90's table")
    for (n, k), dtype in itertools.product(((200, 512), (200, 2080), (3800, 2080)), FLOATS):  # the table's buckets differ in N and K
        weight_q, x = operands(fmt, n, tokens, k)
        packed, bound = sm.pack_block_weight(weight_q, fmt), max(BOUND, 2e-9 * k)
        rounding = tokens >= (9 if fmt in ("q4_1", "q5_1") else 17)
        y = sm.block_linear(x.to(dtype), packed, out_dtype=torch.float32, mode="w16a16")
        assert relative_error(y.t().cpu(), want(weight_q, fmt, x.to(dtype), rounding)) <= bound, (n, k, dtype)
        if dtype is not torch.float32:
            assert torch.equal(sm.block_linear(x.to(dtype), packed), y.to(dtype)), (n, k, dtype)
            exact = sm.block_linear(x.to(dtype), packed, out_dtype=torch.float32)
            assert relative_error(exact.t().cpu(), want(weight_q, fmt, x.to(dtype), rounding=False)) <= BOUND, (n, k, dtype)


@pytest.mark.parametrize("fmt", WEIGHTS)
@pytest.mark.parametrize("exponent", [-10, -16, -20])
def test_small_weights_are_within_the_bound(fmt, exponent):
    """Down to weights of a few units of float16's subnormal scales."""
    handle = sm.Handle("cuda")
    weight_q = sm.quantize_block(torch.randn(200, 512, generator=seeded(3)) * 2.0**exponent, fmt).cuda()
    x = torch.randn(64, 512, generator=seeded(4)).cuda()
    for dtype in FLOATS:
        out = compute(handle, fmt, sm.pack_block_weight(weight_q, fmt), x.to(dtype), 200, 64, mode="w16a16")
        assert relative_error(out.cpu(), want(weight_q, fmt, x.to(dtype), rounding=handle.arch == "sm90")) <= BOUND, dtype


@pytest.mark.parametrize("fmt", WEIGHTS)
@pytest.mark.parametrize("m, n, k", LARGE)
def test_shared_tiles_are_within_the_bound(fmt, m, n, k):
    weight_q, x = operands(fmt, m, n, k)
    for dtype in FLOATS:
        y = sm.block_linear(x.to(dtype), sm.pack_block_weight(weight_q, fmt), out_dtype=torch.float32, mode="w16a16")
        rounding = load_table(sm.Handle("cuda").arch).gguf.rows[-1].family.startswith("gguf_wgmma")
        bound = min(LONG_BOUND, max(BOUND, 2e-9 * k))  # docs/design/gguf-formats.md
        assert relative_error(y.t().cpu(), want(weight_q, fmt, x.to(dtype), rounding)) <= bound, dtype


# Of an H200's 132 SMs: whole rounds and tiles that are left; parts of two tiles in a thread block; a few tiles shared by many; tiles in two panels.
@pytest.mark.parametrize("kernel", [row.name for row in load_table("sm90").gguf.rows if rounds("sm90", row.name)])
def test_tiles_that_a_thread_block_computes_in_turn_or_shares_are_right(kernel):
    handle = sm.Handle("cuda")
    if handle.arch != "sm90":
        pytest.skip("a kernel config of SM90's table")
    tile = load_table("sm90").row(kernel).tile.m
    for fmt, m, k, full, dtype in (
        ("q4_0", 128 * 150 - 5, 800, 1, torch.float16),
        ("q5_1", 128 * 70 + 1, 2080, 2, torch.float16),
        ("q8_0", 300, 8224, 1, torch.bfloat16),
        ("q5_0", 128 * 27 - 1, 1056, 4, torch.bfloat16),
    ):
        n = full * tile + 3
        weight_q, x = operands(fmt, m, n, k)
        packed, x = sm.pack_block_weight(weight_q, fmt), x.to(dtype)
        runs = [compute(handle, fmt, packed, x, m, n, mode="w16a16", kernel=kernel) for _ in range(3)]
        bound = max(BOUND, 2e-9 * k)  # a sum over all of K, which tensor cores truncate at each step (docs/design/gguf-formats.md)
        assert relative_error(runs[0].cpu(), want(weight_q, fmt, x, rounding=True)) <= bound, (fmt, m)
        assert all(torch.equal(runs[0], run) for run in runs[1:]), (fmt, m)


@pytest.mark.parametrize("kernel", [row.name for row in load_table("sm90").gguf.rows if row.family == "gguf_wgmma_cluster"])
def test_clusters_of_every_size_add_the_parts_of_a_tile(kernel):
    handle = sm.Handle("cuda")
    if handle.arch != "sm90":
        pytest.skip("a kernel config of SM90's table")
    row, sms = load_table("sm90").row(kernel), torch.cuda.get_device_properties(0).multi_processor_count
    resident = family_of(row).resident(row, config_cost(row, "sm90"), ARCHES["sm90"].shared_memory)
    # By size of the clusters, and whether one has several tiles: the fewest steps of K. Some thread blocks have one more than others, or none.
    sizes: dict[tuple[int, bool], tuple[int, int]] = {}
    for steps in range(1, 30):
        for tiles in range(2, 300):
            blocks, waves = cluster_blocks(tiles, steps, sms, resident, row.split_k)
            sizes.setdefault((blocks, waves > 1), (tiles, steps))
    assert sms < 78 or {(blocks, False) for blocks in SHARING_CLUSTERS if blocks <= row.split_k} | {(2, True)} <= set(sizes)
    for size, (tiles, steps) in sizes.items():
        for fmt, last, tokens, dtype in (
            ("q4_0", 256, row.tile.m, torch.bfloat16),
            ("q5_1", 96, row.tile.m - 3, torch.float16),
            ("q4_1", 32, 1, torch.bfloat16),
        ):
            m, k = tiles * row.tile.n - 5, (steps - 1) * 256 + last
            weight_q, x = operands(fmt, m, tokens, k)
            packed, bias, x = sm.pack_block_weight(weight_q, fmt), torch.randn(m, generator=seeded(m)).cuda(), x.to(dtype)
            runs = [compute(handle, fmt, packed, x, m, tokens, bias=bias, mode="w16a16", kernel=kernel) for _ in range(2)]
            expected = want(weight_q, fmt, x, rounding=True) + bias.cpu().double()[:, None]
            assert relative_error(runs[0].cpu(), expected) <= max(BOUND, 2e-9 * k), (size, fmt)
            assert torch.equal(*runs), (size, fmt)


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_rows_and_tokens_of_any_size_keep_their_digits(fmt):
    g = seeded(3)
    weight = torch.randn(96, 512, generator=g) * torch.logspace(-6, 3, 96)[:, None]
    weight_q = sm.quantize_block(weight, fmt).cuda()
    x = (torch.randn(40, 512, generator=g) * torch.logspace(-30, 30, 40)[:, None]).cuda()
    y = sm.block_linear(x, sm.pack_block_weight(weight_q, fmt), mode="w16a16").double().t().cpu()
    exact = reference.gemm(weight_q.cpu(), x.cpu(), fmt)
    size = sm.dequantize_block(weight_q.cpu(), fmt).double().norm(dim=1)[:, None] * x.cpu().double().norm(dim=1)
    assert ((y - exact).abs() <= 2.0**-10 * size).all()


@pytest.mark.parametrize("k", [32, 4128, 16384, 16416, 40960])
def test_float32_activations_of_any_strides_round_alike(k):
    """Rows that are and are not aligned to 16 bytes, shorter and longer than the registers of a thread block."""
    for tokens in (5, 21):  # by mma.sync, by wgmma
        weight_q, x = operands("q4_0", 40, tokens, k)
        packed = sm.pack_block_weight(weight_q, "q4_0")
        y = sm.block_linear(x, packed)
        for strided in (x.t().contiguous().t(), torch.cat([x[:, :1], x], 1)[:, 1:], torch.stack([x, x], 2)[..., 0]):
            assert torch.equal(sm.block_linear(strided, packed), y), (tokens, strided.stride())
        assert relative_error(y.t().cpu(), want(weight_q, "q4_0", x, rounding=False)) <= 2.0**-9


@pytest.mark.parametrize("fmt", WEIGHTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_not_finite_stays_in_its_row_and_its_token(fmt, dtype):
    weight_q, x = operands(fmt, 130, 70, 512)
    x = x.to(dtype)
    packed = sm.pack_block_weight(weight_q, fmt)
    clean = sm.block_linear(x, packed, out_dtype=torch.float32, mode="w16a16")
    weight_q[77, 3, :2] = torch.tensor([0x00, 0x7E], dtype=torch.uint8)  # a NaN for d
    x[5, 100] = float("inf")
    y = sm.block_linear(x, sm.pack_block_weight(weight_q, fmt), out_dtype=torch.float32, mode="w16a16")
    touched = torch.zeros_like(y, dtype=torch.bool)
    touched[5], touched[:, 77] = True, True
    assert not y[touched].isfinite().any() and torch.equal(y[~touched], clean[~touched])


@pytest.mark.parametrize("fmt", WEIGHTS)
@pytest.mark.parametrize("out_dtype", FLOATS)
def test_outputs_are_the_float32_ones_cast_once_whatever_their_strides(fmt, out_dtype):
    """Outputs that bulk copies take, rows in pairs of one word, odd numbers of rows, and rows that are not neighbours; one tile and several for each
    thread block, whole tiles and shared ones; tiles of every size. Nothing is written beside the outputs."""
    handle = sm.Handle("cuda")
    sizes = [
        (128, 256, 512, None),
        (129, 33, 512, None),
        (130, 65, 1024, None),
        (1152, 520, 2048, None),
        (2056, 4091, 256, None),
        (904, 5000, 800, None),
    ]
    rows = [row for row in load_table(handle.arch).gguf.rows if rounds(handle.arch, row.name)]
    sizes += [(131, row.tile.m + 5, k, row.name) for row in rows for k in (352, 448, 512)]  # the last step of K has 2, 3 and 4 pairs of blocks
    sizes += [(635, 30 * row.tile.m - 5, 2080, row.name) for row in rows]  # whole tiles, then shared ones
    sizes += [(40, 5, 512, row.name) for row in rows] + [(8, 1, 512, row.name) for row in rows]
    for m, n, k, kernel in sizes:
        weight_q, x = operands(fmt, m, n, k)
        product = dict(weight=sm.pack_block_weight(weight_q, fmt), activation=x.half(), bias=torch.randn(m, generator=seeded(n)).cuda())
        new = functools.partial(torch.full, fill_value=torch.nan, dtype=out_dtype, device="cuda")

        def computed(out):
            with sm.create_block_descriptor(handle, out=out.t(), **product, mode="w16a16", kernel=kernel) as descriptor:  # noqa: B023
                workspace = torch.empty(descriptor.workspace_size, dtype=torch.uint8, device="cuda")
                descriptor.calculate(out.t(), *product.values(), workspace=workspace)  # noqa: B023
            return out

        one_by_one = torch.full((n, 2 * m), torch.nan, device="cuda")[:, ::2]
        wanted = computed(one_by_one).to(out_dtype)
        even, eights = m + m % 2, -(-m // 8) * 8
        for columns in ((m, slice(m)), (eights + 16, slice(8, m + 8)), (even + 2, slice(m)), (m + 1, slice(1, m + 1)), (2 * m, slice(0, 2 * m, 2))):
            whole = new((n + 1, columns[0]))
            out = computed(whole[:n, columns[1]])
            assert torch.equal(out, wanted), (m, n, k, kernel, out.stride())
            assert whole.isnan().sum() == whole.numel() - out.numel()
        assert torch.equal(computed(new((m, n)).t()), wanted)


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_blocks_of_zeros_at_the_end_of_k_change_no_bit(fmt):
    """What the last step of 256 does not have is left out, 64 values at a time, but in tiles of 64 tokens with two thread blocks on an SM."""
    handle = sm.Handle("cuda")
    rows = [row for row in load_table(handle.arch).gguf.rows if rounds(handle.arch, row.name)]
    for row in rows:
        for m, n, k in ((131, row.tile.m + 5, 32), (131, row.tile.m, 320), (131, row.tile.m, 448), (635, 30 * row.tile.m - 5, 2080)):
            weight_q, x = operands(fmt, m, n, k)
            wider = -(-k // 256) * 256
            padded_q = torch.zeros(m, wider // 32, weight_q.shape[2], dtype=torch.uint8, device="cuda")
            padded_q[:, : k // 32] = weight_q
            padded_x = torch.zeros(n, wider, dtype=torch.float16, device="cuda")
            padded_x[:, :k] = x
            out, padded = (
                compute(handle, fmt, sm.pack_block_weight(blocks, fmt), of, m, n, mode="w16a16", kernel=row.name)
                for blocks, of in ((weight_q, x.half()), (padded_q, padded_x))
            )
            assert torch.equal(out, padded), (row.name, m, n, k)


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_an_unpacked_weight_is_not_rounded(fmt):
    weight_q, x = operands(fmt, 130, 40, 512)
    handle, x = sm.Handle("cuda"), x.half()
    out = compute(handle, fmt, weight_q, x, 130, 40, mode="w16a16")
    assert torch.equal(out, compute(handle, fmt, weight_q, x, 130, 40, mode="w4a16"))


@pytest.mark.parametrize("dtype", FLOATS)
def test_activations_of_any_strides_give_the_same(dtype):
    weight_q, _ = operands("q4_1", 130, 40, 512)
    packed = sm.pack_block_weight(weight_q, "q4_1")
    x = torch.randn(80, 1100, generator=seeded(4)).cuda().to(dtype)
    for view in (x[:40, 1:513], x[::2, 3:515], x[:40, ::2][:, :512], x[:40, :512].t().contiguous().t(), x[:1, :512].expand(40, 512)):
        assert torch.equal(sm.block_linear(view, packed, mode="w16a16"), sm.block_linear(view.contiguous(), packed, mode="w16a16"))
