"""Attention and rotary angles whose bits depend on neither the device nor the batch, compared with loops and with torch in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import scaled_mm as sm
from scaled_mm.nn.functional import reproducible_attention
from scaled_mm.nn.reproducible import rotary_angles

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CASES = [(1, 4, 4, 1, 1, 64), (2, 6, 2, 5, 5, 16), (1, 9, 3, 7, 12, 64), (3, 4, 1, 1, 33, 8), (1, 2, 2, 3, 8, 1)]  # B, heads, KV heads, T, L, D


def case(batch, heads, groups, tokens, length, size, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + length)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    return draw(batch, heads, tokens, size), draw(batch, groups, length, size), draw(batch, groups, length, size)


def causal(tokens, length):
    """float32 [1, 1, T, L]: the last T of L tokens, each with those before it."""
    return torch.full((tokens, length), torch.finfo(torch.float32).min).triu(length - tokens + 1)[None, None]


def tree(values: list) -> np.float32:
    """The sum of neighbours, of neighbours of these sums, and so on."""
    while len(values) > 1:
        values = [values[i] + values[i + 1] if i + 1 < len(values) else values[i] for i in range(0, len(values), 2)]
    return values[0]


def loops(query, key, value, mask, scale) -> torch.Tensor:
    """The formula, one float32 operation after the other; exp and its rounding by Python's, which is right to half a unit in the last place."""
    query, key, value, mask = (tensor.float().numpy() for tensor in (query, key, value, mask))
    out = np.zeros(query.shape, np.float32)
    batch, heads, tokens, size = query.shape
    for b, h, t in np.ndindex(batch, heads, tokens):
        g, scores = h // (heads // key.shape[1]), []
        for j in range(key.shape[2]):
            product = tree([query[b, h, t, d] * key[b, g, j, d] for d in range(size)])
            scores.append(product * np.float32(scale) + mask[0, 0, t, j])
        weights = [np.float32(math.exp(float(one - max(scores)))) for one in scores]
        weights = [one / tree(weights) for one in weights]
        for d in range(size):
            out[b, h, t, d] = tree([weights[j] * value[b, g, j, d] for j in range(key.shape[2])])
    return torch.from_numpy(out)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", CASES)
