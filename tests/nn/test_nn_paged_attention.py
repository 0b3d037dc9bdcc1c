"""Paged attention, compared with a loop over sequences, heads and tokens."""

from __future__ import annotations

import pytest
import torch
from allpairspy import AllPairs

import scaled_mm as sm
from scaled_mm.nn.functional import paged_attention

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GRID = [
    tuple(case)
    for case in AllPairs([[torch.float32, torch.bfloat16, torch.float16], [(4, 4), (6, 2), (4, 1)], [1, 16], [(1,), (7, 0, 33, 16), (40,) * 5]])
]


def case(dtype, heads, page, lengths, device="cpu"):
    """Operands in which places that must not be read are NaN."""
    num_heads, kv_heads = heads
    generator = torch.Generator().manual_seed(page + len(lengths))
    pages_of = [-(-length // page) for length in lengths]
    longest, total = max(pages_of) + 1, sum(pages_of) + 3
    order = torch.randperm(total, generator=generator).tolist()
    keys, values = (torch.full((total, page, kv_heads, 32), float("nan"), dtype=dtype) for _ in range(2))
    tables = torch.full((len(lengths), longest), -1, dtype=torch.int32)
    for sequence, (length, pages) in enumerate(zip(lengths, pages_of)):
        for index in range(pages):
            tables[sequence, index] = order.pop()
        for token in range(length):
            for cache in (keys, values):
                cache[tables[sequence, token // page], token % page] = torch.randn(kv_heads, 32, generator=generator).to(dtype)
    query = torch.randn(len(lengths), num_heads, 32, generator=generator).to(dtype)
    operands = query, keys, values, torch.tensor(lengths, dtype=torch.int32), tables
    return [operand.to(device) for operand in operands], num_heads, kv_heads


def expected(query, keys, values, lengths, tables, heads, kv_heads, scale) -> torch.Tensor:
    out = torch.zeros(query.shape, dtype=torch.float64)
    for sequence, length in enumerate(lengths.tolist()):
        places = [(int(tables[sequence, token // keys.shape[1]]), token % keys.shape[1]) for token in range(length)]
        for head in range(heads if length else 0):
            group = head // (heads // kv_heads)
            k, v = (torch.stack([cache[page, place, group] for page, place in places]).double() for cache in (keys, values))
            out[sequence, head] = (scale * (k @ query[sequence, head].double())).softmax(0) @ v
    return out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype, heads, page, lengths", GRID)
def test_each_sequence_attends_to_its_own_pages(dtype, heads, page, lengths, device):
    operands, num_heads, kv_heads = case(dtype, heads, page, lengths)
    wanted = expected(*operands, num_heads, kv_heads, 0.2)
    out = paged_attention(*(operand.to(device) for operand in operands), num_heads, 0.2, kv_heads).cpu()
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]
    assert out.dtype is dtype and torch.allclose(out.double(), wanted, rtol=tolerance, atol=tolerance)


def test_heads_may_be_joined_and_a_sequence_does_not_depend_on_its_batch():
    operands, heads, kv_heads = case(torch.float32, (6, 2), 16, (7, 33, 16))
    whole = paged_attention(*operands, heads, 0.2, kv_heads)
    query, keys, values, lengths, tables = operands
    joined = paged_attention(query.reshape(3, -1), keys, values, lengths.long(), tables.long(), heads, 0.2, kv_heads)
    assert joined.shape == (3, 6 * 32) and torch.equal(joined.reshape(whole.shape), whole)
    alone = paged_attention(query[1:2], keys, values, lengths[1:2], tables[1:2], heads, 0.2, kv_heads)
    assert torch.allclose(alone, whole[1:2], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(num_heads=5), r"kv_heads: expected a divisor of num_heads = 5, got 2"),
        (dict(kv_heads=0), "kv_heads: expected an integer of 1 or more, got 0"),
        (dict(query=torch.zeros(3, 4, 32)), r"query: expected \[sequences, 6, D\]"),
        (dict(query=torch.zeros(3, 6, 32, dtype=torch.int8)), "query: expected"),
        (dict(value_cache=torch.zeros(2, 16, 2, 32)), r"value_cache: expected \[pages, page, 2, 32\]"),
        (dict(key_cache=torch.zeros(9, 16, 2, 32).half()), "key_cache: expected float32"),
        (dict(context_lens=torch.zeros(3)), "context_lens: expected int32 or int64"),
        (dict(block_tables=torch.zeros(2, 4, dtype=torch.int32)), r"block_tables: expected \[3, pages\], got \[2, 4\]"),
        (dict(context_lens=torch.tensor([7, 99, 16])), "context_lens: expected 0 to 64, got 7 to 99"),
        (dict(block_tables=torch.full((3, 4), 99)), "block_tables: expected pages from 0 to"),
    ],
)
def test_wrong_operands_are_refused_by_name(change, message):
    (query, keys, values, lengths, tables), heads, kv_heads = case(torch.float32, (6, 2), 16, (7, 33, 16))
    options = dict(
        query=query, key_cache=keys, value_cache=values, context_lens=lengths, block_tables=tables, num_heads=heads, scale=0.2, kv_heads=kv_heads
    )
    with pytest.raises(sm.ScaledMMError, match=message):
        paged_attention(**{**options, **change})


def test_a_nan_that_is_read_arrives_and_one_that_is_not_does_not():
    operands, heads, kv_heads = case(torch.float32, (4, 2), 4, (5, 0, 3))
    query, keys, _, _, tables = operands
    keys[tables[0, 1], 0, 1, 3] = float("nan")  # token 4 of the first sequence, the second group
    out = paged_attention(*operands, heads, 0.2, kv_heads)
    assert out[0, 2:].isnan().all() and out[0, :2].isfinite().all() and out[1:].isfinite().all() and (out[1] == 0).all()


def test_autocast_does_not_change_it():
    operands, heads, kv_heads = case(torch.float32, (4, 2), 4, (5, 9))
    with torch.autocast("cpu", torch.bfloat16):
        out = paged_attention(*operands, heads, 0.2, kv_heads)
    assert torch.equal(out, paged_attention(*operands, heads, 0.2, kv_heads))


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("pages", [0, 3])
def test_no_sequences_and_no_pages(joined, pages):
    cache, lengths = torch.zeros(pages, 4, 2, 32), torch.zeros(0, dtype=torch.int32)
    query = torch.zeros(0, 4 * 32) if joined else torch.zeros(0, 4, 32)
    assert paged_attention(query, cache, cache, lengths, torch.zeros(0, 5, dtype=torch.int32), 4, 0.2, 2).shape == query.shape
    one = torch.randn(1, *query.shape[1:])
    assert not paged_attention(one, cache, cache, torch.zeros(1, dtype=torch.int32), torch.zeros(1, 5, dtype=torch.int32), 4, 0.2, 2).any()


@pytest.mark.parametrize("scale", [None, "0.2", True, float("nan"), torch.ones(2)])
def test_the_scale_is_a_finite_number(scale):
    operands, heads, kv_heads = case(torch.float32, (4, 2), 4, (5,))
    with pytest.raises(sm.BadParamError, match="scale: expected a finite number, got "):
        paged_attention(*operands, heads, scale, kv_heads)
