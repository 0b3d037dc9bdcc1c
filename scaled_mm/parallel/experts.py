"""Expert parallelism: each rank has some of the experts of a mixture. A token's weighted sum is computed by one rank, in the order of its choices."""

from __future__ import annotations

import dataclasses

import torch

from scaled_mm.errors import BadParamError, BadTensorShapeError
from scaled_mm.layers.experts import check_experts, expected_rows, products_of_experts
from scaled_mm.parallel import collectives
from scaled_mm.parallel.ranks import Ranks, rows_of
from scaled_mm.rowwise import moe
from scaled_mm.rowwise.int8 import quantize_int8
from scaled_mm.rowwise.int8_block import quantize_int8_block


@torch.no_grad()
def all_reduce_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    global_num_experts: int,
    group=None,
    activation: str = "silu",
    block_scales: bool = False,
) -> torch.Tensor:
    """`fused_experts` with the experts split over the ranks of a group, where all ranks have all tokens: [tokens, H] to [tokens, H] on every rank.

    Each rank multiplies the choices of its experts. The results travel as bits, before they are weighted: the choices of `rows_of(tokens, rank,
    size)` to each rank, which computes their weighted sums, and the sums to all. A rank's int8 weights are those of experts
    `rows_of(global_num_experts, rank, size)`; it may have none.

    w13: int8 [E of this rank, 2 I, H]; w2: int8 [E of this rank, H, I]; their scales as of `fused_experts`, for E of this rank.
    x, topk_weights, topk_ids and the other arguments: as of `fused_experts`, the same on all ranks. topk_ids: from 0 to global_num_experts - 1, or -1
    for no expert. global_num_experts: of all ranks together.

    The bits are those of `fused_experts` with all experts on one process, for any number of ranks. Sends tokens * choices * H elements of x's dtype
    in a reduce-scatter and tokens * H in an all-gather. Does not synchronize with the device; may be captured in a CUDA graph. No gradient.
    Raises a ScaledMMError subclass that names the argument: on CPUs on all ranks. On GPUs a rank that raises alone leaves the others waiting until
    the group's timeout.
    """
    ranks = Ranks.of(group)
    weights = w13, w13_scale, w2, w2_scale
    local = ranks.checked(
        x,
        lambda: _checked(x, *weights, topk_weights, topk_ids, activation, block_scales, global_num_experts, ranks),
        x__number_of_tokens=lambda _: x.shape[0],
        x__H=lambda _: x.shape[1],
        x__dtype=lambda _: x.element_size(),
        topk_ids__number_of_choices=lambda _: topk_ids.shape[1],
        global_num_experts__number=lambda _: global_num_experts,
    )
    tokens, choices, hidden = *topk_ids.shape, x.shape[1]
    if local.count:
        order = moe.moe_sort(topk_ids, local.count, expert_map=local.map(x.device))
        q, scale = moe.quantize_to_rows(x, order.inverse, block_scales)
        rows = expected_rows(tokens, choices, local.count, local.map(x.device))
        y = products_of_experts(q, scale, *weights, order.ends, x.dtype, activation, block_scales, rows)
        here = order.inverse >= 0
        y = torch.where(here.view(-1, 1), y[order.inverse.clamp_min(0).view(-1)], y.new_zeros(())) if here.numel() else y
    else:
        y = x.new_zeros(tokens * choices, hidden)
    mine = rows_of(tokens, ranks.rank, ranks.size)
    y = collectives.sum_of_one(y.view(tokens, choices * hidden), ranks).view(-1, hidden)
    result = moe.combine(y, topk_weights[mine], _rows_in_order(topk_ids[mine], global_num_experts))
    return collectives.gather_rows(result, tokens, ranks)


