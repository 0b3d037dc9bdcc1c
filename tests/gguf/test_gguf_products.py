"""GGUF products against the documented formula in float64: all formats, awkward shapes, extreme blocks; and the whole path's error."""

from __future__ import annotations

import itertools

import pytest
import torch
from gguf_data import LAYOUTS, WEIGHTS, distributions, random_blocks, relative_error, seeded
from operands.pairs import pairwise

import scaled_mm as sm
from scaled_mm.gguf import product, reference

BOUND = 2e-6
SHAPES = [(1, 1, 32), (1, 1, 64), (2, 1, 4096), (1, 3, 96), (17, 5, 96), (33, 2, 2048), (31, 64, 2080), (130, 7, 4128), (257, 33, 1056)]
LONG = [(3, 1, 28672), (40, 8, 28672), (5, 70, 14336), (4096, 1, 64), (2, 4096, 64), (1000, 129, 160)]


def gemm_q8_1(fmt):
    return getattr(sm, f"gemm_{fmt}_q8_1")


def gemm(fmt):
    return getattr(sm, f"gemm_{fmt}")


def operands(fmt: str, m: int, n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(weight_q, activation_q, activation in float32)"""
    g = seeded(seed + m + n + k)
    weight, activation = torch.randn(m, k, generator=g), torch.randn(n, k, generator=g)
    return sm.quantize_block(weight, fmt), sm.quantize_q8_1(activation), activation


# ---- against float64 ------------------------------------------------------------------------------------------------------


@pairwise(shape=SHAPES + LONG, fmt=WEIGHTS, kind=["q8_1", torch.float16, torch.bfloat16])
def test_every_shape_is_within_the_bound(shape, fmt, kind):
    weight_q, activation_q, activation = operands(fmt, *shape)
    if kind == "q8_1":
        out, want = gemm_q8_1(fmt)(weight_q, activation_q), reference.gemm_q8_1(weight_q, activation_q, fmt)
    else:
        out, want = gemm(fmt)(weight_q, activation.to(kind)), reference.gemm(weight_q, activation.to(kind), fmt)
    assert out.dtype is torch.float32 and out.is_contiguous()
    assert relative_error(out, want) <= BOUND


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_any_levels_and_any_stored_sums_are_within_the_bound(fmt):
    """Sums that are not those of the values count as they are stored."""
    for seed in range(3):
        weight_q = random_blocks(50, 70, fmt, seed, finite=True)
        activation_q = random_blocks(9, 70, "q8_1", seed + 10, finite=True)
        assert relative_error(gemm_q8_1(fmt)(weight_q, activation_q), reference.gemm_q8_1(weight_q, activation_q, fmt)) <= BOUND
        activation = torch.randn(9, 2240, generator=seeded(seed)).half()
        assert relative_error(gemm(fmt)(weight_q, activation), reference.gemm(weight_q, activation, fmt)) <= BOUND


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_the_stored_sum_is_used(fmt):
    weight_q, activation_q, _ = operands(fmt, 5, 3, 128)
    before = gemm_q8_1(fmt)(weight_q, activation_q)
    activation_q[1, 2, 2:4] = torch.tensor([50.0], dtype=torch.float16).view(torch.uint8)
    after = gemm_q8_1(fmt)(weight_q, activation_q)
    assert relative_error(after, reference.gemm_q8_1(weight_q, activation_q, fmt)) <= BOUND
    assert torch.equal(after[:, 1], before[:, 1]) == (LAYOUTS[fmt].zero is None and LAYOUTS[fmt].minimum is None)
    assert torch.equal(after[:, ::2], before[:, ::2])


@pytest.mark.parametrize("name", ["uniform", "negative", "outliers", "cubed", "relu", "integers", "every_magnitude", "mixed_magnitudes"])
def test_every_distribution_is_within_the_bound(name):
    for fmt, seed in itertools.product(WEIGHTS, (1, 2)):
        x = distributions(seed, rows=24, k=1024)[name].clamp(-6e4, 6e4)
        weight_q, activation_q = sm.quantize_block(x, fmt, "ggml"), sm.quantize_q8_1(x.flip(0) / 32)
        want = reference.gemm_q8_1(weight_q, activation_q, fmt)
        assert want.isfinite().all() and relative_error(gemm_q8_1(fmt)(weight_q, activation_q), want) <= BOUND, (fmt, seed)


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_rows_that_are_all_one_value_are_within_a_looser_bound(fmt):
    """Equal terms round in the same direction all the way: the one case found that is beyond 2e-6."""
    x = torch.full((8, 28672), 0.7361)
    weight_q, activation_q = sm.quantize_block(x, fmt), sm.quantize_q8_1(x)
    assert relative_error(gemm_q8_1(fmt)(weight_q, activation_q), reference.gemm_q8_1(weight_q, activation_q, fmt)) <= 2e-5


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_where_the_chunks_end_does_not_show(fmt, monkeypatch):
    weight_q, activation_q, activation = operands(fmt, 37, 5, 320)
    monkeypatch.setattr(product, "_CHUNK_K", 96)
    monkeypatch.setattr(product, "_CHUNK_ELEMENTS", 96 * 7)
    assert relative_error(gemm_q8_1(fmt)(weight_q, activation_q), reference.gemm_q8_1(weight_q, activation_q, fmt)) <= BOUND
    assert relative_error(gemm(fmt)(weight_q, activation.half()), reference.gemm(weight_q, activation.half(), fmt)) <= BOUND
    monkeypatch.setattr(product, "_CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(product, "_CHUNK_MAX_ELEMENTS", 1)
    assert relative_error(gemm_q8_1(fmt)(weight_q, activation_q), reference.gemm_q8_1(weight_q, activation_q, fmt)) <= BOUND


# ---- operands -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_products_without_elements_are_zero(fmt):
    for m, n, k in ((0, 2, 64), (3, 0, 64), (3, 2, 0), (0, 0, 0)):
        weight_q, activation_q, activation = operands(fmt, m, n, k)
        for out in (gemm_q8_1(fmt)(weight_q, activation_q), gemm(fmt)(weight_q, activation.half())):
            assert out.shape == (m, n) and not out.any()


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_slices_rows_apart_and_odd_addresses_are_taken(fmt):
    weight_q, activation_q, activation = operands(fmt, 12, 6, 512)
    odd = torch.empty(weight_q.numel() + 1, dtype=torch.uint8)[1:].view(weight_q.shape).copy_(weight_q)
    for weight, x_q, x in (
        (weight_q[::2], activation_q[::3], activation[::3]),
        (weight_q[:, 3:9], activation_q[:, 2:8], activation[:, 64:256]),
        (weight_q[:, 3:4], activation_q[:, 2:3], activation[:, 64:96]),
        (odd[1:3], activation_q[:1], activation[:1]),
        (odd[:1, :1], activation_q[:1, :1], activation[:1, :32]),
        (weight_q[:1].expand(4, -1, -1), activation_q, activation.t().contiguous().t()),
    ):
        assert torch.equal(gemm_q8_1(fmt)(weight, x_q), gemm_q8_1(fmt)(weight.contiguous().clone(), x_q.contiguous()))
        x = x.half()
        assert relative_error(gemm(fmt)(weight, x), reference.gemm(weight, x, fmt)) <= BOUND


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_the_sizes_may_be_said_and_the_inputs_are_left_alone(fmt):
    weight_q, activation_q, activation = operands(fmt, 5, 3, 64)
    kept = weight_q.clone(), activation_q.clone()
    out = gemm_q8_1(fmt)(weight_q, activation_q)
    assert torch.equal(gemm_q8_1(fmt)(weight_q, activation_q, M=5, N=3, K=64), out)
    assert torch.equal(gemm_q8_1(fmt)(weight_q, activation_q, 5, None, 64), out)
    assert gemm(fmt)(weight_q, activation.half(), 5, 3, 64).shape == (5, 3)
    assert torch.equal(weight_q, kept[0]) and torch.equal(activation_q, kept[1])


@pytest.mark.parametrize("fmt", WEIGHTS)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_scale_that_is_not_finite_spoils_its_row_or_column_and_nothing_else(fmt, value):
    weight_q, activation_q, activation = operands(fmt, 9, 20, 2112)
    half = torch.tensor([value], dtype=torch.float16).view(torch.uint8)
    clean = gemm_q8_1(fmt)(weight_q, activation_q).isfinite()
    assert clean.all()
    row, column = weight_q.clone(), activation_q.clone()
    row[4, 65, :2] = half
    column[7, 1, :2] = half
    for out in (gemm_q8_1(fmt)(row, activation_q), gemm(fmt)(row, activation.half())):
        assert not out[4].isfinite().any() and out[torch.arange(9) != 4].isfinite().all()
    out = gemm_q8_1(fmt)(weight_q, column)
    assert not out[:, 7].isfinite().any() and out[:, torch.arange(20) != 7].isfinite().all()


# ---- the whole path -------------------------------------------------------------------------------------------------------

# ||out - W A^T||^2 / ||W A^T||^2 of normal weights and activations: with q8_1 activations, and with bfloat16 ones.
NMSE = {
    ("q4_0", "absmax"): (1.01e-2, 9.8e-3),
    ("q4_0", "ggml"): (7.9e-3, 7.7e-3),
    ("q4_1", "ggml"): (6.6e-3, 6.4e-3),
    ("q5_0", "absmax"): (2.35e-3, 2.15e-3),
    ("q5_0", "ggml"): (2.1e-3, 1.95e-3),
    ("q5_1", "ggml"): (1.65e-3, 1.5e-3),
    ("q8_0", "ggml"): (6.1e-5, 3.4e-5),
}


@pytest.mark.parametrize("fmt, rule", NMSE)
def test_the_error_of_the_whole_path_is_what_the_documentation_says(fmt, rule):
    for measured, bound in zip(whole_path(fmt, rule), NMSE[fmt, rule]):
        assert 0.9 * bound <= measured <= bound


def whole_path(fmt: str, rule: str) -> tuple[float, float]:
    """Quantize both, or the weight alone, and multiply; against the float64 product of what was quantized."""
    g = seeded(42)
    weight, activation = torch.randn(512, 4096, generator=g), torch.randn(64, 4096, generator=g)
    want = weight.double() @ activation.double().t()
    weight_q = sm.quantize_block(weight, fmt, rule)
    quantized = gemm_q8_1(fmt)(weight_q, sm.quantize_q8_1(activation))
    floats = gemm(fmt)(weight_q, activation.bfloat16())
    return relative_error(quantized, want) ** 2, relative_error(floats, want) ** 2
