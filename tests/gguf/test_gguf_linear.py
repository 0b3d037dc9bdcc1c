"""`block_linear` and packed weights: exact to pack, and the product that the formulas say."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gguf_data import BLOCK_BYTES, WEIGHTS, random_blocks, relative_error, seeded

import scaled_mm as sm
from scaled_mm.gguf import reference


def layer(fmt: str, m: int = 40, k: int = 192, rows: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(weight_q, x in float32, bias)"""
    g = seeded(m + k)
    return sm.quantize_block(torch.randn(m, k, generator=g), fmt), torch.randn(rows, k, generator=g), torch.randn(m, generator=g)


# ---- packing ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_unpacking_gives_the_original_bytes_whatever_they_are(device, fmt):
    for m, blocks in ((1, 1), (33, 7), (4, 130), (0, 3), (3, 0)):
        q = random_blocks(m, blocks, fmt, seed=m + blocks).to(device)  # NaN of every kind among the scales
        packed = sm.pack_block_weight(q, fmt)
        assert packed.shape == (m, 32 * blocks) and packed.fmt == fmt and packed.device == q.device
        kept = [packed.tiles] if q.is_cuda else [field for field in packed.fields if field is not None]
        assert packed.nbytes == sum(t.nbytes for t in kept) and all(t.is_contiguous() for t in kept)
        assert packed.nbytes == (-(-m // 64) * -(-blocks // 8) * (512 * BLOCK_BYTES[fmt] + 128) if q.is_cuda else q.numel())
        unpacked = packed.unpack()
        assert unpacked.is_contiguous() and torch.equal(unpacked, q)
        assert torch.equal(packed.to("cpu").unpack(), q.cpu())


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_a_packed_weight_is_a_copy_also_of_slices(device, fmt):
    q = random_blocks(8, 6, fmt, seed=1).to(device)
    for view in (q[::2], q[:, 1:4], q[:1, :1], q[2:]):
        kept = view.clone()
        packed = sm.pack_block_weight(view, fmt)
        view.fill_(7)
        assert torch.equal(packed.unpack(), kept)
        view.copy_(kept)


def test_a_packed_weight_is_shown_in_a_line(device):
    packed = sm.pack_block_weight(random_blocks(1000, 8, "q5_1").to(device), "q5_1")
    assert repr(packed) == str(packed) == f"PackedBlockWeight(q5_1, 1000 x 256, {device}, constant={device != 'cpu'})"
    assert repr(packed.to("meta")) == "PackedBlockWeight(q5_1, 1000 x 256, meta, constant=False)"


def test_a_weight_that_is_not_of_its_parts_is_refused(device):
    packed = sm.pack_block_weight(random_blocks(10, 2, "q4_0", seed=3).to(device), "q4_0")
    for change, status, message in (
        (dict(rows=100), "BAD_TENSOR_SHAPE", r"^rows, k: expected those of the \w+, \[.*\] here, got \[100, 64\]$"),
        (dict(k=320), "BAD_TENSOR_SHAPE", r"^rows, k: .* got \[10, 320\]$"),
        (dict(k=65), "BAD_TENSOR_SHAPE", r"^rows, k: .* got \[10, 65\]$"),
        (dict(fmt="zzz"), "BAD_PARAM", "^fmt: expected .*zzz"),
        (dict(tiles=None, fields=None), "BAD_PARAM", "^tiles: expected tiles or fields, got neither$"),
        (dict(tiles=torch.empty(0), fields=()), "BAD_PARAM", "^tiles: expected tiles or fields, got both$"),
    ):
        with pytest.raises(sm.ScaledMMError, match=message) as error:
            dataclasses.replace(packed, **change)
        assert error.value.status.name == status
    again = dataclasses.replace(packed)
    assert torch.equal(again.unpack(), packed.unpack()) and not again.constant


def test_a_weight_goes_only_where_there_is_a_device_and_from_where_there_is_data():
    packed = sm.pack_block_weight(random_blocks(10, 2, "q4_0", seed=3), "q4_0")
    with pytest.raises(sm.BadParamError, match="^device: expected a device such as cuda:0 or cpu, got 'nowhere'$"):
        packed.to("nowhere")
    with pytest.raises(sm.DeviceNotSupportedError, match="^device: expected one that torch .* can use here, got cuda:99: "):
        packed.to("cuda:99")
    assert packed.to("meta").to("meta").shape == (10, 64)
    with pytest.raises(sm.BadParamError, match="^device: expected meta, where this weight is, which has no data to copy, got cpu$"):
        packed.to("meta").to("cpu")


# ---- the layer ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", WEIGHTS)
@pytest.mark.parametrize("m, k, rows", [(40, 192, 6), (1, 32, 1), (70, 2112, 1), (3, 4128, 33)])
def test_each_mode_is_its_product_transposed(fmt, m, k, rows):
    weight_q, x, _ = layer(fmt, m, k, rows)
    packed = sm.pack_block_weight(weight_q, fmt)
    want = reference.gemm_q8_1(weight_q, sm.quantize_q8_1(x), fmt).t()
    y = sm.block_linear(x, packed, mode="w4a8")
    assert y.shape == (rows, m) and y.dtype is torch.float32 and y.is_contiguous()
    assert relative_error(y, want) <= 2e-6
    for dtype in (torch.float16, torch.bfloat16):
        y = sm.block_linear(x.to(dtype), packed, out_dtype=torch.float32, mode="w4a16")
        assert relative_error(y, reference.gemm(weight_q, x.to(dtype), fmt).t()) <= 2e-6


def test_a_cpu_quantizes_no_float_activations_by_itself():
    weight_q, x, _ = layer("q4_0")
    packed = sm.pack_block_weight(weight_q, "q4_0")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        y = sm.block_linear(x.to(dtype), packed, out_dtype=torch.float32)
        assert relative_error(y, reference.gemm(weight_q, x.to(dtype), "q4_0").t()) <= 2e-6
        for mode in ("w16a16", "w4a16")[: 1 if dtype is torch.float32 else 2]:
            assert torch.equal(y, sm.block_linear(x.to(dtype), packed, out_dtype=torch.float32, mode=mode))


@pytest.mark.parametrize("mode", ["w4a8", "w4a16"])
@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_bias_is_added_in_float32_and_the_sum_is_cast_once(out_dtype, mode):
    weight_q, x, bias = layer("q5_1")
    packed, x = sm.pack_block_weight(weight_q, "q5_1"), x.bfloat16()
    raw = sm.block_linear(x, packed, out_dtype=torch.float32, mode=mode)
    out = out_dtype or torch.bfloat16
    for given in (bias, bias.view(1, -1), bias.to(out)):
        y = sm.block_linear(x, packed, given, out_dtype, mode)
        assert y.dtype is out and torch.equal(y, (raw + given.float()).to(out))


def test_leading_dimensions_and_strides_of_x_are_taken():
    weight_q, _, _ = layer("q4_1")
    packed = sm.pack_block_weight(weight_q, "q4_1")
    x = torch.randn(4, 3, 384, generator=seeded(3)).half()
    for view in (x[..., :192], x[..., ::2], x[..., :192].transpose(0, 1), x[0, 0, 7:199], x[:0, :, :192]):
        y = sm.block_linear(view, packed)
        assert y.shape == (*view.shape[:-1], 40)
        rows = view.reshape(-1, 192)
        if rows.numel():
            assert relative_error(y.reshape(-1, 40), reference.gemm(weight_q, rows, "q4_1").t()) <= 2e-3  # float16 out


def test_a_weight_without_columns_gives_the_bias():
    packed = sm.pack_block_weight(torch.empty(5, 0, BLOCK_BYTES["q4_0"], dtype=torch.uint8), "q4_0")
    for dtype in (torch.float32, torch.float16):
        assert not sm.block_linear(torch.empty(2, 0, dtype=dtype), packed).any()
        assert torch.equal(sm.block_linear(torch.empty(2, 0, dtype=dtype), packed, torch.ones(5)), torch.ones(2, 5, dtype=dtype))


def test_nothing_requires_a_gradient():
    weight_q, x, bias = layer("q8_0")
    assert not sm.block_linear(x.requires_grad_(), sm.pack_block_weight(weight_q, "q8_0"), bias.requires_grad_()).requires_grad
