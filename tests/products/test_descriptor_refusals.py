"""Handles and descriptors refuse invalid arguments by a typed error that names the argument."""

from __future__ import annotations

import pytest
import torch
from operands.cases import Case, strided
from refused import K, M, N, tensors, zeros

import scaled_mm as sm
from scaled_mm import errors
from scaled_mm.errors import (
    BadParamError,
    BadTensorShapeError,
    BadTensorStridesError,
    ScaledMMError,
)


def test_a_handle_on_a_device_without_a_backend_is_refused():
    with pytest.raises(errors.DeviceNotSupportedError, match="meta"):
        sm.Handle("meta")


def described(device: str, **replaced) -> dict:
    """TensorDescs of a valid product, by argument name."""
    inputs = tensors(device)
    inputs["out"] = zeros(M, N, dtype=torch.bfloat16, device=device)
    descs = {name: sm.TensorDesc(tuple(t.shape), t.dtype, t.stride()) for name, t in inputs.items()}
    return {**descs, **replaced}


@pytest.mark.parametrize(
    "name, fields, error",
    [
        ("a", dict(shape=(-1, K)), BadTensorShapeError),
        ("a", dict(shape=(M, K), strides=(-K, 1)), BadTensorStridesError),
        ("a", dict(shape=(M, K), strides=(1 << 62, 1)), BadTensorStridesError),
        ("b", dict(shape=(K, 1 << 40)), BadTensorShapeError),
        ("out", dict(shape=(M, N), dtype=torch.bfloat16, strides=(0, 1)), BadTensorStridesError),
        ("a", dict(shape=(M, K), alignment=3), BadParamError),
        ("a", dict(shape=(M, K), alignment=0), BadParamError),
        ("a_scale", dict(shape=(M,), dtype=torch.float32, alignment=2), errors.BadTensorAlignmentError),
        ("a", dict(shape=(1, 1, M, K)), BadTensorShapeError),
        # Sizes whose product is 1 modulo 2^64 are not one value.
        (
            "a_scale",
            dict(shape=(11806113, 409891, 7623851), dtype=torch.float32, strides=(0, 0, 0)),
            BadTensorShapeError,
        ),
    ],
)
def test_descriptions_that_no_tensor_can_have_are_refused(device, name, fields, error):
    fields = {"dtype": torch.int8, **fields}
    with pytest.raises(error, match=name):
        sm.create_descriptor(sm.Handle(device), **described(device, **{name: sm.TensorDesc(**fields)}))


@pytest.mark.parametrize("name", ["a", "b", "a_scale", "b_scale", "bias", "a_zero_point", "b_zero_point", "out"])
def test_calculate_refuses_tensors_that_the_descriptor_was_not_made_for(device, name):
    inputs = tensors(device)
    inputs["out"] = zeros(M, N, dtype=torch.bfloat16, device=device)
    with sm.create_descriptor(sm.Handle(device), **inputs) as descriptor:
        workspace = torch.empty(descriptor.workspace_size, dtype=torch.uint8, device=device)
        longer = strided(*([1] * (2 - inputs[name].dim())), *(s + 1 for s in inputs[name].shape), "rows", inputs[name].dtype)
        longer = longer.reshape([s + 1 for s in inputs[name].shape]).to(device)
        for wrong in (longer, inputs[name].to(torch.float64), inputs[name].to("meta")):
            with pytest.raises(ScaledMMError, match=name):
                descriptor.calculate(**{**inputs, name: wrong}, workspace=workspace)
        if name not in ("a", "b", "out"):
            with pytest.raises(ScaledMMError, match=name):
                descriptor.calculate(**{**inputs, name: None}, workspace=workspace)
        descriptor.calculate(**inputs, workspace=workspace)


def test_calculate_refuses_tensors_that_the_descriptor_was_made_without(device):
    operands = Case(M, N, K).make(device)
    out = operands.poisoned_out()
    extra = Case(M, N, K, bias="out", a_zero_point="one_1d_int8", b_zero_point="vector_int32").make(device)
    with sm.create_descriptor(sm.Handle(device), out=out, **operands.inputs) as descriptor:
        for name in ("bias", "a_zero_point", "b_zero_point"):
            with pytest.raises(ScaledMMError, match=name):
                descriptor.calculate(out, **{**operands.inputs, name: getattr(extra, name)})
        descriptor.calculate(out, **operands.inputs)
        operands.check(out)


def test_a_destroyed_descriptor_is_refused(device):
    operands = Case(M, N, K).make(device)
    out = operands.poisoned_out()
    descriptor = sm.create_descriptor(sm.Handle(device), out=out, **operands.inputs)
    descriptor.destroy()
    with pytest.raises(ScaledMMError, match="destroyed"):
        descriptor.calculate(out, **operands.inputs)
    descriptor.destroy()  # a second time does nothing
    assert out.isnan().all()


def test_a_kernel_that_no_table_has_is_refused(device):
    operands = Case(M, N, K).make(device)
    with pytest.raises(ScaledMMError, match="no_such_row"):
        sm.create_descriptor(sm.Handle(device), out=operands.poisoned_out(), **operands.inputs, kernel="no_such_row")


@pytest.mark.parametrize("name", ["tpu", "cuda:-1", "cuda:9999", "cpu:x", ""])
def test_devices_that_are_not_there_are_refused(name):
    with pytest.raises((ScaledMMError, RuntimeError)):
        sm.Handle(name)


def test_an_architecture_without_a_table_is_refused():
    with pytest.raises(ScaledMMError, match="sm12345|arch"):
        sm.Handle("cpu", arch="sm12345")


@pytest.mark.parametrize("stream", [-1, True, 2**63, 2**80, "0"])
def test_a_stream_that_is_none_is_refused(stream):
    inputs = tensors("cpu")
    out = zeros(M, N, dtype=torch.bfloat16)
    with sm.create_descriptor(sm.Handle("cpu"), out=out, **inputs) as descriptor:
        with pytest.raises(BadParamError, match="^stream: expected"):
            descriptor.calculate(out, **inputs, stream=stream)


def test_a_cpu_with_an_index_is_the_cpu():
    inputs = tensors("cpu")
    out = zeros(M, N, dtype=torch.bfloat16)
    handle = sm.Handle("cpu:0")
    assert handle.device == torch.device("cpu")
    with sm.create_descriptor(handle, out=out, **inputs) as descriptor:
        descriptor.calculate(out, **inputs)
    assert torch.equal(out, sm.scaled_mm(**inputs))
