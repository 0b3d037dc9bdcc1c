"""Block products on a GPU against the formula in float64: formats, activations, modes, sizes, memory, rows of every table, graphs."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from gguf_data import WEIGHTS, random_blocks, relative_error, seeded

import scaled_mm as sm
from scaled_mm.errors import (
    BadParamError,
    BadTensorDeviceError,
    BadTensorDtypeError,
    BadTensorShapeError,
    InsufficientWorkspaceError,
    KernelNotFoundError,
    ScaledMMError,
)
from scaled_mm.gguf import reference
from scaled_mm.tables import available_tables, load_table, rules, rules_gguf

pytestmark = pytest.mark.gpu

BOUND = 2e-6
ROUNDING = {torch.float32: BOUND, torch.float16: 2.0**-11 + BOUND, torch.bfloat16: 2.0**-8 + BOUND}  # of a sum that is cast
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
KINDS = ["q8_1", *FLOATS]
# Odd ones, edges of tiles (rows by 64, tokens by 8) and of blocks of 256 k.
SHAPES = [
    (1, 1, 32),
    (1, 300, 64),
    (300, 1, 4096),
    (63, 7, 96),
    (64, 8, 256),
    (65, 9, 288),
    (127, 17, 2048),
    (129, 33, 320),
    (191, 63, 1056),
    (257, 65, 512),
    (300, 129, 2080),
    (255, 300, 4064),
]


def gemm(fmt: str):
    return getattr(sm, f"gemm_{fmt}")


def gemm_q8_1(fmt: str):
    return getattr(sm, f"gemm_{fmt}_q8_1")


def operands(fmt: str, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight as blocks, activations in float32), on the GPU."""
    g = seeded(m + n + k)
    return sm.quantize_block(torch.randn(m, k, generator=g), fmt).cuda(), torch.randn(n, k, generator=g).cuda()


def expected(weight_q: torch.Tensor, fmt: str, activation: torch.Tensor, mode: str = "w4a8", bias: torch.Tensor | None = None) -> torch.Tensor:
    """float64 [M, N] on the CPU, by formulas that share nothing with the kernels. Activations that mode quantizes are quantized here."""
    if activation.dtype is torch.uint8 or mode == "w4a8":
        q = activation if activation.dtype is torch.uint8 else sm.quantize_q8_1(activation)
        value = reference.gemm_q8_1(weight_q.cpu(), q.cpu(), fmt)
    else:
        value = reference.gemm(weight_q.cpu(), activation.cpu(), fmt)
    return value if bias is None else value + bias.cpu().double()[:, None]


def modes_of(kind) -> tuple[str, ...]:
    return ("w4a8", "w4a16") if kind in (torch.float16, torch.bfloat16) else ("w4a8",)


def activation_of(kind, x: torch.Tensor) -> torch.Tensor:
    return sm.quantize_q8_1(x) if kind == "q8_1" else x.to(kind)


def compute(handle: sm.Handle, weight, activation, m: int, n: int, *, bias=None, mode="auto", out_dtype=torch.float32, kernel=None) -> torch.Tensor:
    """[M, N] by a descriptor, whose output and workspace are poisoned."""
    out = torch.full((m, n), torch.nan, dtype=out_dtype, device="cuda")
    with sm.create_block_descriptor(handle, out=out, weight=weight, activation=activation, bias=bias, mode=mode, kernel=kernel) as descriptor:
        workspace = torch.full((descriptor.workspace_size,), 255, dtype=torch.uint8, device="cuda") if descriptor.workspace_size else None
        descriptor.calculate(out, weight, activation, bias, workspace=workspace)
    return out


# ---- the functions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", WEIGHTS)
@pytest.mark.parametrize("m, n, k", SHAPES)
def test_products_are_within_the_bound(fmt, m, n, k):
    weight_q, x = operands(fmt, m, n, k)
    activation_q, packed = sm.quantize_q8_1(x), sm.pack_block_weight(weight_q, fmt)
    want = expected(weight_q, fmt, activation_q)
    for weight in (weight_q, packed):
        out = gemm_q8_1(fmt)(weight, activation_q)
        assert out.shape == (m, n) and out.dtype is torch.float32 and out.is_contiguous() and out.is_cuda
        assert relative_error(out.cpu(), want) <= BOUND
    for dtype in (torch.float16, torch.bfloat16):
        want = expected(weight_q, fmt, x.to(dtype), "w4a16")
        for weight in (weight_q, packed):
            assert relative_error(gemm(fmt)(weight, x.to(dtype)).cpu(), want) <= BOUND


