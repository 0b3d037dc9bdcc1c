"""fused_experts: the bits of a loop over tokens and their experts by the references, whatever else is in the batch; and what is refused."""

from __future__ import annotations

import pytest
import torch
from operands.pairs import pairwise

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.layers.experts import expected_rows
from scaled_mm.rowwise import reference as rowwise_reference
from scaled_mm.rowwise.moe import ACTIVATIONS

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
HIDDEN, INNER = 136, 72


def routing(tokens: int, choices: int, experts: int, seed: int, absent: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, experts, (tokens, choices), generator=generator)
    ids[torch.rand(tokens, choices, generator=generator) < absent] = -1
    return ids


def weights(experts: int, rows: int, columns: int, block_scales: bool, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    w = torch.randn(experts, rows, columns, generator=torch.Generator().manual_seed(seed)) / columns**0.5
    return sm.quantize_int8_block(w, "weight") if block_scales else sm.quantize_int8(w, "channel")


def operands(tokens=7, choices=2, experts=5, dtype=torch.bfloat16, block_scales=False, absent=0.0, seed=0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    w13, w13_scale = weights(experts, 2 * INNER, HIDDEN, block_scales, seed + 1)
    w2, w2_scale = weights(experts, HIDDEN, INNER, block_scales, seed + 2)
    return dict(
        x=torch.randn(tokens, HIDDEN, generator=generator).to(dtype),
        w13=w13,
        w13_scale=w13_scale,
        w2=w2,
        w2_scale=w2_scale,
        topk_weights=torch.rand(tokens, choices, generator=generator),
        topk_ids=routing(tokens, choices, experts, seed, absent),
    )


def on(device: str, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in named.items()}


def expected(x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, activation="silu", block_scales=False, expert_map=None) -> torch.Tensor:
    """A loop over the tokens and their choices, with the references of each step."""
    y32_of = {"silu": "silu_and_mul", "gelu": "gelu_and_mul", "gelu_tanh": "gelu_and_mul"}[activation]
    more = ("tanh",) if activation == "gelu_tanh" else ()

    def product(q, weight, scale, weight_scale, expert):
        if block_scales:
            return reference.block_scaled_mm(q, weight[expert].t(), scale, weight_scale[expert].t(), out_dtype=x.dtype)
        of_expert = weight_scale.reshape(-1) if weight_scale.numel() == 1 else weight_scale[expert].reshape(-1)
        return reference.scaled_mm(q, weight[expert].t(), scale, of_expert, out_dtype=x.dtype)

    tokens, choices = topk_ids.shape
    y, rows = torch.zeros(max(1, tokens * choices), x.shape[1], dtype=x.dtype), torch.full((tokens, choices), -1)
    for t in range(tokens):
        for j in range(choices):
            expert = int(topk_ids[t, j])
            if expert >= 0 and expert_map is not None:
                expert = int(expert_map[expert])
            if expert < 0:
                continue
            q, scale = sm.quantize_int8_block(x[t : t + 1]) if block_scales else sm.quantize_int8(x[t : t + 1])
            activated = getattr(rowwise_reference, y32_of)(product(q, w13, scale, w13_scale, expert), *more)
            q, scale = sm.quantize_int8_block(activated.to(x.dtype)) if block_scales else rowwise_reference.token(activated)
            rows[t, j] = t * choices + j
            y[rows[t, j]] = product(q, w2, scale, w2_scale, expert)[0]
    return rowwise_reference.moe_combine(y, topk_weights, rows)


@pairwise(
    tokens=(0, 1, 3, 40),
    choices=(1, 2, 8),
    experts=(1, 5, 40),
    dtype=FLOATS,
    weights_dtype=FLOATS,
    ids_dtype=(torch.int32, torch.int64),
    activation=tuple(ACTIVATIONS),
    block_scales=(False, True),
    absent=(0.0, 0.3, 1.0),
    mapped=(False, True),
    scales=("channels", "columns", "experts", "one"),
    out=("none", "contiguous", "strided"),
)
def test_every_pair_of_options_has_the_bits_of_a_loop(
    device, tokens, choices, experts, dtype, weights_dtype, ids_dtype, activation, block_scales, absent, mapped, scales, out
):
    t = operands(tokens, choices, experts, dtype, block_scales, absent, seed=tokens + choices)
    options = dict(activation=activation, block_scales=block_scales)
    t["topk_weights"], t["topk_ids"] = t["topk_weights"].to(weights_dtype), t["topk_ids"].to(ids_dtype)
    if mapped:  # the experts here are a part of twice as many
        options["expert_map"] = torch.full((2 * experts,), -1, dtype=torch.int32)
        options["expert_map"][torch.randperm(2 * experts, generator=torch.Generator().manual_seed(3))[:experts]] = torch.arange(
            experts, dtype=torch.int32
        )
        t["topk_ids"] = torch.where(t["topk_ids"] >= 0, 2 * t["topk_ids"] + 1, -1).to(ids_dtype)
    if not block_scales:
        for name in ("w13_scale", "w2_scale"):
            forms = {"channels": t[name], "columns": t[name].transpose(1, 2), "experts": t[name][:, 0, 0], "one": t[name][0, 0, :1]}
            t[name] = forms[scales]
    loop = expected(**t, **options)
    moved, options = on(device, t), on(device, options)
    if out != "none":
        shape = (tokens, HIDDEN)
        into = torch.full(shape, float("nan"), dtype=dtype, device=device)
        options["out"] = into if out == "contiguous" else torch.stack((into, into), -1)[..., 0]
    found = sm.fused_experts(**moved, **options)
    assert out == "none" or found is options["out"]
    assert reference.same_bits(found.cpu(), loop), reference.describe_difference(found.cpu(), loop)


@pytest.mark.parametrize("block_scales", [False, True])
def test_a_token_has_the_same_bits_in_any_batch_and_any_order(device, block_scales):
    t = on(device, operands(33, 4, 9, block_scales=block_scales))
    whole = sm.fused_experts(**t, block_scales=block_scales)
    order = torch.randperm(33, generator=torch.Generator().manual_seed(1)).to(device)
    of_tokens = ("x", "topk_weights", "topk_ids")
    assert torch.equal(sm.fused_experts(**{n: v[order] if n in of_tokens else v for n, v in t.items()}, block_scales=block_scales), whole[order])
    for token in (0, 17, 32):
        alone = {n: v[token : token + 1] if n in of_tokens else v for n, v in t.items()}
        assert torch.equal(sm.fused_experts(**alone, block_scales=block_scales), whole[token : token + 1])


def test_the_parts_of_experts_on_several_ranks_add_up_to_the_whole(device):
    """With one choice of a token nothing is rounded in between: the bits are those of one rank."""
    t = on(device, operands(20, 1, 6))
    whole, parts = sm.fused_experts(**t), []
    for rank in range(3):
        expert_map = torch.full((6,), -1, dtype=torch.int32)
        expert_map[2 * rank : 2 * rank + 2] = torch.arange(2, dtype=torch.int32)
        own = {n: v[2 * rank : 2 * rank + 2] if n.startswith("w") else v for n, v in t.items()}
        parts.append(sm.fused_experts(**own, expert_map=expert_map.to(device)))
    assert torch.equal(parts[0] + parts[1] + parts[2], whole)


def test_a_rank_expects_its_share_of_the_rows():
    of_256, of_none = torch.full((256,), -1), torch.full((0,), -1)
    shares = [expected_rows(512, 8, 32, of_256), expected_rows(1, 8, 32, of_256), expected_rows(3, 6, 32, of_256), expected_rows(0, 8, 32, of_256)]
    assert shares == [512, 1, 3, 1]
    assert expected_rows(512, 8, 32, None) is None and expected_rows(512, 8, 32, of_none) is None


class OfARank(torch.nn.Module):
    """Experts 0 and 1 of 4 are here."""

    def __init__(self, device):
        super().__init__()
        self.weights = {name: t for name, t in on(device, operands(2, 2, 2)).items() if name.startswith("w")}
        self.expert_map = torch.tensor([0, 1, -1, -1], dtype=torch.int32, device=device)

    def forward(self, x, topk_weights, topk_ids):
        return sm.fused_experts(x=x, **self.weights, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=self.expert_map)


def test_a_rank_is_exported_with_any_number_of_tokens(device):
    names, rank = ("x", "topk_weights", "topk_ids"), OfARank(device)
    few, many = (tuple(on(device, operands(tokens, 2, 4))[name] for name in names) for tokens in (6, 9))
    exported = torch.export.export(rank, few, dynamic_shapes=({0: torch.export.Dim("tokens", min=1, max=4096)},) * 3, strict=False).module()
    assert torch.equal(exported(*many), rank(*many))


def test_a_token_that_is_not_a_number_spoils_no_other(device):
    t = on(device, operands(9, 2, 4))
    whole = sm.fused_experts(**t)
    t["x"] = t["x"].clone()
    t["x"][3, 5], t["x"][6, 0] = float("nan"), float("inf")
    found = sm.fused_experts(**t)
    assert found[[3, 6]].isnan().all()
    rest = [0, 1, 2, 4, 5, 7, 8]
    assert torch.equal(found[rest], whole[rest])


def test_the_output_may_be_the_input(device):
    t = on(device, operands(9, 2, 4))
    whole = sm.fused_experts(**t)
    assert sm.fused_experts(**t, out=t["x"]) is t["x"] and torch.equal(t["x"], whole)


def test_results_are_close_to_the_experts_in_float64(device):
    t = operands(16, 2, 4, torch.float32)
    found = sm.fused_experts(**on(device, t)).cpu().double()
    w13, w2 = (t[name].double() * t[f"{name}_scale"].double().transpose(1, 2) for name in ("w13", "w2"))
    exact = torch.zeros_like(found)
    for token, (ids, factors) in enumerate(zip(t["topk_ids"], t["topk_weights"])):
        for expert, factor in zip(ids, factors):
            gate, up = (w13[expert] @ t["x"][token].double()).chunk(2)
            exact[token] += factor * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
    assert (found - exact).norm() / exact.norm() < 0.02  # two quantizations to 8 bits


@pytest.mark.parametrize("block_scales", [False, True])
def test_a_compiled_graph_has_the_bits_of_the_eager_call(device, block_scales):
    t = on(device, operands(9, 2, 4, block_scales=block_scales))
    torch.compiler.reset()
    compiled = torch.compile(lambda **t: sm.fused_experts(**t, block_scales=block_scales), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**t), sm.fused_experts(**t, block_scales=block_scales))


@pytest.mark.gpu
@pytest.mark.parametrize("block_scales", [False, True])
def test_routing_may_change_between_replays_of_a_graph(block_scales):
    t = on("cuda", operands(40, 2, 8, block_scales=block_scales))
    out = torch.empty_like(t["x"])
    sm.fused_experts(**t, block_scales=block_scales, out=out)  # kernels are built and loaded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sm.fused_experts(**t, block_scales=block_scales, out=out)
    for seed, absent in ((1, 0.0), (2, 0.5), (3, 1.0)):
        t["topk_ids"].copy_(routing(40, 2, 8, seed, absent))
        t["x"].normal_()
        out.fill_(float("nan"))
        graph.replay()
        assert reference.same_bits(out.cpu(), expected(**on("cpu", t), block_scales=block_scales))


GOOD = operands()


def wrong(**changed):
    return lambda: sm.fused_experts(**{**GOOD, **changed})


@pytest.mark.parametrize(
    "error, message, call",
    [
        (sm.BadTensorDtypeError, "x: expected float16, bfloat16 or float32", wrong(x=GOOD["x"].long())),
        (sm.BadTensorShapeError, r"x: expected \[tokens, H\]", wrong(x=GOOD["x"][None])),
        (sm.BadTensorDtypeError, "w13: expected int8, got torch.float32", wrong(w13=GOOD["w13"].float())),
        (sm.BadTensorShapeError, r"w13: expected \[E, 2 I, H\], got 2 dimensions", wrong(w13=GOOD["w13"][0])),
        (sm.BadTensorShapeError, rf"w13: expected \[E, 2 I, H\] with H = {HIDDEN}", wrong(w13=GOOD["w13"][..., :-1])),
        (sm.BadTensorShapeError, rf"w13: expected \[E, 2 I, H\] with H = {HIDDEN}", wrong(w13=GOOD["w13"][:, :-1])),
        (sm.BadTensorShapeError, "w13: expected at least one expert", wrong(w13=GOOD["w13"][:0])),
        (sm.BadTensorShapeError, rf"w2: expected \[E, H, I\] = \[5, {HIDDEN}, {INNER}\]", wrong(w2=GOOD["w2"][:4])),
        (sm.BadTensorDtypeError, "w2_scale: expected float32", wrong(w2_scale=GOOD["w2_scale"].half())),
        (sm.BadTensorShapeError, "w13_scale: expected one value,", wrong(w13_scale=GOOD["w13_scale"][:4])),
        (sm.BadTensorShapeError, r"w13_scale: expected \[5, 2, 2\], got", wrong(block_scales=True)),
        (sm.BadTensorShapeError, r"topk_weights: expected \[tokens, choices\] with 7", wrong(topk_weights=GOOD["topk_weights"][:3])),
        (sm.BadTensorShapeError, r"topk_ids: expected \[7, 2\] as topk_weights", wrong(topk_ids=GOOD["topk_ids"][:, :1])),
        (sm.BadTensorDtypeError, "topk_ids: expected int32 or int64", wrong(topk_ids=GOOD["topk_ids"].float())),
        (sm.BadParamError, "topk_ids: expected values from -1 to 4, got 5", wrong(topk_ids=GOOD["topk_ids"].clamp_min(5))),
        (sm.BadParamError, "activation: expected one of 'silu', 'gelu', 'gelu_tanh', got 'relu'", wrong(activation="relu")),
        (sm.BadParamError, "block_scales: expected True or False", wrong(block_scales=1)),
        (sm.BadTensorDeviceError, "w2: expected a tensor on cpu", wrong(w2=GOOD["w2"].to("meta"))),
        (sm.BadTensorShapeError, "out: expected", wrong(out=GOOD["x"][:3])),
    ],
)
def test_what_is_wrong_is_refused_and_named(error, message, call):
    with pytest.raises(error, match="^" + message):
        call()


def test_an_output_that_shares_memory_with_a_weight_is_refused():
    memory = torch.zeros(7 * HIDDEN, dtype=torch.float32)
    with pytest.raises(sm.BadParamError, match="^out: expected memory apart from w2_scale, got an overlap"):
        scale = memory[: 5 * HIDDEN].view(5, HIDDEN)
        sm.fused_experts(**{**GOOD, "x": GOOD["x"].float(), "w2_scale": scale, "out": memory.view(7, HIDDEN)})