def test_it_has_the_bits_of_the_formula(sizes, dtype, device):
    query, key, value = case(*sizes, dtype)
    mask = causal(*sizes[3:5])
    with np.errstate(over="ignore"):  # masked scores overflow
        wanted = loops(query, key, value, mask, 0.3).to(dtype)
    out = reproducible_attention(query.to(device), key.to(device), value.to(device), mask.to(device), scale=0.3)
    assert out.dtype is dtype and torch.equal(out.cpu(), wanted)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_it_is_attention(dtype, tolerance):
    query, key, value = case(2, 6, 2, 40, 40, 64, dtype)
    mask = causal(40, 40)
    out = reproducible_attention(query, key, value, mask, scale=0.125)
    options = dict(attn_mask=mask.double(), scale=0.125, enable_gqa=True)
    wanted = torch.nn.functional.scaled_dot_product_attention(query.double(), key.double(), value.double(), **options)
    assert torch.allclose(out.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_a_token_does_not_depend_on_what_else_a_call_has(device, monkeypatch):
    """Other tokens, sequences and heads, keys that are masked, and how many queries are computed at a time."""
    query, key, value = (tensor.to(device) for tensor in case(2, 6, 2, 37, 37, 64))
    mask = causal(37, 37).to(device)
    whole = reproducible_attention(query, key, value, mask, scale=0.125)
    for t in range(37):
        for length in (t + 1, min(37, t + 4)):
            one = reproducible_attention(
                query[1:, 3:4, t : t + 1], key[1:, 1:, :length], value[1:, 1:, :length], mask[:, :, t : t + 1, :length], scale=0.125
            )
            assert torch.equal(one[0, 0, 0], whole[1, 3, t])
    monkeypatch.setattr("scaled_mm.nn.reproducible.LARGEST", 5 * 2 * 6 * 37 * 64)
    assert torch.equal(reproducible_attention(query, key, value, mask, scale=0.125), whole)


@pytest.mark.gpu
def test_long_attention_has_the_bits_of_the_cpu():
    operands = (*case(1, 4, 2, 300, 700, 64), causal(300, 700))
    out = reproducible_attention(*(operand.cuda() for operand in operands), scale=0.125)
    assert torch.equal(out.cpu(), reproducible_attention(*operands, scale=0.125))


def test_without_a_mask_every_key_counts_and_empty_tensors_are_empty():
    query, key, value = case(1, 2, 1, 3, 4, 8)
    assert torch.equal(
        reproducible_attention(query, key, value, scale=1.0), reproducible_attention(query, key, value, torch.zeros(1, 1, 1, 1), scale=1.0)
    )
    assert reproducible_attention(query[:, :, :0], key, value, scale=1.0).shape == (1, 2, 0, 8)
    assert not reproducible_attention(query, key[:, :, :0], value[:, :, :0], scale=1.0).any()


def test_a_bool_mask_leaves_keys_out_and_values_may_have_another_size():
    query, key, value = case(2, 4, 2, 5, 9, 16)
    keep = causal(5, 9) == 0
    out = reproducible_attention(query, key, value[..., :6], keep, scale=0.3)
    assert torch.equal(out, reproducible_attention(query, key, value, causal(5, 9), scale=0.3)[..., :6])
    assert reproducible_attention(query, key, value[..., :0], keep, scale=0.3).shape == (2, 4, 5, 0)


def test_nan_reaches_the_rows_that_read_it():
    query, key, value = case(1, 2, 2, 2, 4, 8)
    key[0, 1, 2, 5] = float("nan")
    out = reproducible_attention(query, key, value, scale=1.0)
    assert not out[0, 0].isnan().any() and out[0, 1].isnan().all()


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(query=torch.ones(2, 3, 4)), r"query: expected \[B, heads, T, D\], got \[2, 3, 4\]"),
        (dict(query=torch.ones(1, 4, 3, 8, dtype=torch.int8)), "query: expected"),
        (dict(key=torch.ones(1, 2, 5, 9)), r"key: expected \[1, KV heads, L, 8\], got \[1, 2, 5, 9\]"),
        (dict(value=torch.ones(1, 2, 6, 8)), r"value: expected \[1, 2, 5, E\] as key, got \[1, 2, 6, 8\]"),
        (dict(value=torch.ones(1, 2, 5, 8).half()), "value: expected"),
        (dict(key=torch.ones(1, 3, 5, 8), value=torch.ones(1, 3, 5, 8)), "key: expected a number of heads that divides the 4 of query, got 3"),
        (dict(mask=torch.zeros(1, 1, 3, 4)), r"mask: expected what broadcasts to \[1, 4, 3, 5\], got \[1, 1, 3, 4\]"),
        (dict(mask=torch.ones(1, 1, 3, 5, dtype=torch.int8)), "mask: expected"),
        (dict(scale=float("nan")), "scale: expected a finite number of float32, got nan"),
        (dict(scale=torch.ones(5)), "scale: expected a finite number"),
    ],
)
def test_errors_name_the_argument(change, message):
    query, key, value = case(1, 4, 2, 3, 5, 8)
    with pytest.raises(sm.ScaledMMError, match=message):
        reproducible_attention(**{"query": query, "key": key, "value": value, "mask": None, "scale": 1.0, **change})


@pytest.mark.parametrize("device", DEVICES)
def test_angles_are_rounded_once(device):
    """Python's cos and sin of the float32 angle are right to half a unit of float64."""
    positions = torch.tensor([[0, 1, 2, 3, 500, 4095], [8191, 40000, 99999, 131071, 1000000, 7]])
    frequencies = 1.0 / (10000 ** (torch.arange(0, 64, 2).float() / 64))
    angles = positions[..., None].float() * frequencies
    for found, function in zip(rotary_angles(positions.to(device), frequencies.to(device)), (math.cos, math.sin)):
        wanted = torch.tensor([function(angle) for angle in angles.flatten().tolist()], dtype=torch.float64).float()
        assert torch.equal(found.cpu().flatten(), wanted)