@pytest.mark.parametrize("fmt", WEIGHTS)
@pytest.mark.parametrize("dtype, mode", [(dtype, mode) for dtype in FLOATS for mode in modes_of(dtype)], ids=str)
def test_a_layer_is_within_the_bound_in_every_mode(fmt, dtype, mode):
    for m, n, k in SHAPES:
        weight_q, x = operands(fmt, m, n, k)
        x, packed, bias = x.to(dtype), sm.pack_block_weight(weight_q, fmt), torch.randn(m, generator=seeded(n)).cuda()
        y = sm.block_linear(x, packed, bias, torch.float32, mode)
        assert y.shape == (n, m) and y.is_contiguous()
        assert relative_error(y.t().cpu(), expected(weight_q, fmt, x, mode, bias)) <= BOUND, (m, n, k)


@pytest.mark.parametrize("fmt", WEIGHTS)
@pytest.mark.parametrize("tokens", [1, 8, 9, 300])
def test_auto_is_what_the_table_says(fmt, tokens):
    weight_q, x = operands(fmt, 96, tokens, 512)
    packed = sm.pack_block_weight(weight_q, fmt)
    rules = load_table(sm.Handle("cuda").arch).gguf.auto
    mode = next(rule.mode for rule in rules if rule.m is None or tokens <= rule.m)
    assert torch.equal(sm.block_linear(x, packed), sm.block_linear(x, packed, mode="w4a8"))
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(sm.block_linear(x.to(dtype), packed), sm.block_linear(x.to(dtype), packed, mode=mode))


@pytest.mark.parametrize("fmt", WEIGHTS)
@pytest.mark.parametrize("mode", ["w4a8", "w4a16"])
def test_the_bias_is_added_in_float32_and_the_sum_is_cast_once(fmt, mode):
    weight_q, x = operands(fmt, 65, 9, 288)
    x, packed = x.bfloat16(), sm.pack_block_weight(weight_q, fmt)
    raw = sm.block_linear(x, packed, out_dtype=torch.float32, mode=mode)
    for out_dtype in FLOATS:
        for bias in (torch.randn(130, generator=seeded(1)).cuda()[::2], torch.randn(1, 65, generator=seeded(2)).cuda().to(out_dtype)):
            y = sm.block_linear(x, packed, bias, out_dtype, mode)
            assert y.dtype is out_dtype and torch.equal(y, (raw + bias.float()).to(out_dtype))


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_any_levels_and_any_stored_sums_are_within_the_bound(fmt):
    for seed in range(3):
        weight_q, activation_q = random_blocks(70, 33, fmt, seed, finite=True).cuda(), random_blocks(19, 33, "q8_1", seed + 10, finite=True).cuda()
        want = expected(weight_q, fmt, activation_q)
        for weight in (weight_q, sm.pack_block_weight(weight_q, fmt)):
            assert relative_error(gemm_q8_1(fmt)(weight, activation_q).cpu(), want) <= BOUND


@pytest.mark.parametrize("fmt", WEIGHTS)
@pytest.mark.parametrize("m, n, k", [(5, 3, 0), (0, 3, 64), (5, 0, 64), (0, 0, 0)])
def test_empty_products(fmt, m, n, k):
    packed = sm.pack_block_weight(sm.quantize_block(torch.zeros(m, k), fmt).cuda(), fmt)
    for mode in ("auto", "w4a8", "w4a16"):
        bias = torch.arange(m, dtype=torch.float32, device="cuda")
        y = sm.block_linear(torch.zeros(n, k, dtype=torch.float16, device="cuda"), packed, bias, torch.float32, mode)
        assert torch.equal(y, bias.expand(n, m))
    assert torch.equal(gemm(fmt)(packed, torch.zeros(n, k, dtype=torch.float16, device="cuda")), torch.zeros(m, n, device="cuda"))


# ---- memory -------------------------------------------------------------------------------------------------------------


def moved(blocks: torch.Tensor, gap: int, offset: int) -> torch.Tensor:
    """The same blocks, rows `gap` bytes further apart, beginning at an address of this remainder."""
    rows, row = blocks.shape[0], blocks.shape[1] * blocks.shape[2]
    memory = torch.full((offset + rows * (row + gap),), 0xFF, dtype=torch.uint8, device="cuda")
    return memory[offset:].view(rows, row + gap)[:, :row].unflatten(1, blocks.shape[1:]).copy_(blocks)


