"""`ExpertParallelInt8Experts`: the experts of a mixture, of which each rank has some."""

from __future__ import annotations

import torch

from scaled_mm.errors import BadParamError, BadTensorDtypeError, BadTensorShapeError
from scaled_mm.nn.experts import Int8Experts
from scaled_mm.parallel.experts import all_reduce_experts, all_to_all_experts, check_global
from scaled_mm.parallel.ranks import Ranks, part_of, ranks_of

TOKENS = {"all": all_reduce_experts, "split": all_to_all_experts}


class ExpertParallelInt8Experts(Int8Experts):
    """An `Int8Experts` with the experts of this rank: `part_of(global_num_experts, rank, size)`.

    forward(hidden_states, top_k_index, top_k_weights): as of `Int8Experts`, with numbers of all experts. With tokens="all" every rank has all tokens
    (`all_reduce_experts`), with tokens="split" each has its own (`all_to_all_experts`). Made by `from_shard`.

    The bits are those of the whole layer on one process. Raises what these functions raise.
    """

    is_shard = True
    ranks: Ranks | None = None
    tokens = "all"
    global_num_experts = 0

    @classmethod
    def from_shard(
        cls,
        gate_up_proj: torch.Tensor,
        gate_up_proj_scale: torch.Tensor,
        down_proj: torch.Tensor,
        down_proj_scale: torch.Tensor,
        *,
        global_num_experts: int,
        group=None,
        tokens: str = "all",
        activation: str = "silu",
    ) -> ExpertParallelInt8Experts:
        """Of the E experts of this rank: gate_up_proj: int8 [E, 2 I, H]; down_proj: int8 [E, H, I]; their scales: float32 [E, 2 I, 1] and [E, H, 1].
        global_num_experts: of all ranks. tokens, activation: see the classes. A collective: all ranks must call it.

        Raises a ScaledMMError subclass on all ranks if one has a wrong argument, or if what must be the same differs."""
        ranks = Ranks.of(group)

        def facts() -> dict[str, object]:
            if not isinstance(tokens, str) or tokens not in TOKENS:
                raise BadParamError(f"tokens: expected {' or '.join(map(repr, TOKENS))}, got {tokens!r}")
            check_global(global_num_experts)
            part = part_of(global_num_experts, ranks.rank, ranks.size)
            _check_tensors(gate_up_proj, gate_up_proj_scale, down_proj, down_proj_scale, part.stop - part.start)
            inner, hidden = down_proj.shape[2], down_proj.shape[1]
            sizes = {"H": hidden, "I": inner} if down_proj.shape[0] else {"H": None, "I": None}
            return sizes | {"tokens": tokens, "global_num_experts": global_num_experts, "activation": activation}

        found = ranks.gather_facts(facts)
        same = {name: name for name in ("tokens", "global_num_experts", "activation")}
        ranks.require_same(found, **same)
        ranks.require_same([of_rank for of_rank in found if of_rank["H"] is not None], H="gate_up_proj", I="down_proj")
        experts, hidden, inner = down_proj.shape
        made = cls(experts, hidden, inner, activation=activation, device="meta")
        tensors = dict(gate_up_proj=gate_up_proj, gate_up_proj_scale=gate_up_proj_scale, down_proj=down_proj, down_proj_scale=down_proj_scale)
        for name, tensor in tensors.items():
            setattr(made, name, torch.nn.Parameter(tensor, requires_grad=False))
        made.ranks, made.tokens, made.global_num_experts = ranks, tokens, global_num_experts
        return made

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        weights = self.gate_up_proj, self.gate_up_proj_scale, self.down_proj, self.down_proj_scale
        options = dict(global_num_experts=self.global_num_experts, group=ranks_of(self), activation=self.activation)
        return TOKENS[self.tokens](hidden_states, *weights, top_k_weights, top_k_index, **options)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, global_num_experts={self.global_num_experts}, tokens={self.tokens}"


def _check_tensors(gate_up, gate_up_scale, down, down_scale, count: int) -> None:
    """Checks dtypes and shapes for `count` experts. Raises a ScaledMMError that names the argument."""
    given = dict(gate_up_proj=gate_up, gate_up_proj_scale=gate_up_scale, down_proj=down, down_proj_scale=down_scale)
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor):
            raise BadParamError(f"{name}: expected a tensor, got {type(tensor).__name__}")
        if tensor.is_meta:
            raise BadParamError(f"{name}: expected a tensor with memory, got one on the meta device")
    for name, tensor in (("gate_up_proj", gate_up), ("down_proj", down)):
        if tensor.dtype is not torch.int8:
            raise BadTensorDtypeError(f"{name}: expected int8, got {tensor.dtype}")
        if tensor.dim() != 3 or tensor.shape[0] != count:
            raise BadTensorShapeError(f"{name}: expected three dimensions, the first the {count} experts of this rank, got {list(tensor.shape)}")
    expected = {
        "gate_up_proj": [count, 2 * down.shape[2], down.shape[1]],
        "gate_up_proj_scale": [count, 2 * down.shape[2], 1],
        "down_proj_scale": [count, down.shape[1], 1],
    }
    for name, shape in expected.items():
        if list(given[name].shape) != shape:
            raise BadTensorShapeError(f"{name}: expected {shape} as down_proj {list(down.shape)}, got {list(given[name].shape)}")
        if name.endswith("_scale") and given[name].dtype is not torch.float32:
            raise BadTensorDtypeError(f"{name}: expected float32, got {given[name].dtype}")
