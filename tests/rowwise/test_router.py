"""`topk_softmax`: the bits of the numpy reference, and what follows from its definition."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operands.pairs import pairwise
from rowwise_data import FLOATS, KINDS, LAYOUTS, SPECIAL, beyond_one_unit, laid_out, values
from torch.fx.experimental.proxy_tensor import make_fx

import scaled_mm as sm
from scaled_mm.errors import BadParamError, BadTensorDtypeError, BadTensorShapeError
from scaled_mm.reference import same_bits
from scaled_mm.rowwise import kernels, reference

NAN, INF = float("nan"), float("inf")


def same(got, expected) -> bool:
    weights, ids = (t.cpu() for t in got)
    right = same_bits(weights, expected[0]) and ids.dtype is torch.int32 and torch.equal(ids, expected[1])
    return right and all(t.is_contiguous() for t in got)


@pairwise(
    dtype=FLOATS,
    experts=(1, 2, 8, 31, 32, 33, 60, 128, 129, 500, 1024),
    k=(1, 2, 8, 32),
    rows=((), (1,), (5,), (2, 3), (1, 2, 1, 2, 1, 2, 1), (0,), (2, 0)),
    renormalize=(False, True),
    layout=LAYOUTS,
    kind=(*KINDS, "ties"),
)
def test_every_pair_of_operands_has_the_bits_of_the_reference(device, dtype, experts, k, rows, renormalize, layout, kind):
    logits = values((*rows, experts), dtype, "plain" if kind == "ties" else kind, seed=experts)
    x = laid_out(logits.round() if kind == "ties" else logits, layout)
    k = min(k, experts)
    assert same(sm.topk_softmax(x.to(device), k, renormalize=renormalize), reference.topk_softmax(x, k, renormalize))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_random_rows_have_the_properties_of_the_definition(data):
    """Of any values: the bits of the reference. Of finite ones also: ids as torch's stable sort has them, weights that decrease, within the bound."""
    dtype = data.draw(st.sampled_from(FLOATS))
    width = 32 if dtype is torch.float32 else 16
    number = st.one_of(st.floats(width=width), st.sampled_from(SPECIAL), st.floats(-8, 8, width=16), st.integers(-3, 3).map(float))
    row = data.draw(st.lists(number, min_size=1, max_size=data.draw(st.sampled_from((4, 40, 150)))))
    k, renormalize = data.draw(st.integers(1, min(32, len(row)))), data.draw(st.booleans())
    x = torch.tensor(row).to(dtype)
    weights, ids = sm.topk_softmax(x, k, renormalize=renormalize)
    assert same((weights, ids), reference.topk_softmax(x, k, renormalize))
    order = x.float().sort(descending=True, stable=True).indices
    assert torch.equal(ids.long(), order[:k])
    highest = float(x.float()[order[0]])
    if highest != highest or abs(highest) == INF:
        assert weights.isnan().all()
        return
    assert (weights >= 0).all() and (weights.diff() <= 0).all()
    exact = x.double().softmax(-1)[order[:k]]
    exact = exact / exact.sum() if renormalize else exact
    assert torch.allclose(weights.double(), exact, rtol=2**-15, atol=2.0**-140)


def test_a_row_of_equal_logits_is_divided_evenly(device):
    for dtype in FLOATS:
        weights, ids = sm.topk_softmax(torch.full((3, 128), -2.5, dtype=dtype, device=device), 4, renormalize=False)
        assert (weights == 1 / 128).all() and ids.tolist() == [[0, 1, 2, 3]] * 3
        weights, _ = sm.topk_softmax(torch.zeros(3, 128, dtype=dtype, device=device), 4)
        assert (weights == 0.25).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_infinity_and_zeros_are_selected_as_defined(device, dtype):
    for row, ids, nan in (
        ([1.0, NAN, 5.0, NAN], [1, 3, 2, 0], True),
        ([-NAN, INF, NAN, 0.0], [0, 2, 1, 3], True),
        ([1.0, INF, 5.0, INF], [1, 3, 2, 0], True),
        ([-INF, -INF, -INF, -INF], [0, 1, 2, 3], True),
        ([-INF, 3.0, -INF, -60000.0], [1, 3, 0, 2], False),
        ([-0.0, 0.0, -0.0, -1.0], [0, 1, 2, 3], False),
        ([-1.0, 0.0, -0.0, 0.0], [1, 2, 3, 0], False),
    ):
        weights, found = sm.topk_softmax(torch.tensor(row, dtype=dtype, device=device), 4)
        assert found.tolist() == ids and weights.isnan().all() == nan and weights.isnan().any() == nan, row
    assert sm.topk_softmax(torch.tensor([-INF, 3.0], dtype=dtype, device=device), 2)[0].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_row_alone_has_the_bits_of_the_row_in_a_batch(device, dtype):
    x = values((67, 200), dtype, "special").to(device)
    batch = sm.topk_softmax(x, 8)
    for row in (0, 31, 66):
        assert all(torch.equal(one.view(torch.int32), many[row].view(torch.int32)) for one, many in zip(sm.topk_softmax(x[row], 8), batch))


