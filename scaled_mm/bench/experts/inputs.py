"""The operands of experts: weights, tokens, and routings that rotate, so that successive calls read other experts' weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

import scaled_mm as sm
from scaled_mm.bench.experts.cases import BLOCK, LAYER, SKEWED, W13, ExpertsCase, Model
from scaled_mm.bench.int8.inputs import INT8_STD, OUT_DTYPE, UNIFORM
from scaled_mm.layers.experts import expected_rows
from scaled_mm.measure.device import last_level_cache_bytes
from scaled_mm.measure.roofline import PEAKS
from scaled_mm.measure.rotation import RotatedOutputs, RotatedWeights, output_slots

#: Expert of rank r of a skewed routing is chosen in proportion to 1 / r, as words are (Zipf).
ZIPF = 1.0
CHECKED_ROWS, CHECKED_TOKENS = 48, 4
#: Routings that rotate: with few tokens each reads other experts; with many each reads all of them, and the rows take memory.
ROUTINGS, FEW_ROUTINGS, MANY_TOKENS = 8, 2, 512


@dataclass(frozen=True)
class Routing:
    """topk_ids: int64 [T, choices], of all experts. topk_weights: float32. order: of the copies whose expert is here. active: experts with rows."""

    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    order: sm.ExpertOrder
    active: int


class ExpertsWeights(RotatedWeights):
    """w13 int8 [here, 2 I, H], w2 int8 [here, H, I] and their scales, of channels [here, N] or of blocks. One set: the routings rotate.

    cold: whether all experts together exceed the cache. tensors: w13, w13_scale, w2, w2_scale; None: random ones.
    """

    def __init__(self, model: Model, block: bool, device: torch.device, generator: torch.Generator, tensors: tuple[torch.Tensor, ...] | None = None):
        everything = model.here * 3 * model.hidden * model.inner
        super().__init__(everything, everything, device, 1)
        self.model, self.block = model, block
        if tensors is None:
            tensors = (*self._random(2 * model.inner, model.hidden, generator), *self._random(model.hidden, model.inner, generator))
        self.w13, self.w13_scale, self.w2, self.w2_scale = tensors
        self.expert_map = None
        if model.here < model.experts:
            self.expert_map = torch.full((model.experts,), -1, dtype=torch.int32, device=device)
            self.expert_map[: model.here] = torch.arange(model.here, dtype=torch.int32, device=device)

    def _random(self, n: int, k: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        here, device = self.model.here, self.device
        weight = torch.empty(here, n, k, dtype=torch.int8, device=device)
        for of_expert in weight:
            of_expert.copy_(torch.randint(-128, 128, (n, k), dtype=torch.int8, device=device, generator=generator))
        shape = (here, -(-n // 128), -(-k // 128)) if self.block else (here, n)
        return weight, (torch.rand(shape, device=device, generator=generator) + 0.5) / (INT8_STD[UNIFORM] * math.sqrt(k))


class ExpertsInputs(RotatedOutputs):
    """A case. x: bfloat16 [T, H]. a(i), a_scale(i): the rows of a product, int8 [copies, K], sorted by expert for routing i."""

    case: ExpertsCase

    def __init__(self, case: ExpertsCase, weights: ExpertsWeights, generator: torch.Generator):
        super().__init__(case, weights, OUT_DTYPE)
        model, device = case.model, self.device
        self.x = torch.randn(case.M, model.hidden, device=device, generator=generator).to(torch.bfloat16)
        inner = torch.randn(case.copies, model.inner, device=device, generator=generator).to(torch.bfloat16)
        quantize = sm.quantize_int8_block if case.scales == BLOCK else sm.quantize_int8
        self.tokens, self.token_scale = quantize(self.x)
        self.inner, self.inner_scale = quantize(inner)
        self.routings = [self._routing(i, generator) for i in range(FEW_ROUTINGS if case.M > MANY_TOKENS else ROUTINGS)]
        each = case.N * OUT_DTYPE.itemsize * (case.M if case.part == LAYER else case.copies)
        self.slots = output_slots(len(self.routings), each, last_level_cache_bytes(device))
        self.outs = self.make_outputs(case.M, OUT_DTYPE)

    def make_outputs(self, rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return super().make_outputs(rows if self.case.part == LAYER else self.case.copies, dtype)

    def calls(self, make: Callable[[int], Callable[[], torch.Tensor]]) -> list[Callable[[], torch.Tensor]]:
        """`make(i)` for every routing i."""
        return [make(i) for i in range(len(self.routings))]

    @property
    def expected_rows(self) -> int | None:
        return expected_rows(*self.routings[0].topk_ids.shape, self.case.model.here, self.weights.expert_map)

    @property
    def weight(self) -> torch.Tensor:
        return self.weights.w13 if self.case.part == W13 else self.weights.w2

    @property
    def weight_scale(self) -> torch.Tensor:
        return self.weights.w13_scale if self.case.part == W13 else self.weights.w2_scale

    def a(self, i: int) -> torch.Tensor:
        return self.tokens[self._tokens_of(i)] if self.case.part == W13 else self.inner

    def a_scale(self, i: int) -> torch.Tensor:
        return self.token_scale[self._tokens_of(i)] if self.case.part == W13 else self.inner_scale

    def product(self, a: torch.Tensor, a_scale: torch.Tensor, ends: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The grouped product of the part by this package, as `fused_experts` calls it: unassigned rows are not written."""
        b, scale, options = self.weight.transpose(1, 2), self.weight_scale, dict(expected_rows=self.expected_rows, zero_unassigned=False)
        if self.case.scales == BLOCK:
            return sm.grouped_block_scaled_mm(a, b, a_scale, scale.transpose(1, 2), ends, out=out, **options)
        return sm.grouped_scaled_mm(a, b, a_scale, scale, ends, out=out, **options)

    def layer(self, i: int, out: torch.Tensor) -> torch.Tensor:
        """The whole layer by this package."""
        w, routing = self.weights, self.routings[i]
        options = dict(block_scales=self.case.scales == BLOCK, expert_map=w.expert_map, out=out)
        return sm.fused_experts(self.x, w.w13, w.w13_scale, w.w2, w.w2_scale, routing.topk_weights, routing.topk_ids, **options)

    # ---- what is right --------------------------------------------------------------------------------------------------------

    @cached_property
    def checked_rows(self) -> torch.Tensor:
        """Rows of the output for routing 0 that are compared with the reference."""
        most = self.case.M if self.case.part == LAYER else int(self.routings[0].order.ends[-1])
        count = min(most, CHECKED_TOKENS if self.case.part == LAYER else CHECKED_ROWS)
        return torch.linspace(0, max(most - 1, 0), count, dtype=torch.float64).round().long().to(self.device)

    @cached_property
    def expected(self) -> torch.Tensor:
        """These rows by the CPU backend, on the device."""
        rows = self.checked_rows
        found = self._expected_layer(rows) if self.case.part == LAYER else self._expected_product(rows)
        return found.to(self.device)

    def _expected_product(self, rows: torch.Tensor) -> torch.Tensor:
        experts = torch.searchsorted(self.routings[0].order.ends, rows.to(torch.int32), right=True)
        a, a_scale, out = self.a(0)[rows].cpu(), self.a_scale(0)[rows].cpu(), []
        for row, expert in enumerate(experts.tolist()):
            b, scale, one = self.weight[expert].cpu().t(), self.weight_scale[expert].cpu(), slice(row, row + 1)
            product = sm.block_scaled_mm if self.case.scales == BLOCK else sm.scaled_mm
            out.append(product(a[one], b, a_scale[one], scale.t() if self.case.scales == BLOCK else scale, out_dtype=OUT_DTYPE))
        return torch.cat(out)

    def _expected_layer(self, rows: torch.Tensor) -> torch.Tensor:
        w, routing = self.weights, self.routings[0]
        ids = routing.topk_ids[rows].cpu()
        here = ids if w.expert_map is None else w.expert_map.cpu()[ids].long()
        used = here[here >= 0].unique()
        if used.numel() == 0:
            return torch.zeros(len(rows), self.case.N, dtype=OUT_DTYPE)
        renamed = torch.full((self.case.model.here,), -1)
        renamed[used] = torch.arange(len(used))
        ids = torch.where(here >= 0, renamed[here.clamp_min(0)], -1)
        of_experts = [t[used.to(self.device)].cpu() for t in (w.w13, w.w13_scale, w.w2, w.w2_scale)]
        return sm.fused_experts(self.x[rows].cpu(), *of_experts, routing.topk_weights[rows].cpu(), ids, block_scales=self.case.scales == BLOCK)

    # ---- the roof ----------------------------------------------------------------------------------------------------------------

    @property
    def traffic_bytes(self) -> int:
        """Weights of the experts with rows, read once; rows read and written once. Of a layer: the weights of both products, x and out.

        Scales are not counted.
        """
        model, case = self.case.model, self.case
        active = sum(routing.active for routing in self.routings) / len(self.routings)
        rows = sum(int(routing.order.ends[-1]) for routing in self.routings) / len(self.routings)
        if case.part == LAYER:
            return int(active * 3 * model.hidden * model.inner + 4 * case.M * model.hidden)
        return int(active * case.N * case.K + rows * (case.K + 2 * case.N))

    def roof_us(self, gpu: str) -> float | None:
        """The larger of arithmetic and memory traffic; None for an unknown GPU."""
        if gpu not in PEAKS:
            return None
        rows = sum(int(routing.order.ends[-1]) for routing in self.routings) / len(self.routings)
        of_row = 3 * self.case.model.hidden * self.case.model.inner if self.case.part == LAYER else self.case.N * self.case.K
        operations, bandwidth = PEAKS[gpu]
        return 1e6 * max(2 * rows * of_row / operations, self.traffic_bytes / bandwidth)

    # ---- routing -------------------------------------------------------------------------------------------------------------------

    def _routing(self, i: int, generator: torch.Generator) -> Routing:
        """Gumbel noise makes top-k a draw without replacement. Experts are renamed from one routing to the next, so that few tokens read others."""
        model, device, case = self.case.model, self.device, self.case
        noise = -torch.log(-torch.log(torch.rand(case.M, model.experts, device=device, generator=generator).clamp(1e-9, 1 - 1e-7)))
        if case.routing == SKEWED:
            noise -= ZIPF * torch.log(torch.arange(1, model.experts + 1, device=device))
        weights, ids = noise.softmax(-1).topk(model.choices)
        ids = (ids + i * model.choices) % model.experts
        order = sm.moe_sort(ids, model.here, expert_map=self.weights.expert_map)
        rows = torch.diff(order.ends, prepend=order.ends.new_zeros(1))
        return Routing(ids, weights / weights.sum(-1, keepdim=True), order, int((rows > 0).sum()))

    def _tokens_of(self, i: int) -> torch.Tensor:
        """The token of each row; token 0 for unassigned rows."""
        return self.routings[i].order.order.long().clamp_min(0) // self.case.model.choices