@pytest.mark.parametrize("fmt", WEIGHTS)
@pytest.mark.parametrize("gap, offset", [(0, 1), (1, 0), (6, 2), (14, 15), (16, 16)])
def test_blocks_at_any_address_give_the_same(fmt, gap, offset):
    weight_q, x = operands(fmt, 65, 9, 288)
    activation_q = sm.quantize_q8_1(x)
    want = expected(weight_q, fmt, activation_q)
    for weight in (moved(weight_q, gap, offset), sm.pack_block_weight(weight_q, fmt)):
        assert relative_error(gemm_q8_1(fmt)(weight, moved(activation_q, gap, offset)).cpu(), want) <= BOUND
    x = x.half()
    assert relative_error(gemm(fmt)(moved(weight_q, gap, offset), x).cpu(), expected(weight_q, fmt, x, "w4a16")) <= BOUND


@pytest.mark.parametrize("fmt", WEIGHTS)
@pytest.mark.parametrize("dtype, mode", [(dtype, mode) for dtype in FLOATS for mode in modes_of(dtype)], ids=str)
def test_views_of_activations_and_outputs_give_the_same(fmt, dtype, mode):
    weight_q, _ = operands(fmt, 65, 9, 288)
    packed, handle = sm.pack_block_weight(weight_q, fmt), sm.Handle("cuda")
    wide = torch.randn(20, 700, generator=seeded(4)).to(dtype).cuda()
    views = (
        wide[:9, :288],
        wide[:9, 1:289],
        wide[::2, 5:293][:9],
        wide[:9, ::2][:, :288],
        wide[:9, :288].t().contiguous().t(),
        wide[:1, :288].expand(9, 288),
    )
    for x in views:
        want = expected(weight_q, fmt, x.contiguous(), mode)
        for weight in (weight_q, packed):
            memory = torch.full((70, 31), torch.nan, device="cuda")
            for out in (memory[1:66, 2:20:2], memory.view(-1)[: 65 * 9].view(9, 65).t()):
                memory.fill_(torch.nan)
                with sm.create_block_descriptor(handle, out=out, weight=weight, activation=x, mode=mode) as descriptor:
                    workspace = torch.empty(descriptor.workspace_size, dtype=torch.uint8, device="cuda")
                    descriptor.calculate(out, weight, x, workspace=workspace)
                assert relative_error(out.cpu(), want) <= BOUND and int((~memory.isnan()).sum()) == out.numel()


# ---- rows of every table ------------------------------------------------------------------------------------------------


def rows_here() -> list[tuple[str, str]]:
    """(arch, row) of every table whose kernels this GPU runs."""
    found = []
    for arch, _ in available_tables() if torch.cuda.is_available() else ():
        try:
            sm.Handle("cuda", arch=arch).destroy()
        except ScaledMMError:
            continue
        found += [(arch, row.name) for row in load_table(arch).gguf.rows]
    return found


