"""The ways from this rank's part of an activation to the quantized input of the next layer on every rank, as calls on tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

import scaled_mm as sm
from scaled_mm.bench.experts.cases import Model
from scaled_mm.parallel.cost.linear import BF16, EXACT, EXACT_ALL_REDUCE, EXACT_INT8
from scaled_mm.parallel.ranks import Ranks, part_of

EXACT_WAYS = (EXACT, EXACT_INT8, EXACT_ALL_REDUCE)
ONE_GPU, TORCH_ASYNC = "one_gpu", "torch_async"


@dataclasses.dataclass(frozen=True)
class Way:
    """name: of the cost model, or ONE_GPU or TORCH_ASYNC. call: computes. result: what must have the bits of one GPU; None: nothing is expected to.
    graph: whether a CUDA graph may hold it."""

    name: str
    call: Callable[[], object]
    chunks: int = 1
    static: bool = False
    result: Callable[[object], torch.Tensor] | None = None
    graph: bool = True


class LinearLayer:
    """A row-parallel layer of M tokens, [N, K] over all ranks, with the residual and norm that follow. The same operands on all ranks."""

    def __init__(self, m: int, n: int, k: int, ranks: Ranks, device: torch.device, seed: int):
        generator = torch.Generator(device).manual_seed(seed)
        random = dict(generator=generator, device=device)
        self.ranks, self.m, self.rows = ranks, m, part_of(m, ranks.rank, ranks.size)
        self.x = torch.randn(m, k, **random).to(torch.bfloat16)
        self.x[:, ::97] *= 20  # outliers, as activations have
        self.weight = torch.randint(-127, 128, (n, k), dtype=torch.int8, **random)
        self.scale = torch.rand(n, **random) * 1e-3 + 1e-4
        self.residual, self.norm = torch.randn(m, n, **random).to(torch.bfloat16), torch.rand(n, **random).to(torch.bfloat16)
        columns = part_of(k, ranks.rank, ranks.size)
        self.part = self.x[:, columns].contiguous()
        self.prepared = sm.prepare_weight(self.weight[:, columns].contiguous().t())
        self.static = self.x.abs().amax().float().view(1) / 127

    def one_gpu(self, static: bool = False) -> torch.Tensor:
        """int8: the quantized result of the whole layer on one GPU."""
        return self._quantized(sm.int8_linear(self.x, self.weight, self.scale, input_scale=self.static if static else None)).q

    def _quantized(self, y: torch.Tensor, rows: slice = slice(None)) -> sm.nn.QuantizedActivation:
        (q, scale), _ = sm.add_rms_norm(y, self.residual[rows], self.norm, quantize="token")
        return sm.nn.QuantizedActivation(q, scale, y.dtype)

    def ways(self, chunks: tuple[int, ...]) -> Iterator[Way]:
        """All ways; those that reduce in chunks with each of the numbers."""
        yield Way(ONE_GPU, self.one_gpu)
        yield Way(BF16, lambda: self._quantized(self._everywhere(exact=False)))
        for static in (False, True):
            for name in EXACT_WAYS:
                for count in chunks if name != EXACT_ALL_REDUCE else (1,):
                    call = lambda name=name, count=count, static=static: self._exact(name, count, static)  # noqa: E731
                    yield Way(name, call, count, static, lambda found: found.q)
        if (fused := self._torch_async()) is not None:
            yield fused

    def _exact(self, name: str, chunks: int, static: bool) -> sm.nn.QuantizedActivation:
        options = dict(group=self.ranks, input_scale=self.static if static else None, chunks=chunks)
        if name == EXACT_INT8:
            mine = sm.parallel.reduce_scatter_linear(self.part, self.prepared, self.scale, **options)
            return sm.parallel.all_gather_rows(self._quantized(mine, self.rows), self.m, group=self.ranks)
        via = "all_reduce" if name == EXACT_ALL_REDUCE else "reduce_scatter"
        return self._quantized(sm.parallel.all_reduce_linear(self.part, self.prepared, self.scale, via=via, **options))

    def _everywhere(self, exact: bool) -> torch.Tensor:
        return sm.parallel.all_reduce_linear(self.part, self.prepared, self.scale, group=self.ranks, exact=exact)

    def _torch_async(self) -> Way | None:
        """torch's product and reduce-scatter in one operator, in bfloat16, then a gather of bfloat16; None where it does not apply."""
        if self.part.device.type != "cuda" or self.m % self.ranks.size or self.ranks.size == 1:
            return None
        from torch.distributed import _symmetric_memory as symmetric

        columns = part_of(self.weight.shape[1], self.ranks.rank, self.ranks.size)
        weight = (self.weight[:, columns].float() * self.scale.view(-1, 1)).to(torch.bfloat16).t()
        name = self.ranks.group.group_name

        def call() -> sm.nn.QuantizedActivation:
            mine = torch.ops.symm_mem.fused_matmul_reduce_scatter(self.part, weight, "sum", scatter_dim=0, group_name=name)
            return sm.parallel.all_gather_rows(self._quantized(mine, self.rows), self.m, group=self.ranks)

        try:
            symmetric.enable_symm_mem_for_group(name)
        except (RuntimeError, AttributeError):
            return None
        return Way(TORCH_ASYNC, call, graph=False)


