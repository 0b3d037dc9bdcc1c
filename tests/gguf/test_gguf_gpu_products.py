"""GGUF products on a GPU against the formula in float64: formats, activations, modes, sizes, and memory of any kind."""

from __future__ import annotations

import pytest
import torch
from gguf_data import WEIGHTS, planned_weight, random_blocks, relative_error, seeded
from gguf_gpu import BOUND, CALLS, FLOATS, activation_of, expected, gemm, gemm_q8_1, moved, operands, weight_of
from operands.pairs import pairs

import scaled_mm as sm
from scaled_mm.errors import BadTensorDeviceError
from scaled_mm.gguf import reference
from scaled_mm.tables import load_table

pytestmark = pytest.mark.gpu

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


# ---- the functions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_products_are_within_the_bound(fmt):
    for case in pairs(shape=SHAPES, kind=("q8_1", torch.float16, torch.bfloat16), packed=(False, True)):
        (m, n, k), kind = case["shape"], case["kind"]
        weight_q, x = operands(fmt, m, n, k)
        activation = activation_of(kind, x)
        out = (gemm_q8_1 if kind == "q8_1" else gemm)(fmt)(weight_of(weight_q, fmt, case["packed"]), activation)
        assert out.shape == (m, n) and out.dtype is torch.float32 and out.is_contiguous() and out.is_cuda
        assert relative_error(out.cpu(), expected(weight_q, fmt, activation, "w4a16")) <= BOUND, case


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_a_layer_is_within_the_bound_in_every_mode(fmt):
    for case in pairs(shape=SHAPES, call=CALLS):
        (m, n, k), (dtype, mode) = case["shape"], case["call"]
        weight_q, x = operands(fmt, m, n, k)
        x, packed, bias = x.to(dtype), sm.pack_block_weight(weight_q, fmt), torch.randn(m, generator=seeded(n)).cuda()
        y = sm.block_linear(x, packed, bias, torch.float32, mode)
        assert y.shape == (n, m) and y.is_contiguous()
        assert relative_error(y.t().cpu(), expected(weight_q, fmt, x, mode, bias)) <= BOUND, case


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_auto_is_what_the_table_says(fmt):
    for tokens in (1, 8, 9, 300):
        weight_q, x = operands(fmt, 96, tokens, 512)
        packed = sm.pack_block_weight(weight_q, fmt)
        rules = load_table(sm.Handle("cuda").arch).gguf.auto
        mode = next(rule.mode for rule in rules if rule.m is None or tokens <= rule.m)
        assert torch.equal(sm.block_linear(x, packed), sm.block_linear(x, packed, mode="w16a16"))
        for dtype in (torch.float16, torch.bfloat16):
            assert torch.equal(sm.block_linear(x.to(dtype), packed), sm.block_linear(x.to(dtype), packed, mode=mode))
            wide = sm.block_linear(x.to(dtype), packed, out_dtype=torch.float32)
            assert torch.equal(wide, sm.block_linear(x.to(dtype), packed, out_dtype=torch.float32, mode="w4a16" if mode == "w16a16" else mode))


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
def test_empty_products_are_the_bias(fmt):
    for m, n, k in ((5, 3, 0), (0, 3, 64), (5, 0, 64), (0, 0, 0)):
        packed = sm.pack_block_weight(sm.quantize_block(torch.zeros(m, k), fmt).cuda(), fmt)
        for mode in ("auto", "w4a8", "w4a16", "w16a16"):
            bias = torch.arange(m, dtype=torch.float32, device="cuda")
            y = sm.block_linear(torch.zeros(n, k, dtype=torch.float16, device="cuda"), packed, bias, torch.float32, mode)
            assert torch.equal(y, bias.expand(n, m))
        assert torch.equal(gemm(fmt)(packed, torch.zeros(n, k, dtype=torch.float16, device="cuda")), torch.zeros(m, n, device="cuda"))


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_large_products_are_within_the_bound(fmt):
    weight_q, x = operands(fmt, 4096, 4096, 2048)
    for activation in (x.half(), sm.quantize_q8_1(x)):
        want = (reference.gemm_q8_1 if activation.dtype is torch.uint8 else reference.gemm)(weight_q, activation, fmt)
        out = (gemm_q8_1(fmt) if activation.dtype is torch.uint8 else gemm(fmt))(weight_q, activation)
        assert float((out.double() - want).norm() / want.norm()) <= BOUND


# ---- memory -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_blocks_at_any_address_give_the_same(fmt):
    weight_q, x = operands(fmt, 65, 9, 288)
    activation_q, half = sm.quantize_q8_1(x), x.half()
    want, want_half = expected(weight_q, fmt, activation_q), expected(weight_q, fmt, half, "w4a16")
    for gap, offset in ((0, 1), (1, 0), (6, 2), (14, 15), (16, 16)):
        for weight in (moved(weight_q, gap, offset), sm.pack_block_weight(weight_q, fmt)):
            assert relative_error(gemm_q8_1(fmt)(weight, moved(activation_q, gap, offset)).cpu(), want) <= BOUND, (gap, offset)
        assert relative_error(gemm(fmt)(moved(weight_q, gap, offset), half).cpu(), want_half) <= BOUND, (gap, offset)


VIEWS = {
    "rows of a wider matrix": lambda x: x[:9, :288],
    "an odd column on": lambda x: x[:9, 1:289],
    "every second row": lambda x: x[::2, 5:293][:9],
    "every second column": lambda x: x[:9, ::2][:, :288],
    "columns": lambda x: x[:9, :288].t().contiguous().t(),
    "one row for all tokens": lambda x: x[:1, :288].expand(9, 288),
}
OUTPUTS = {"every second column": lambda memory: memory[1:66, 2:20:2], "columns": lambda memory: memory.view(-1)[: 65 * 9].view(9, 65).t()}


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_views_of_activations_and_outputs_give_the_same(fmt):
    weight_q, _ = operands(fmt, 65, 9, 288)
    handle = sm.Handle("cuda")
    for case in pairs(view=VIEWS, call=CALLS, out=OUTPUTS, packed=(False, True)):
        dtype, mode = case["call"]
        x = VIEWS[case["view"]](torch.randn(20, 700, generator=seeded(4)).to(dtype).cuda())
        weight, memory = weight_of(weight_q, fmt, case["packed"]), torch.full((70, 31), torch.nan, device="cuda")
        out = OUTPUTS[case["out"]](memory)
        with sm.create_block_descriptor(handle, out=out, weight=planned_weight(weight, fmt), activation=x, mode=mode) as descriptor:
            workspace = torch.empty(descriptor.workspace_size, dtype=torch.uint8, device="cuda")
            descriptor.calculate(out, weight, x, workspace=workspace)
        assert relative_error(out.cpu(), expected(weight_q, fmt, x.contiguous(), mode)) <= BOUND, case
        assert int((~memory.isnan()).sum()) == out.numel(), case


def test_operands_on_other_devices_are_refused():
    weight_q, x = operands("q4_0", 64, 8, 256)
    with pytest.raises(BadTensorDeviceError, match="^activation: expected a tensor on cuda:0, as weight_q, got one on cpu"):
        sm.gemm_q4_0(weight_q, x.half().cpu())
    with pytest.raises(BadTensorDeviceError, match="^x: expected a tensor on cpu, as packed, got one on cuda:0"):
        sm.block_linear(x, sm.pack_block_weight(weight_q.cpu(), "q4_0"))
