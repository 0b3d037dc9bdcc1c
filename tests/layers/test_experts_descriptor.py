"""FusedExpertsDescriptor: the bits of fused_experts, by a plan that is made once."""

from __future__ import annotations

import warnings

import pytest
import torch
from operands.pairs import pairwise
from test_experts import FLOATS, on, operands, routing
from torch._subclasses.fake_tensor import FakeTensorMode

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.rowwise.moe import ACTIVATIONS


class Subclass(torch.Tensor):
    """With the memory of a torch.Tensor, as the parameters of serving engines."""


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
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            before = torch.cuda.memory_allocated()  # torch itself allocates at the begin of a capture
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
        (sm.BadTensorShapeError, "w13_scale: expected 3 dimensions, got 2", dict(block_scales=True, w13_scale=t["w13_scale"][..., 0])),
        (sm.BadTensorShapeError, r"w2_scale: expected \[5, 2, 1\], got \[5, 1, 136\]", dict(block_scales=True, w13_scale=torch.ones(5, 2, 2))),
        (sm.BadTensorShapeError, r"w13_scale: expected \[5, 2, 2\], got \[5, 3, 3\]", dict(block_scales=True, w13_scale=torch.ones(5, 3, 3))),
        (sm.BadParamError, "x: expected a strided tensor, got a nested tensor", dict(x=torch.nested.nested_tensor([torch.zeros(3)]))),
        (sm.BadParamError, r"w13\^T: expected a TensorDesc that is not constant", dict(w13=sm.TensorDesc(t["w13"].shape, torch.int8, constant=True))),
        (sm.BadTensorShapeError, "w13: expected from 1 to 1024 experts, got", dict(w13=t["w13"][:0], w2=t["w2"][:0])),
    ):
        with pytest.raises(error, match="^" + message):
            sm.create_fused_experts_descriptor(handle, **{"out": out, **t, **changed})
    for wrong in (None, "cpu"):
        with pytest.raises(sm.BadParamError, match="^handle: expected a live Handle, got"):
            sm.create_fused_experts_descriptor(wrong, out=out, **t)
    with sm.create_fused_experts_descriptor(handle, out=out, **t) as descriptor:
        size = descriptor.workspace_size
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch deprecates quantized tensors
            quantized = torch.quantize_per_tensor(torch.zeros(size), 1.0, 0, torch.qint8)
        for workspace in (quantized, torch._neg_view(torch.zeros(size)), torch.zeros(size, dtype=torch.complex64).conj()):
            with pytest.raises(sm.BadParamError, match="^workspace: expected a tensor with plain memory, got"):
                descriptor.calculate(out, **t, workspace=workspace)
        with FakeTensorMode() as mode:
            fake = {name: mode.from_tensor(tensor) for name, tensor in {"out": out, **t}.items()}
            with pytest.raises(sm.BadParamError, match="^out: expected a tensor with memory, got a FakeTensor"):
                descriptor.calculate(**fake)
        with pytest.raises(sm.InsufficientWorkspaceError, match="^workspace: expected"):
            descriptor.calculate(out, **t, workspace=torch.empty(16, dtype=torch.uint8))
        with pytest.raises(sm.BadTensorShapeError, match="^x: expected"):
            descriptor.calculate(out, **{**t, "x": t["x"][:3]})
        for error, message, changed in (
            (sm.BadParamError, "w2: expected a tensor, got None", dict(w2=None)),
            (sm.BadParamError, "topk_ids: expected a tensor, got str", dict(topk_ids="ids")),
            (sm.BadTensorShapeError, r"w13: expected \[5, 144, 136\], got \[144, 136\]", dict(w13=t["w13"][0])),
            (sm.BadTensorShapeError, r"w13_scale: expected", dict(w13_scale=t["w13_scale"][..., 0])),
            (sm.BadTensorDtypeError, "topk_weights: expected torch.float32, got torch.float16", dict(topk_weights=t["topk_weights"].half())),
            (sm.BadTensorDeviceError, "x: expected a tensor on cpu, got one on meta", dict(x=t["x"].to("meta"))),
            (sm.BadParamError, "expert_map: expected None, as when", dict(expert_map=torch.zeros(5, dtype=torch.int32))),
        ):
            with pytest.raises(error, match="^" + message):
                descriptor.calculate(out, **{**t, **changed})
    with pytest.raises(sm.BadParamError, match="descriptor"):
        descriptor.calculate(out, **t)


@pytest.mark.parametrize("name", ["w13", "w13_scale", "w2", "w2_scale", "topk_weights", "topk_ids", "expert_map"])
def test_out_is_apart_from_all_but_x(device, name):
    """`out` is placed in the middle of the memory of the other operand."""
    t = on(device, operands())
    t["expert_map"] = torch.arange(5, dtype=torch.int32, device=device)
    size, skipped = t["x"].nbytes, t[name].nbytes // 2 // 16 * 16
    memory = torch.zeros(t[name].nbytes + size + 16, dtype=torch.uint8, device=device)
    shared = memory[: t[name].nbytes].view(t[name].dtype).view(t[name].shape).copy_(t[name])
    out = memory[skipped : skipped + size].view(t["x"].dtype).view(t["x"].shape)
    for given in (out, out.as_subclass(Subclass)):
        with pytest.raises(sm.BadParamError, match=f"^out: expected memory apart from {name}, got an overlap"):
            sm.fused_experts(**{**t, name: shared}, out=given)
    with sm.create_fused_experts_descriptor(sm.Handle(device), out=out, **t) as descriptor:
        with pytest.raises(sm.BadParamError, match=f"^out: expected memory apart from {name}, got an overlap"):
            descriptor.calculate(out, **{**t, name: shared}, workspace=workspace_of(descriptor, device))


def test_out_may_be_x(device):
    t = on(device, operands())
    whole = sm.fused_experts(**t)
    with sm.create_fused_experts_descriptor(sm.Handle(device), out=t["x"], **t) as descriptor:
        descriptor.calculate(t["x"], **t, workspace=workspace_of(descriptor, device))
    assert torch.equal(t["x"], whole)


@pytest.mark.parametrize(("hidden", "inner", "named"), [(131072, 1, "x"), (1, 131072, "w2")])
def test_a_depth_beyond_an_exact_accumulator_is_refused_and_named(device, hidden, inner, named):
    t = dict(
        x=torch.zeros(1, hidden, device=device),
        w13=torch.zeros(1, 2 * inner, hidden, dtype=torch.int8, device=device),
        w13_scale=torch.ones(1, device=device),
        w2=torch.zeros(1, hidden, inner, dtype=torch.int8, device=device),
        w2_scale=torch.ones(1, device=device),
        topk_weights=torch.ones(1, 1, device=device),
        topk_ids=torch.zeros(1, 1, dtype=torch.int32, device=device),
    )
    message = f"^{named}: expected K <= 131071, beyond which a 32-bit accumulator is not exact, got K = 131072"
    with pytest.raises(sm.AccumulatorOverflowError, match=message):
        sm.fused_experts(**t)
    with pytest.raises(sm.AccumulatorOverflowError, match=message):
        sm.create_fused_experts_descriptor(sm.Handle(device), out=torch.empty_like(t["x"]), **t)
