"""Invalid calls are refused by a typed error that names the argument. A refused call leaves its output alone."""

import pytest
import torch
from operands.cases import Case
from refused import K, M, N, refused, tensors, zeros

import scaled_mm as sm
from scaled_mm import errors
from scaled_mm.errors import (
    AccumulatorOverflowError,
    BadParamError,
    BadTensorDeviceError,
    BadTensorDtypeError,
    BadTensorShapeError,
    BadTensorStridesError,
    NullPointerError,
    ScaledMMError,
)


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float32, torch.bfloat16, torch.bool], ids=str)
def test_operands_other_than_int8_are_refused(device, name, dtype):
    inputs = tensors(device)
    refused(device, BadTensorDtypeError, rf"{name}: expected int8", **{name: inputs[name].to(dtype)})


@pytest.mark.parametrize("name", ["a_scale", "b_scale"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32], ids=str)
def test_scales_other_than_float32_are_refused(device, name, dtype):
    inputs = tensors(device)
    refused(device, BadTensorDtypeError, rf"{name}: expected float32", **{name: inputs[name].to(dtype)})


@pytest.mark.parametrize("name", ["a_zero_point", "b_zero_point"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64, torch.float32], ids=str)
def test_zero_points_other_than_int32_and_int8_are_refused(device, name, dtype):
    inputs = tensors(device)
    refused(device, BadTensorDtypeError, rf"{name}: expected int32 or int8", **{name: inputs[name].to(dtype)})


WRONG_DTYPES = {
    "a": "expected int8",
    "b": "expected int8",
    "a_scale": "expected float32",
    "b_scale": "expected float32",
    "bias": "expected out's dtype bfloat16 or float32",
    "a_zero_point": "expected int32 or int8",
    "b_zero_point": "expected int32 or int8",
    "out": "expected float16, bfloat16, float32 or int32",
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.uint8, torch.bool], ids=str)
def test_a_dtype_that_the_core_has_no_number_for_is_named_as_torch_does(device, dtype):
    inputs = {**tensors(device), "out": zeros(M, N, dtype=torch.bfloat16, device=device)}
    name_of = str(dtype).removeprefix("torch.")
    for name, expected in WRONG_DTYPES.items():
        wrong = {**inputs, name: inputs[name].to(dtype)}
        message = f"^{name}: {expected}, got {name_of}$"
        refused(device, BadTensorDtypeError, message, **wrong)
        with pytest.raises(BadTensorDtypeError, match=message):
            sm.create_descriptor(sm.Handle(device), **wrong)
        with sm.create_descriptor(sm.Handle(device), **inputs) as descriptor:
            workspace = torch.empty(descriptor.workspace_size, dtype=torch.uint8, device=device)
            with pytest.raises(BadTensorDtypeError, match=f"^{name}: expected .* as the descriptor was created, got {name_of}$"):
                descriptor.calculate(**wrong, workspace=workspace)
    without = dict(a_zero_point=None, b_zero_point=None)  # on a GPU another way leads there
    refused(device, BadTensorDtypeError, f"^a: expected int8, got {name_of}$", a=inputs["a"].to(dtype), **without)


def test_a_bias_of_another_dtype_than_out_or_float32_is_refused(device):
    refused(device, BadTensorDtypeError, "bias", bias=zeros(N, dtype=torch.float16, device=device))
    refused(device, BadTensorDtypeError, "bias", bias=zeros(N, dtype=torch.bfloat16, device=device), out_dtype=torch.float16)
    refused(device, BadTensorDtypeError, "bias", bias=zeros(N, dtype=torch.float64, device=device))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.int64, torch.uint8], ids=str)
def test_other_output_dtypes_are_refused(device, dtype):
    refused(device, BadTensorDtypeError, "^out_dtype: expected torch.bfloat16, .*, got torch.", out_dtype=dtype, bias=None)


@pytest.mark.parametrize("thing", ["bfloat16", None, 5, [torch.bfloat16]], ids=repr)
def test_an_out_dtype_that_is_none_is_refused_by_name(device, thing):
    match = r"out_dtype: expected torch.bfloat16, torch.float16, torch.float32, torch.int32, got "
    refused(device, BadTensorDtypeError, match, out_dtype=thing, bias=None)


def test_an_out_of_an_unsupported_dtype_is_refused(device):
    for dtype in (torch.int8, torch.float64, torch.bool):
        refused(device, BadTensorDtypeError, "out", out=zeros(M, N, dtype=dtype, device=device), bias=None)


@pytest.mark.parametrize(
    "name, shape",
    [
        ("a", (M, K + 1)),
        ("a", (K,)),
        ("a", (1, 1, M, K)),
        ("a", (2, M, K + 1)),
        ("b", (K + 1, N)),
        ("b", (N, K)),
        ("b", (K,)),
        ("b", (1, 1, K, N)),
        ("b", (2, N, K)),
    ],
)
def test_operands_whose_shapes_do_not_meet_are_refused(device, name, shape):
    refused(device, BadTensorShapeError, "expected", **{name: zeros(*shape, device=device)})


