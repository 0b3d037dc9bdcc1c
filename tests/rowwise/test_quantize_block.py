"""`quantize_int8_block`: the rule of `quantize_int8` a block at a time, with the same bits on every device."""

from __future__ import annotations

import itertools

import pytest
import torch

import scaled_mm as sm
from scaled_mm.errors import BadParamError, BadTensorDtypeError, BadTensorShapeError


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [128, 64])
@pytest.mark.parametrize("rows, k", [(1, 1), (3, 128), (5, 129), (2, 700), (300, 256), (0, 300), (4, 0)])
def test_a_block_is_what_quantize_int8_makes_of_it_alone(device, rows, k, size, dtype):
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(k)).to(device, dtype)
    q, scale = sm.quantize_int8_block(x, block_size=size)
    assert (q.shape, q.dtype, scale.shape, scale.dtype) == ((rows, k), torch.int8, (rows, -(-k // size)), torch.float32)
    assert q.is_contiguous() and scale.is_contiguous()
    for block in range(scale.shape[1]):
        part = slice(size * block, size * block + size)
        expected_q, expected_scale = sm.quantize_int8(x[:, part])
        assert torch.equal(q[:, part], expected_q) and torch.equal(scale[:, block, None], expected_scale)
    q, scale = sm.quantize_int8_block(x, dim="weight", block_size=size)
    assert (q.shape, scale.shape) == ((rows, k), (-(-rows // size), -(-k // size))) and q.is_contiguous() and scale.is_contiguous()
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = (slice(size * i, size * i + size), slice(size * j, size * j + size))
            expected_q, expected_scale = sm.quantize_int8(x[block], dim="tensor")
            assert torch.equal(q[block], expected_q) and torch.equal(scale[i, j].reshape(1), expected_scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", ["token", "weight"])
def test_truncated_quotients_are_rounded_toward_zero(device, dim, dtype):
    x = torch.randn(140, 300, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0, :5], x[1, 2], x[3] = torch.tensor([127.0, 126.99, -126.99, 0.99, -1.0]), float("nan"), 0
    (q, scale), (rounded, same_scale) = sm.quantize_int8_block(x.to(device), dim, rounding="truncate"), sm.quantize_int8_block(x.to(device), dim)
    assert torch.equal(scale.nan_to_num(), same_scale.nan_to_num()) and q.is_contiguous() and not torch.equal(q, rounded)
    of_elements = scale.cpu().repeat_interleave(128, 1)[:, :300]
    of_elements = of_elements if dim == "token" else of_elements.repeat_interleave(128, 0)[:140]
    expected = (x.float() / of_elements).double().trunc().nan_to_num(0)
    assert torch.equal(q.cpu().double(), expected)
    assert torch.equal(sm.quantize_int8_block(x.to(device), dim, rounding="nearest")[0], rounded)


@pytest.mark.parametrize("dim", ["token", "weight"])
def test_nan_infinity_and_zeros_stay_in_their_block(device, dim):
    x = torch.ones(130, 400, device=device)
    x[0, 3], x[0, 130], x[129, 0] = float("nan"), float("inf"), float("-inf")
    x[:, 256:384] = 0
    q, scale = sm.quantize_int8_block(x, dim)
    assert scale[0, 0].isnan() and scale[0, 1].isinf() and scale[-1, 0].isinf()
    assert (scale[:, 2] == 2.0**-126).all() and (q[:, 256:384] == 0).all()
    assert (q[0, :256] == 0).all() and (q[129, :128] == 0).all() and (q[:, 384:] == 127).all()


def test_leading_dimensions_and_strides_are_taken(device):
    x = torch.randn(2, 3, 300, 260, device=device).transpose(0, 1)
    for dim in ("token", "weight"):
        q, scale = sm.quantize_int8_block(x, dim)
        assert q.shape == x.shape and scale.shape[:2] == (3, 2)
        alone = sm.quantize_int8_block(x[1, 1], dim)
        assert torch.equal(q[1, 1], alone[0]) and torch.equal(scale[1, 1], alone[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_cpu_and_gpu_give_the_same_bits(dtype):
    for rows, k in ((1, 1), (17, 4096), (333, 1000), (129, 7168)):
        x = (torch.randn(rows, k) * torch.exp2(torch.randint(-20, 10, (rows, 1)).float())).to(dtype)
        for dim, rounding, size in itertools.product(("token", "weight"), ("nearest", "truncate"), (128, 64)):
            cpu, gpu = (sm.quantize_int8_block(t, dim, rounding=rounding, block_size=size) for t in (x, x.cuda()))
            assert all(torch.equal(here, there.cpu()) for here, there in zip(cpu, gpu))


@pytest.mark.parametrize("size", [128, 64])
def test_a_quantized_product_is_close_to_the_product(device, size):
    x, w = torch.randn(33, 1000, device=device), torch.randn(300, 1000, device=device)
    (a, a_scale), (q, scale) = sm.quantize_int8_block(x, block_size=size), sm.quantize_int8_block(w, dim="weight", block_size=size)
    out = sm.block_scaled_mm(a, q.t(), a_scale, scale.t(), out_dtype=torch.float32)
    assert ((out - x @ w.t()).norm() / (x @ w.t()).norm()).item() < 0.02


def test_what_cannot_be_quantized_is_refused(device):
    x = torch.ones(4, 4, device=device)
    with pytest.raises(BadParamError, match="^dim: expected one of 'token', 'weight', got 'channel'"):
        sm.quantize_int8_block(x, "channel")
    with pytest.raises(BadParamError, match="^rounding: expected one of 'nearest', 'truncate', got 'up'"):
        sm.quantize_int8_block(x, rounding="up")
    for size in (32, True, 64.0, None):
        with pytest.raises(BadParamError, match=f"^block_size: expected one of 128, 64, got {size!r}"):
            sm.quantize_int8_block(x, block_size=size)
    with pytest.raises(BadParamError, match="^x: expected a tensor, got None"):
        sm.quantize_int8_block(None)
    with pytest.raises(BadTensorDtypeError, match="^x: expected float16, bfloat16 or float32, got torch.int8"):
        sm.quantize_int8_block(x.to(torch.int8))
    with pytest.raises(BadTensorShapeError, match="^x: dim='weight' needs at least 2 dimensions"):
        sm.quantize_int8_block(x[0], "weight")


@pytest.mark.parametrize("k", [300, 256, 100])
@pytest.mark.parametrize("dim", ["token", "weight"])
def test_torch_compile_with_inductor_quantizes_to_the_same_bits(device, dim, k):
    x = torch.randn(200, k, generator=torch.Generator().manual_seed(k)).to(device)
    torch.compiler.reset()  # the cases share one lambda, which may be compiled a few times only
    compiled = torch.compile(lambda x: sm.quantize_int8_block(x, dim), fullgraph=True)
    for eager, made in zip(sm.quantize_int8_block(x, dim), compiled(x)):
        assert torch.equal(eager, made)


def test_the_operator_rounds_to_nearest_by_default(device):
    x = torch.randn(4, 200, generator=torch.Generator().manual_seed(1)).to(device)
    for found, expected in zip(torch.ops.scaled_mm.quantize_int8_block(x, "token"), sm.quantize_int8_block(x), strict=True):
        assert torch.equal(found, expected)