@pytest.mark.parametrize("fmt", WEIGHTS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_row_of_every_table_computes_every_kind_of_product(fmt, kind):
    assert rows_here()
    handles = {}
    for (arch, row), (m, n, k) in itertools.product(rows_here(), [(1, 1, 32), (65, 9, 288), (130, 33, 544), (300, 140, 1056)]):
        handle = handles.setdefault(arch, sm.Handle("cuda", arch=arch))
        weight_q, x = operands(fmt, m, n, k)
        activation, bias = activation_of(kind, x), torch.randn(m, generator=seeded(3)).cuda()
        for mode in modes_of(kind):
            want = expected(weight_q, fmt, activation, mode, bias)
            for weight, out_dtype in itertools.product((weight_q, sm.pack_block_weight(weight_q, fmt)), FLOATS):
                out = compute(handle, weight, activation, m, n, bias=bias, mode=mode, out_dtype=out_dtype, kernel=row)
                assert relative_error(out.cpu(), want) <= ROUNDING[out_dtype], (arch, row, mode, m, n, k, out_dtype)


@pytest.mark.parametrize("fmt", ["q4_0", "q4_1", "q8_0"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_layer_quantizes_activations_to_the_bits_of_quantize_q8_1(fmt, dtype):
    m, n, k = 70, 43, 800
    weight_q, x = operands(fmt, m, n, k)
    x = (x * torch.logspace(-9, 4, n, device="cuda")[:, None]).to(dtype)  # float16: some denormal
    x[5], x[6, 40], x[7, 50], x[8, 0], x[9] = 0.0, float("nan"), -float("inf"), 6e4, 1e7  # the last: d and s overflow
    wide = torch.zeros(n, k + 3, dtype=dtype, device="cuda")
    views = (x, wide[:, 3:].copy_(x), x.t().contiguous().t())
    quantized = sm.quantize_q8_1(x)
    odd = moved(quantized, 1, 1)
    for arch, row in rows_here():
        handle = sm.Handle("cuda", arch=arch)
        want = compute(handle, weight_q, quantized, m, n, mode="w4a8", kernel=row)
        for activation in (*views, odd):
            torch.testing.assert_close(compute(handle, weight_q, activation, m, n, mode="w4a8", kernel=row), want, rtol=0, atol=0, equal_nan=True)


def native_rows() -> list[str]:
    return [row.name for row in load_table(sm.Handle("cuda").arch).gguf.rows]


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_long_sums_are_within_the_bound_in_every_row(fmt):
    handle = sm.Handle("cuda")
    weight_q, x = operands(fmt, 130, 40, 28672)
    weight = sm.pack_block_weight(weight_q, fmt)
    for activation, mode in ((x.half(), "w4a16"), (x.half() + 1, "w4a16"), (x, "w4a8")):
        want = expected(weight_q, fmt, activation, mode)
        for row in native_rows():
            out = compute(handle, weight, activation, 130, 40, mode=mode, kernel=row)
            assert relative_error(out.cpu(), want) <= BOUND, (row, mode)


# The products of formats with minima, of levels and of what their middle stands for, nearly cancel, and the tensor cores cut sums:
# docs/design/gguf-formats.md.
@pytest.mark.parametrize("fmt", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("skewed", [False, True])
def test_weights_whose_levels_are_far_from_their_middle_are_within_the_bound_in_every_row(fmt, dtype, skewed):
    m, k = 144, 28672
    normal, uniform = torch.randn(m, k, generator=seeded(m)), torch.rand(m, k, generator=seeded(m))
    weight = sm.pack_block_weight(sm.quantize_block((-uniform.clamp_min(1e-7).log() - 1 if skewed else normal**3).cuda(), fmt), fmt)
    wide = torch.zeros(40, k + 8, dtype=dtype, device="cuda")
    wide[:, :k] = torch.randn(40, k, generator=seeded(k)) + 1
    want = reference.gemm(weight.unpack(), wide[:, :k], fmt)
    odd = torch.empty_like(wide)[:, 1 : k + 1].copy_(wide[:, :k])  # not aligned to 16 bytes
    for arch, row in rows_here():
        for tokens, x in (*((tokens, wide[:, :k]) for tokens in (1, 2, 3, 13, 40)), (1, odd), (2, odd)):
            out = compute(sm.Handle("cuda", arch=arch), weight, x[:tokens], m, tokens, mode="w4a16", kernel=row)
            in_place = row == "gguf_mma_16x8_x2" and tokens < 3 and x is not odd
            bound = 1e-5 if skewed and fmt in ("q4_1", "q5_1") and arch != "sm75" and not in_place else BOUND
            assert relative_error(out, want[:, :tokens]) <= bound, (arch, row, tokens, x is odd)


# Rows of the weight and K, on an H200: warps that have a K of their own, that share one by 8 or by 2, the last ones fewer; what fits shared memory,
# or
# not; thread blocks of 14 strips, whose other two warps are idle, and of 10, twice for each multiprocessor.
@pytest.mark.parametrize(
    "m, k", [(70, 32), (70, 544), (2117, 1056), (4100, 4096), (4100, 14336), (300, 28672), (15000, 1312), (28672, 800), (40000, 288)]
)
@pytest.mark.parametrize("fmt", WEIGHTS)
def test_few_tokens_are_the_same_product_wherever_they_lie(fmt, m, k):
    rows = [(sm.Handle("cuda", arch=arch), row, load_table(arch).row(row).tile.m) for arch, row in rows_here()]
    few = {8: (1, 2, 5, 8), 16: (3, 9, 13, 16)}  # tokens, by those of a tile
    cases = [(handle, row, tokens) for handle, row, tile in rows if tile in few for tokens in few[tile]]
    assert {tokens for *_, tokens in cases} == {1, 2, 3, 5, 8, 9, 13, 16}
    weight_q = sm.quantize_block(torch.randn(m, k, generator=seeded(m)).cuda(), fmt)
    weight = sm.pack_block_weight(weight_q, fmt)
    for dtype, mean in ((torch.float16, 0), (torch.float16, 1), (torch.bfloat16, 0)):
        wide = (torch.randn(16, k + 8, generator=seeded(k)) + mean).to(dtype).cuda()
        for x in (wide[:, :k], wide[:, 3 : k + 3]):  # aligned to 16 bytes; not
            want = reference.gemm(weight_q, x.contiguous(), fmt)
            for handle, row, tokens in cases:
                out = compute(handle, weight, x[:tokens], m, tokens, mode="w4a16", kernel=row)
                assert float((out.double() - want[:, :tokens]).norm() / want[:, :tokens].norm()) <= BOUND, (handle.arch, row, dtype, mean, tokens)


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_few_tokens_that_lie_well_are_not_staged(fmt):
    handle, table = sm.Handle("cuda"), load_table(sm.Handle("cuda").arch)
    m, k = 300, 1056
    weight = sm.pack_block_weight(sm.quantize_block(torch.randn(m, k, generator=seeded(1)).cuda(), fmt), fmt)
    rows = [row for row in table.gguf.rows if row.family == "gguf_mma" and row.tile.m <= 16]
    assert {row.tile.m for row in rows} == {8, 16}
    for row, dtype in itertools.product(rows, (torch.float16, torch.bfloat16)):
        wide, out = torch.randn(row.tile.m, k + 8, generator=seeded(k)).to(dtype).cuda(), torch.empty(m, row.tile.m, device="cuda")
        for offset, tokens in itertools.product((0, 3), (1, 2, row.tile.m - 1, row.tile.m)):
            operands = dict(out=out[:, :tokens], weight=weight, activation=wide[:tokens, offset : k + offset])
            with sm.create_block_descriptor(handle, **operands, kernel=row.name) as descriptor:
                workspace = torch.full((descriptor.workspace_size,), 255, dtype=torch.uint8, device="cuda")
                descriptor.calculate(**operands, workspace=workspace)
            assert bool((workspace == 255).all()) is (offset == 0), (row.name, dtype, offset, tokens)


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_one_or_two_tokens_that_lie_well_have_a_kernel_of_their_own(fmt):
    m, k = 300, 1056
    weight = sm.pack_block_weight(sm.quantize_block(torch.randn(m, k, generator=seeded(1)).cuda(), fmt), fmt)
    x = torch.randn(3, k, generator=seeded(k)).cuda().half()
    tables = [load_table(arch) for arch, row in rows_here() if row == "gguf_mma_16x8_x2"]
    assert tables
    for table, tokens in itertools.product(tables, (1, 2, 3)):
        handle, staged = (
            sm.Handle("cuda", arch=table.arch),
            rules_gguf.stages(table.row("gguf_mma_16x8_x2"), fmt, rules.shared_memory_of(table)) == 1,
        )
        compute(handle, weight, x[:tokens], m, tokens, kernel="gguf_mma_16x8_x2", mode="w4a16")  # loads it
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            compute(handle, weight, x[:tokens], m, tokens, kernel="gguf_mma_16x8_x2", mode="w4a16")
            torch.cuda.synchronize()
        kernels = [event.name for event in profile.events() if "mma_kernel" in event.name]
        own = [re.search(r"Activations(\)|E)2", name) is not None for name in kernels]  # Activations::kFew, demangled or not
        assert own == [tokens < 3 and not staged], (table.arch, tokens, kernels)


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_a_token_of_few_that_is_not_finite_spoils_its_column_and_nothing_else(fmt):
    weight_q, x = operands(fmt, 70, 11, 1056)
    for (arch, row), value, tokens in itertools.product(rows_here(), (float("inf"), -float("inf"), float("nan")), (1, 2, 3, 8, 11)):
        for dtype in (torch.float16, torch.bfloat16):
            activation = x[:tokens].to(dtype)
            activation[tokens - 1, 1000] = value
            finite = compute(sm.Handle("cuda", arch=arch), weight_q, activation, 70, tokens, mode="w4a16", kernel=row).isfinite()
            assert not finite[:, tokens - 1].any() and finite[:, : tokens - 1].all(), (arch, row, value, dtype)


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_large_products_are_within_the_bound(fmt):
    weight_q, x = operands(fmt, 4096, 4096, 2048)
    for activation in (x.half(), sm.quantize_q8_1(x)):
        want = (reference.gemm_q8_1 if activation.dtype is torch.uint8 else reference.gemm)(weight_q, activation, fmt)
        out = (gemm_q8_1(fmt) if activation.dtype is torch.uint8 else gemm(fmt))(weight_q, activation)
        assert float((out.double() - want).norm() / want.norm()) <= BOUND


SHARING = [row.name for row in load_table("sm90").gguf.rows if row.split_k > 1]


# Of an H200's 132 multiprocessors: whole rounds and tiles that are left; parts of two tiles in a thread block; a few tiles shared by many; the
# same where tiles are numbered in two panels and more, all of them shared, and those left over of the last panel.
@pytest.mark.parametrize(
    "m, k, full", [(128 * 150 - 5, 800, 1), (128 * 70 + 1, 2080, 1), (300, 8224, 1), (128 * 13 - 3, 2080, 4), (128 * 27 - 1, 2080, 4)]
)
@pytest.mark.parametrize("fmt, kind", [("q4_0", torch.float16), ("q5_1", torch.float16), ("q5_1", "q8_1"), ("q8_0", torch.bfloat16)], ids=str)
@pytest.mark.parametrize("row", SHARING)
def test_tiles_that_are_left_over_and_shared_are_as_right_as_whole_ones(row, fmt, kind, m, k, full):
    """full: tiles of tokens that have no others beside them; three tokens are in one more."""
    if sm.Handle("cuda").arch != "sm90":
        pytest.skip("a row of SM90's table")
    tokens = load_table("sm90").row(row).tile.m
    weight_q, x = operands(fmt, m, full * tokens + 3, k)
    activation, weight = activation_of(kind, x), sm.pack_block_weight(weight_q, fmt)
    bias = torch.randn(weight_q.shape[0], generator=seeded(4)).cuda()
    want = (reference.gemm_q8_1 if kind == "q8_1" else reference.gemm)(weight_q, activation, fmt) + bias.double()[:, None]
    mode = "w4a8" if kind == "q8_1" else "w4a16"
    runs = [compute(sm.Handle("cuda"), weight, activation, *want.shape, bias=bias, mode=mode, kernel=row) for _ in range(3)]
    runs.append(compute(sm.Handle("cuda"), weight_q, activation, *want.shape, bias=bias, mode=mode, kernel=row))  # that is not packed
    error = (runs[0].double() - want).norm(dim=1) / want.norm(dim=1)
    assert float(error.max()) <= 4 * BOUND and all(torch.equal(runs[0], run) for run in runs[1:])
    assert float((runs[0].double() - want).norm() / want.norm()) <= BOUND


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize("fmt", WEIGHTS)
def test_what_is_not_finite_spoils_its_row_or_column_and_nothing_else(fmt, value):
    handle, m, n = sm.Handle("cuda"), 70, 21
    weight_q, x = operands(fmt, m, n, 1056)
    half = torch.tensor([value], dtype=torch.float16).view(torch.uint8).cuda()
    quantized = sm.quantize_q8_1(x)
    for row in native_rows():
        for at in (0, 2) if fmt in ("q4_1", "q5_1") else (0,):  # d, m
            spoilt = weight_q.clone()
            spoilt[4, 30, at : at + 2] = half
            for activation in (x.half(), quantized):
                finite = compute(handle, spoilt, activation, m, n, mode="w4a8" if activation is quantized else "w4a16", kernel=row).isfinite()
                assert not finite[4].any() and finite[torch.arange(m) != 4].all(), (row, at)
        for activation in (x.half(), x.bfloat16()):
            activation[7, 1000] = value
            finite = compute(handle, weight_q, activation, m, n, mode="w4a16", kernel=row).isfinite()
            assert not finite[:, 7].any() and finite[:, torch.arange(n) != 7].all(), row
        for at in (0, 2) if fmt != "q8_0" else (0,):  # d, s
            spoilt = quantized.clone()
            spoilt[7, 30, at : at + 2] = half
            finite = compute(handle, weight_q, spoilt, m, n, mode="w4a8", kernel=row).isfinite()
            assert not finite[:, 7].any() and finite[:, torch.arange(n) != 7].all(), (row, at)


def test_a_row_that_is_not_in_the_section_is_refused():
    handle, weight_q, x = sm.Handle("cuda"), *operands("q4_0", 64, 8, 256)
    with pytest.raises(KernelNotFoundError, match="^kernel: expected a block row of "):
        compute(handle, weight_q, x, 64, 8, kernel="generic_64x64x64")


# ---- graphs, streams, compiled functions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_a_captured_layer_follows_its_inputs(fmt):
    weight_q, x = operands(fmt, 130, 5, 544)
    packed, x = sm.pack_block_weight(weight_q, fmt), x.half()
    activation_q = sm.quantize_q8_1(x)
    sm.block_linear(x, packed, mode="w4a8"), gemm_q8_1(fmt)(weight_q, activation_q), gemm(fmt)(packed, x)  # builds what has to be built
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = sm.block_linear(x, packed, mode="w4a8"), gemm_q8_1(fmt)(weight_q, activation_q), gemm(fmt)(packed, x)
    for seed in range(3):
        x.copy_(torch.randn(x.shape, generator=seeded(seed)))
        activation_q.copy_(sm.quantize_q8_1(x * 2))
        weight_q.copy_(sm.quantize_block(torch.randn(130, 544, generator=seeded(seed + 9)), fmt))
        graph.replay()
        torch.cuda.synchronize()
        kept = packed.unpack()
        assert relative_error(outs[0].t().cpu(), expected(kept, fmt, x, "w4a8")) <= ROUNDING[torch.float16]
        assert relative_error(outs[1].cpu(), expected(weight_q, fmt, activation_q)) <= BOUND
        assert relative_error(outs[2].cpu(), expected(kept, fmt, x, "w4a16")) <= BOUND


def test_a_weight_packed_while_a_graph_is_captured_is_not_constant():
    weight_q, _ = operands("q4_0", 64, 1, 256)
    sm.pack_block_weight(weight_q, "q4_0")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed = sm.pack_block_weight(weight_q, "q4_0")
    assert not packed.constant
    graph.replay()
    assert torch.equal(packed.unpack(), weight_q)


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_a_descriptor_runs_on_a_stream_and_is_captured(fmt):
    weight_q, x = operands(fmt, 65, 9, 288)
    packed, x, out = sm.pack_block_weight(weight_q, fmt), x.bfloat16(), torch.empty(65, 9, device="cuda")
    descriptor = sm.create_block_descriptor(sm.Handle("cuda"), out=out, weight=packed, activation=x, mode="w4a8")
    workspace = torch.empty(descriptor.workspace_size, dtype=torch.uint8, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    descriptor.calculate(out, packed, x, workspace=workspace, stream=stream)
    stream.synchronize()
    assert relative_error(out.cpu(), expected(weight_q, fmt, x)) <= BOUND
    with torch.cuda.graph(graph):
        descriptor.calculate(out, packed, x, workspace=workspace)
    x.copy_(torch.randn(9, 288, generator=seeded(8)))
    graph.replay()
    assert relative_error(out.cpu(), expected(weight_q, fmt, x)) <= BOUND


@pytest.mark.parametrize("fmt, mode", [("q4_0", "w4a16"), ("q5_1", "w4a16"), ("q5_1", "w4a8"), ("q8_0", "w4a8")])
@pytest.mark.parametrize("row", SHARING)
def test_products_that_share_tiles_follow_one_another_on_one_workspace(row, fmt, mode):
    """Each waits for the one before on the GPU alone: called one after another, and captured, of another size and of other activations."""
    handle = sm.Handle("cuda")
    if handle.arch != "sm90":
        pytest.skip("a row of SM90's table")
    tokens, calls, memory = load_table("sm90").row(row).tile.m + 3, [], 0
    for m, k in ((300, 8224), (128 * 140 + 1, 1056)):  # of an H200: few tiles that many share; a round of whole ones or two, and 18 that are left
        weight_q, x = operands(fmt, m, tokens, k)
        weight, xs = sm.pack_block_weight(weight_q, fmt), (x.half(), x.flip(0).half())
        outs = [torch.empty(10, m, tokens, device="cuda") for _ in xs]  # of ten calls
        descriptor = sm.create_block_descriptor(handle, out=outs[0][0], weight=weight, activation=xs[0], mode=mode, kernel=row)
        memory = max(memory, descriptor.workspace_size)
        calls += [(descriptor, weight, x, out) for x, out in zip(xs, outs)]
    workspace = torch.empty(memory, dtype=torch.uint8, device="cuda")

    def ten_times_one_after_another() -> None:
        for i, (descriptor, weight, x, out) in itertools.product(range(10), calls):
            descriptor.calculate(out[i], weight, x, workspace=workspace)

    def check(run) -> None:
        workspace.fill_(255)
        for *_, out in calls:
            out.fill_(torch.nan)
        run()
        wanted = [compute(handle, weight, x, *out.shape[1:], mode=mode, kernel=row) for _, weight, x, out in calls]
        assert not torch.equal(wanted[0], wanted[1])
        for (*_, out), want in zip(calls, wanted):
            assert torch.equal(out, want.expand_as(out))

    check(ten_times_one_after_another)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ten_times_one_after_another()
    for seed in range(5):
        for i, (_, _, x, _) in enumerate(calls):
            x.copy_(torch.randn(x.shape, generator=seeded(10 * seed + i)))
        check(graph.replay)


@pytest.mark.parametrize("fmt", ["q4_0", "q5_1"])
def test_a_compiled_layer_has_the_bits_of_the_eager_one(fmt):
    weight_q, x = operands(fmt, 65, 9, 288)
    packed, bias, x = sm.pack_block_weight(weight_q, fmt), torch.randn(65, generator=seeded(1)).cuda(), x.half()
    for mode in ("w4a8", "w4a16"):
        compiled = torch.compile(lambda x, mode=mode: sm.block_linear(x, packed, bias, mode=mode), fullgraph=True)
        assert torch.equal(compiled(x), sm.block_linear(x, packed, bias, mode=mode))
    compiled = torch.compile(lambda x: gemm(fmt)(weight_q, x), fullgraph=True)
    assert torch.equal(compiled(x), gemm(fmt)(weight_q, x))


# ---- refusals -----------------------------------------------------------------------------------------------------------


def test_what_a_descriptor_refuses():
    weight_q, x = operands("q4_0", 65, 9, 288)
    packed, out, handle = sm.pack_block_weight(weight_q, "q4_0"), torch.empty(65, 9, device="cuda"), sm.Handle("cuda")
    with sm.create_block_descriptor(handle, out=out, weight=packed, activation=x) as descriptor:
        assert descriptor.kernel.reason.startswith("block w4a8 bucket ")
        for arguments, error, message in [
            ((out, weight_q, x), BadParamError, "^weight: expected a constant PackedBlockWeight"),
            (
                (out, sm.pack_block_weight(weight_q[:64], "q4_0"), x),
                BadTensorShapeError,
                r"^weight: expected \[65, 288\] as the descriptor was created",
            ),
            ((out, packed, x.half()), BadTensorDtypeError, "^activation: expected float32 as the descriptor was created, got float16"),
            ((out.t().contiguous().t(), packed, x), ScaledMMError, "^out: expected strides"),
            ((out, packed, x.cpu()), BadTensorDeviceError, "^activation: expected a tensor on cuda:0"),
            ((out, packed, x, torch.zeros(65, device="cuda")), BadParamError, "^bias: expected none as the descriptor was created"),
        ]:
            with pytest.raises(error, match=message):
                descriptor.calculate(*arguments, workspace=torch.empty(descriptor.workspace_size, dtype=torch.uint8, device="cuda"))
        if descriptor.workspace_size:
            with pytest.raises(InsufficientWorkspaceError, match="^workspace: expected at least"):
                descriptor.calculate(out, packed, x)
    with sm.create_block_descriptor(handle, out=out, weight=weight_q, activation=x) as descriptor:
        with pytest.raises(BadParamError, match="^weight: expected blocks as the descriptor was created, got packed tiles"):
            descriptor.calculate(out, packed, x)


def test_operands_on_other_devices_are_refused():
    weight_q, x = operands("q4_0", 64, 8, 256)
    with pytest.raises(BadTensorDeviceError, match="^activation: expected a tensor on cuda:0, as weight_q, got one on cpu"):
        sm.gemm_q4_0(weight_q, x.half().cpu())
    with pytest.raises(BadTensorDeviceError, match="^x: expected a tensor on cpu, as packed, got one on cuda:0"):
        sm.block_linear(x, sm.pack_block_weight(weight_q.cpu(), "q4_0"))
