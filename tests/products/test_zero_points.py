"""Zero points: the asymmetric quantizer, prepared weights, and row and column sums that the caller gives."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operands.cases import FLOAT_DTYPES, MAX_K_BOTH_ZERO_POINTS, OUT_DTYPES, Case
from torch._subclasses.fake_tensor import FakeTensorMode

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.errors import (
    AccumulatorOverflowError,
    BadParamError,
    BadTensorDeviceError,
    BadTensorDtypeError,
    BadTensorShapeError,
    ScaledMMError,
)

TINY = 2.0**-126


def to_float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def by_hand(row: list[float]) -> tuple[list[int], float, int]:
    """One finite row, in Python numbers: a float32 operation done in double and rounded to float32 is that operation."""
    low, high = min([0.0, *row]), max([0.0, *row])
    scale = max(to_float32(to_float32(high / 255) - to_float32(low / 255)), TINY)
    zero_point = max(-128, min(127, round(to_float32(-128 - to_float32(low / scale)))))
    return [max(-128, min(127, round(to_float32(x / scale)) + zero_point)) for x in row], scale, zero_point


# ---- the quantizer ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_every_row_equals_the_definition(device, dtype):
    generator = torch.Generator().manual_seed(1)
    for magnitude, shift in [(1.0, 0.0), (1.0, 3.0), (1.0, -3.0), (1e-3, 0.0), (300.0, 100.0)]:
        x = (torch.randn(37, 65, generator=generator) * magnitude + shift).to(dtype)
        quantized = sm.quantize_int8(x.to(device), symmetric=False)
        want = [by_hand(row) for row in x.tolist()]
        assert quantized.q.tolist() == [values for values, _, _ in want]
        assert quantized.scale.flatten().tolist() == [scale for _, scale, _ in want]
        assert quantized.zero_point.flatten().tolist() == [point for _, _, point in want]


def test_the_result_is_a_named_tuple_whose_layouts_fit_the_product(device):
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(2)).to(device)
    for dim, shape, sums in [("token", (5, 1), (5, 1)), ("channel", (1, 5), (1, 5)), ("tensor", (1,), (5, 1))]:
        quantized = sm.quantize_int8(x, dim, symmetric=False)
        q, scale, zero_point, row_sums = quantized
        assert isinstance(quantized, sm.AsymmetricInt8) and quantized.row_sums is row_sums
        assert (q.dtype, scale.dtype, zero_point.dtype, row_sums.dtype) == (torch.int8, torch.float32, torch.int32, torch.int32)
        assert (q.shape, scale.shape, zero_point.shape, row_sums.shape) == (x.shape, shape, shape, sums)
        assert q.is_contiguous() and row_sums.flatten().tolist() == q.sum(-1).tolist()
    assert len(sm.quantize_int8(x)) == len(sm.quantize_int8(x, "token", True)) == 2


def test_zero_is_exact_and_the_error_at_most_half_a_scale(device):
    x = torch.randn(64, 300, generator=torch.Generator().manual_seed(3)) + torch.linspace(-4, 4, 64).reshape(-1, 1)
    x[:, 0] = 0
    q, scale, zero_point, _ = sm.quantize_int8(x.to(device), symmetric=False)
    back = (q.double() - zero_point) * scale.double()
    assert (back[:, 0] == 0).all()
    assert ((back - x.to(device)).abs() <= scale.double() * 0.5001).all()


def test_a_shifted_row_keeps_a_finer_step_than_symmetric_quantization_has(device):
    x = torch.rand(8, 256, generator=torch.Generator().manual_seed(4)).to(device)  # positive: half of the symmetric values lie idle
    assert (sm.quantize_int8(x, symmetric=False).scale < 0.51 * sm.quantize_int8(x)[1]).all()


def test_rows_without_a_sensible_scale_have_the_documented_one(device):
    x = torch.zeros(5, 4, device=device)
    x[1, 0], x[2, 1], x[3, 2], x[4] = float("nan"), float("inf"), float("-inf"), 3e38
    x[4, 0] = -3e38
    q, scale, zero_point, sums = sm.quantize_int8(x, symmetric=False)
    assert scale[0].item() == TINY and zero_point[0].item() == -128 and q[0].tolist() == [-128] * 4 and sums[0].item() == -512
    assert scale[1].isnan().item() and (scale[2:4] == float("inf")).all()
    assert zero_point[1:4].flatten().tolist() == [0, 0, 0] and q[1:4].tolist() == [[0] * 4] * 3
    assert scale[4].isfinite().item() and zero_point[4].item() in (-1, 0) and q[4, 0].item() == -128  # no overflow of the range


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,), (0, 0), (2, 0, 3)])
def test_tensors_without_elements_give_empty_results(device, shape):
    for dim in ("token", "channel", "tensor") if len(shape) > 1 else ("token", "tensor"):
        q, scale, zero_point, row_sums = sm.quantize_int8(torch.empty(shape, device=device), dim, symmetric=False)
        assert q.shape == shape and (scale == TINY).all() and (zero_point == -128).all() and (row_sums == 0).all()


def test_a_scalar_has_one_of_everything(device):
    quantized = sm.quantize_int8(torch.tensor(-2.0, device=device), "tensor", symmetric=False)
    assert quantized.q.shape == () and all(t.shape == (1,) for t in quantized[1:])
    assert quantized.q.item() == quantized.row_sums.item() == -128 and quantized.zero_point.item() == 127


def test_symmetric_is_a_bool():
    with pytest.raises(BadParamError, match="symmetric: expected True or False, got 'no'"):
        sm.quantize_int8(torch.ones(2, 2), "token", "no")


@pytest.mark.gpu
def test_cpu_and_gpu_quantize_to_the_same_bits():
    x = torch.randn(257, 1031, generator=torch.Generator().manual_seed(9)) * 3 + 1
    for dtype, dim in itertools.product(FLOAT_DTYPES, ("token", "channel", "tensor")):
        on_cpu, on_gpu = (sm.quantize_int8(x.to(dtype).to(where), dim, symmetric=False) for where in ("cpu", "cuda"))
        assert all(reference.same_bits(gpu.cpu(), cpu) for gpu, cpu in zip(on_gpu, on_cpu))


@pytest.mark.gpu
def test_quantizing_does_not_synchronise():
    x = torch.randn(64, 256, device="cuda")
    sm.quantize_int8(x, symmetric=False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for dim in ("token", "channel", "tensor"):
            sm.quantize_int8(x, dim, symmetric=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- what the product does with it ----------------------------------------------------------------------------------------------


def test_an_asymmetric_linear_layer_is_close_to_the_float_one(device):
    generator = torch.Generator().manual_seed(5)
    x = torch.nn.functional.gelu(torch.randn(40, 512, generator=generator) * 2).to(device)
    weight = (torch.randn(64, 512, generator=generator) + 0.3).to(device)
    a, w = sm.quantize_int8(x, symmetric=False), sm.quantize_int8(weight, "channel", symmetric=False)
    prepared = sm.prepare_weight(w.q.t(), w.zero_point)
    assert torch.equal(prepared.column_sums, w.row_sums)
    out = sm.scaled_mm(a.q, prepared, a.scale, w.scale, out_dtype=torch.float32, a_zero_point=a.zero_point, a_row_sums=a.row_sums)
    exact = x.double() @ weight.double().t()
    asymmetric_error = ((out - exact).norm() / exact.norm()).item()
    (q, scale), (wq, w_scale) = sm.quantize_int8(x), sm.quantize_int8(weight, "channel")
    symmetric_error = ((sm.scaled_mm(q, wq.t(), scale, w_scale, out_dtype=torch.float32) - exact).norm() / exact.norm()).item()
    assert asymmetric_error < symmetric_error < 0.02


@settings(max_examples=400, deadline=None, database=None)
@given(
    case=st.builds(
        Case,
        m=st.integers(0, 40),
        n=st.integers(0, 60),
        k=st.integers(0, 300),
        out_dtype=st.sampled_from(OUT_DTYPES),
        b_layout=st.sampled_from(["columns", "rows", "padded_columns", "every_second", "broadcast_row"]),
        a_layout=st.sampled_from(["rows", "offset_rows", "columns"]),
        bias=st.sampled_from([None, "float32"]),
        a_zero_point=st.sampled_from([None, "one_1d_int8", "vector_int32", "matrix_int8"]),
        b_zero_point=st.sampled_from([None, "one_0d_int32", "vector_int8", "matrix_int32"]),
        seed=st.integers(0, 2**20),
    ),
    sums=st.sampled_from([None, "vector", "matrix"]),
)
def test_a_prepared_weight_and_known_row_sums_change_no_bit(case, sums):
    check_prepared(case, sums, "cpu")


@pytest.mark.gpu
def test_a_prepared_weight_and_known_row_sums_change_no_bit_on_a_gpu():
    zero_points = (None, "one_1d_int8", "vector_int32")
    shapes = [(1, 256, 512), (17, 136, 272), (70, 144, 272), (5, 33, 37), (4, 16, 0)]
    for (m, n, k), za, zb, sums in itertools.product(shapes, zero_points, zero_points, (None, "vector", "matrix")):
        check_prepared(Case(m, n, k, torch.bfloat16, bias="float32", a_zero_point=za, b_zero_point=zb), sums, "cuda:0")


def check_prepared(case: Case, sums: str | None, device: str) -> None:
    operands = case.make(device)
    expected = operands.expected()
    prepared = sm.prepare_weight(operands.b, operands.b_zero_point)
    inputs = {**operands.inputs, "b": prepared}
    del inputs["b_zero_point"]
    if sums:
        row_sums = operands.a.sum(-1, dtype=torch.int32)
        inputs["a_row_sums"] = row_sums if sums == "vector" else row_sums.reshape(-1, 1)
    out = operands.poisoned_out()
    assert sm.scaled_mm(**inputs, out=out) is out
    operands.check(out)
    assert reference.same_bits(sm.scaled_mm(**inputs, out_dtype=case.out_dtype), expected)
    calculated = operands.poisoned_out()
    with sm.create_descriptor(sm.Handle(device), out=calculated, **inputs) as descriptor:
        workspace = torch.empty(descriptor.workspace_size, dtype=torch.uint8, device=device)
        descriptor.calculate(calculated, **inputs, workspace=workspace)
    assert reference.same_bits(calculated, expected)


def test_sums_that_are_given_are_believed_where_they_are_needed_and_only_there(device):
    for za, zb in itertools.product((None, "vector_int32"), (None, "vector_int8")):
        operands = Case(5, 16, 32, torch.float32, a_zero_point=za, b_zero_point=zb).make(device)
        sums = {"a_row_sums": operands.a.sum(-1, dtype=torch.int32), "b_column_sums": operands.b.sum(0, dtype=torch.int32)}
        right = sm.scaled_mm(**operands.inputs, **sums, out_dtype=torch.float32)
        operands.check(right)
        for name, needed in (("a_row_sums", zb), ("b_column_sums", za)):
            wrong = sm.scaled_mm(**operands.inputs, **{**sums, name: sums[name] + 1}, out_dtype=torch.float32)
            assert reference.same_bits(wrong, right) == (needed is None), f"{name} with {za} and {zb}"


def test_the_bound_on_k_with_two_zero_points_holds_for_prepared_weights(device):
    def product(k):
        a = torch.full((2, k), -128, dtype=torch.int8, device=device)
        point = torch.tensor([127], dtype=torch.int8, device=device)
        weight = sm.prepare_weight(torch.full((3, k), -128, dtype=torch.int8, device=device).t(), point)
        sums = torch.full((2,), -128 * k, dtype=torch.int32, device=device)
        return sm.scaled_mm(a, weight, out_dtype=torch.int32, a_zero_point=point, a_row_sums=sums)

    assert product(MAX_K_BOTH_ZERO_POINTS).unique().tolist() == [MAX_K_BOTH_ZERO_POINTS * 255 * 255]
    with pytest.raises(AccumulatorOverflowError, match=f"K <= {MAX_K_BOTH_ZERO_POINTS}"):
        product(MAX_K_BOTH_ZERO_POINTS + 1)


def test_a_prepared_batch_has_sums_for_each_product(device):
    generator = torch.Generator().manual_seed(6)
    b = torch.randint(-128, 128, (3, 16, 32), dtype=torch.int8, generator=generator).to(device).mT
    a = torch.randint(-128, 128, (3, 5, 32), dtype=torch.int8, generator=generator).to(device)
    za, zb = (torch.randint(-128, 128, shape, dtype=torch.int32, generator=generator).to(device) for shape in ((3, 5, 1), (3, 1, 16)))
    prepared = sm.prepare_weight(b, zb)
    assert prepared.column_sums.shape == (3, 1, 16)
    out = sm.scaled_mm(a, prepared, out_dtype=torch.int32, a_zero_point=za)
    assert torch.equal(out, reference.scaled_mm(a, b, None, None, out_dtype=torch.int32, a_zero_point=za, b_zero_point=zb))


def test_a_descriptor_of_a_prepared_weight_takes_no_other(device):
    operands = Case(5, 16, 32).make(device)
    prepared, out = sm.prepare_weight(operands.b), operands.poisoned_out()
    inputs = {**operands.inputs, "b": prepared}
    constant = sm.TensorDesc(tuple(operands.b.shape), torch.int8, tuple(operands.b.stride()), constant=True)
    message = "^b: expected a constant PreparedWeight, for which the descriptor was created, got a "
    for b in (prepared, constant):
        with sm.create_descriptor(sm.Handle(device), out=out, **{**inputs, "b": b}) as descriptor:
            with pytest.raises(BadParamError, match=message + "Tensor$"):
                descriptor.calculate(out, **operands.inputs)
            for copied in (copy.deepcopy(prepared), dataclasses.replace(prepared, b=operands.b), pickle.loads(pickle.dumps(prepared))):
                with pytest.raises(BadParamError, match=message + "PreparedWeight that is not constant$"):
                    descriptor.calculate(out, **{**inputs, "b": copied})
            descriptor.calculate(out, **inputs)
        operands.check(out)
    with pytest.raises(BadParamError, match="^a: expected flags 0, got 1"):
        sm.create_descriptor(sm.Handle(device), out=out, **{**operands.inputs, "a": sm.TensorDesc((5, 32), torch.int8, constant=True)})


def test_a_weight_is_constant_from_its_preparation_on_but_not_without_data_nor_while_a_graph_is_captured(device):
    weight = torch.randint(-128, 128, (16, 32), dtype=torch.int8, device=device)
    assert sm.prepare_weight(weight.t()).constant
    assert not sm.prepare_weight(weight.t().to("meta")).constant
    if torch.device(device).type == "cuda":
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            assert not sm.prepare_weight(weight.t()).constant
        assert not sm.prepare_weight(weight.reshape(-1)[1:497].reshape(16, 31).t()).constant
        with FakeTensorMode(), torch.device("cuda"):
            assert not sm.prepare_weight(torch.empty(16, 32, dtype=torch.int8).t()).constant
        torch.cuda._sleep(50_000_000)
        sm.prepare_weight(weight.t())
        assert torch.cuda.current_stream().query(), "what the stream had to do before is done"


def test_a_prepared_weight_may_be_compiled_into_a_graph(device):
    operands = Case(5, 16, 32, a_zero_point="vector_int32", b_zero_point="vector_int32").make(device)
    prepared = sm.prepare_weight(operands.b, operands.b_zero_point)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(a, a_zero_point):
        return sm.scaled_mm(a, prepared, operands.a_scale, operands.b_scale, a_zero_point=a_zero_point)

    operands.check(layer(operands.a, operands.a_zero_point))


# ---- refusals -----------------------------------------------------------------------------------------------------------------


def test_a_prepared_weight_holds_its_own_zero_points_and_sums(device):
    operands = Case(5, 16, 32, b_zero_point="vector_int32").make(device)
    prepared = sm.prepare_weight(operands.b, operands.b_zero_point)
    inputs = {"a": operands.a, "b": prepared, "a_scale": operands.a_scale, "b_scale": operands.b_scale}
    out = operands.poisoned_out()
    with sm.create_descriptor(sm.Handle(device), out=out, **inputs) as descriptor:
        for name, t in (("b_zero_point", operands.b_zero_point), ("b_column_sums", prepared.column_sums)):
            match = f"{name}: expected none with a prepared weight, which holds its own, got a Tensor"
            with pytest.raises(BadParamError, match=match):
                sm.scaled_mm(**inputs, **{name: t})
            with pytest.raises(BadParamError, match=match):
                sm.create_descriptor(sm.Handle(device), out=out, **inputs, **{name: t})
            with pytest.raises(BadParamError, match=match):
                descriptor.calculate(out, **inputs, **{name: t})


def test_what_cannot_be_a_weight_is_refused_by_name(device):
    b = torch.zeros(32, 16, dtype=torch.int8, device=device)
    point = torch.zeros(16, dtype=torch.int32, device=device)
    for error, match, args in [
        (BadParamError, "b: expected a tensor, got None", (None,)),
        (BadParamError, "b: expected a tensor, got list", ([1],)),
        (BadTensorDtypeError, "b: expected int8, got float32", (b.float(),)),
        (BadTensorShapeError, "b: expected 2 dimensions", (b[0],)),
        (BadParamError, "b_zero_point: expected a tensor, got int", (b, 3)),
        (BadTensorDtypeError, "b_zero_point: expected int32 or int8, got int64", (b, point.long())),
        (BadTensorDeviceError, "b_zero_point: expected a tensor on", (b, point.to("meta"))),
        (BadTensorShapeError, r"b_zero_point: expected one value, \[16\]", (b, point[:3])),
        (BadTensorShapeError, r"\[16\], \[1, 16\] or \[B, 1, 16\] with 1 in any place for a b \[32, 16\], got", (b, point.expand(2, 2, 16))),
        (BadTensorShapeError, r"b_zero_point: expected one value, .* or \[3, 1, 16\] with", (b.expand(3, 32, 16), point.expand(2, 1, 16))),
        (BadTensorShapeError, r"or \[1, 1, 16\] with .*, got \[2, 1, 1\]$", (b.expand(1, 32, 16), point[:2].view(2, 1, 1))),
        (BadTensorShapeError, r"b_zero_point: expected one value, \[16\]", (b, point.reshape(16, 1))),
    ]:
        with pytest.raises(error, match=match):
            sm.prepare_weight(*args)


def test_a_prepared_weight_takes_column_sums_with_a_zero_point_folded_in(device):
    """vLLM's azp_adj of a static activation: zero_point * column sums, subtracted by a zero point of 1."""
    for batch in (None, 3):
        operands = Case(5, 16, 32).make(device)
        inputs = dict(operands.inputs)
        if batch:
            inputs["b"] = torch.stack([inputs["b"].roll(i, 0) + i for i in range(batch)])
        for point in (-200, -128, 0, 3, 1000):
            zero_point, one = (torch.tensor([value], dtype=torch.int32, device=device) for value in (point, 1))
            folded = point * inputs["b"].sum(-2, keepdim=True, dtype=torch.int32)
            expected = reference.scaled_mm(**{**inputs, "a_zero_point": zero_point}, out_dtype=torch.bfloat16)
            for sums in (folded, folded[0] if not batch else folded.contiguous()):
                weight = sm.prepare_weight(inputs["b"], b_column_sums=sums)
                assert torch.equal(sm.scaled_mm(**{**inputs, "b": weight, "a_zero_point": one}), expected)


