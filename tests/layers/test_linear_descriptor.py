"""`LinearDescriptor` has the bits of `int8_linear`, and says what is wrong."""

from __future__ import annotations

import pytest
import torch

import scaled_mm as sm
from scaled_mm.layers.linear_descriptor import LinearDescriptor

M, N, K = 5, 48, 128
OPTIONS = {
    "dynamic": {},
    "bias": dict(bias=torch.linspace(-1, 1, N)),
    "smooth": dict(smooth_scale=torch.linspace(0.5, 2, K)),
    "static": dict(input_scale=torch.tensor([0.02])),
    "zero point": dict(input_scale=torch.tensor(0.02), input_zero_point=torch.tensor(3, dtype=torch.int32)),
}


def operands(device: str, m: int = M) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(m, K, generator=generator).to(torch.bfloat16)
    weight = torch.randint(-127, 128, (N, K), generator=generator, dtype=torch.int8)
    return x.to(device), weight.to(device), (torch.rand(N, generator=generator) + 0.1).to(device)


def workspace_of(desc: LinearDescriptor, device: str) -> torch.Tensor:
    return torch.empty(desc.workspace_size, dtype=torch.uint8, device=device)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("m", [1, M])
def test_the_bits_are_those_of_int8_linear(device, options, prepared, m, monkeypatch):
    x, weight, scale = operands(device, m)
    options = {name: tensor.to(device) for name, tensor in options.items()}
    weight = sm.prepare_weight(weight.t()) if prepared else weight
    out = torch.full((m, N), float("nan"), dtype=torch.bfloat16, device=device)
    given = dict(out=out, x=x, weight=weight, weight_scale=scale, **options)
    with sm.create_linear_descriptor(sm.Handle(device), **given) as desc:
        workspace = workspace_of(desc, device)
        desc.calculate(**given, workspace=workspace)
        assert torch.equal(out, sm.int8_linear(x, weight, scale, **options))
        if device != "cpu":  # once more, where only the call of both is left
            monkeypatch.setattr(LinearDescriptor, "_apart", None)
            desc.calculate(**{**given, "out": out.zero_()}, workspace=workspace)
            assert torch.equal(out, sm.int8_linear(x, weight, scale, **options))


@pytest.mark.gpu
def test_a_captured_descriptor_computes_from_what_its_tensors_hold_then():
    x, weight, scale = operands("cuda:0")
    out = torch.empty(M, N, dtype=torch.bfloat16, device="cuda:0")
    given = dict(out=out, x=x, weight=weight, weight_scale=scale)
    with sm.create_linear_descriptor(sm.Handle("cuda:0"), **given) as desc:
        workspace = workspace_of(desc, "cuda:0")
        desc.calculate(**given, workspace=workspace)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            desc.calculate(**given, workspace=workspace)
        x.mul_(3)
        graph.replay()
        assert torch.equal(out, sm.int8_linear(x, weight, scale))


WRONG = [
    (dict(x=torch.zeros(M, K + 1, dtype=torch.bfloat16)), sm.BadTensorShapeError, "x: expected"),
    (dict(out=torch.empty(M + 1, N, dtype=torch.bfloat16)), sm.BadTensorShapeError, "out: expected"),
    (dict(weight_scale=torch.ones(N + 1)), sm.BadTensorShapeError, "weight_scale: expected"),
    (dict(workspace=torch.empty(16, dtype=torch.uint8)), sm.InsufficientWorkspaceError, "workspace: expected"),
    (dict(weight=None), sm.BadParamError, "weight: expected"),
    (dict(weight=torch.zeros(N, K, 1, dtype=torch.int8)), sm.BadTensorShapeError, "weight: expected"),
    (dict(smooth_scale=torch.ones(K)), sm.BadParamError, "smooth_scale: expected none"),
    (dict(input_scale=torch.ones(1)), sm.BadParamError, "input_scale: expected none"),
    (dict(workspace=7), sm.BadParamError, "workspace: expected"),
    (dict(bias=torch.ones(N)), sm.BadParamError, "bias: expected"),
]


@pytest.mark.parametrize("wrong, error, message", WRONG, ids=[f"{next(iter(one[0]))}-{i}" for i, one in enumerate(WRONG)])
def test_what_differs_from_the_descriptor_is_refused(device, wrong, error, message):
    x, weight, scale = operands(device)
    given = dict(out=torch.empty(M, N, dtype=torch.bfloat16, device=device), x=x, weight=weight, weight_scale=scale)
    with sm.create_linear_descriptor(sm.Handle(device), **given) as desc:
        wrong = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in wrong.items()}
        with pytest.raises(error, match=message):
            desc.calculate(**{**given, "workspace": workspace_of(desc, device), **wrong})


