"""The order of tokens by expert, tokens quantized to rows of experts, and the weighted sum: the bits of the reference on every device."""

from __future__ import annotations

import numpy
import pytest
import torch
from operands.pairs import pairwise
from rowwise_data import FLOATS, KINDS, LAYOUTS, laid_out, values
from torch.fx.experimental.proxy_tensor import make_fx

import scaled_mm as sm
from scaled_mm.errors import BadParamError, BadTensorDeviceError, BadTensorDtypeError, BadTensorShapeError, BadTensorStridesError
from scaled_mm.reference import same_bits
from scaled_mm.rowwise import kernels, moe, reference


def routing(tokens: int, choices: int, experts: int, seed: int = 0, absent: float = 0.2, skewed: bool = False, dtype=torch.int32) -> torch.Tensor:
    """Random experts, different ones of a token where there are enough; some -1; skewed: half of them expert 0."""
    generator = torch.Generator().manual_seed(seed)
    if choices <= experts:
        ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :choices]
    else:
        ids = torch.randint(0, experts, (tokens, choices), generator=generator)
    ids[torch.rand(tokens, choices, generator=generator) < absent] = -1
    if skewed:
        ids[torch.rand(tokens, choices, generator=generator) < 0.5] = 0
    return ids.to(dtype)


def equal(got, expected) -> bool:
    return len(got) == len(expected) and all(g.is_contiguous() and g.dtype is e.dtype and torch.equal(g.cpu(), e) for g, e in zip(got, expected))


