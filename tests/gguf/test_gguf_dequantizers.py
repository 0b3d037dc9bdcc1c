"""GGUF dequantizers: the bits of the gguf package, whatever the bytes are; and the reference against it."""

from __future__ import annotations

import pytest
import torch
from gguf_data import ALL, BLOCK_BYTES, ORACLE_KNOWS, gguf_dequantize, random_blocks

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.gguf import layout
from scaled_mm.gguf import reference as block_reference


@pytest.mark.parametrize("fmt", ORACLE_KNOWS)
def test_any_bytes_dequantize_to_the_bits_of_the_gguf_package(device, fmt):
    q = random_blocks(200, 32, fmt, seed=1)
    assert reference.same_bits(sm.dequantize_block(q.to(device), fmt).cpu(), gguf_dequantize(q, fmt))


@pytest.mark.parametrize("fmt", ORACLE_KNOWS)
def test_every_half_of_float16_is_taken(device, fmt):
    q = random_blocks(256, 256, fmt, seed=2)
    q[..., 0], q[..., 1] = torch.arange(256).to(torch.uint8), torch.arange(256).to(torch.uint8).unsqueeze(1)
    assert reference.same_bits(sm.dequantize_block(q.to(device), fmt).cpu(), gguf_dequantize(q, fmt))


def test_q8_1_is_q8_0_whatever_its_sums_are(device):
    q = random_blocks(64, 16, "q8_1", seed=3)
    without = torch.cat((q[..., :2], q[..., 4:]), -1)
    assert reference.same_bits(sm.dequantize_q8_1(q.to(device)), sm.dequantize_q8_0(without.to(device)))


@pytest.mark.parametrize("fmt", ALL)
def test_the_reference_dequantizes_to_the_same_values(fmt):
    q = random_blocks(100, 16, fmt, seed=4)
    want = block_reference.dequantize(q, fmt).float()  # at most one rounding each: of the same exact value
    value = sm.dequantize_block(q, fmt)
    assert torch.equal(value.isnan(), want.isnan()) and torch.equal(value.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fmt", ALL)
def test_a_narrower_dtype_is_a_cast_of_float32(device, fmt, dtype):
    q = random_blocks(50, 16, fmt, seed=5).to(device)
    assert reference.same_bits(sm.dequantize_block(q, fmt, dtype), sm.dequantize_block(q, fmt).to(dtype))


@pytest.mark.parametrize("fmt", ALL)
def test_rows_of_any_stride_and_blocks_at_any_address_are_taken(device, fmt):
    size = BLOCK_BYTES[fmt]
    q = random_blocks(8, 12, fmt, seed=6).to(device)
    odd = torch.empty(q.numel() + 1, dtype=torch.uint8, device=device)[1:].view(q.shape).copy_(q)
    for view in (q[::2], q[:, 3:7], q[:, 3:4], q[:1, :1], q.view(4, 2, 12, size).transpose(0, 1), q[0], odd, odd[:, 2:3], odd[:1, :1]):
        value = sm.dequantize_block(view, fmt)
        assert value.is_contiguous() and value.shape == (*view.shape[:-2], 32 * view.shape[-2])
        assert reference.same_bits(value, sm.dequantize_block(view.contiguous().clone(), fmt))


@pytest.mark.parametrize("fmt", ALL)
def test_where_the_chunks_end_does_not_show(device, fmt, monkeypatch):
    q = random_blocks(7, 10, fmt, seed=7).to(device)
    whole = sm.dequantize_block(q, fmt)
    monkeypatch.setattr(layout, "_CHUNK_ELEMENTS", {q.device.type: 96})
    assert reference.same_bits(sm.dequantize_block(q, fmt), whole)


@pytest.mark.parametrize("fmt", ALL)
def test_what_was_dequantized_quantizes_to_the_same_values(device, fmt):
    """By the rule that uses the outermost levels; rounding d to float16 may move a level once, not twice."""
    x = torch.randn(32, 512, generator=torch.Generator().manual_seed(8)).to(device)
    once = sm.dequantize_block(sm.quantize_block(x, fmt), fmt)
    twice = sm.dequantize_block(sm.quantize_block(once, fmt), fmt)
    assert ((once - twice).norm() / once.norm()).item() < 1e-3
