"""Implementations: this package, a loop of its plain products, Triton, a chain with its products, the steps around products, torch in bfloat16."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

import scaled_mm as sm
from scaled_mm.bench.experts.cases import BLOCK, LAYER, W13
from scaled_mm.bench.experts.inputs import ExpertsInputs
from scaled_mm.bench.int8.inputs import OUT_DTYPE
from scaled_mm.bench.ours import our_handle
from scaled_mm.bench.triton.tiles import Config, align, configs
from scaled_mm.errors import ScaledMMError
from scaled_mm.layers.experts import products_of_experts
from scaled_mm.measure.device import multiprocessors
from scaled_mm.measure.environment import version_of
from scaled_mm.measure.peer import OURS, Peer, TensorCall
from scaled_mm.rowwise import moe

LOOP, TRITON, CHAIN, STEPS, BF16 = "loop", "triton", "chain", "steps", "bf16"
OURS_ALL = (OURS, LOOP)


class ExpertsPeer(Peer):
    devices = ("cuda", "cpu")

    def serves(self, part: str, scales: str) -> bool:
        return True


class Ours(ExpertsPeer):
    """Outputs exist already."""

    name, label, int8 = OURS, "scaled_mm (this project): grouped_scaled_mm, grouped_block_scaled_mm, fused_experts", True

    def available(self, device: torch.device) -> str | None:
        try:
            our_handle(device)
        except ScaledMMError as error:
            return f"{type(error).__name__}: {error}"
        return None

    def prepare(self, inputs: ExpertsInputs) -> list[TensorCall]:
        if inputs.case.part == LAYER:
            return inputs.calls(lambda i: _call(inputs.layer, i, inputs.out(i)))

        def make(i: int) -> TensorCall:
            return _call(inputs.product, inputs.a(i), inputs.a_scale(i), inputs.routings[i].order.ends, inputs.out(i))

        return inputs.calls(make)

    def details(self, inputs: ExpertsInputs) -> dict[str, str]:
        if inputs.case.part == LAYER:
            return {}
        b = inputs.weight.transpose(1, 2)
        operands = dict(a=inputs.a(0), b=b, a_scale=inputs.a_scale(0), expert_offsets=inputs.routings[0].order.ends)
        if inputs.case.scales == BLOCK:
            scale, create = inputs.weight_scale.transpose(1, 2), sm.create_grouped_block_scaled_descriptor
        else:
            scale, create = inputs.weight_scale, sm.create_grouped_descriptor
        options = dict(expected_rows=inputs.expected_rows, zero_unassigned=False)
        with create(our_handle(inputs.device), out=inputs.out(0), b_scale=scale, **operands, **options) as descriptor:
            return {"kernel": descriptor.kernel.row, "reason": descriptor.kernel.reason}

    def version(self) -> str | None:
        return version_of("scaled_mm")


class Loop(Ours):
    """A plain product for each expert with rows, whose numbers the host knows."""

    name, label = LOOP, "scaled_mm (this project): a loop of scaled_mm or block_scaled_mm over the experts; the host knows the routing"

    def serves(self, part: str, scales: str) -> bool:
        return part != LAYER

    def prepare(self, inputs: ExpertsInputs) -> list[TensorCall]:
        block, weight, scales = inputs.case.scales == BLOCK, inputs.weight, inputs.weight_scale

        def make(i: int) -> TensorCall:
            a, a_scale, out, begin, products = inputs.a(i), inputs.a_scale(i), inputs.out(i), 0, []
            for expert, end in enumerate(inputs.routings[i].order.ends.tolist()):
                if end > begin:
                    rows, b, scale = slice(begin, end), weight[expert].t(), scales[expert]
                    operands = (a[rows], b, a_scale[rows], scale.t() if block else scale)
                    products.append((sm.block_scaled_mm if block else sm.scaled_mm, operands, out[rows]))
                begin = end

            def call() -> torch.Tensor:
                for function, operands, into in products:
                    function(*operands, out=into)
                return out

            return call

        return inputs.calls(make)

    def details(self, inputs: ExpertsInputs) -> dict[str, str]:
        return {}


class Triton(ExpertsPeer):
    """The best of its configurations, chosen by time before. Which rows lie in which tile is known before the call."""

    name, label, devices, int8, rival = (
        TRITON,
        "a persistent grouped kernel in Triton that gathers rows, the best of its configurations",
        ("cuda",),
        True,
        True,
    )

    def available(self, device: torch.device) -> str | None:
        return None if importlib.util.find_spec("triton") else "triton is not installed"

    def serves(self, part: str, scales: str) -> bool:
        return part != LAYER

    def prepare(self, inputs: ExpertsInputs) -> list[TensorCall]:
        self._config = config = best_config(inputs, inputs.case.part)
        return inputs.calls(lambda i: triton_product(inputs, inputs.case.part, config, i, inputs.out(i)))

    def finish(self, output: torch.Tensor, inputs: ExpertsInputs) -> torch.Tensor:
        """In the order of the experts: w13 is written in that of the copies."""
        return output[inputs.routings[0].order.order.long().clamp_min(0)] if inputs.case.part == W13 else output

    def details(self, inputs: ExpertsInputs) -> dict[str, str]:
        return {"note": str(self._config)}

    def version(self) -> str | None:
        return version_of("triton")


class Chain(ExpertsPeer):
    """The layer with the products of the Triton kernel, each step an operator of its own. Sort, quantizer and activation are this package's."""

    name, devices, int8, rival = CHAIN, ("cuda",), True, True
    label = "the layer from Triton products; sort, quantizer and activation of this project, weighted sum of torch"

    def available(self, device: torch.device) -> str | None:
        return Triton().available(device)

    def serves(self, part: str, scales: str) -> bool:
        return part == LAYER

    def prepare(self, inputs: ExpertsInputs) -> list[TensorCall]:
        from scaled_mm.bench.triton import grouped as tg

        case, w, x, sms = inputs.case, inputs.weights, inputs.x, multiprocessors(inputs.device)
        first, second = best_config(inputs, W13), best_config(inputs, "w2")
        quantize = sm.quantize_int8_block if case.scales == BLOCK else sm.quantize_int8
        h = torch.empty(case.copies, 2 * case.model.inner, dtype=OUT_DTYPE, device=inputs.device)
        y = torch.empty(case.copies, case.model.hidden, dtype=OUT_DTYPE, device=inputs.device)

        def make(i: int) -> TensorCall:
            routing, out = inputs.routings[i], inputs.out(i)
            factors = routing.topk_weights.to(OUT_DTYPE)[..., None]

            def call() -> torch.Tensor:
                order = sm.moe_sort(routing.topk_ids, case.model.here, expert_map=w.expert_map)
                q, scale = quantize(x)
                aligned = align(order.order, order.ends, first.bm, False)
                tg.product(first, q, scale, w.w13, w.w13_scale, aligned, h, case.model.choices, sms)
                q, scale = quantize(sm.silu_and_mul(h))
                if second.bm != first.bm:
                    aligned = align(order.order, order.ends, second.bm, False)
                tg.product(second, q, scale, w.w2, w.w2_scale, aligned, y, 1, sms)
                copies = y.view(case.M, case.model.choices, -1)
                if w.expert_map is not None:
                    copies = torch.where(order.inverse[..., None] >= 0, copies, 0)
                torch.sum(copies * factors, 1, out=out)
                return out

            return call

        return inputs.calls(make)

    def version(self) -> str | None:
        return version_of("triton")


