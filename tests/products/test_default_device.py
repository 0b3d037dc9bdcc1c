"""Products of CPU tensors while torch's default device is another one, or under a fake tensor mode."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import scaled_mm as sm
from scaled_mm.gguf_formats import WEIGHT_FORMATS


def product(K: int) -> torch.Tensor:
    """A descriptor's product with everything that the CPU backend makes tensors for; its inputs are made on the CPU."""
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(K)
        a = torch.randint(-128, 128, (100, K), dtype=torch.int8, generator=generator)
        b = torch.randint(-128, 128, (16, K), dtype=torch.int8, generator=generator).t()
        scale, zero, out = torch.ones(1), torch.tensor([3], dtype=torch.int32), torch.full((100, 16), torch.nan)
    inputs = dict(a=a, b=b, a_scale=scale, b_scale=scale, a_zero_point=zero, b_zero_point=zero)
    with sm.create_descriptor(sm.Handle("cpu"), out=out, **inputs) as descriptor:
        assert descriptor.kernel.row in repr(descriptor)
        descriptor.calculate(out, **inputs)
    return out


def block_product(fmt: str) -> torch.Tensor:
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(1)
        weight, activation = (sm.quantize_block(torch.randn(rows, 64, generator=generator), name) for rows, name in ((16, fmt), (3, "q8_1")))
    return getattr(sm, f"gemm_{fmt}_q8_1")(weight, activation)


def grouped_and_block_scaled() -> list[torch.Tensor]:
    with torch.device("cpu"):
        a, b, scale = torch.ones(4, 256, dtype=torch.int8), torch.ones(2, 128, 256, dtype=torch.int8).transpose(1, 2), torch.ones(4, 2)
        per_column, offsets = torch.ones(2, 128), torch.tensor([1, 4], dtype=torch.int32)
    grouped = sm.grouped_scaled_mm(a, b, scale[:, :1].contiguous(), per_column, offsets)
    return [grouped, sm.block_scaled_mm(a, b[0], scale, scale[:2, :1].contiguous())]


@pytest.mark.parametrize("K", [48, 0])
def test_a_product_does_not_depend_on_the_default_device(K):
    with torch.device("meta"):
        under = product(K)
    assert torch.equal(under, product(K))


def test_the_first_product_of_a_process_may_be_one_under_another_default_device():
    from scaled_mm.cpu import integer_product

    integer_product._choose.cache_clear()
    test_a_product_does_not_depend_on_the_default_device(48)


def test_grouped_and_block_scaled_products_do_not_depend_on_the_default_device():
    with torch.device("meta"):
        under = grouped_and_block_scaled()
    assert all(torch.equal(one, other) for one, other in zip(under, grouped_and_block_scaled(), strict=True))


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
def test_a_gguf_product_does_not_depend_on_the_default_device(fmt):
    with torch.device("meta"):
        under = block_product(fmt)
    assert torch.equal(under, block_product(fmt))


@pytest.mark.parametrize("fmt", ["q5_0", "q5_1"])
def test_a_gguf_product_of_fake_tensors_leaves_nothing_behind(fmt):
    expected = block_product(fmt)
    weight, activation = (sm.quantize_block(torch.ones(rows, 64), name) for rows, name in ((16, fmt), (3, "q8_1")))
    with FakeTensorMode() as mode:
        fake = getattr(sm, f"gemm_{fmt}_q8_1")(mode.from_tensor(weight), mode.from_tensor(activation))
    assert fake.shape == (16, 3)
    assert torch.equal(block_product(fmt), expected)
