"""Checks of experts that run on every rank of a group of processes (`worker.py`). Each raises where it fails."""

from __future__ import annotations

import pytest
import torch
from linear_checks import part

import scaled_mm as sm
from scaled_mm import parallel

EXPERTS, CHOICES, HIDDEN, INNER = 10, 3, 32, 48  # 10 experts: 4 ranks have 3, 3, 3 and 1; 3 have 4, 4 and 2


def mixture(tokens: int, dtype: torch.dtype, experts: int = EXPERTS, block: bool = False):
    """x, w13, its scale, w2, its scale, topk_weights and topk_ids of all experts, the same on every rank. Some choices are -1."""
    generator = torch.Generator().manual_seed(tokens + experts)

    def weight(n: int, k: int):
        shape = (experts, -(-n // 128), -(-k // 128)) if block else (experts, n, 1)
        return torch.randint(-128, 128, (experts, n, k), dtype=torch.int8, generator=generator), torch.rand(*shape, generator=generator) * 1e-2

    x, weights = torch.randn(tokens, HIDDEN, generator=generator), torch.rand(tokens, CHOICES, generator=generator)
    ids = torch.rand(tokens, experts, generator=generator).topk(min(CHOICES, experts)).indices
    ids = torch.cat((ids, ids.new_full((tokens, CHOICES - ids.shape[1]), -1)), 1)
    ids[::4, 1] = -1
    return x.to(dtype), *weight(2 * INNER, HIDDEN), *weight(HIDDEN, INNER), weights, ids


def experts_have_the_bits_of_one_process(rank, size):
    """All tokens on every rank, and split evenly, unevenly and on one rank; fewer experts than ranks; dtypes, block scales, activations."""
    for tokens, dtype, experts, block, activation in (
        (0, torch.float32, EXPERTS, False, "silu"),
        (1, torch.bfloat16, EXPERTS, False, "silu"),
        (13, torch.float32, EXPERTS, False, "gelu"),
        (13, torch.bfloat16, EXPERTS, True, "silu"),
        (12, torch.float16, 1, False, "gelu_tanh"),
        (7, torch.bfloat16, 3, True, "silu"),
    ):
        x, w13, w13_scale, w2, w2_scale, weights, ids = mixture(tokens, dtype, experts, block)
        options = dict(activation=activation, block_scales=block)
        want = sm.fused_experts(x, w13, w13_scale, w2, w2_scale, weights, ids, **options)
        mine = parallel.part_of(experts, rank, size)
        shards = w13[mine], w13_scale[mine], w2[mine], w2_scale[mine]
        found = parallel.all_reduce_experts(x, *shards, weights, ids, global_num_experts=experts, **options)
        assert torch.equal(found, want)
        for rows in (part(tokens, rank, size), slice(0, tokens if rank == size - 1 else 0), [slice(0, 1), slice(1, 8)][min(rank, 1)]):
            of_rank = parallel.all_to_all_experts(x[rows], *shards, weights[rows], ids[rows].int(), global_num_experts=experts, **options)
            assert torch.equal(of_rank, want[rows])
        if not block:
            for tokens_of, rows in (("all", slice(None)), ("split", part(tokens, rank, size))):
                layer = parallel.ExpertParallelInt8Experts.from_shard(*shards, global_num_experts=experts, tokens=tokens_of, activation=activation)
                assert torch.equal(layer(x[rows], ids[rows], weights[rows]), want[rows])


def odd_sizes_and_strides_of_experts(rank, size):
    """H that 4 does not divide, column-major ids and x, no and one token on a rank, the same expert twice."""
    generator = torch.Generator().manual_seed(0)
    hidden, inner, experts = 31, 7, 5
    w13, w2 = (
        torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator) for shape in ((experts, 2 * inner, hidden), (experts, hidden, inner))
    )
    scales = torch.rand(experts, generator=generator), torch.rand(1, generator=generator)
    for tokens in (0, 1, 2, 9):
        x = torch.randn(hidden, tokens, generator=generator).t()
        ids = torch.randint(-1, experts, (3, tokens), generator=generator).t()
        weights = torch.rand(tokens, 3, generator=generator).bfloat16()
        want = sm.fused_experts(x, w13, scales[0], w2, scales[1], weights, ids)
        mine = parallel.part_of(experts, rank, size)
        shards = w13[mine], scales[0][mine], w2[mine], scales[1]
        assert torch.equal(parallel.all_reduce_experts(x, *shards, weights, ids, global_num_experts=experts), want)
        for rows in (part(tokens, rank, size), slice(0, tokens if rank == 0 else 0)):
            found = parallel.all_to_all_experts(x[rows], *shards, weights[rows], ids[rows], global_num_experts=experts)
            assert torch.equal(found, want[rows])


def infinite_results_of_experts_arrive(rank, size):
    x, w13, w13_scale, w2, w2_scale, weights, ids = mixture(6, torch.float32)
    x[2, 3], x[4, 1] = float("nan"), float("inf")
    want = sm.fused_experts(x, w13, w13_scale, w2, w2_scale, weights, ids)
    mine = parallel.part_of(EXPERTS, rank, size)
    shards = w13[mine], w13_scale[mine], w2[mine], w2_scale[mine]
    found = parallel.all_reduce_experts(x, *shards, weights, ids, global_num_experts=EXPERTS)
    split = parallel.all_to_all_experts(x, *shards, weights, ids, global_num_experts=EXPERTS)
    for y in (found, split):
        assert torch.equal(y.isnan(), want.isnan()) and want[2].isnan().all() and torch.equal(y.nan_to_num(), want.nan_to_num())


def wrong_experts_are_refused_on_all(rank, size):
    x, w13, w13_scale, w2, w2_scale, weights, ids = mixture(6, torch.float32)
    mine, last = parallel.part_of(EXPERTS, rank, size), rank == size - 1
    shards = w13[mine], w13_scale[mine], w2[mine], w2_scale[mine]
    for function in (parallel.all_reduce_experts, parallel.all_to_all_experts):

        def call(x=x, shards=shards, weights=weights, ids=ids, function=function, **options):
            return function(x, *shards, weights, ids, **dict(global_num_experts=EXPERTS) | options)

        for message, others, wrong in (
            ("topk_ids: expected int32 or int64", "ids", ids.float()),
            ("w13: expected .* with the . experts from", "shards", tuple(tensor[:0] for tensor in shards)),
            ("topk_ids: expected values from -1 to 9, got 10", "ids", ids.clamp_min(10)),
            ("activation: expected one of", "activation", "relu"),
            ("global_num_experts: expected a positive integer, got 0", "global_num_experts", 0),
        ):
            with pytest.raises(sm.ScaledMMError, match=message if last else f"rank {size - 1} of {size}: .*{message}"):
                call(**({others: wrong} if last else {}))
        with pytest.raises(sm.BadParamError, match="x: expected the same dtype on all . ranks, got torch.float16, torch.*bfloat16"):
            call(x=x.bfloat16() if last else x.half())  # as many bytes: their bits would be taken for the other's
        with pytest.raises(sm.BadParamError, match="topk_ids: expected the same choices on all"):
            call(weights=weights[:, : CHOICES - last], ids=ids[:, : CHOICES - last])
    with pytest.raises(sm.BadParamError, match="x: expected the same tokens on all"):
        parallel.all_reduce_experts(x[last:], *shards, weights[last:], ids[last:], global_num_experts=EXPERTS)
    make = parallel.ExpertParallelInt8Experts.from_shard
    for message, wrong in (
        ("tokens: expected 'all' or 'split', got 'some'", dict(tokens="some")),
        ("tokens: expected the same on all", dict(tokens="all" if last else "split")),
        (
            "global_num_experts: expected the same on all|gate_up_proj: expected three dimensions, the first the",
            dict(global_num_experts=EXPERTS + last),
        ),
    ):
        with pytest.raises(sm.ScaledMMError, match=message):
            make(*shards, **dict(global_num_experts=EXPERTS) | wrong)
