"""GGUF products by every kernel config that the GPU runs: within the bound; a non-finite value stays in its row or column."""

from __future__ import annotations

import pytest
import torch
from gguf_data import LAYOUTS, WEIGHTS, WITH_MINIMUM, relative_error, seeded
from gguf_gpu import BOUND, CALLS, FLOATS, ROUNDING, activation_of, compute, expected, moved, native_rows, operands, rows_here, weight_of
from operands.pairs import pairs, pairwise

import scaled_mm as sm
from scaled_mm.errors import KernelNotFoundError
from scaled_mm.gguf import reference
from scaled_mm.tables import load_table

pytestmark = pytest.mark.gpu

SHARING = [row.name for row in load_table("sm90").gguf.rows if row.split_k > 1]


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_every_kernel_config_of_every_table_computes_every_kind_of_product(fmt):
    assert rows_here()
    shapes = [(1, 1, 32), (65, 9, 288), (130, 33, 544), (300, 140, 1056)]
    for case in pairs(shape=shapes, call=(("q8_1", "w4a8"), *CALLS), packed=(False, True), out_dtype=FLOATS):
        (m, n, k), (kind, mode), out_dtype = case["shape"], case["call"], case["out_dtype"]
        weight_q, x = operands(fmt, m, n, k)
        activation, bias = activation_of(kind, x), torch.randn(m, generator=seeded(3)).cuda()
        want, weight = expected(weight_q, fmt, activation, mode, bias), weight_of(weight_q, fmt, case["packed"])
        for arch, row in rows_here():
            out = compute(sm.Handle("cuda", arch=arch), fmt, weight, activation, m, n, bias=bias, mode=mode, out_dtype=out_dtype, kernel=row)
            assert relative_error(out.cpu(), want) <= ROUNDING[out_dtype], (arch, row, case)


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
        want = compute(handle, fmt, weight_q, quantized, m, n, mode="w4a8", kernel=row)
        for activation in (*views, odd):
            torch.testing.assert_close(
                compute(handle, fmt, weight_q, activation, m, n, mode="w4a8", kernel=row), want, rtol=0, atol=0, equal_nan=True
            )


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_long_sums_are_within_the_bound_in_every_kernel_config(fmt):
    handle = sm.Handle("cuda")
    weight_q, x = operands(fmt, 130, 40, 28672)
    weight = sm.pack_block_weight(weight_q, fmt)
    for activation, mode in ((x.half(), "w4a16"), (x.half() + 1, "w4a16"), (x, "w4a8")):
        want = expected(weight_q, fmt, activation, mode)
        for row in native_rows():
            out = compute(handle, fmt, weight, activation, 130, 40, mode=mode, kernel=row)
            assert relative_error(out.cpu(), want) <= BOUND, (row, mode)