@pairwise(
    tokens=(0, 1, 5, 64, 1025, 3000),
    choices=(0, 1, 2, 8),
    experts=(1, 8, 128, 256, 1500),
    absent=(0.0, 0.3, 1.0),
    skewed=(False, True),
    dtype=(torch.int32, torch.int64),
    layout=("contiguous", "transposed", "strided", "expanded"),
    mapped=(False, True),
)
def test_every_pair_of_routings_is_sorted_as_the_reference_sorts(device, tokens, choices, experts, absent, skewed, dtype, layout, mapped):
    ids = routing(tokens, choices, experts, 1, absent, skewed, dtype)
    if layout == "strided":
        ids = torch.stack((ids, ids + 7), -1)[..., 0]
    else:
        ids = laid_out(ids, layout)
    expert_map, here = None, experts
    if mapped:
        here = max(1, experts // 3)
        expert_map = torch.full((experts,), -1, dtype=torch.int32)
        expert_map[torch.randperm(experts, generator=torch.Generator().manual_seed(2))[:here]] = torch.arange(here, dtype=torch.int32)
    moved = expert_map if expert_map is None else expert_map.to(device)
    found = sm.moe_sort(ids.to(device), here, expert_map=moved)
    assert equal(found, reference.moe_sort(ids, here, expert_map))


def test_the_order_of_one_small_routing_is_as_documented(device):
    ids = torch.tensor([[2, 0], [0, -1], [2, 1]], device=device)
    order, ends, inverse = sm.moe_sort(ids, 4)
    assert order.tolist() == [1, 2, 5, 0, 4, -1] and ends.tolist() == [2, 3, 5, 5] and inverse.tolist() == [[3, 0], [1, -1], [4, 2]]
    assert inverse.flatten()[order[:5].long()].tolist() == [0, 1, 2, 3, 4]


def test_ids_out_of_range_are_an_error_on_a_cpu_and_not_here_on_a_gpu(device):
    ids, far, low = (torch.tensor([[0, 1], [id, 2]], device=device) for id in (3, 2**32, -2))
    wrong_map = torch.tensor([0, 5, 1, -1], dtype=torch.int32, device=device)
    if device == "cpu":
        for given, value in ((ids, 3), (far, 2**32), (low, -2)):
            with pytest.raises(BadParamError, match=rf"^topk_ids: expected values from -1 to 2, got {value}$"):
                sm.moe_sort(given, 3)
        with pytest.raises(BadParamError, match="^expert_map: expected values from -1 to 1, got 5$"):
            sm.moe_sort(ids, 2, expert_map=wrong_map)
        return
    for given in (ids, far, low):
        assert equal(sm.moe_sort(given, 3), reference.moe_sort(given.cpu(), 3))
    assert equal(sm.moe_sort(ids, 2, expert_map=wrong_map), reference.moe_sort(ids.cpu(), 2, wrong_map.cpu()))


@pairwise(
    dtype=FLOATS,
    shape=((1, 1), (3, 127), (17, 128), (5, 1000), (33, 4096), (3, 7168), (2, 20000), (0, 64), (4, 0)),
    choices=(0, 1, 2, 8),
    block=(False, True),
    layout=LAYOUTS,
    kind=KINDS,
)
def test_rows_of_experts_are_the_quantized_tokens(device, dtype, shape, choices, block, layout, kind):
    x = laid_out(values(shape, dtype, kind), layout)
    order, _, inverse = reference.moe_sort(routing(shape[0], choices, 9), 9)
    found = moe.quantize_to_rows(x.to(device), inverse.to(device), block)
    named = order[order >= 0].long()
    for got, expected in zip(found, sm.quantize_int8_block(x) if block else sm.quantize_int8(x)):
        assert got.is_contiguous() and got.shape == (inverse.numel(), expected.shape[1]) and got.dtype is expected.dtype
        got, expected = got[: len(named)].cpu(), expected[named // max(choices, 1)]
        assert same_bits(got, expected) if got.is_floating_point() else torch.equal(got, expected)


@pairwise(
    dtype=FLOATS,
    weights_dtype=FLOATS,
    shape=((1, 1), (3, 127), (17, 128), (33, 4096), (3, 7168), (0, 64), (4, 0)),
    choices=(0, 1, 2, 5, 8),
    absent=(0.0, 0.3, 1.0),
    layout=LAYOUTS,
    kind=KINDS,
    out=("none", "contiguous", "transposed"),
)
def test_the_weighted_sum_has_the_bits_of_the_reference(device, dtype, weights_dtype, shape, choices, absent, layout, kind, out):
    tokens, n = shape
    rows = reference.moe_sort(routing(tokens, choices, 9, 3, absent), 9)[2]
    y = laid_out(values((max(rows.numel(), 1), n), dtype, kind), layout)
    weights = laid_out(values((tokens, choices), weights_dtype, seed=1), layout)
    into = None if out == "none" else laid_out(torch.full(shape, float("nan"), dtype=dtype), out).to(device)
    found = moe.combine(y.to(device), weights.to(device), rows.to(device), into)
    assert out == "none" or found is into
    assert same_bits(found.cpu(), reference.moe_combine(y, weights, rows))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "tokens, choices, experts", [(513, 8, 128), (2048, 2, 1000), (8192, 8, 128), (8191, 9, 257), (70000, 3, 5), (300000, 4, 1024)]
)
def test_clusters_of_thread_blocks_sort_many_tokens(tokens, choices, experts, dtype):
    for skewed, strided, absent in ((False, False, 0.0), (True, True, 0.3)):
        generator = torch.Generator().manual_seed(tokens)
        ids = (torch.rand(tokens, choices, generator=generator) ** (8 if skewed else 1) * experts).to(dtype)
        ids[torch.rand(tokens, choices, generator=generator) < absent] = -1
        given = ids.cuda() if not strided else ids.t().contiguous().cuda().t()
        half = torch.arange(experts, dtype=torch.int32).where(torch.arange(experts) % 2 == 0, torch.tensor(-1, dtype=torch.int32))
        for expert_map in (None, half):
            found = sm.moe_sort(given, experts, expert_map=None if expert_map is None else expert_map.cuda())
            assert equal(found, moe._sort(ids, experts, expert_map))


@pytest.mark.gpu
def test_torch_operations_give_the_bits_of_the_kernels(monkeypatch):
    """More experts than the kernel counts, and what serves while kernels are not built."""
    device = "cuda"
    monkeypatch.setattr(kernels, "launch", lambda *_: False)
    ids, x, weights = routing(40, 4, 16), values((40, 300), torch.bfloat16), values((40, 4), torch.float32)
    found = sm.moe_sort(ids.to(device), 16)
    assert equal(found, reference.moe_sort(ids, 16))
    y = values((160, 300), torch.bfloat16, seed=1)
    assert same_bits(moe.combine(y.to(device), weights.to(device), found.inverse).cpu(), reference.moe_combine(y, weights, found.inverse.cpu()))
    count = int(found.ends[-1])
    q, scale = moe.quantize_to_rows(x.to(device), found.inverse, False)
    expected, expected_scale = sm.quantize_int8(x)
    token = found.order[:count].cpu().long() // 4
    assert torch.equal(q[:count].cpu(), expected[token]) and torch.equal(scale[:count].cpu(), expected_scale[token])


def test_opcheck_finds_nothing_wrong(device):
    ids, x, weights = (t.to(device) for t in (routing(9, 2, 5), values((9, 64), torch.float16), values((9, 2), torch.float32)))
    rows = sm.moe_sort(ids, 5).inverse
    ops = torch.ops.scaled_mm
    # Rows that are not named have any values, which opcheck would compare.
    every = torch.randperm(18, generator=torch.Generator().manual_seed(0)).to(torch.int32).view(9, 2).to(device)
    for operator, arguments in (
        (ops.moe_sort, (ids, 5, None)),
        (ops.moe_quantize, (x, every, False)),
        (ops.moe_quantize, (x, every, True)),
        (ops.moe_combine, (values((18, 64), torch.float16).to(device), weights, rows)),
    ):
        torch.library.opcheck(operator.default, arguments)


def test_compiled_graphs_have_the_bits_of_eager_calls(device):
    ids, x, weights = (t.to(device) for t in (routing(9, 2, 5), values((9, 64), torch.float16), values((9, 2), torch.float32)))

    def chain(x, ids, weights):
        order = sm.moe_sort(ids, 5)
        q, scale = moe.quantize_to_rows(x, order.inverse, False)
        y = torch.where(torch.arange(18, device=x.device)[:, None] < order.ends[-1], q * scale, 0.0)
        return order.order, order.ends, order.inverse, moe.combine(y, weights, order.inverse)

    torch.compiler.reset()
    compiled = torch.compile(chain, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(x, ids, weights), chain(x, ids, weights)):
        assert torch.equal(got, expected)


IDS, WEIGHTS, Y = torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2), torch.ones(6, 8)