@torch.no_grad()
def all_to_all_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    global_num_experts: int,
    group=None,
    activation: str = "silu",
    block_scales: bool = False,
) -> torch.Tensor:
    """`fused_experts` with the experts and the tokens split over the ranks of a group: [tokens of this rank, H] to the same shape.

    Each rank quantizes its tokens and sends them, with their scales and choices, to the ranks that have one of their experts, each at most once.
    The results of all choices come back, and are weighted and added in the order of the choices.

    x: float16, bfloat16 or float32 [tokens of this rank, H]; topk_weights, topk_ids: [tokens of this rank, choices]. The number of tokens may differ
    between ranks, and be 0. The other arguments: as of `all_reduce_experts`.

    The bits are those of `fused_experts` with all experts on one process, for any number of ranks and any split of the tokens. A token sends
    H + 4 * (scales + choices) bytes to each rank, and gets H elements of x's dtype back for each choice. The host waits for the device once, to learn
    how much arrives. No gradient. Raises a ScaledMMError subclass that names the argument, on all ranks.
    """
    ranks = Ranks.of(group)
    weights = w13, w13_scale, w2, w2_scale
    local = choices = error = None
    try:
        local = _checked(x, *weights, topk_weights, topk_ids, activation, block_scales, global_num_experts, ranks)
        choices = _Choices(topk_ids, global_num_experts, ranks.size)
    except Exception as raised:  # noqa: BLE001 - it is raised again, once the others know
        error = raised
    facts = None if choices is None else [x.shape[1], topk_ids.shape[1], x.element_size(), int(block_scales), global_num_experts]
    sent, received = _announce(None if choices is None else choices.counts, facts, x, ranks, error)
    tokens, ids = choices.sent(sum(n for n, _ in sent))
    q, scale = quantize_int8_block(x) if block_scales else quantize_int8(x)
    packed = torch.cat([collectives.bytes_of(part) for part in (q[tokens], scale[tokens], ids)], 1)
    packed = collectives.exchange(packed, [n for n, _ in sent], [n for n, _ in received], ranks)
    sizes = x.shape[1], 4 * scale.shape[1], 4 * topk_ids.shape[1]
    arrived = [part.contiguous().view(dtype) for part, dtype in zip(packed.split(sizes, 1), (torch.int8, torch.float32, torch.int32))]
    y = _of_local(*arrived, sum(n for _, n in received), local, weights, x.dtype, activation, block_scales)
    back = collectives.exchange(y, [n for _, n in received], [n for _, n in sent], ranks)
    return moe.combine(back, topk_weights, choices.rows)


@dataclasses.dataclass(frozen=True)
class _Local:
    """The experts of this rank: `count`, from number `first` of `of` experts on."""

    first: int
    count: int
    of: int

    def map(self, device: torch.device) -> torch.Tensor:
        """The expert_map of `moe_sort`: int32 [of]."""
        numbers = torch.arange(-self.first, self.of - self.first, dtype=torch.int32, device=device)
        return torch.where((numbers >= 0) & (numbers < self.count), numbers, -1)


