"""FusedExpertsDescriptor: the bits of fused_experts, by a plan that is made once."""

from __future__ import annotations

import pytest
import torch
from operands.pairs import pairwise
from test_experts import FLOATS, on, operands, routing

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.layers.experts import ACTIVATIONS


def described(named: dict[str, torch.Tensor]) -> dict[str, sm.TensorDesc]:
    return {name: sm.TensorDesc(t.shape, t.dtype, t.stride()) for name, t in named.items()}


def workspace_of(descriptor, device: str) -> torch.Tensor | None:
    return None if device == "cpu" else torch.full((descriptor.workspace_size,), 255, dtype=torch.uint8, device=device)


@pairwise(
    tokens=(0, 1, 33),
    choices=(1, 3),
    experts=(1, 12),
    dtype=FLOATS,
    ids_dtype=(torch.int32, torch.int64),
    activation=tuple(ACTIVATIONS),
    block_scales=(False, True),
    absent=(0.0, 0.4),
    mapped=(False, True),
    by_tensors=(False, True),
)
def test_every_pair_of_options_has_the_bits_of_the_function(
    device, tokens, choices, experts, dtype, ids_dtype, activation, block_scales, absent, mapped, by_tensors
):
    t = on(device, operands(tokens, choices, experts, dtype, block_scales, absent))
    t["topk_ids"] = t["topk_ids"].to(ids_dtype)
    out = torch.full_like(t["x"], float("nan"))
    expert_map = torch.arange(experts, dtype=torch.int32, device=device) if mapped else None
    options = dict(activation=activation, block_scales=block_scales)
    given = {**t, "out": out} if by_tensors else described({**t, "out": out})
    given["expert_map"] = expert_map
    with sm.create_fused_experts_descriptor(sm.Handle(device), **given, **options) as descriptor:
        for seed in (1, 2):  # the second finds what the first left in the workspace
            t["topk_ids"].copy_(routing(tokens, choices, experts, seed, absent))
            out.fill_(float("nan"))
            descriptor.calculate(out, **t, expert_map=expert_map, workspace=workspace_of(descriptor, device))
            whole = sm.fused_experts(**t, **options, expert_map=expert_map)
            assert reference.same_bits(out, whole), reference.describe_difference(out, whole)


@pytest.mark.gpu
def test_it_is_captured_in_a_graph_and_allocates_nothing():
    t = on("cuda", operands(40, 2, 8))
    out = torch.empty_like(t["x"])
    with sm.create_fused_experts_descriptor(sm.Handle("cuda:0"), out=out, **t) as descriptor:
        workspace = workspace_of(descriptor, "cuda")
        descriptor.calculate(out, **t, workspace=workspace)  # loads the kernels
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            descriptor.calculate(out, **t, workspace=workspace)
            assert torch.cuda.memory_allocated() == before
        t["x"].normal_()
        graph.replay()
        assert torch.equal(out, sm.fused_experts(**t))


def test_what_is_wrong_is_refused_and_named():
    t, handle = operands(), sm.Handle("cpu")
    out = torch.empty_like(t["x"])
    for error, message, changed in (
        (sm.BadParamError, "x: expected a tensor or a TensorDesc, got NoneType", dict(x=None)),
        (sm.BadTensorShapeError, "w13: expected 3 dimensions, got 2", dict(w13=t["w13"][0])),
        (sm.BadTensorShapeError, r"w13: expected \[E, 2 I, H\]", dict(w13=t["w13"][..., 1:])),
        (sm.BadTensorShapeError, "w2: expected", dict(w2=t["w2"][1:])),
        (sm.BadTensorShapeError, r"out: expected \[7, 136\], got \[3, 136\]", dict(out=out[:3])),
        (sm.BadTensorDtypeError, "out: expected bfloat16, got float32", dict(out=out.float())),
        (sm.BadTensorShapeError, r"topk_ids: expected \[tokens, choices\] with 7", dict(topk_ids=t["topk_ids"][:3])),
        (sm.BadTensorShapeError, r"topk_weights: expected \[7, 1\]", dict(topk_ids=t["topk_ids"][:, :1])),
        (sm.BadTensorDtypeError, "topk_ids: expected int32 or int64, got float32", dict(topk_ids=t["topk_ids"].float())),
        (sm.BadTensorDtypeError, r"w13\^T: expected int8, got float32", dict(w13=t["w13"].float())),
        (sm.BadTensorShapeError, "w2_scale: expected one value", dict(w2_scale=t["w2_scale"][1:])),
        (sm.BadTensorDtypeError, "x: expected float16, bfloat16 or float32", dict(x=t["x"].long())),
        (sm.BadParamError, "activation: expected one of", dict(activation="relu")),
        (sm.BadParamError, "block_scales: expected True or False, got 1", dict(block_scales=1)),
    ):
        with pytest.raises(error, match="^" + message):
            sm.create_fused_experts_descriptor(handle, **{"out": out, **t, **changed})
    with sm.create_fused_experts_descriptor(handle, out=out, **t) as descriptor:
        with pytest.raises(sm.InsufficientWorkspaceError, match="^workspace: expected"):
            descriptor.calculate(out, **t, workspace=torch.empty(16, dtype=torch.uint8))
        with pytest.raises(sm.BadTensorShapeError, match="^x: expected"):
            descriptor.calculate(out, **{**t, "x": t["x"][:3]})
    with pytest.raises(sm.BadParamError, match="descriptor"):
        descriptor.calculate(out, **t)
