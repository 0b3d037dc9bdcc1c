"""The layer from vLLM's operators, over outputs that exist already. Experts are multiplied by the Triton kernel of `bench experts`."""

from __future__ import annotations

from collections.abc import Callable

import torch

import scaled_mm as sm
from scaled_mm.bench.decoder.inputs import EPSILON, DecoderInputs, Layer, Pair, attention
from scaled_mm.bench.decoder.plain import routed
from scaled_mm.bench.experts.cases import BALANCED, CHANNEL, ExpertsCase
from scaled_mm.bench.experts.cases import LAYER as WHOLE
from scaled_mm.bench.experts.cases import MODELS as MIXTURES
from scaled_mm.bench.experts.cases import Model as ExpertsModel
from scaled_mm.bench.triton.tiles import Config, align
from scaled_mm.measure.device import multiprocessors

NAMES = ("rms_norm_dynamic_per_token_quant", "dynamic_scaled_int8_quant", "cutlass_scaled_mm", "rotary_embedding", "silu_and_mul")
OF_MIXTURES = ("fused_qk_norm_rope", "fused_add_rms_norm")


class VllmLayer:
    """One layer: `call()` returns (output, residual), bfloat16 [T, H]. The residual is written in place, as vLLM's models do."""

    def __init__(self, inputs: DecoderInputs, weights: Layer, packet: Callable[[str], Callable]):
        self.inputs, self.weights, self.model = inputs, weights, inputs.case.model
        self.op = {name: packet(name) for name in (NAMES if weights.router is None else NAMES + OF_MIXTURES)}
        tokens, m = inputs.case.M, self.model
        self.residual = inputs.residual.clone()
        self.cos_sin = torch.cat((inputs.cos, inputs.sin), -1)
        self.scale = self._empty(tokens, 1, dtype=torch.float32)
        self.h_q, self.attended_q = (self._empty(tokens, n, dtype=torch.int8) for n in (m.hidden, m.of_query))
        self.qkv, self.h = self._empty(tokens, m.of_qkv), self._empty(tokens, m.hidden)
        if weights.router is None:
            self.gate_up, self.gated = self._empty(tokens, 2 * m.inner), self._empty(tokens, m.inner)
            self.gated_q, self.out = self._empty(tokens, m.inner, dtype=torch.int8), self._empty(tokens, m.hidden)
        else:
            self.experts = _Experts(inputs, weights, self.op)

    def call(self) -> Pair:
        w, op, m = self.weights, self.op, self.model
        op["rms_norm_dynamic_per_token_quant"](self.h_q, self.inputs.x, w.norms[0], self.scale, EPSILON, None, self.residual)
        self._product(self.qkv, self.h_q, w.qkv)
        query, key, value = self.qkv.split((m.of_query, m.kv_heads * m.head, m.kv_heads * m.head), 1)
        if w.head_norms is None:
            op["rotary_embedding"](self.inputs.positions, query, key, m.head, self.cos_sin, True)
        else:
            sizes = (m.heads, m.kv_heads, m.kv_heads, m.head, EPSILON)
            op["fused_qk_norm_rope"](self.qkv, *sizes, *w.head_norms, self.cos_sin, True, self.inputs.positions)
        attended = attention(*(tensor.view(len(tensor), -1, m.head) for tensor in (query, key, value)))
        op["dynamic_scaled_int8_quant"](self.attended_q, attended, self.scale, None)
        self._product(self.h, self.attended_q, w.o)
        if w.router is not None:
            op["fused_add_rms_norm"](self.h, self.residual, w.norms[1], EPSILON)
            return self.experts.call(self.h), self.residual
        op["rms_norm_dynamic_per_token_quant"](self.h_q, self.h, w.norms[1], self.scale, EPSILON, None, self.residual)
        self._product(self.gate_up, self.h_q, w.gate_up)
        op["silu_and_mul"](self.gated, self.gate_up)
        op["dynamic_scaled_int8_quant"](self.gated_q, self.gated, self.scale, None)
        self._product(self.out, self.gated_q, w.down)
        return self.out, self.residual

    def _product(self, out: torch.Tensor, q: torch.Tensor, weight) -> None:
        self.op["cutlass_scaled_mm"](out, q, weight.q.t(), self.scale, weight.scale.t(), None)

    def _empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.inputs.device)


class _Experts:
    """The chain of `bench experts`: vLLM's quantizer and activation, products by Triton; sort of this project, weighted sum of torch."""

    def __init__(self, inputs: DecoderInputs, weights: Layer, op: dict[str, Callable]):
        m, tokens = inputs.case.model, inputs.case.M
        self.model, self.weights, self.op, self.sms = m, weights, op, multiprocessors(inputs.device)
        self.configs = configurations(inputs, weights)

        def empty(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(rows, columns, dtype=dtype, device=inputs.device)

        copies = tokens * m.choices
        self.q, self.q_scale = empty(tokens, m.hidden, torch.int8), empty(tokens, 1, torch.float32)
        self.gate_up, self.gated, self.y = empty(copies, 2 * m.inner), empty(copies, m.inner), empty(copies, m.hidden)
        self.gated_q, self.gated_scale = empty(copies, m.inner, torch.int8), empty(copies, 1, torch.float32)

    def call(self, h: torch.Tensor) -> torch.Tensor:
        from scaled_mm.bench.triton import grouped

        m, w, op, (first, second) = self.model, self.weights, self.op, self.configs
        factors, ids = routed(h, w.router, m.choices)
        order = sm.moe_sort(ids, m.experts)
        op["dynamic_scaled_int8_quant"](self.q, h, self.q_scale, None)
        aligned = align(order.order, order.ends, first.bm, False)
        grouped.product(first, self.q, self.q_scale, w.gate_up.q, w.gate_up.scale.squeeze(-1), aligned, self.gate_up, m.choices, self.sms)
        op["silu_and_mul"](self.gated, self.gate_up)
        op["dynamic_scaled_int8_quant"](self.gated_q, self.gated, self.gated_scale, None)
        if second.bm != first.bm:
            aligned = align(order.order, order.ends, second.bm, False)
        grouped.product(second, self.gated_q, self.gated_scale, w.down.q, w.down.scale.squeeze(-1), aligned, self.y, 1, self.sms)
        return (self.y.view(-1, m.choices, m.hidden) * factors.to(h.dtype)[..., None]).sum(1)


def configurations(inputs: DecoderInputs, weights: Layer) -> tuple[Config, Config]:
    """Those of the Triton kernel with the least time for the two products, by the choice of `bench experts` on a routing of its own."""
    from scaled_mm.bench.experts.inputs import ExpertsInputs, ExpertsWeights
    from scaled_mm.bench.experts.peers import best_config

    m = inputs.case.model
    mixture = ExpertsModel(m.experts, m.experts, m.choices, m.hidden, m.inner)
    name = next((name for name, known in MIXTURES.items() if known == mixture), None)
    if name is None:
        raise ValueError(f"expected a mixture that `bench experts` knows, got {mixture}")
    tensors = weights.gate_up.q, weights.gate_up.scale.squeeze(-1), weights.down.q, weights.down.scale.squeeze(-1)
    generator = torch.Generator(inputs.device).manual_seed(0)
    of_experts = ExpertsWeights(mixture, False, inputs.device, generator, tensors)
    case = ExpertsCase(name, inputs.case.M, m.hidden, m.inner, WHOLE, BALANCED, CHANNEL)
    made = ExpertsInputs(case, of_experts, generator)
    return best_config(made, "w13"), best_config(made, "w2")
