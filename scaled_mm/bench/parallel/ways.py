"""The ways from this rank's part of an activation to the quantized input of the next layer on every rank, as calls on tensors."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

import scaled_mm as sm
from scaled_mm.bench.experts.cases import Model
from scaled_mm.parallel.collectives import bytes_of
from scaled_mm.parallel.cost.linear import BF16, EXACT, EXACT_ALL_REDUCE, EXACT_INT8, GATHER, GATHER_INT8
from scaled_mm.parallel.ranks import Ranks, part_of

EXACT_WAYS = (EXACT, EXACT_INT8, EXACT_ALL_REDUCE)
GATHERS = {GATHER: "float", GATHER_INT8: "int8"}  # gather_input of `gather_linear`
ONE_GPU, TORCH_ASYNC = "one_gpu", "torch_async"
_BEYOND_L2 = 160 << 20  # bytes


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
    """A layer of M tokens whose input is divided along K, [N, K] over all ranks, with the residual and norm that follow.

    The weight is divided along K, or along N for the ways that gather the input; these are left out unless the ranks divide K and N. The same
    operands on all ranks."""

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
        self._wholes, self._shards = _copies(self.weight, device), _copies(self.weight[:, columns].contiguous(), device)
        self.outputs = part_of(n, ranks.rank, ranks.size)
        self._blocks = None if n % ranks.size or k % ranks.size else _copies(self.weight[self.outputs], device)
        self.static = self.x.abs().amax().float().view(1) / 127

    def one_gpu(self, static: bool = False) -> torch.Tensor:
        """int8 [M, N + 4]: the quantized result of the whole layer on one GPU, with the bytes of its scales."""
        return _bits_of(self._on_one_gpu(static))

    def _on_one_gpu(self, static: bool = False) -> sm.nn.QuantizedActivation:
        return self._quantized(sm.int8_linear(self.x, next(self._wholes), self.scale, input_scale=self.static if static else None))

    def _quantized(self, y: torch.Tensor, rows: slice = slice(None)) -> sm.nn.QuantizedActivation:
        (q, scale), _ = sm.add_rms_norm(y, self.residual[rows], self.norm, quantize="token")
        return sm.nn.QuantizedActivation(q, scale, y.dtype)

    def ways(self, chunks: tuple[int, ...]) -> Iterator[Way]:
        """All ways; those that reduce in chunks with each of the numbers."""
        yield Way(ONE_GPU, self._on_one_gpu)
        yield Way(BF16, self._usual)
        for static in (False, True):
            for name in EXACT_WAYS:
                for count in chunks if name != EXACT_ALL_REDUCE else (1,):
                    call = lambda name=name, count=count, static=static: self._exact(name, count, static)  # noqa: E731
                    yield Way(name, call, count, static, _bits_of)
            for name in GATHERS if self._blocks is not None else ():
                yield Way(name, lambda name=name, static=static: self._gathered(name, static), static=static, result=_bits_of)
        if (fused := self._torch_async()) is not None:
            yield fused

    def _exact(self, name: str, chunks: int, static: bool) -> sm.nn.QuantizedActivation:
        options = dict(group=self.ranks, input_scale=self.static if static else None, chunks=chunks)
        if name == EXACT_INT8:
            mine = sm.parallel.reduce_scatter_linear(self.part, next(self._shards), self.scale, **options)
            return sm.parallel.all_gather_rows(self._quantized(mine, self.rows), self.m, group=self.ranks)
        via = "all_reduce" if name == EXACT_ALL_REDUCE else "reduce_scatter"
        return self._quantized(sm.parallel.all_reduce_linear(self.part, next(self._shards), self.scale, via=via, **options))

    def _gathered(self, name: str, static: bool) -> sm.nn.QuantizedActivation:
        options = dict(group=self.ranks, input_scale=self.static if static else None, gather_input=GATHERS[name])
        return self._quantized(sm.parallel.gather_linear(self.part, next(self._blocks), self.scale[self.outputs], **options))

    def _usual(self) -> sm.nn.QuantizedActivation:
        return self._quantized(sm.parallel.all_reduce_linear(self.part, next(self._shards), self.scale, group=self.ranks, exact=False))

    def _torch_async(self) -> Way | None:
        """torch's product and reduce-scatter in one operator, in bfloat16; norm and quantizer on the rank's rows, then a gather of int8. None on all
        ranks, with a warning, where it does not run."""
        if self.part.device.type != "cuda" or self.m % self.ranks.size or self.ranks.size == 1:
            return None
        from torch.distributed import _symmetric_memory as symmetric

        columns = part_of(self.weight.shape[1], self.ranks.rank, self.ranks.size)
        weight = (self.weight[:, columns].float() * self.scale.view(-1, 1)).to(torch.bfloat16).t()
        name = self.ranks.group.group_name

        def call() -> sm.nn.QuantizedActivation:
            mine = torch.ops.symm_mem.fused_matmul_reduce_scatter(self.part, weight, "sum", scatter_dim=0, group_name=name)
            return sm.parallel.all_gather_rows(self._quantized(mine, self.rows), self.m, group=self.ranks)

        def attempt() -> dict[str, object]:
            if _torch_version() < (2, 11):  # later ones need no call, and warn
                symmetric.enable_symm_mem_for_group(name)
            call()
            torch.cuda.synchronize()
            return {}

        try:
            self.ranks.gather_facts(attempt)
        except (RuntimeError, AttributeError, ValueError) as error:
            warnings.warn(f"{TORCH_ASYNC} is not measured: {type(error).__name__}: {error}", stacklevel=2)
            return None
        return Way(TORCH_ASYNC, call, graph=False)


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _copies(weight: torch.Tensor, device: torch.device) -> Iterator[sm.PreparedWeight]:
    """Prepared copies of a weight [N, K] in turn, that together exceed the L2 of a GPU: between two calls a model reads its other layers."""
    count = 1 if device.type == "cpu" else max(1, -(-_BEYOND_L2 // weight.numel()))
    return itertools.cycle([sm.prepare_weight(weight.clone().t()) for _ in range(count)])


def _bits_of(found: sm.nn.QuantizedActivation) -> torch.Tensor:
    return torch.cat((found.q, bytes_of(found.scale.reshape(-1, 1))), 1)


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
