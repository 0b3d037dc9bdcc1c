"""Quantizers with a given scale: static `quantize_int8`, `quantize`, smooth scales, out=, `dynamic_quant`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from operands.pairs import pairwise
from rowwise_data import FLOATS, KINDS, LAYOUTS, LEADING, laid_out, values

import scaled_mm as sm
from scaled_mm.errors import BadParamError, BadTensorDeviceError, BadTensorDtypeError, BadTensorShapeError, BadTensorStridesError
from scaled_mm.reference import same_bits
from scaled_mm.rowwise import reference

CASES = dict(dtype=FLOATS, k=(1, 7, 8, 9, 255, 2049, 4096), leading=LEADING, layout=LAYOUTS, kind=KINDS)
SCALES = (0.01, 1.0, 1e-40, 0.0, float("inf"), float("nan"), -0.5)


def by_rows(scale: torch.Tensor, dim: str) -> torch.Tensor:
    return scale.transpose(-1, -2) if dim == "channel" and scale.numel() != 1 else scale


@pairwise(**CASES, dim=("token", "channel", "tensor"), shape=("one", "full"), zero_point=(None, torch.int8, torch.int32), seed=(0, 1, 2))
def test_a_static_scale_has_the_bits_of_the_reference(device, dtype, k, leading, layout, kind, dim, shape, zero_point, seed):
    if dim == "channel" and not leading:
        leading = (2,)
    x = laid_out(values((*leading, k), dtype, kind, seed), layout)
    full = {"token": (*leading, 1), "channel": (*leading[:-1], 1, leading[-1] if leading else 1), "tensor": (1,)}[dim]
    generator = torch.Generator().manual_seed(seed)
    scale = torch.empty(() if shape == "one" else full).uniform_(1e-3, 0.1, generator=generator)
    point = None if zero_point is None else torch.randint(-128, 128, scale.shape, generator=generator).to(zero_point)
    moved = {"scale": scale.to(device), "zero_point": None if point is None else point.to(device)}
    made = sm.quantize_int8(x.to(device), dim, **moved)
    want = reference.static(x, by_rows(scale, dim), None if point is None else by_rows(point, dim))
    assert made[0].is_contiguous() and same_bits(made[0].cpu(), want) and made[1] is moved["scale"]
    if point is None:
        assert type(made) is tuple
        return
    sums = want.sum(-1, keepdim=True, dtype=torch.int32)
    assert type(made) is sm.AsymmetricInt8 and torch.equal(made.zero_point.cpu(), point.to(torch.int32))
    assert torch.equal(made.row_sums.cpu(), sums.transpose(-1, -2) if dim == "channel" else sums)
    assert made.row_sums.is_contiguous() and made.row_sums.dtype is torch.int32


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scales_that_are_not_numbers_give_the_bits_of_the_reference(device, dtype):
    x = torch.cat((values((7, 11), dtype, "special"), values((7, 3), dtype, "wide")), -1)
    for zero_point in (
        None,
        torch.tensor(-128, dtype=torch.int8),
        torch.tensor(2**31 - 1, dtype=torch.int32),
        torch.tensor(-16777217, dtype=torch.int32),
    ):
        for scale in map(torch.tensor, SCALES):
            moved = None if zero_point is None else zero_point.to(device)
            made = sm.quantize_int8(x.to(device), scale=scale.to(device), zero_point=moved)
            assert same_bits(made[0].cpu(), reference.static(x, scale, zero_point))


def test_ties_round_to_even_before_the_zero_point_and_after_the_offset(device):
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, -128.5, float("nan")], device=device)
    one, odd = torch.ones((), device=device), torch.ones((), dtype=torch.int8, device=device)
    assert sm.quantize_int8(x, scale=one)[0].tolist() == [0, 2, 2, 0, -2, 126, 127, -128, 0]
    assert sm.quantize_int8(x, scale=one, zero_point=odd)[0].tolist() == [1, 3, 3, 1, -1, 127, 127, -127, 1]
    assert sm.quantize(x, one, one).tolist() == [2, 2, 4, 0, 0, 127, 127, -128, 0]


def test_a_static_scale_with_zero_points_gives_a_product_of_the_values(device):
    x, w = values((4, 64), torch.float32).to(device), values((8, 64), torch.float32).to(device)
    a = sm.quantize_int8(x, scale=torch.tensor([0.05], device=device), zero_point=torch.tensor([9], dtype=torch.int8, device=device))
    q, b_scale = sm.quantize_int8(w, "channel")
    out = sm.scaled_mm(a.q, q.t(), a.scale, b_scale, a_zero_point=a.zero_point, out_dtype=torch.float32)
    assert (out - x @ w.t()).abs().max() < 1.5


def test_a_tensor_of_no_dimensions_may_have_a_static_scale(device):
    made = sm.quantize_int8(
        torch.tensor(-2.0, device=device),
        "tensor",
        scale=torch.ones(1, device=device),
        zero_point=torch.ones(1, dtype=torch.int8, device=device),
    )
    assert made.q.item() == -1 and made.q.shape == () and made.row_sums.tolist() == [-1]


@pairwise(**CASES, scale_dtype=FLOATS, vector=(False, True), offset=(None, False, True))
def test_quantize_has_the_bits_of_the_reference(device, dtype, k, leading, layout, kind, scale_dtype, vector, offset):
    x = laid_out(values((*leading, k), dtype, kind), layout)
    scale = values((k,) if vector else (1,), scale_dtype, seed=1) * 20
    offset = None if offset is None else values((k,) if offset else (), scale_dtype, seed=2) * 5
    q = sm.quantize(x.to(device), scale.to(device), None if offset is None else offset.to(device))
    assert q.is_contiguous() and same_bits(q.cpu(), reference.quantize(x, scale, offset))


@pairwise(**CASES, smooth_dtype=(None, *FLOATS))
def test_smooth_scales_and_dynamic_quant_have_the_bits_of_the_reference(device, dtype, k, leading, layout, kind, smooth_dtype):
    x = laid_out(values((*leading, k), dtype, kind), layout)
    smooth = None if smooth_dtype is None else values((k,), smooth_dtype, seed=1)
    moved = None if smooth is None else smooth.to(device)
    for one, other in zip(sm.quantize_int8(x.to(device), smooth_scale=moved), reference.token(x, smooth)):
        assert same_bits(one.cpu(), other)
    if leading:
        y, scale = sm.dynamic_quant(x.to(device), moved)
        want, want_scale = reference.dynamic_quant(x, smooth)
        assert scale.shape == x.shape[:-1] and y.is_contiguous() and same_bits(y.cpu(), want) and same_bits(scale.cpu(), want_scale)


def test_smooth_scales_go_with_every_dim_and_mode(device):
    x, smooth = values((6, 40), torch.bfloat16).to(device), values((40,), torch.float32, seed=1).to(device)
    product = x.float() * smooth
    for options in ({"dim": "channel"}, {"dim": "tensor"}, {"symmetric": False}, {"scale": torch.tensor(0.1, device=device)}):
        for one, other in zip(sm.quantize_int8(x, smooth_scale=smooth, **options), sm.quantize_int8(product, **options)):
            assert same_bits(one, other)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "unaligned"])
def test_values_are_written_to_an_out_of_any_strides(device, layout):
    x = values((6, 40), torch.float16).to(device)
    for options in ({}, {"symmetric": False}, {"dim": "channel"}, {"scale": torch.tensor(0.1, device=device)}):
        out = laid_out(torch.full((6, 40), 77.0), layout).to(device).to(torch.int8, memory_format=torch.preserve_format)
        want, made = sm.quantize_int8(x, **options), sm.quantize_int8(x, out=out, **options)
        assert made[0] is out and type(made) is type(want)
        assert all(same_bits(one, other) for one, other in zip(made, want))


X, S, Z = torch.ones(2, 4), torch.ones(1), torch.zeros(1, dtype=torch.int8)
MEMORY = torch.ones(2)


@pytest.mark.parametrize(
    "error, message, options",
    [
        (BadParamError, "symmetric: expected True or False", {"symmetric": 1}),
        (BadParamError, "scale: expected a tensor, got float", {"scale": 0.1}),
        (BadTensorDtypeError, "scale: expected float32, got torch.float16", {"scale": S.half()}),
        (BadTensorShapeError, r"scale: expected one value or \[2, 1\], got \[2\]", {"scale": torch.ones(2)}),
        (BadTensorShapeError, r"scale: expected one value or \[1, 2\], got \[2, 1\]", {"scale": torch.ones(2, 1), "dim": "channel"}),
        (BadTensorDeviceError, "scale: expected a tensor on cpu", {"scale": S.to("meta")}),
        (BadParamError, "zero_point: expected None without a static scale", {"zero_point": Z}),
        (BadParamError, "zero_point: expected a tensor, got int", {"scale": S, "zero_point": 3}),
        (BadTensorDtypeError, "zero_point: expected int8 or int32, got torch.float32", {"scale": S, "zero_point": S}),
        (BadTensorShapeError, r"zero_point: expected one value or \[2, 1\], got \[4\]", {"scale": S, "zero_point": Z.expand(4)}),
        (BadTensorDeviceError, "zero_point: expected a tensor on cpu", {"scale": S, "zero_point": Z.to("meta")}),
        (BadParamError, "smooth_scale: expected a tensor, got list", {"smooth_scale": [1.0]}),
        (BadTensorDtypeError, "smooth_scale: expected float16", {"smooth_scale": X[0].double()}),
        (BadTensorShapeError, r"smooth_scale: expected \[4\], got \[1\]", {"smooth_scale": S}),
        (BadTensorDeviceError, "smooth_scale: expected a tensor on cpu", {"smooth_scale": X[0].to("meta")}),
        (BadParamError, "out: expected a tensor, got int", {"out": 1}),
        (BadTensorDtypeError, "out: expected torch.int8, got torch.float32", {"out": X.clone()}),
        (BadTensorShapeError, r"out: expected \[2, 4\], got \[2, 3\]", {"out": torch.zeros(2, 3, dtype=torch.int8)}),
        (BadTensorDeviceError, "out: expected a tensor on cpu", {"out": torch.zeros(2, 4, dtype=torch.int8, device="meta")}),
        (BadTensorStridesError, "out: expected memory of its own", {"out": torch.zeros(4, dtype=torch.int8).expand(2, 4)}),
        (BadTensorStridesError, "out: expected memory of its own", {"out": torch.zeros(8, dtype=torch.int8).as_strided((2, 4), (3, 1))}),
        (BadParamError, "out: expected memory apart from scale", {"scale": MEMORY[0], "out": MEMORY.view(torch.int8).view(2, 4)}),
        (BadParamError, "dim: expected one of", {"dim": np.array(["token", "channel"])}),
    ],
)
def test_what_is_wrong_in_quantize_int8_is_refused_and_named(error, message, options):
    with pytest.raises(error, match="^" + message):
        sm.quantize_int8(X, **options)


@pytest.mark.parametrize(
    "error, message, call",
    [
        (BadParamError, "x: expected a tensor, got None", lambda: sm.quantize(None, S)),
        (BadTensorShapeError, "x: expected 1 to 8 dimensions, got 0", lambda: sm.quantize(X[0, 0], S)),
        (BadParamError, "scale: expected a tensor, got float", lambda: sm.quantize(X, 0.1)),
        (BadTensorDtypeError, "scale: expected float16", lambda: sm.quantize(X, S.double())),
        (BadTensorShapeError, r"scale: expected one value or \[4\], got \[2\]", lambda: sm.quantize(X, X[:, 0])),
        (BadTensorShapeError, r"scale: expected one value or \[4\], got \[1, 1\]", lambda: sm.quantize(X, S[None])),
        (BadTensorDtypeError, "offset: expected torch.float32 as scale, got torch.float16", lambda: sm.quantize(X, S, S.half())),
        (BadTensorShapeError, r"offset: expected one value or \[4\]", lambda: sm.quantize(X, S, X[:, 0])),
        (BadTensorDeviceError, "offset: expected a tensor on cpu", lambda: sm.quantize(X, S, S.to("meta"))),
        (BadTensorDtypeError, "x: expected float16", lambda: sm.dynamic_quant(X.int())),
        (BadTensorShapeError, "x: expected 2 to 8 dimensions, got 1", lambda: sm.dynamic_quant(X[0])),
        (BadTensorShapeError, r"smooth_scales: expected \[4\], got \[1\]", lambda: sm.dynamic_quant(X, S)),
        (BadParamError, "smooth_scales: expected a tensor, got int", lambda: sm.dynamic_quant(X, 1)),
    ],
)
def test_what_is_wrong_in_quantize_and_dynamic_quant_is_refused_and_named(error, message, call):
    with pytest.raises(error, match="^" + message):
        call()


def test_a_compiled_graph_gives_the_same_bits(device):
    def layer(x, scale, point, smooth, out):
        one = sm.quantize_int8(x, scale=scale, zero_point=point), sm.quantize_int8(x, "tensor", smooth_scale=smooth)
        return *one, sm.quantize(x, smooth, smooth), sm.dynamic_quant(x, smooth), sm.quantize_int8(x, out=out)

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for rows in (3, 7):
        x, scale, point = values((rows, 34), torch.bfloat16), torch.tensor(0.1), torch.tensor(3, dtype=torch.int8)
        made = [each.to(device) for each in (x, scale, point, values((34,), torch.float32, seed=1))]
        outs = [torch.zeros(rows, 34, dtype=torch.int8, device=device) for _ in range(2)]
        for one, other in zip(*(torch.utils._pytree.tree_leaves(result) for result in (layer(*made, outs[0]), compiled(*made, outs[1])))):
            assert same_bits(one, other) and one.stride() == other.stride()
        assert torch.equal(*outs)


def test_inductor_keeps_the_rounding_to_16_bits_between_two_operators(device):
    weight, smooth = (values((256,), torch.float32, seed=seed).to(device) for seed in (1, 2))

    def layer(x):
        y = sm.rms_norm(x, weight)
        return y.float(), *sm.quantize_int8(y, smooth_scale=smooth), *sm.dynamic_quant(x * 1.37, smooth)

    torch.compiler.reset()
    x = values((16, 256), torch.bfloat16).to(device)
    assert all(same_bits(one, other) for one, other in zip(layer(x), torch.compile(layer, fullgraph=True)(x)))


def test_the_raw_operators_refuse_as_the_functions_do():
    static, smooth = torch.ops.scaled_mm.quantize_int8_static, torch.ops.scaled_mm.rowwise_smooth
    for error, message, call in (
        (BadTensorDtypeError, "scale: expected float32", lambda: static(X, S.double(), None)),
        (BadTensorShapeError, r"scale: expected \[\], \[2, 1\] or \[4\], got \[3\]", lambda: static(X, X[0, :3], None)),
        (BadTensorDtypeError, "zero_point: expected int8 or int32", lambda: static(X, S[0], S[0])),
        (BadTensorDeviceError, "zero_point: expected a tensor on cpu", lambda: static(X, S[0], Z[0].to("meta"))),
        (BadTensorShapeError, "x: expected at least 1 dimension", lambda: smooth(X[0, 0], S)),
    ):
        with pytest.raises(error, match="^" + message):
            call()


def test_opcheck_finds_nothing_wrong(device):
    x, scale, point = (
        values((5, 12), torch.float16).t().to(device),
        torch.tensor(0.1, device=device),
        torch.tensor(3, dtype=torch.int8, device=device),
    )
    vector, operators = values((5,), torch.float32).to(device), torch.ops.scaled_mm
    for operator, arguments in (
        (operators.quantize, (x, vector, vector)),
        (operators.quantize, (x, scale, None)),
        (operators.quantize_int8_static, (x, scale, point)),
        (operators.rowwise_smooth, (x, vector)),
        (operators.rowwise_cast, (x.float(), torch.bfloat16)),
    ):
        torch.library.opcheck(operator.default, arguments)