def test_weights_are_those_of_a_float64_softmax_to_bfloat16s_precision():
    x = values((500, 128), torch.bfloat16)
    weights, ids = sm.topk_softmax(x, 8)
    exact = x.double().softmax(-1).gather(-1, ids.long())
    assert not beyond_one_unit(weights.to(torch.bfloat16), exact / exact.sum(-1, keepdim=True)).numel()


def test_the_experts_take_its_results_as_they_are(device, monkeypatch):
    """ids of int32, weights of float32: nothing converts them."""
    layer = sm.nn.Int8Experts(8, 64, 32, device=device)
    for tensor in layer.parameters():
        tensor.copy_(torch.randint(-9, 9, tensor.shape) if tensor.dtype is torch.int8 else torch.full(tensor.shape, 0.01))
    x = values((5, 64), torch.bfloat16).to(device)
    weights, ids = sm.topk_softmax(values((5, 8), torch.bfloat16).to(device), 2)
    expected = layer(x, ids.long(), weights)
    taken, sort = [], sm.layers.experts.moe.moe_sort
    monkeypatch.setattr(sm.layers.experts.moe, "moe_sort", lambda given, *rest, **named: taken.append(given) or sort(given, *rest, **named))
    assert torch.equal(layer(x, ids, weights), expected) and taken[0] is ids


LOGITS = torch.zeros(3, 40)


@pytest.mark.parametrize(
    "error, message, call",
    [
        (BadParamError, "logits: expected a tensor, got None", lambda: sm.topk_softmax(None, 2)),
        (BadTensorDtypeError, "logits: expected float16, bfloat16 or float32, got torch.float64", lambda: sm.topk_softmax(LOGITS.double(), 2)),
        (BadTensorShapeError, "logits: expected 1 to 8 dimensions, got 0", lambda: sm.topk_softmax(LOGITS[0, 0], 1)),
        (BadTensorShapeError, "logits: expected 1 to 8 dimensions, got 9", lambda: sm.topk_softmax(LOGITS.view(3, *[1] * 7, 40), 1)),
        (
            BadTensorShapeError,
            r"logits: expected \[..., E\] with E from 1 to 1024, got \[3, 1025\]",
            lambda: sm.topk_softmax(torch.zeros(3, 1025), 1),
        ),
        (BadTensorShapeError, r"logits: expected \[..., E\] with E from 1 to 1024, got \[3, 0\]", lambda: sm.topk_softmax(LOGITS[:, :0], 1)),
        (BadParamError, "k: expected an integer from 1 to 8 for 8 experts, got 9", lambda: sm.topk_softmax(LOGITS[:, :8], 9)),
        (BadParamError, "k: expected an integer from 1 to 32 for 40 experts, got 33", lambda: sm.topk_softmax(LOGITS, 33)),
        (BadParamError, "k: expected an integer from 1 to 32 for 40 experts, got 0", lambda: torch.ops.scaled_mm.topk_softmax(LOGITS, 0, True)),
        (BadParamError, "renormalize: expected True or False, got 1", lambda: sm.topk_softmax(LOGITS, 2, renormalize=1)),
    ],
)
def test_what_is_wrong_is_refused_and_named(error, message, call):
    with pytest.raises(error, match="^" + message):
        call()


def test_k_may_be_any_kind_of_integer():
    assert same(sm.topk_softmax(LOGITS, numpy.int64(3)), sm.topk_softmax(LOGITS, 3))
    for wrong in (True, 2.0, "2", None, torch.tensor(2), torch.tensor(2, device="meta")):
        with pytest.raises(BadParamError, match="^k: expected an integer from 1 to 32 for 40 experts, got"):
            sm.topk_softmax(LOGITS, wrong)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_graph_gives_the_same_bits(device, dynamic):
    torch.compiler.reset()
    compiled = torch.compile(lambda x: sm.topk_softmax(x * 2, 4), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (3, 7):
        x = values((tokens, 60), torch.bfloat16, "special").to(device)
        assert same(compiled(x), tuple(t.cpu() for t in sm.topk_softmax(x * 2, 4)))


def test_opcheck_and_a_recorded_call_find_nothing_wrong(device):
    for layout, dtype, renormalize in (("contiguous", torch.float16, False), ("transposed", torch.float32, True)):
        x = laid_out(values((3, 2, 40), dtype), layout).to(device)
        torch.library.opcheck(torch.ops.scaled_mm.topk_softmax.default, (x, 8, renormalize))
    for mode in ("real", "symbolic"):
        graph = make_fx(lambda x: sm.topk_softmax(x, 8), tracing_mode=mode)(values((5, 40), torch.float32))
        other = values((5, 40), torch.float32, "special", seed=4)
        assert same(graph(other), sm.topk_softmax(other, 8))


@pytest.mark.gpu
def test_torch_operations_give_the_bits_of_the_kernels(monkeypatch):
    """What serves while kernels are not built."""
    monkeypatch.setattr(kernels, "launch", lambda *_: False)
    for dtype in FLOATS:
        x = values((40, 300), dtype, "special")
        assert same(sm.topk_softmax(x.cuda(), 8), reference.topk_softmax(x, 8))