def test_what_no_linear_layer_has_is_refused():
    x, weight, scale = operands("cpu")
    given = dict(out=torch.empty(M, N, dtype=torch.bfloat16), x=x, weight=weight, weight_scale=scale)
    for wrong, message in (
        (dict(x=x[0]), "x: expected"),
        (dict(weight=weight.float()), "weight: expected"),
        (dict(input_zero_point=torch.zeros(1, dtype=torch.int8)), "input_zero_point: expected None"),
        (dict(out=None), "out: expected"),
    ):
        with pytest.raises(sm.ScaledMMError, match=message):
            sm.create_linear_descriptor(sm.Handle("cpu"), **{**given, **wrong})


def test_a_weight_with_zero_points_is_refused_by_a_descriptor_without(device):
    x, weight, scale = operands(device)
    out = torch.empty(M, N, dtype=torch.bfloat16, device=device)
    given = dict(out=out, x=x, weight=sm.prepare_weight(weight.t()), weight_scale=scale)
    with sm.create_linear_descriptor(sm.Handle(device), **given) as desc:
        other = sm.prepare_weight(weight.t(), torch.tensor([5], dtype=torch.int32, device=device))
        with pytest.raises(sm.BadParamError, match="b_zero_point: expected none"):
            desc.calculate(**{**given, "weight": other}, workspace=workspace_of(desc, device))


@pytest.mark.parametrize("name", ["weight", "weight_scale", "out", "x"])
def test_a_workspace_within_an_operand_is_refused(device, name):
    x, weight, scale = operands(device)
    given = dict(out=torch.empty(M, N, dtype=torch.bfloat16, device=device), x=x, weight=weight, weight_scale=scale)
    with sm.create_linear_descriptor(sm.Handle(device), **given) as desc:
        memory = torch.zeros(1 << 16, dtype=torch.uint8, device=device)
        tensor = given[name]
        inside = memory[64 : 64 + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        before = memory.clone()
        with pytest.raises(sm.BadParamError, match=f"workspace: expected memory apart from every tensor, got an overlap with {name}"):
            desc.calculate(**{**given, name: inside}, workspace=memory)
        assert torch.equal(memory, before)


def test_a_destroyed_descriptor_says_so(device):
    x, weight, scale = operands(device)
    given = dict(out=torch.empty(M, N, dtype=torch.bfloat16, device=device), x=x, weight=weight, weight_scale=scale)
    desc = sm.create_linear_descriptor(sm.Handle(device), **given)
    desc.destroy()
    with pytest.raises(sm.BadParamError, match="descriptor: expected a live descriptor"):
        desc.calculate(**given)


def test_an_output_that_aliases_the_smooth_scale_is_refused(device):
    x, weight, scale = operands(device)
    memory = torch.rand(M * N + K, device=device)
    out, smooth = memory[: M * N].view(M, N), memory[M * N - 4 : M * N - 4 + K]
    given = dict(out=out, x=x, weight=weight, weight_scale=scale, smooth_scale=smooth)
    with sm.create_linear_descriptor(sm.Handle(device), **given) as desc:
        before = memory.clone()
        with pytest.raises(sm.BadParamError, match="^out: expected memory apart from smooth_scale, got an overlap"):
            desc.calculate(**given, workspace=workspace_of(desc, device))
        assert torch.equal(memory, before)


@pytest.mark.parametrize("name", ["weight_scale", "bias"])
def test_an_output_that_aliases_an_operand_of_the_product_is_refused_by_its_name(device, name):
    x, weight, scale = operands(device)
    memory = torch.ones(M * N + N, device=device)
    out, inside = memory[: M * N].view(M, N), memory[M * N - 4 : M * N - 4 + N]
    given = dict(out=out, x=x, weight=weight, weight_scale=scale) | {name: inside}
    with sm.create_linear_descriptor(sm.Handle(device), **given) as desc:
        with pytest.raises(sm.BadParamError, match=f"^out: expected memory apart from every input, got an overlap with {name}$"):
            desc.calculate(**given, workspace=workspace_of(desc, device))


def test_torchs_default_device_does_not_matter():
    x, weight, scale = operands("cpu")
    out = torch.empty(M, N, dtype=torch.bfloat16)
    with sm.create_linear_descriptor(sm.Handle("cpu"), out=out, x=x, weight=weight, weight_scale=scale) as desc, torch.device("meta"):
        desc.calculate(out, x, weight, scale)
    assert torch.equal(out, sm.int8_linear(x, weight, scale))
