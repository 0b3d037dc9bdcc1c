"""Few tokens with a GGUF weight: kernels that read activations in place, and kernels that stage them in the workspace."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from gguf_data import WEIGHTS, seeded
from gguf_gpu import BOUND, compute, operands, rows_here
from operands.pairs import pairwise

import scaled_mm as sm
from scaled_mm.gguf import reference
from scaled_mm.kernels.registry import family_of
from scaled_mm.tables import load_table, rules

pytestmark = pytest.mark.gpu

# Rows of the weight and K, on an H200: warps that have a K of their own, that share one by 8 or by 2, the last ones fewer; what fits shared
# memory, or not; thread blocks of 14 strips, whose other two warps are idle, and of 10, twice for each SM.
SIZES = [(70, 32), (70, 544), (2117, 1056), (4100, 4096), (4100, 14336), (300, 28672), (15000, 1312), (28672, 800), (40000, 288)]


@pairwise(size=SIZES, fmt=WEIGHTS, values=[(torch.float16, 0), (torch.float16, 1), (torch.bfloat16, 0)], offset=[0, 3])
def test_few_tokens_are_the_same_product_wherever_they_lie(size, fmt, values, offset):
    """values: dtype and mean of the activations; offset: of their first column, aligned to 16 bytes or not."""
    (m, k), (dtype, mean) = size, values
    rows = [(sm.Handle("cuda", arch=arch), row, load_table(arch).row(row).tile.m) for arch, row in rows_here()]
    few = {8: (1, 2, 5, 8), 16: (3, 9, 13, 16)}  # tokens, by those of a tile
    cases = [(handle, row, tokens) for handle, row, tile in rows if tile in few for tokens in few[tile]]
    assert {tokens for *_, tokens in cases} == {1, 2, 3, 5, 8, 9, 13, 16}
    weight_q = sm.quantize_block(torch.randn(m, k, generator=seeded(m)).cuda(), fmt)
    weight = sm.pack_block_weight(weight_q, fmt)
    x = (torch.randn(16, k + 8, generator=seeded(k)) + mean).to(dtype).cuda()[:, offset : k + offset]
    want = reference.gemm(weight_q, x.contiguous(), fmt)
    for handle, row, tokens in cases:
        out = compute(handle, fmt, weight, x[:tokens], m, tokens, mode="w4a16", kernel=row)
        assert float((out.double() - want[:, :tokens]).norm() / want[:, :tokens].norm()) <= BOUND, (handle.arch, row, tokens)


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
            family_of(table.row("gguf_mma_16x8_x2")).stages(table.row("gguf_mma_16x8_x2"), fmt, rules.shared_memory_of(table)) == 1,
        )
        compute(handle, fmt, weight, x[:tokens], m, tokens, kernel="gguf_mma_16x8_x2", mode="w4a16")  # loads it
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            compute(handle, fmt, weight, x[:tokens], m, tokens, kernel="gguf_mma_16x8_x2", mode="w4a16")
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
            finite = compute(sm.Handle("cuda", arch=arch), fmt, weight_q, activation, 70, tokens, mode="w4a16", kernel=row).isfinite()
            assert not finite[:, tokens - 1].any() and finite[:, : tokens - 1].all(), (arch, row, value, dtype)