@pytest.mark.parametrize(
    "error, message, call",
    [
        (BadParamError, "topk_ids: expected a tensor, got None", lambda: sm.moe_sort(None, 4)),
        (BadTensorDtypeError, "topk_ids: expected int32 or int64, got torch.float32", lambda: sm.moe_sort(IDS.float(), 4)),
        (BadTensorShapeError, r"topk_ids: expected \[tokens, choices\], got \[6\]", lambda: sm.moe_sort(IDS.flatten(), 4)),
        (BadTensorDtypeError, "expert_map: expected int32, got torch.int64", lambda: sm.moe_sort(IDS, 4, expert_map=torch.arange(4))),
        (BadTensorShapeError, r"expert_map: expected \[G\], got \[3, 2\]", lambda: sm.moe_sort(IDS, 4, expert_map=IDS)),
        (BadTensorDeviceError, "expert_map: expected a tensor on cpu", lambda: sm.moe_sort(IDS, 4, expert_map=IDS[0].to("meta"))),
        (BadTensorShapeError, r"x: expected \[tokens, K\], got", lambda: torch.ops.scaled_mm.moe_quantize(Y[None], IDS, False)),
        (BadTensorShapeError, r"rows: expected \[tokens, choices\] with the tokens of x", lambda: torch.ops.scaled_mm.moe_quantize(Y, IDS, False)),
        (BadTensorStridesError, "rows: expected a contiguous", lambda: torch.ops.scaled_mm.moe_quantize(Y[:2], IDS.t(), False)),
        (BadTensorDtypeError, "y: expected float16", lambda: torch.ops.scaled_mm.moe_combine(IDS, WEIGHTS, IDS)),
        (BadTensorShapeError, r"topk_weights: expected \[tokens", lambda: torch.ops.scaled_mm.moe_combine(Y, WEIGHTS[0], IDS)),
        (BadTensorShapeError, r"rows: expected \[3, 2\] as", lambda: torch.ops.scaled_mm.moe_combine(Y, WEIGHTS, IDS[:, :1].contiguous())),
    ],
)
def test_what_is_wrong_is_refused_and_named(error, message, call):
    with pytest.raises(error, match="^" + message):
        call()


def test_the_number_of_experts_may_be_any_kind_of_integer():
    ids, expected = torch.tensor([[0, 1], [2, -1]]), sm.moe_sort(torch.tensor([[0, 1], [2, -1]]), 3)
    assert equal(sm.moe_sort(ids, numpy.int64(3)), expected)
    for wrong in (True, 0, 2**31, 1.5, "3", None, torch.tensor(4), torch.tensor(4, device="meta"), torch.tensor(True)):
        with pytest.raises(BadParamError, match=r"^num_experts: expected an integer from 1 to 2147483647, got"):
            sm.moe_sort(ids, wrong)
    compiled = torch.compile(lambda ids, weight: tuple(sm.moe_sort(ids, weight.shape[0])), dynamic=True, fullgraph=True, backend="aot_eager")
    with pytest.warns(torch.jit.TracerWarning, match="Python integer"):
        traced = torch.jit.trace(lambda ids, weight: tuple(sm.moe_sort(ids, weight.shape[0])), (ids, torch.zeros(3, 1)), check_trace=False)
    for experts in (3, 5, 9):
        assert equal(compiled(ids, torch.zeros(experts, 1)), sm.moe_sort(ids, experts))
    assert equal(traced(ids.flip(0), torch.zeros(3, 1)), sm.moe_sort(ids.flip(0), 3))


def test_a_recorded_sort_reads_no_values():
    """As torch.export and make_fx record it: the graph gives the bits for other ids too."""
    ids = torch.tensor([[0, 1], [2, -1]])
    for mode in ("real", "symbolic"):
        graph = make_fx(lambda ids: tuple(sm.moe_sort(ids, 4)), tracing_mode=mode)(ids)
        other = torch.tensor([[3, 3], [-1, 0]])
        assert equal(graph(other), sm.moe_sort(other, 4))