class ExpertsLayer:
    """The experts of a mixture, over the ranks, for M tokens of all ranks together. The same operands on all ranks."""

    def __init__(self, m: int, model: Model, ranks: Ranks, device: torch.device, seed: int):
        random = dict(generator=torch.Generator(device).manual_seed(seed), device=device)
        experts, hidden, inner = model.experts, model.hidden, model.inner
        self.ranks, self.m, self.experts = ranks, m, experts
        self.rows, self.mine = part_of(m, ranks.rank, ranks.size), part_of(experts, ranks.rank, ranks.size)
        self.x = torch.randn(m, hidden, **random).to(torch.bfloat16)
        self.w13 = torch.randint(-127, 128, (experts, 2 * inner, hidden), dtype=torch.int8, **random)
        self.w2 = torch.randint(-127, 128, (experts, hidden, inner), dtype=torch.int8, **random)
        self.scales = torch.rand(experts, 2 * inner, **random) * 1e-3, torch.rand(experts, hidden, **random) * 1e-3
        self.weights = torch.rand(m, model.choices, **random)
        self.ids = torch.rand(m, experts, **random).topk(model.choices).indices.to(torch.int32)
        numbers = torch.arange(experts, device=device, dtype=torch.int32) - self.mine.start
        self.map = torch.where((numbers >= 0) & (numbers < self.mine.stop - self.mine.start), numbers, -1)

    def one_gpu(self) -> torch.Tensor:
        return sm.fused_experts(self.x, self.w13, self.scales[0], self.w2, self.scales[1], self.weights, self.ids)

    def _shards(self) -> tuple[torch.Tensor, ...]:
        return self.w13[self.mine], self.scales[0][self.mine], self.w2[self.mine], self.scales[1][self.mine]

    def ways(self) -> Iterator[Way]:
        options = dict(global_num_experts=self.experts, group=self.ranks)
        whole = lambda found: found  # noqa: E731
        yield Way(ONE_GPU, self.one_gpu)
        yield Way(BF16, self._usual)
        replicated = lambda: sm.parallel.all_reduce_experts(self.x, *self._shards(), self.weights, self.ids, **options)  # noqa: E731
        yield Way("replicated", replicated, result=whole)

        def sent() -> torch.Tensor:
            mine = self.x[self.rows], *self._shards(), self.weights[self.rows], self.ids[self.rows]
            return sm.parallel.all_gather_rows(sm.parallel.all_to_all_experts(*mine, **options), self.m, group=self.ranks)

        yield Way("all_to_all", sent, result=whole, graph=False)

    def _usual(self) -> torch.Tensor:
        y = sm.fused_experts(self.x, *self._shards(), self.weights, self.ids, expert_map=self.map)
        dist.all_reduce(y, group=self.ranks.group)
        return y