class _Choices:
    """What this rank's tokens choose.

    counts: int64 [ranks, 2], how many tokens go to each rank, and how many of their choices.
    rows: int32 [tokens, choices], where the result of each choice is in what comes back; -1: no expert.
    """

    def __init__(self, topk_ids: torch.Tensor, global_num_experts: int, size: int):
        self._each = -(-global_num_experts // size)
        self._ids = topk_ids
        chosen = (topk_ids >= 0) & (topk_ids < global_num_experts)
        of_rank = torch.where(chosen, topk_ids // self._each, -1)
        self._there = of_rank == torch.arange(size, device=topk_ids.device).view(-1, 1, 1)  # [ranks, tokens, choices]
        self._goes = self._there.any(2)
        self.counts = torch.stack((self._goes.sum(1), self._there.sum((1, 2))), 1)
        before = self._there.view(-1).cumsum(0).view(self._there.shape) - 1  # choices in order of rank, token and choice
        self.rows = torch.where(chosen, before.gather(0, of_rank.clamp_min(0).to(torch.int64).unsqueeze(0))[0], -1).to(torch.int32)

    def sent(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens int64 [count] in order of rank they go to; their experts there int32 [count, choices], from 0 on each rank, -1 for those
        elsewhere). count: the sum of `counts[:, 0]`, for which the host has waited."""
        place = _first(self._goes, count)
        tokens = place % max(1, self._goes.shape[1])
        there = self._there.view(-1, self._ids.shape[1])[place]
        return tokens, torch.where(there, self._ids[tokens] % self._each, -1).to(torch.int32)


def _first(mask: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [count]: the places of the `count` true elements, in order. Unlike `nonzero` it does not wait for the device."""
    return mask.logical_not().view(-1).to(torch.int8).sort(stable=True).indices[:count]


def _of_local(q, scale, ids, rows: int, local: _Local, weights, dtype, activation: str, block_scales: bool) -> torch.Tensor:
    """[rows, H]: the results of the choices of this rank's experts, in order of token and choice. ids: int32 [tokens, choices]; rows: the number of
    those that are not -1."""
    if rows == 0:
        return q.new_empty((0, q.shape[1]), dtype=dtype)
    order = moe.moe_sort(ids, local.count)
    token = order.order[:rows] // ids.shape[1]
    y = products_of_experts(q[token], scale[token], *weights, order.ends, dtype, activation, block_scales, None)
    here = order.inverse.view(-1)
    return y[here[_first(here >= 0, rows)]]


def _rows_in_order(topk_ids: torch.Tensor, global_num_experts: int) -> torch.Tensor:
    """int32, topk_ids' shape: 0, 1, ..., or -1 where no expert is chosen."""
    rows = torch.arange(topk_ids.numel(), dtype=torch.int32, device=topk_ids.device).view(topk_ids.shape)
    return torch.where((topk_ids >= 0) & (topk_ids < global_num_experts), rows, -1)


def _checked(x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, activation, block_scales, global_num_experts, ranks: Ranks) -> _Local:
    if isinstance(global_num_experts, bool) or not isinstance(global_num_experts, int) or global_num_experts < 1:
        raise BadParamError(f"global_num_experts: expected a positive integer, got {global_num_experts!r}")
    check_experts(x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, activation, block_scales, least=0)
    part = rows_of(global_num_experts, ranks.rank, ranks.size)
    if w13.shape[0] != part.stop - part.start:
        expected = f"the {part.stop - part.start} experts from {part.start} on, of {global_num_experts} over {ranks.size} ranks"
        raise BadTensorShapeError(f"w13: expected [E, 2 I, H] with {expected}, got {list(w13.shape)}")
    moe.check_sort(topk_ids, global_num_experts)
    moe.check_ids(topk_ids, global_num_experts)
    return _Local(part.start, part.stop - part.start, global_num_experts)


_REFUSED = -1
_FACTS = {"H": "x", "choices": "topk_ids", "bytes of an element": "x", "block scales": "block_scales", "number": "global_num_experts"}


def _announce(counts: torch.Tensor | None, facts: list[int] | None, x: object, ranks: Ranks, error: Exception | None) -> tuple[list, list]:
    """([[tokens, choices] that go to each rank], [[tokens, choices] that arrive from each]). Raises on all ranks if one has an error, or other
    sizes."""
    device = x.device if isinstance(x, torch.Tensor) else torch.device("cpu")
    counts = torch.zeros(ranks.size, 2, dtype=torch.int64, device=device) if counts is None else counts
    of_this = torch.tensor(facts or [_REFUSED] * len(_FACTS), device=device).expand(ranks.size, -1)
    one = [1] * ranks.size
    try:
        arrived = collectives.exchange(torch.cat((counts, of_this), 1), one, one, ranks)
        found = torch.cat((counts, arrived), 1).tolist()  # the host waits here
    except RuntimeError:
        if error is None:
            raise
    if error is not None:
        raise error
    of_ranks = [row[4:] for row in found]
    refused = [rank for rank, facts in enumerate(of_ranks) if facts[0] == _REFUSED]
    if refused:
        raise BadParamError(f"group: expected arguments that all {ranks.size} ranks accept, got an error on rank {refused[0]}")
    for (what, argument), values in zip(_FACTS.items(), zip(*of_ranks)):
        if len(set(values)) > 1:
            raise BadTensorShapeError(f"{argument}: expected the same {what} on all {ranks.size} ranks, got {', '.join(map(str, values))}")
    return [row[:2] for row in found], [row[2:4] for row in found]
