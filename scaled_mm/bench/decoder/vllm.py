"""The layer from vLLM's operators, with preallocated outputs. Experts are multiplied by the Triton kernel of `bench experts`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from scaled_mm.bench.decoder.inputs import EPSILON, DecoderInputs, Pair, Weight, attention
from scaled_mm.bench.experts.cases import BALANCED, CHANNEL, ExpertsCase
from scaled_mm.bench.experts.cases import LAYER as WHOLE
from scaled_mm.bench.experts.cases import MODELS as MIXTURES
from scaled_mm.bench.experts.cases import Model as ExpertsModel
from scaled_mm.bench.triton.tiles import Aligned, Config
from scaled_mm.measure.device import multiprocessors

NAMES = ("rms_norm_dynamic_per_token_quant", "dynamic_scaled_int8_quant", "cutlass_scaled_mm", "rotary_embedding", "silu_and_mul")
#: Further ones of mixtures: of the same library, and of that for experts.
OF_MIXTURES = ("fused_qk_norm_rope", "fused_add_rms_norm", "topk_softmax", "moe_align_block_size", "moe_sum")
Operators = dict[str, Callable]
Configs = tuple[Config, Config]


class VllmLayer:
    """Layer i: `call()` returns (output, residual), bfloat16 [T, H].

    The residual is written in place, as in vLLM's models, so it grows from replay to replay. configs: of the Triton kernel, for a mixture.
    """

    def __init__(self, inputs: DecoderInputs, i: int, op: Operators, configs: Configs | None = None):
        self.inputs, self.weights, self.op, self.model = inputs, inputs.weights.layers[i], op, inputs.case.model
        tokens, m = inputs.case.M, self.model
        self.residual = inputs.residual.clone()
        self.cos_sin = torch.cat((inputs.cos, inputs.sin), -1)
        self.scale = self._empty(tokens, 1, dtype=torch.float32)
        self.h_q, self.attended_q = (self._empty(tokens, n, dtype=torch.int8) for n in (m.hidden, m.of_query))
        self.qkv, self.h, self.out = self._empty(tokens, m.of_qkv), self._empty(tokens, m.hidden), inputs.out(i)
        if configs is not None:
            self.experts = _Experts(self, configs)
        else:
            self.gate_up, self.gated = self._empty(tokens, 2 * m.inner), self._empty(tokens, m.inner)
            self.gated_q = self._empty(tokens, m.inner, dtype=torch.int8)

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
            self.experts.call(self.h, self.out)
        else:
            op["rms_norm_dynamic_per_token_quant"](self.h_q, self.h, w.norms[1], self.scale, EPSILON, None, self.residual)
            self._product(self.gate_up, self.h_q, w.gate_up)
            op["silu_and_mul"](self.gated, self.gate_up)
            op["dynamic_scaled_int8_quant"](self.gated_q, self.gated, self.scale, None)
            self._product(self.out, self.gated_q, w.down)
        return self.out, self.residual

    def _product(self, out: torch.Tensor, q: torch.Tensor, weight: Weight) -> None:
        self.op["cutlass_scaled_mm"](out, q, weight.q.t(), self.scale, weight.scale.t(), None)

    def _empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        (made,) = self.inputs.share([torch.empty(shape, dtype=dtype, device=self.inputs.device)])
        return made


class _Experts:
    """vLLM's router, tile lists, quantizer, activation and sum around Triton products. The routing weights are multiplied into the second product's
    scales, as vLLM's own Triton kernel multiplies them into its outputs."""

    def __init__(self, layer: VllmLayer, configs: Configs):
        m, tokens = layer.model, layer.inputs.case.M
        self.model, self.weights, self.op, self.configs, self.sms = m, layer.weights, layer.op, configs, multiprocessors(layer.inputs.device)
        empty, copies = layer._empty, tokens * m.choices
        self.factors, self.ids = empty(tokens, m.choices, dtype=torch.float32), empty(tokens, m.choices, dtype=torch.int32)
        self.sources = empty(tokens, m.choices, dtype=torch.int32)
        self.q, self.q_scale = empty(tokens, m.hidden, dtype=torch.int8), empty(tokens, 1, dtype=torch.float32)
        self.gate_up, self.gated, self.y = empty(copies, 2 * m.inner), empty(copies, m.inner), empty(copies, m.hidden)
        self.gated_q, self.gated_scale = empty(copies, m.inner, dtype=torch.int8), empty(copies, 1, dtype=torch.float32)
        self.lists = []
        for bm in dict.fromkeys(config.bm for config in configs):
            tiles = copies // bm + min(m.experts, copies)
            self.lists.append((bm, *(empty(n, dtype=torch.int32) for n in (tiles * bm, tiles, 1, 1))))

    def call(self, h: torch.Tensor, out: torch.Tensor) -> None:
        from scaled_mm.bench.triton import grouped

        m, w, op, (first, second) = self.model, self.weights, self.op, self.configs
        op["topk_softmax"](self.factors, self.ids, self.sources, functional.linear(h, w.router), True, None)
        aligned = {}
        for bm, rows, experts, padded, tiles in self.lists:
            op["moe_align_block_size"](self.ids, m.experts, bm, rows, experts, padded, None)
            aligned[bm] = Aligned(rows, experts, torch.div(padded, bm, rounding_mode="floor", out=tiles))
        op["dynamic_scaled_int8_quant"](self.q, h, self.q_scale, None)
        scales = w.gate_up.scale.squeeze(-1), w.down.scale.squeeze(-1)
        grouped.product(first, self.q, self.q_scale, w.gate_up.q, scales[0], aligned[first.bm], self.gate_up, m.choices, self.sms)
        op["silu_and_mul"](self.gated, self.gate_up)
        op["dynamic_scaled_int8_quant"](self.gated_q, self.gated, self.gated_scale, None)
        self.gated_scale.mul_(self.factors.view(-1, 1))
        grouped.product(second, self.gated_q, self.gated_scale, w.down.q, scales[1], aligned[second.bm], self.y, 1, self.sms)
        op["moe_sum"](self.y.view(-1, m.choices, m.hidden), out)


def configurations(inputs: DecoderInputs) -> Configs:
    """The fastest configuration of the Triton kernel for each product, tuned as in `bench experts` on a random balanced routing."""
    from scaled_mm.bench.experts.inputs import ExpertsInputs, ExpertsWeights
    from scaled_mm.bench.experts.peers import best_config

    m, weights = inputs.case.model, inputs.weights.layers[0]
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