class Steps(ExpertsPeer):
    """The steps of our layer before and after its products, which multiply once, before the timing, for routing 0."""

    name, label, devices = STEPS, "of the layer only sort, quantizer and weighted sum", ("cuda",)

    def serves(self, part: str, scales: str) -> bool:
        return part == LAYER

    def prepare(self, inputs: ExpertsInputs) -> list[TensorCall]:
        w, x, block = inputs.weights, inputs.x, inputs.case.scales == BLOCK
        order = inputs.routings[0].order
        of_rows = moe.quantize_to_rows(x, order.inverse, block)
        y = products_of_experts(*of_rows, w.w13, w.w13_scale, w.w2, w.w2_scale, order.ends, x.dtype, "silu", block, inputs.expected_rows)

        def make(i: int) -> TensorCall:
            routing, out = inputs.routings[i], inputs.out(i)

            def call() -> torch.Tensor:
                order = sm.moe_sort(routing.topk_ids, inputs.case.model.here, expert_map=w.expert_map)
                moe.quantize_to_rows(x, order.inverse, block)
                return moe.combine(y, routing.topk_weights, order.inverse, out)

            return call

        return inputs.calls(make)


class Bf16(ExpertsPeer):
    """torch's grouped product in bfloat16, of rows that are sorted already."""

    name, label, devices = BF16, "torch._grouped_mm in bfloat16", ("cuda",)

    def serves(self, part: str, scales: str) -> bool:
        return part != LAYER and scales != BLOCK  # its time does not depend on them

    def prepare(self, inputs: ExpertsInputs) -> list[TensorCall]:
        weight = inputs.weight.to(torch.bfloat16).mul_(inputs.weight_scale[..., None].to(torch.bfloat16)).transpose(1, 2)

        count = range(len(inputs.routings))
        a = [inputs.a(i).to(torch.bfloat16).mul_(inputs.a_scale(i).to(torch.bfloat16)) for i in count]
        return inputs.keeping(lambda i: torch._grouped_mm(a[i], weight, offs=inputs.routings[i].order.ends))


def every_peer() -> list[ExpertsPeer]:
    """All implementations but `Ours`."""
    return [Loop(), Triton(), Chain(), Steps(), Bf16()]


def best_config(inputs: ExpertsInputs, part: str) -> Config:
    """The configuration of the Triton kernel with the least time on this case."""
    from scaled_mm.bench.triton.grouped import fastest

    rows = inputs.case.copies / inputs.case.model.experts
    n = 2 * inputs.case.model.inner if part == W13 else inputs.case.model.hidden
    out = torch.empty(inputs.case.copies, n, dtype=OUT_DTYPE, device=inputs.device)
    return fastest(configs(rows, inputs.case.scales == BLOCK), lambda config: triton_product(inputs, part, config, 0, out))


def triton_product(inputs: ExpertsInputs, part: str, config: Config, i: int, out: torch.Tensor) -> Callable[..., torch.Tensor]:
    """w13 reads the token of each copy and writes copy t * choices + j to that row. w2 reads and writes rows sorted by expert."""
    from scaled_mm.bench.triton import grouped as tg

    w, order = inputs.weights, inputs.routings[i].order
    weight, scale = (w.w13, w.w13_scale) if part == W13 else (w.w2, w.w2_scale)
    a, a_scale = (inputs.tokens, inputs.token_scale) if part == W13 else (inputs.inner, inputs.inner_scale)
    aligned = align(order.order, order.ends, config.bm, part != W13)
    gather, sms = inputs.case.model.choices if part == W13 else 1, multiprocessors(inputs.device)
    return lambda compile_only=False: tg.product(config, a, a_scale, weight, scale, aligned, out, gather, sms, compile_only)


def _call(function: Callable[..., torch.Tensor], *arguments) -> TensorCall:
    return lambda: function(*arguments)
