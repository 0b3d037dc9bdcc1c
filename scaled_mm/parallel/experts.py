"""Expert parallelism: each rank has some of the experts of a mixture. A token's weighted sum is computed by one rank, in the order of its choices."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from scaled_mm.errors import BadParamError, BadTensorShapeError
from scaled_mm.layers.experts import check_experts, expected_rows, products_of_experts
from scaled_mm.parallel import collectives
from scaled_mm.parallel.functional import device_of
from scaled_mm.parallel.ranks import Ranks, code_of, part_of
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

    Each rank has experts `part_of(global_num_experts, rank, size)`, which may be none, and multiplies the choices of them. A reduce-scatter gives
    each rank the unweighted results of tokens `part_of(tokens, rank, size)`. It computes their weighted sums, and an all-gather distributes them.

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
        device_of(x),
        lambda: _checked(x, *weights, topk_weights, topk_ids, activation, block_scales, global_num_experts, ranks),
        lambda _: _facts(x, topk_ids, activation, block_scales, global_num_experts) | {"tokens": x.shape[0]},
        tokens="x",
        **_ARGUMENTS,
    )
    tokens, choices, hidden = *topk_ids.shape, x.shape[1]
    if local.count:
        expert_map = local.map(x.device)
        order = moe.moe_sort(topk_ids, local.count, expert_map=expert_map)
        q, scale = moe.quantize_to_rows(x, order.inverse, block_scales)
        rows = expected_rows(tokens, choices, local.count, expert_map)
        y = products_of_experts(q, scale, *weights, order.ends, x.dtype, activation, block_scales, rows)
        here = order.inverse >= 0
        y = torch.where(here.view(-1, 1), y[order.inverse.clamp_min(0).view(-1)], y.new_zeros(())) if here.numel() else y
    else:
        y = x.new_zeros(tokens * choices, hidden)
    mine = part_of(tokens, ranks.rank, ranks.size)
    y = collectives.reduce_scatter_disjoint(y.view(tokens, choices * hidden), ranks).view(-1, hidden)
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
    facts = {} if choices is None else _facts(x, topk_ids, activation, block_scales, global_num_experts)
    sent, received = _announce(choices, facts, device_of(x), ranks, error)
    tokens, ids = choices.sent(sum(sent.tokens))
    q, scale = quantize_int8_block(x) if block_scales else quantize_int8(x)
    packed = torch.cat([collectives.bytes_of(part) for part in (q[tokens], scale[tokens], ids)], 1)
    packed = collectives.all_to_all(packed, sent.tokens, received.tokens, ranks)
    sizes = x.shape[1], 4 * scale.shape[1], 4 * topk_ids.shape[1]
    arrived = [collectives.of_bytes(part, dtype) for part, dtype in zip(packed.split(sizes, 1), (torch.int8, torch.float32, torch.int32))]
    y = _of_local(*arrived, sum(received.choices), local, weights, x.dtype, activation, block_scales)
    back = collectives.all_to_all(y, received.choices, sent.choices, ranks)
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

    With 2 ranks, 4 experts, and the choices [[0, 3], [1, 0]] of two tokens: experts 0 and 1 are on rank 0. Both tokens go to rank 0, with the
    experts [[0, -1], [1, 0]]; token 0 goes to rank 1 too, with [[-1, 1]]. counts: [[2, 3], [1, 1]]. Results come back in order of rank, token and
    choice, so rows are [[0, 3], [1, 2]].
    """

    def __init__(self, topk_ids: torch.Tensor, global_num_experts: int, size: int):
        self._each = -(-global_num_experts // size)
        self._ids = topk_ids.contiguous()
        chosen = (self._ids >= 0) & (self._ids < global_num_experts)
        of_rank = torch.where(chosen, self._ids // self._each, -1)
        self._there = of_rank == torch.arange(size, device=topk_ids.device).view(-1, 1, 1)  # [ranks, tokens, choices]: the choice is of the rank
        self._goes = self._there.any(2)  # [ranks, tokens]
        self.counts = torch.stack((self._goes.sum(1), self._there.sum((1, 2))), 1)
        places = self._there.flatten().cumsum(0).view(self._there.shape) - 1  # of the true ones, in order of rank, token and choice
        place = places.gather(0, of_rank.clamp_min(0).to(torch.int64).unsqueeze(0))[0]
        self.rows = torch.where(chosen, place, -1).to(torch.int32)

    def sent(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens int64 [count] in order of rank they go to; their experts there int32 [count, choices], from 0 on each rank, -1 for those
        elsewhere). count: the sum of `counts[:, 0]`, for which the host has waited."""
        place = _first(self._goes, count)
        tokens = place % max(1, self._goes.shape[1])
        there = self._there.flatten(0, 1)[place]
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


def check_global(global_num_experts: object) -> None:
    """BadParamError unless it is a positive integer."""
    if isinstance(global_num_experts, bool) or not isinstance(global_num_experts, int) or global_num_experts < 1:
        raise BadParamError(f"global_num_experts: expected a positive integer, got {global_num_experts!r}")


def _checked(x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, activation, block_scales, global_num_experts, ranks: Ranks) -> _Local:
    """Checks the arguments of this rank. Raises a ScaledMMError that names one."""
    check_global(global_num_experts)
    check_experts(x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, activation, block_scales, least=0)
    part = part_of(global_num_experts, ranks.rank, ranks.size)
    if w13.shape[0] != part.stop - part.start:
        expected = f"the {part.stop - part.start} experts from {part.start} on, of {global_num_experts} over {ranks.size} ranks"
        raise BadTensorShapeError(f"w13: expected [E, 2 I, H] with {expected}, got {list(w13.shape)}")
    for name, sizes in (("x", {"H": x.shape[1]}), ("topk_ids", {"choices": topk_ids.shape[1]})):
        for size, value in sizes.items():
            if value < 1:
                raise BadTensorShapeError(f"{name}: expected [tokens, {size}] with {size} of at least 1, got {value}")
    moe.check_sort(topk_ids, global_num_experts)
    moe.check_ids(topk_ids, global_num_experts)
    return _Local(part.start, part.stop - part.start, global_num_experts)


def _facts(x, topk_ids, activation, block_scales, global_num_experts) -> dict[str, object]:
    """What all ranks must have in common, by the names in `_ARGUMENTS`."""
    sizes = {"H": x.shape[1], "dtype": x.dtype, "choices": topk_ids.shape[1]}
    return sizes | {"activation": activation, "block_scales": block_scales, "global_num_experts": global_num_experts}


_ARGUMENTS = {"H": "x", "dtype": "x", "choices": "topk_ids"} | {name: name for name in ("activation", "block_scales", "global_num_experts")}


class _Counts(NamedTuple):
    """How many tokens, and choices, go to each rank, or come from each."""

    tokens: list[int]
    choices: list[int]


def _announce(choices: _Choices | None, facts: dict, device: torch.device | None, ranks: Ranks, error: Exception | None) -> tuple[_Counts, _Counts]:
    """(what goes to each rank, what arrives from each). Raises on all ranks if one has an error, or other facts."""
    counts = torch.zeros(ranks.size, 2, dtype=torch.int64, device=ranks.device_of(device)) if choices is None else choices.counts
    state = counts.new_full((ranks.size, 1), int(error is not None)), counts.new_full((ranks.size, 1), code_of(facts))
    one = [1] * ranks.size
    try:
        arrived = collectives.all_to_all(torch.cat((counts, *state), 1), one, one, ranks)
        found = torch.cat((counts, arrived), 1).tolist()  # the host waits for the device here
    except RuntimeError:
        if error is None:
            raise
        raise error from None
    if any(row[4] for row in found) or len({row[5] for row in found}) > 1:
        ranks.explain(facts, error, **_ARGUMENTS)
    return _Counts([row[0] for row in found], [row[1] for row in found]), _Counts([row[2] for row in found], [row[3] for row in found])