@pytest.mark.parametrize(
    "name, dtype, shapes",
    [
        ("a_scale", torch.float32, [(M + 1,), (2,), (1, M), (M, 2), (M, N), (0,), (M, 1, 1)]),
        ("b_scale", torch.float32, [(N + 1,), (2,), (N, 2), (N + 1, 1), (2, N), (M, N), (0,), (1, 1, N)]),
        ("bias", torch.bfloat16, [(N + 1,), (1,), (), (N, 1), (M, N), (1, 1)]),
        ("a_zero_point", torch.int32, [(M + 1,), (1, M), (M, 2), (0,)]),
        ("b_zero_point", torch.int8, [(N + 1,), (N, 1), (2, N), (0,)]),
    ],
)
def test_vectors_of_the_wrong_shape_are_refused(device, name, dtype, shapes):
    for shape in shapes:
        refused(device, BadTensorShapeError, rf"{name}: expected", **{name: zeros(*shape, dtype=dtype, device=device)})


@pytest.mark.parametrize("shape", [(M, N + 1), (M + 1, N), (N, M), (M * N,), (1, M, N)])
def test_an_out_of_another_shape_is_refused(device, shape):
    refused(device, BadTensorShapeError, "out: expected", out=zeros(*shape, dtype=torch.bfloat16, device=device))


def test_an_out_whose_elements_overlap_is_refused(device):
    one_row = zeros(1, N, dtype=torch.bfloat16, device=device).expand(M, N)
    refused(device, BadTensorStridesError, "out", out=one_row)
    sliding = zeros(M + N, dtype=torch.bfloat16, device=device).as_strided((M, N), (1, 1))
    refused(device, BadTensorStridesError, "out", out=sliding)


def test_an_out_that_shares_memory_with_an_input_is_refused(device):
    shared = zeros(4096, device=device)
    out = shared[:4096].view(torch.bfloat16)[: M * N].view(M, N)
    for name, view in {
        "a": shared[64 : 64 + M * K].view(M, K),
        "b": shared[: N * K].view(N, K).t(),
        "a_scale": shared[: 4 * M].view(torch.float32),
        "b_scale": shared[64 : 64 + 4 * N].view(torch.float32),
        "bias": out[M - 1],
        "a_zero_point": shared[: 4 * M].view(torch.int32),
        "b_zero_point": shared[16 : 16 + N],
    }.items():
        refused(device, BadParamError, rf"overlap with {name}", out=out, **{name: view})


def test_an_out_right_beside_its_inputs_is_taken(device):
    operands = Case(M, N, K).make(device)
    shared = zeros(M * K + 2 * M * N, device=device)
    a = shared[: M * K].view(M, K).copy_(operands.a)
    out = shared[M * K :].view(torch.bfloat16).view(M, N)
    sm.scaled_mm(**{**operands.inputs, "a": a}, out=out)
    operands.check(out.clone())  # the memory beside it is a's


def test_raw_accumulators_take_neither_scales_nor_bias(device):
    inputs = tensors(device)
    none = dict(a_scale=None, b_scale=None, bias=None)
    for name in ("a_scale", "b_scale"):
        refused(device, BadParamError, name, out_dtype=torch.int32, **{**none, name: inputs[name]})
    bias = zeros(N, dtype=torch.float32, device=device)
    refused(device, BadParamError, "bias", out_dtype=torch.int32, **{**none, "bias": bias})


@pytest.mark.parametrize("name", ["a_scale", "b_scale"])
def test_a_float_output_needs_both_scales(device, name):
    refused(device, NullPointerError, rf"{name}: expected", **{name: None})


@pytest.mark.parametrize(
    "zero_points, bound",
    [((False, False), 131071), ((True, False), 65793), ((False, True), 65793), ((True, True), 33025)],
)
def test_k_beyond_the_exact_bound_is_refused_whatever_the_values(device, zero_points, bound):
    point = zeros(1, device=device)
    kwargs = dict(zip(("a_zero_point", "b_zero_point"), (point if given else None for given in zero_points)))
    one = torch.ones(1, device=device)
    for k in (bound + 1, 1 << 20):
        a, b = zeros(1, 1, device=device).expand(2, k), zeros(1, 1, device=device).expand(k, 3)
        with pytest.raises(AccumulatorOverflowError, match=f"K <= {bound}.*K = {k}"):
            sm.scaled_mm(a, b, one, one, **kwargs)