def test_column_sums_that_cannot_be_a_weights_are_refused_by_name(device):
    b = torch.zeros(32, 16, dtype=torch.int8, device=device)
    sums = torch.zeros(16, dtype=torch.int32, device=device)
    for error, match, weight, column_sums in [
        (BadParamError, "b_column_sums: expected a tensor, got int", b, 3),
        (BadTensorDtypeError, "b_column_sums: expected int32, got float32", b, sums.float()),
        (BadTensorDeviceError, "b_column_sums: expected a tensor on", b, sums.to("meta")),
        (BadTensorShapeError, r"b_column_sums: expected \[16\] or \[1, 16\] for a b \[32, 16\], got \[3\]", b, sums[:3]),
        (BadTensorShapeError, r"expected \[16\] or \[1, 16\] for a b \[32, 16\], got \[16, 1\]", b, sums.reshape(16, 1)),
        (BadTensorShapeError, r"or \[3, 1, 16\] with 1 for B for a b \[3, 32, 16\], got \[2, 1, 16\]", b.expand(3, 32, 16), sums.expand(2, 1, 16)),
    ]:
        with pytest.raises(error, match=match):
            sm.prepare_weight(weight, b_column_sums=column_sums)


@pytest.mark.parametrize(
    "name, shapes", [("a_row_sums", [(), (1,), (1, 5), (6,), (5, 2), (1, 5, 1)]), ("b_column_sums", [(), (1,), (16, 1), (17,), (1, 1, 16)])]
)
def test_sums_of_another_shape_or_dtype_are_refused_with_and_without_zero_points(device, name, shapes):
    for zero_point in (None, "vector_int32"):
        operands = Case(5, 16, 32, a_zero_point=zero_point, b_zero_point=zero_point).make(device)
        for shape in shapes:
            with pytest.raises(BadTensorShapeError, match=f"{name}: expected"):
                sm.scaled_mm(**operands.inputs, **{name: torch.zeros(shape, dtype=torch.int32, device=device)})
        right = torch.zeros(shapes[3][0] - 1, dtype=torch.int32, device=device)
        for dtype in (torch.int8, torch.int64, torch.float32):
            with pytest.raises(BadTensorDtypeError, match=f"{name}: expected int32, got {str(dtype).removeprefix('torch.')}"):
                sm.scaled_mm(**operands.inputs, **{name: right.to(dtype)})
        with pytest.raises(ScaledMMError, match=name):
            sm.scaled_mm(**operands.inputs, **{name: right.to("meta")})