# The products of formats with minima, of levels and of what their middle stands for, nearly cancel, and the tensor cores cut sums:
# docs/design/gguf-formats.md.
@pytest.mark.parametrize("fmt", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("skewed", [False, True])
def test_weights_whose_levels_are_far_from_their_middle_are_within_the_bound_in_every_kernel_config(fmt, dtype, skewed):
    m, k = 144, 28672
    normal, uniform = torch.randn(m, k, generator=seeded(m)), torch.rand(m, k, generator=seeded(m))
    weight = sm.pack_block_weight(sm.quantize_block((-uniform.clamp_min(1e-7).log() - 1 if skewed else normal**3).cuda(), fmt), fmt)
    wide = torch.zeros(40, k + 8, dtype=dtype, device="cuda")
    wide[:, :k] = torch.randn(40, k, generator=seeded(k)) + 1
    want = reference.gemm(weight.unpack(), wide[:, :k], fmt)
    odd = torch.empty_like(wide)[:, 1 : k + 1].copy_(wide[:, :k])  # not aligned to 16 bytes
    for arch, row in rows_here():
        for tokens, x in (*((tokens, wide[:, :k]) for tokens in (1, 2, 3, 13, 40)), (1, odd), (2, odd)):
            out = compute(sm.Handle("cuda", arch=arch), fmt, weight, x[:tokens], m, tokens, mode="w4a16", kernel=row)
            in_place = row == "gguf_mma_16x8_x2" and tokens < 3 and x is not odd
            bound = 1e-5 if skewed and fmt in WITH_MINIMUM and arch != "sm75" and not in_place else BOUND
            assert relative_error(out, want[:, :tokens]) <= bound, (arch, row, tokens, x is odd)


# Of an H200's 132 SMs: whole rounds and tiles that are left; parts of two tiles in a thread block; a few tiles shared by many; the
# same where tiles are numbered in two panels and more, all of them shared, and those left over of the last panel.
@pairwise(
    row=SHARING,
    product=[("q4_0", torch.float16), ("q5_1", torch.float16), ("q5_1", "q8_1"), ("q8_0", torch.bfloat16)],
    size=[(128 * 150 - 5, 800, 1), (128 * 70 + 1, 2080, 1), (300, 8224, 1), (128 * 13 - 3, 2080, 4), (128 * 27 - 1, 2080, 4)],
)
def test_tiles_that_are_left_over_and_shared_are_as_right_as_whole_ones(row, product, size):
    """size: rows of the weight, K, tiles of tokens that have no others beside them; three tokens are in one more."""
    (fmt, kind), (m, k, full) = product, size
    if sm.Handle("cuda").arch != "sm90":
        pytest.skip("a row of SM90's table")
    tokens = load_table("sm90").row(row).tile.m
    weight_q, x = operands(fmt, m, full * tokens + 3, k)
    activation, weight = activation_of(kind, x), sm.pack_block_weight(weight_q, fmt)
    bias = torch.randn(weight_q.shape[0], generator=seeded(4)).cuda()
    want = (reference.gemm_q8_1 if kind == "q8_1" else reference.gemm)(weight_q, activation, fmt) + bias.double()[:, None]
    mode = "w4a8" if kind == "q8_1" else "w4a16"
    runs = [compute(sm.Handle("cuda"), fmt, weight, activation, *want.shape, bias=bias, mode=mode, kernel=row) for _ in range(3)]
    runs.append(compute(sm.Handle("cuda"), fmt, weight_q, activation, *want.shape, bias=bias, mode=mode, kernel=row))  # that is not packed
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
        for at in LAYOUTS[fmt].halves:  # d, m
            spoilt = weight_q.clone()
            spoilt[4, 30, at : at + 2] = half
            for activation in (x.half(), quantized):
                finite = compute(handle, fmt, spoilt, activation, m, n, mode="w4a8" if activation is quantized else "w4a16", kernel=row).isfinite()
                assert not finite[4].any() and finite[torch.arange(m) != 4].all(), (row, at)
        for activation in (x.half(), x.bfloat16()):
            activation[7, 1000] = value
            finite = compute(handle, fmt, weight_q, activation, m, n, mode="w4a16", kernel=row).isfinite()
            assert not finite[:, 7].any() and finite[:, torch.arange(n) != 7].all(), row
        for at in (0, 2) if LAYOUTS[fmt].zero is not None or fmt in WITH_MINIMUM else (0,):  # d, s
            spoilt = quantized.clone()
            spoilt[7, 30, at : at + 2] = half
            finite = compute(handle, fmt, weight_q, spoilt, m, n, mode="w4a8", kernel=row).isfinite()
            assert not finite[:, 7].any() and finite[:, torch.arange(n) != 7].all(), (row, at)


def test_a_kernel_config_of_another_section_is_refused():
    handle, weight_q, x = sm.Handle("cuda"), *operands("q4_0", 64, 8, 256)
    with pytest.raises(KernelNotFoundError, match="^kernel: expected a GGUF row of "):
        compute(handle, "q4_0", weight_q, x, 64, 8, kernel="generic_64x64x64")
