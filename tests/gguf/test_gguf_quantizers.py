"""GGUF quantizers: the bits of the gguf package by rule "ggml", and of the definitions where it has none."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from gguf_data import (
    ALL,
    BLOCK_BYTES,
    LAYOUTS,
    ORACLE_KNOWS,
    ORACLE_KNOWS_INFINITE_LEVELS,
    WITH_MINIMUM,
    WITH_ZERO,
    differing_blocks,
    distributions,
    gguf_quantize,
    not_finite,
    seeded,
)

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.gguf import layout

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


# ---- the gguf package ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(distributions(rows=1)))
def test_rule_ggml_has_the_bits_of_the_gguf_package(device, name):
    for seed, dtype in itertools.product((1, 2), FLOATS):
        x = distributions(seed)[name].to(dtype)
        if name != "negative_zeros":
            # Of blocks that have zeros of both signs, numpy's minimum is either, by the instructions that the machine has.
            x = x.masked_fill(x == 0, 0)
        for fmt in ORACLE_KNOWS:
            q = sm.quantize_block(x.to(device), fmt, "ggml")
            assert differing_blocks(q, gguf_quantize(x, fmt), fmt) == 0, (fmt, seed, dtype)


@pytest.mark.skipif(not ORACLE_KNOWS_INFINITE_LEVELS, reason="the gguf package's bits of infinite levels are those of x86")
@pytest.mark.parametrize("fmt", ORACLE_KNOWS)
def test_nan_and_infinity_give_the_bits_of_the_gguf_package_too(device, fmt):
    for seed in range(4):
        x = not_finite(seed)
        assert differing_blocks(sm.quantize_block(x.to(device), fmt, "ggml"), gguf_quantize(x, fmt), fmt) == 0


@pytest.mark.parametrize("fmt", [fmt for fmt in ALL if fmt not in WITH_ZERO])
def test_the_rule_makes_a_difference_for_formats_with_a_level_for_0_alone(device, fmt):
    for x in (*distributions().values(), not_finite()):
        assert torch.equal(sm.quantize_block(x.to(device), fmt), sm.quantize_block(x.to(device), fmt, "ggml"))


# ---- q8_1 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(distributions(rows=1)))
def test_q8_1_is_q8_0_with_the_sum_of_the_original_values(device, name):
    x = distributions(3)[name]
    q = sm.quantize_q8_1(x.to(device)).cpu()
    assert torch.equal(torch.cat((q[..., :2], q[..., 4:]), -1), sm.quantize_q8_0(x))
    sums = x.numpy().reshape(-1, 32)
    with np.errstate(all="ignore"):
        for apart in (16, 8, 4, 2, 1):  # the documented order, in float32
            sums = sums[:, :apart] + sums[:, apart:]
        want = torch.from_numpy(sums.astype(np.float16))
    assert reference.same_bits(q[..., 2:4].reshape(-1, 2).clone().view(torch.float16), want)


def test_the_sum_of_q8_1_is_not_that_of_the_quantized_values(device):
    x = torch.full((1, 32), 0.4)
    x[0, 0] = 127.0  # the scale is 1, and 31 values are rounded away
    q = sm.quantize_q8_1(x.to(device)).cpu()
    assert sm.dequantize_q8_1(q).sum().item() == 127.0
    assert q[0, 0, 2:4].clone().view(torch.float16).item() == pytest.approx(127 + 31 * 0.4, abs=0.0625)


def test_a_sum_overflows_float16_where_no_value_does(device):
    q = sm.quantize_q8_1(torch.full((1, 32), 3000.0, device=device)).cpu()
    assert q[0, 0, 2:4].clone().view(torch.float16).item() == float("inf")
    assert sm.dequantize_q8_1(q).isfinite().all()


# ---- rule "absmax" ------------------------------------------------------------------------------------------------------


def absmax_by_hand(x: torch.Tensor, zero: int) -> tuple[np.ndarray, np.ndarray]:
    """(levels, d): float32 quotients, rounded half away from zero in float64, where adding 0.5 is exact."""
    blocks = x.float().numpy().reshape(-1, 32)
    with np.errstate(all="ignore"):
        d = np.abs(blocks).max(-1, keepdims=True) / np.float32(zero - 1)
        ratio = (blocks / np.where(d == 0, np.float32(1), d)).astype(np.float64)
    levels = np.sign(ratio) * np.floor(np.abs(ratio) + 0.5) + zero
    return np.clip(levels, 0, 2 * zero - 1).astype(np.uint8), d


@pytest.mark.parametrize("name", list(distributions(rows=1)))
def test_rule_absmax_is_the_documented_formula(device, name):
    values = distributions(4)[name]
    dtypes = FLOATS if name != "largest" else FLOATS[:1]  # float16 has no such values
    for fmt, dtype in itertools.product(WITH_ZERO, dtypes):
        if not (x := values.to(dtype)).isfinite().all():
            continue
        check_by_hand(sm.quantize_block(x.to(device), fmt).cpu(), fmt, *absmax_by_hand(x, LAYOUTS[fmt].zero))


def check_by_hand(q: torch.Tensor, fmt: str, levels: np.ndarray, d: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        want = torch.from_numpy(d.astype(np.float16)).view(torch.int16)
    assert torch.equal(q[..., :2].reshape(-1, 2).clone().view(torch.int16), want), fmt
    assert np.array_equal(levels_of(q, fmt), levels), fmt


def ggml_by_hand(x: torch.Tensor, zero: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """(levels, d), in float32. For formats that the gguf package does not know, and for the others beside it."""
    blocks = x.float().numpy().reshape(-1, 32)
    with np.errstate(all="ignore"):
        d = np.take_along_axis(blocks, np.abs(blocks).argmax(-1, keepdims=True), -1) / np.float32(-zero)
        inverse = np.where(d == 0, np.float32(0), np.float32(1) / d)
        levels = np.trunc(blocks * inverse + np.float32(zero + 0.5))
    return np.clip(np.where(np.isfinite(levels), levels, 0), 0, 2**bits - 1).astype(np.uint8), d


@pytest.mark.parametrize("name", list(distributions(rows=1)))
def test_rule_ggml_is_the_documented_formula(device, name):
    x = distributions(4)[name]
    for fmt in WITH_ZERO:
        check_by_hand(sm.quantize_block(x.to(device), fmt, "ggml").cpu(), fmt, *ggml_by_hand(x, LAYOUTS[fmt].zero, LAYOUTS[fmt].bits))


def levels_of(q: torch.Tensor, fmt: str) -> np.ndarray:
    """uint8 [blocks, 32], unpacked by numpy."""
    q = q.reshape(-1, BLOCK_BYTES[fmt]).numpy()
    at, high = LAYOUTS[fmt].levels, LAYOUTS[fmt].fifth_bits
    low = np.concatenate((q[:, at : at + 16] & 15, q[:, at : at + 16] >> 4), -1)
    return low if high is None else low | np.unpackbits(q[:, high : high + 4], axis=-1, bitorder="little") << 4


@pytest.mark.parametrize("fmt", WITH_ZERO)
def test_absmax_is_symmetric_and_ggml_has_the_smaller_error(device, fmt):
    x = torch.randn(64, 4096, generator=seeded(5)).to(device)
    assert torch.equal(sm.dequantize_block(sm.quantize_block(-x, fmt), fmt), -sm.dequantize_block(sm.quantize_block(x, fmt), fmt))
    errors = [(sm.dequantize_block(sm.quantize_block(x, fmt, rule), fmt) - x).square().mean().sqrt().item() for rule in ("absmax", "ggml")]
    assert errors[1] < errors[0] * {4: 0.90, 5: 0.96}[LAYOUTS[fmt].bits]


def test_a_block_with_nan_or_infinity_dequantizes_to_nan_by_absmax_and_spoils_no_other(device):
    x = torch.ones(3, 96, device=device)
    x[0, 33], x[1, 34], x[2, 35] = float("nan"), float("inf"), float("-inf")
    for fmt in WITH_ZERO:
        value = sm.dequantize_block(sm.quantize_block(x, fmt), fmt)
        assert value[:, 32:64].isnan().all() and value[:, :32].isfinite().all() and value[:, 64:].isfinite().all()


@pytest.mark.parametrize("fmt", ALL)
def test_a_scale_that_overflows_float16_is_infinite(device, fmt):
    x = torch.linspace(-1, 1, 32, device=device).mul(65536.0 * 200).unsqueeze(0)
    q = sm.quantize_block(x, fmt)
    assert q[0, 0, :2].cpu().view(torch.float16).abs().item() == float("inf")
    assert not sm.dequantize_block(q, fmt)[0, 0].isfinite()


# ---- arithmetic ---------------------------------------------------------------------------------------------------------


def test_halves_are_rounded_away_from_zero_and_what_is_below_is_not(device):
    just_below = float(np.nextafter(np.float32(0.5), np.float32(0)))
    x = torch.zeros(1, 32)
    x[0, :8] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -2.5, just_below, -just_below])
    q = sm.quantize_q8_0(x.to(device)).cpu()
    assert q[0, 0, 2:10].view(torch.int8).tolist() == [127, 1, 2, 3, -1, -3, 0, 0]
    x[0, :8] = torch.tensor([7.0, 0.5, 1.5, 2.5, -0.5, -2.5, just_below, -just_below])
    assert levels_of(sm.quantize_q4_0(x.to(device)).cpu(), "q4_0")[0, :8].tolist() == [15, 9, 10, 11, 7, 5, 8, 8]


def test_of_two_values_of_the_largest_magnitude_the_first_decides(device):
    x = torch.zeros(2, 32, device=device)
    x[0, 3], x[0, 20] = 4.0, -4.0
    x[1, 3], x[1, 20] = -4.0, 4.0
    d = sm.quantize_q4_0(x, "ggml")[..., :2].cpu().view(torch.float16).flatten()
    assert d.tolist() == [-0.5, 0.5]


def test_a_minimum_of_both_zeros_is_the_negative_one(device):
    x = torch.zeros(2, 32, device=device)
    x[0, 5], x[1] = -0.0, 1.0
    x[1, 9], x[1, 10] = -0.0, 0.0
    for fmt in WITH_MINIMUM:
        q = sm.quantize_block(x, fmt).cpu()
        assert q[:, 0, 2:4].tolist() == [[0, 0x80]] * 2 and q[0, 0, :2].tolist() == [0, 0]


# ---- shapes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ALL)
def test_leading_dimensions_and_strides_are_taken_and_the_input_is_left_alone(device, fmt):
    x = torch.randn(6, 4, 128, generator=seeded(6)).to(device)
    kept = x.clone()
    for view in (x, x.transpose(0, 1), x[::2], x[..., ::2], x[..., 5:69], x[0, 0], x.expand(2, 6, 4, 128)):
        q = sm.quantize_block(view, fmt)
        assert q.is_contiguous() and q.shape == (*view.shape[:-1], view.shape[-1] // 32, BLOCK_BYTES[fmt])
        assert torch.equal(q, sm.quantize_block(view.contiguous(), fmt))
    assert torch.equal(x, kept)


@pytest.mark.parametrize("fmt", ALL)
def test_tensors_without_elements_give_empty_results(device, fmt):
    for shape in ((0, 32), (3, 0), (0,), (2, 0, 64)):
        q = sm.quantize_block(torch.empty(shape, device=device), fmt)
        assert q.shape == (*shape[:-1], shape[-1] // 32, BLOCK_BYTES[fmt]) and q.dtype is torch.uint8
        assert sm.dequantize_block(q, fmt).shape == shape


@pytest.mark.parametrize("fmt", ALL)
def test_where_the_chunks_end_does_not_show(device, fmt, monkeypatch):
    x = torch.randn(7, 320, generator=seeded(7)).to(device)
    whole = sm.quantize_block(x, fmt)
    monkeypatch.setattr(layout, "_CHUNK_ELEMENTS", {x.device.type: 96})
    assert torch.equal(sm.quantize_block(x, fmt), whole)


@pytest.mark.parametrize("fmt", ALL)
def test_each_format_has_a_pair_of_functions(device, fmt):
    x = torch.randn(3, 64, generator=seeded(8)).to(device)
    quantizer, dequantizer = getattr(sm, f"quantize_{fmt}"), getattr(sm, f"dequantize_{fmt}")
    assert quantizer.__name__ == f"quantize_{fmt}" and dequantizer.__name__ == f"dequantize_{fmt}"
    assert torch.equal(quantizer(x), sm.quantize_block(x, fmt)) and torch.equal(quantizer(x, "ggml"), sm.quantize_block(x, fmt, "ggml"))
    q = quantizer(x)
    assert torch.equal(dequantizer(q), sm.dequantize_block(q, fmt))
    assert torch.equal(dequantizer(q, torch.float16), sm.dequantize_block(q, fmt, torch.float16))


def test_a_gradient_does_not_follow():
    q = sm.quantize_q8_0(torch.ones(1, 32, requires_grad=True))
    assert not q.requires_grad and not sm.dequantize_q8_0(q).requires_grad


# ---- torch.compile, and the GPU -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["q4_0", "q5_1", "q8_1"])
def test_a_compiled_graph_keeps_the_quantizer_whole(device, fmt):
    torch.compiler.reset()
    compiled = torch.compile(lambda x: sm.dequantize_block(sm.quantize_block(x * 1, fmt), fmt), fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 96, generator=seeded(9)).to(device)
    assert torch.equal(compiled(x), sm.dequantize_block(sm.quantize_block(x, fmt), fmt))


def test_the_operators_pass_torch_s_own_checks(device):
    x = torch.randn(2, 64, device=device)
    torch.library.opcheck(torch.ops.scaled_mm.quantize_block.default, (x, "q5_1", "ggml"))
    torch.library.opcheck(torch.ops.scaled_mm.dequantize_block.default, (sm.quantize_q5_1(x), "q5_1", torch.float16))


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ALL)
@pytest.mark.parametrize("rule", ["absmax", "ggml"])
def test_cpu_and_gpu_give_the_same_bits(fmt, rule):
    for x in (*distributions(10).values(), not_finite(10)):
        for dtype in FLOATS:
            q = sm.quantize_block(x.to(dtype), fmt, rule)
            assert torch.equal(sm.quantize_block(x.to(dtype).cuda(), fmt, rule).cpu(), q)


@pytest.mark.gpu
def test_quantizing_on_the_gpu_does_not_synchronise():
    x = torch.randn(64, 256, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for fmt in ALL:
            sm.dequantize_block(sm.quantize_block(x, fmt, "ggml"), fmt)
    finally:
        torch.cuda.set_sync_debug_mode("default")
