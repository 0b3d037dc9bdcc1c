"""int8_linear: the bits of quantize_int8 and scaled_mm, for every form of its operands, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from operands.pairs import pairs

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.core import binding, fast

N, K = 72, 200
MEMORY = torch.ones(3 * N)


def operands(dtype: torch.dtype, shape: tuple[int, ...], device: str, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(*shape, K, generator=generator) * 3).to(dtype)
    weight, scale = sm.quantize_int8(torch.randn(N, K, generator=generator), "channel")
    return x.to(device), weight.to(device), scale.to(device), torch.randn(N, generator=generator).to(device)


GRID = dict(
    dtype=[torch.float32, torch.bfloat16, torch.float16],
    out_dtype=[None, torch.float32, torch.bfloat16],
    shape=[(), (1,), (17,), (2, 3), (4, 0), (2, 1, 3, 1, 2)],
    scale=["row", "column", "vector", "one"],
    bias=[None, "float32", "out"],
    static=[None, "scale", "zero point"],
    smooth=[False, True],
    prepared=[False, True],
    out=[None, "rows", "strided"],
)


@pytest.mark.parametrize("case", pairs(**GRID), ids=str)
def test_every_pair_of_options_equals_the_two_calls_of_the_reference(device, case):
    x, weight, weight_scale, bias = operands(case["dtype"], case["shape"], device)
    out_dtype = case["out_dtype"] or x.dtype
    smooth = torch.rand(K).add(0.5).to(device) if case["smooth"] else None
    given = {"row": weight_scale, "column": weight_scale.t(), "vector": weight_scale[0], "one": weight_scale[0, :1]}[case["scale"]]
    bias = None if case["bias"] is None else bias.to(out_dtype if case["bias"] == "out" else torch.float32)
    input_scale = torch.tensor([0.05], device=device) if case["static"] else None
    zero_point = torch.tensor(-7, dtype=torch.int32, device=device) if case["static"] == "zero point" else None

    rows = x.reshape(-1, K).cpu().float() * (1 if smooth is None else smooth.cpu())
    if input_scale is None:
        q, a_scale = sm.quantize_int8(rows)
    else:
        q = ((rows / input_scale.cpu()).round() + (0 if zero_point is None else zero_point.cpu())).clamp(-128, 127).to(torch.int8)
        a_scale = input_scale.cpu()
    cpu = {"a_zero_point": None if zero_point is None else zero_point.cpu().view(1), "bias": None if bias is None else bias.cpu()}
    expected = reference.scaled_mm(q, weight.cpu().t(), a_scale, given.cpu().reshape(1, -1), **cpu, out_dtype=out_dtype)

    options = dict(input_scale=input_scale, input_zero_point=zero_point, smooth_scale=smooth)
    if case["out"] is not None:
        shape = (*case["shape"], N)
        strided = torch.full((N, *case["shape"]), float("nan"), dtype=out_dtype, device=device).movedim(0, -1)
        options["out"] = strided if case["out"] == "strided" else torch.full(shape, float("nan"), dtype=out_dtype, device=device)
    else:
        options["out_dtype"] = case["out_dtype"]
    y = sm.int8_linear(x, sm.prepare_weight(weight.t()) if case["prepared"] else weight, given, bias, **options)
    assert case["out"] is None or y is options["out"]
    assert y.shape == (*case["shape"], N) and y.dtype == out_dtype
    assert reference.same_bits(y.cpu().reshape(-1, N), expected)


def test_a_token_alone_has_the_bits_of_the_token_in_a_batch(device):
    x, weight, scale, _ = operands(torch.bfloat16, (33,), device)
    together = sm.int8_linear(x, weight, scale)
    assert reference.same_bits(torch.stack([sm.int8_linear(row, weight, scale) for row in x]).cpu(), together.cpu())


def test_too_many_products_in_a_sum_are_refused_by_the_name_of_x():
    for k, static in ((131072, {}), (65794, dict(input_scale=torch.ones(1), input_zero_point=torch.ones(1, dtype=torch.int8)))):
        with pytest.raises(sm.AccumulatorOverflowError, match=f"^x: expected K <= {k - 1}"):
            sm.int8_linear(torch.ones(1, k), torch.ones(1, k, dtype=torch.int8), torch.ones(1), **static)


def test_one_value_may_have_any_number_of_dimensions():
    x, weight, _, _ = operands(torch.float32, (4,), "cpu")
    one, point = torch.full([1] * 5, 0.1), torch.full([1] * 5, 3, dtype=torch.int8)
    made = sm.int8_linear(x, weight, one, input_scale=one, input_zero_point=point)
    assert torch.equal(made, sm.int8_linear(x, weight, one.view(1), input_scale=one.view(1), input_zero_point=point.view(1)))


def test_no_gradient_is_required_of_the_output():
    x, weight, scale, _ = operands(torch.float32, (4,), "cpu")
    assert not sm.int8_linear(x.requires_grad_(), weight, scale).requires_grad


REFUSED = [
    (dict(x=torch.zeros(3, K, dtype=torch.int8)), sm.BadTensorDtypeError, "x: expected float16, bfloat16 or float32"),
    (dict(x=torch.zeros(3, K + 1)), sm.BadTensorShapeError, r"x: expected \[\.\.\., K\] with K = 200"),
    (dict(x=torch.zeros(())), sm.BadTensorShapeError, "x: expected 1 to 8 dimensions"),
    (dict(x=None), sm.BadParamError, "x: expected a tensor, got None"),
    (dict(weight=torch.zeros(N, K)), sm.BadTensorDtypeError, "weight: expected int8"),
    (dict(weight=torch.zeros(1, N, K, dtype=torch.int8)), sm.BadTensorShapeError, r"weight: expected \[N, K\]"),
    (dict(weight=torch.zeros(N, K, dtype=torch.int8, device="meta")), sm.BadTensorDeviceError, "weight: expected a tensor on cpu"),
    (dict(weight_scale=torch.ones(N, dtype=torch.bfloat16)), sm.BadTensorDtypeError, "weight_scale: expected float32"),
    (dict(weight_scale=torch.ones(2, N)), sm.BadTensorShapeError, "weight_scale: expected one value"),
    (dict(weight_scale=None), sm.BadParamError, "weight_scale: expected a tensor"),
    (dict(bias=torch.zeros(N, dtype=torch.float16)), sm.BadTensorDtypeError, "bias: expected torch.bfloat16 or torch.float32"),
    (dict(bias=torch.zeros(N, 1)), sm.BadTensorShapeError, "bias: expected"),
    (dict(input_scale=torch.ones(3, 1)), sm.BadTensorShapeError, "input_scale: expected one value"),
    (dict(input_scale=torch.ones(1, dtype=torch.float64)), sm.BadTensorDtypeError, "input_scale: expected float32"),
    (dict(input_zero_point=torch.zeros(1, dtype=torch.int8)), sm.BadParamError, "input_zero_point: expected None"),
    (dict(input_scale=torch.ones(1), input_zero_point=torch.zeros(1)), sm.BadTensorDtypeError, "input_zero_point: expected int8 or int32"),
    (dict(smooth_scale=torch.ones(K - 1)), sm.BadTensorShapeError, "smooth_scale: expected"),
    (dict(out_dtype=torch.int8), sm.BadTensorDtypeError, "out_dtype: expected float16, bfloat16 or float32"),
    (dict(out=torch.zeros(3, N + 1, dtype=torch.bfloat16)), sm.BadTensorShapeError, "out: expected"),
    (dict(out=torch.zeros(3, N, dtype=torch.int8)), sm.BadTensorDtypeError, "out_dtype: expected"),
    (dict(out_dtype=np.array([1, 2])), sm.BadTensorDtypeError, "out_dtype: expected"),
    (dict(out=torch.zeros(9 * N).bfloat16().as_strided((3, N), (N - 1, 1))), sm.BadTensorStridesError, "out: expected memory of its own"),
    (dict(weight_scale=MEMORY[:N], out=MEMORY[: 3 * N].view(3, N), out_dtype=None), sm.BadParamError, "out: expected memory apart from weight_scale"),
]


@pytest.mark.parametrize("wrong, error, message", REFUSED, ids=lambda value: str(value)[:60])
def test_what_is_wrong_is_refused_and_named(wrong, error, message):
    x, weight, scale, _ = operands(torch.bfloat16, (3,), "cpu")
    with pytest.raises(error, match=f"^{message}"):
        sm.int8_linear(**{**dict(x=x, weight=weight, weight_scale=scale), **wrong})


@pytest.mark.parametrize("status, error", [(15, sm.CudaError), (1, sm.InternalError), (5, None)])
def test_a_fault_of_the_one_call_is_raised_and_not_tried_again(monkeypatch, status, error):
    """A status that is about operands leaves the call to the checks, which name them."""

    class Extension:
        @staticmethod
        def linear(*_):
            binding.library().scaledMMSetLastError(status, b"launch: failed")
            return status

    x, weight, scale, _ = operands(torch.bfloat16, (3,), "cpu")
    expected = sm.int8_linear(x, weight, scale)
    monkeypatch.setattr(fast, "is_current", lambda device: True)
    monkeypatch.setattr(fast, "loaded", lambda: Extension)
    monkeypatch.setattr(fast, "handle_address", lambda device: 0)
    if error is None:
        assert torch.equal(sm.int8_linear(x, weight, scale), expected)
    else:
        with pytest.raises(error, match="launch: failed"):
            sm.int8_linear(x, weight, scale)


def test_symbolic_sizes_and_constant_vectors_compile():
    x, weight = torch.randn(4, 8), torch.randint(-5, 5, (6, 8), dtype=torch.int8)

    def layer(x, weight):
        return sm.int8_linear(x, weight, torch.ones(6), torch.ones(6), smooth_scale=torch.ones(8))

    assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)(x, weight), layer(x, weight))


def test_a_sparse_operand_is_named_with_an_output_too():
    weight, out = torch.ones(6, 8, dtype=torch.int8), torch.empty(4, 6)
    with pytest.raises(sm.BadParamError, match="^smooth_scale: expected a strided tensor"):
        sm.int8_linear(torch.ones(4, 8), weight, torch.ones(6), smooth_scale=torch.ones(8).to_sparse(), out=out)
