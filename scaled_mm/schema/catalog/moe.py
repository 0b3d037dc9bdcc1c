"""Mixtures of experts: the feed-forward networks of each token's experts, with INT8 weights, and their weighted sum."""

from __future__ import annotations

from collections.abc import Iterator

from scaled_mm.schema.catalog.entry import TOKENS, Entry

# (experts, choices, H, I): Mixtral 8x7B, Qwen3-30B-A3B.
LAYERS = ((8, 2, 4096, 14336), (128, 8, 2048, 768))
ANY = {"T": 5, "E": 6, "C": 2, "H": 96, "I": 80, "I2": 160}

BOUND = "norm=0.01"
"""Two quantizations to 8 bits lie between the operands and the output: an intermediate value close to a tie may be rounded either way."""

_REFERENCE = '''import torch


def quantize(v):
    scale = (v.abs().amax(-1, keepdim=True) / 127).clamp_min(2.0**-126)
    return (v / scale).round().clamp(-127, 127), scale


def product(q, scale, weight, weight_scale):
    """The sum is exact: integers below 2^53."""
    return ((q.double() @ weight.double().t()).float() * weight_scale * scale).to(torch.bfloat16)


def run(x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids):
    """The weighted sum over the experts of each token of w2 (silu(gate) * up), where gate and up are the halves of w13 x."""
    q, scale = quantize(x.float())
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for choice in range(topk_ids.shape[1]):
        ids, y = topk_ids[:, choice], torch.zeros_like(total)
        for expert in ids.unique().tolist():
            rows = (ids == expert).nonzero().flatten()
            gate, up = product(q[rows], scale[rows], w13[expert], w13_scale[expert]).double().chunk(2, dim=-1)
            activated, own_scale = quantize((gate / (1 + torch.exp(-gate)) * up).float())
            y[rows] = product(activated, own_scale, w2[expert], w2_scale[expert]).float()
        total = total + topk_weights[:, choice : choice + 1] * y
    return total.to(torch.bfloat16)
'''

_OURS = """import scaled_mm


def run(x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids):
    return scaled_mm.fused_experts(x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids)
"""


def entries() -> Iterator[Entry]:
    yield _entry("", {name: None for name in ANY}, [ANY])
    for experts, choices, hidden, inner in LAYERS:
        axes = {"T": None, "E": experts, "C": choices, "H": hidden, "I": inner, "I2": 2 * inner}
        yield _entry(f"_e{experts}_k{choices}_h{hidden}_i{inner}", axes, [{"T": tokens} for tokens in TOKENS])


def _entry(suffix: str, axes: dict[str, int | None], workloads: list[dict[str, int]]) -> Entry:
    return Entry(
        name=f"moe_int8{suffix}",
        op_type="moe",
        description="The experts of a mixture: tokens quantized dynamically to INT8, gate and up projection, SiLU, quantized again, down projection, "
        "and the sum over a token's C choices, weighted by topk_weights. One weight scale per channel.",
        axes=axes,
        inputs={
            "x": ("bfloat16", ["T", "H"]),
            "w13": ("int8", ["E", "I2", "H"]),
            "w13_scale": ("float32", ["E", "I2"]),
            "w2": ("int8", ["E", "H", "I"]),
            "w2_scale": ("float32", ["E", "H"]),
            "topk_weights": ("float32", ["T", "C"]),
            "topk_ids": ("int64", ["T", "C"]),
        },
        outputs={"out": ("bfloat16", ["T", "H"])},
        reference=_REFERENCE,
        ours=_OURS,
        compare=BOUND,
        tags=["quantization:int8"],
        constraints=["I2 == 2 * I", "C <= E"],
        workloads=workloads,
        files=["topk_ids"],
    )