@pytest.mark.parametrize("name", ["a", "b", "a_scale", "b_scale", "bias", "a_zero_point", "b_zero_point", "out"])
def test_tensors_on_another_device_are_refused(device, name):
    inputs = tensors(device)
    inputs["out"] = zeros(M, N, dtype=torch.bfloat16, device=device)
    # torch asks the shape-only implementation as soon as one tensor is on the meta device; it does not know names.
    refused(device, BadTensorDeviceError, "meta", **{name: inputs[name].to("meta")})
    del inputs["out"]
    if name != "out":
        refused(device, BadTensorDeviceError, "meta", **{name: inputs[name].to("meta")})


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["a", "b", "a_scale", "b_scale", "bias", "a_zero_point", "b_zero_point", "out"])
def test_tensors_on_the_cpu_among_those_on_a_gpu_are_refused_by_name(name):
    inputs = tensors("cuda:0", out=zeros(M, N, dtype=torch.bfloat16, device="cuda:0"))
    refused("cuda:0", BadTensorDeviceError, name, **{**inputs, name: inputs[name].cpu()})


@pytest.mark.parametrize("name", ["a", "b", "a_scale", "bias", "a_zero_point"])
def test_things_that_are_no_tensors_are_refused(device, name):
    for thing in (3, "a", [1, 2], object()):
        with pytest.raises((ScaledMMError, TypeError), match=name):
            sm.scaled_mm(**tensors(device, **{name: thing}))


def test_sparse_and_quantized_tensors_are_refused(device):
    with pytest.raises(ScaledMMError):
        sm.scaled_mm(**tensors(device, a_scale=torch.ones(M, device=device).to_sparse()))


@pytest.mark.parametrize(
    "a, a_scale, message",
    [
        ((3, M, K), (3 * M, 1), rf"a_scale: expected .*, got \[{3 * M}, 1\]; this is a batch, so reshape it to \[3, {M}, 1\]$"),
        ((3, M, K), (3 * M,), rf"; this is a batch, so reshape it to \[3, {M}, 1\]$"),
        ((3 * M, K), (3, M, 1), rf"; a is flat, so reshape it to \[{3 * M}, 1\]$"),
        ((3 * M, K), (3, M), rf"; a is flat, so reshape it to \[{3 * M}, 1\]$"),
        ((3, M, K), (M + 1, 1), rf"got \[{M + 1}, 1\]$"),
    ],
)
def test_a_scale_of_a_flattened_activation_gets_an_error_that_says_what_to_do(device, a, a_scale, message):
    inputs = tensors(device, a=zeros(*a, device=device), a_scale=torch.ones(a_scale, device=device))
    inputs |= dict.fromkeys(("bias", "a_zero_point", "b_zero_point"))
    with pytest.raises(BadTensorShapeError, match=message):
        sm.scaled_mm(**inputs)


def test_a_refused_call_leaves_the_output_alone(device):
    out = torch.full((M, N), float("nan"), dtype=torch.bfloat16, device=device)
    refused(device, BadTensorShapeError, "bias", out=out, bias=zeros(3, dtype=torch.bfloat16, device=device))
    assert out.isnan().all()


def test_after_a_refusal_the_next_call_is_right(device):
    operands = Case(M, N, K).make(device)
    refused(device, BadTensorDtypeError, "a: expected int8", a=operands.a.float())
    operands.check(sm.scaled_mm(**operands.inputs))


def test_every_error_carries_its_own_status():
    classes = ScaledMMError.__subclasses__()
    own = [cls for cls in classes if cls.__module__ == errors.__name__]
    assert {cls.status for cls in own} == set(errors.Status) - {errors.Status.SUCCESS}


def test_an_out_that_torch_would_not_write_to_is_refused_and_left_alone(device):
    with torch.inference_mode():
        inside = zeros(M, N, dtype=torch.bfloat16, device=device)
        sm.scaled_mm(**tensors(device), out=inside)  # here it may be written
        inside.zero_()
    refused(device, BadParamError, "^out: expected a tensor made outside of inference mode", out=inside)
    negated = torch.zeros(M, N, dtype=torch.complex64, device=device).conj().imag
    refused(device, BadParamError, "^out: expected a tensor that is not lazily negated", out=negated)
    assert not inside.any() and not negated.any()
    inputs = tensors(device)
    with sm.create_descriptor(sm.Handle(device), out=inside, **inputs) as descriptor:
        with pytest.raises(BadParamError, match="^out: expected a tensor made outside of inference mode"):
            descriptor.calculate(inside, **inputs)
        assert not inside.any()
        workspace = zeros(descriptor.workspace_size, device=device)
        with torch.inference_mode():
            descriptor.calculate(inside, **inputs, workspace=workspace)
        assert inside.any()


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_by_name(device, name, layout):
    nested = torch.nested.nested_tensor([zeros(4, 4), zeros(4, 4)], layout=layout, device=device)
    refused(device, BadParamError, f"^{name}: expected a strided tensor, got a nested tensor", **{name: nested})


def test_sparse_tensors_are_refused_by_name():
    for call, name in ((sm.quantize_int8, "x"), (sm.quantize_int8_block, "x"), (lambda t: sm.prepare_weight(t.to(torch.int8)), "b")):
        with pytest.raises(BadParamError, match=f"^{name}: expected a strided tensor, got layout torch.sparse_coo"):
            call(torch.eye(3).to_sparse())
