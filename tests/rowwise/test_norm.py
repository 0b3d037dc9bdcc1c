"""`rms_norm` and `add_rms_norm`: the bits of the numpy reference, and the distance from a float64 result."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from operands.pairs import pairwise
from rowwise_data import FLOATS, KINDS, LAYOUTS, LEADING, WIDTHS, beyond_one_unit, laid_out, values
from torch.utils._python_dispatch import TorchDispatchMode

import scaled_mm as sm
from scaled_mm.errors import BadParamError, BadTensorDeviceError, BadTensorDtypeError, BadTensorShapeError, BadTensorStridesError
from scaled_mm.reference import same_bits
from scaled_mm.rowwise import reference
from scaled_mm.rowwise.arithmetic import inverse_root

CASES = dict(dtype=FLOATS, k=WIDTHS, leading=LEADING, layout=LAYOUTS, kind=KINDS, weight_dtype=FLOATS, epsilon=(1e-6, 0.0, 3))


def operands(dtype, k, leading, layout="contiguous", kind="plain", weight_dtype=torch.float32, seed=0):
    """(x, residual, weight)"""
    x, residual = (laid_out(values((*leading, k), dtype, kind, seed + each), layout) for each in (0, 1))
    return x, residual, laid_out(values((k,), weight_dtype, "plain", seed + 2), layout if layout in ("strided", "unaligned") else "")


@pairwise(**CASES)
def test_every_pair_of_operands_has_the_bits_of_the_reference(device, dtype, k, leading, layout, kind, weight_dtype, epsilon):
    x, residual, weight = operands(dtype, k, leading, layout, kind, weight_dtype, seed=k + len(leading))
    y = sm.rms_norm(x.to(device), weight.to(device), epsilon)
    assert y.is_contiguous() and same_bits(y.cpu(), reference.rms_norm(x, weight, epsilon).to(dtype))
    y, total = sm.add_rms_norm(x.to(device), residual.to(device), weight.to(device), epsilon)
    want, want_total = reference.add_rms_norm(x, residual, weight, epsilon)
    assert y.is_contiguous() and total.is_contiguous()
    assert same_bits(y.cpu(), want.to(dtype)) and same_bits(total.cpu(), want_total)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("hidden", [4096, 14336, 28672])
def test_layers_of_language_models_have_the_bits_of_the_reference(device, hidden, dtype):
    x, residual, weight = operands(dtype, hidden, (2,), weight_dtype=dtype)
    y, total = sm.add_rms_norm(x.to(device), residual.to(device), weight.to(device), 1e-5)
    want, want_total = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert same_bits(y.cpu(), want.to(dtype)) and same_bits(total.cpu(), want_total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_inverse_root_is_an_ieee_root_and_an_ieee_quotient(device, dtype):
    v = torch.empty(100_003, dtype=dtype).uniform_(-120, 120, generator=torch.Generator().manual_seed(4)).exp2()
    v[:6] = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1e-40, 3e38])
    with np.errstate(divide="ignore"):
        want = torch.from_numpy(v.numpy().dtype.type(1) / np.sqrt(v.numpy()))
    assert same_bits(inverse_root(v.to(device)).cpu(), want)
    for size in (1, 3, 17, 1000):  # vectors and what is left of them, on one thread or many
        assert same_bits(inverse_root(v[:size].to(device)).cpu(), want[:size])
        assert same_bits(inverse_root(v.to(device)[::7][:size]).cpu(), want[::7][:size])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_row_alone_has_the_bits_of_the_row_in_a_batch(device, dtype):
    x, _, weight = (made.to(device) for made in operands(dtype, 2049, (67,), kind="wide"))
    batch = sm.rms_norm(x, weight)
    for row in (0, 1, 31, 66):
        assert same_bits(sm.rms_norm(x[row], weight), batch[row])
    assert same_bits(sm.rms_norm(x.repeat(40, 1), weight), batch.repeat(40, 1))


@pairwise(dtype=FLOATS, k=(1, 9, 4096, 11008), magnitude=(-18, -8, 0, 5, 14), epsilon=(1e-6, 0.0))
def test_results_are_within_one_unit_in_the_last_place_of_float64(device, dtype, k, magnitude, epsilon):
    generator = torch.Generator().manual_seed(k)
    x = (torch.randn(16, k, generator=generator) * 2.0**magnitude).to(dtype)
    weight = torch.randn(k, generator=generator)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()
    finite = x.isfinite().all(-1) & ((x != 0).any(-1) | (epsilon > 0))
    assert finite.any()
    assert beyond_one_unit(sm.rms_norm(x.to(device), weight.to(device), epsilon)[finite], exact[finite]).numel() == 0


def test_float32_rows_keep_their_accuracy_where_float32_squares_overflow_and_bfloat16_rows_become_zero(device):
    x = torch.tensor([[3e38, -1e38], [1e20, 2e20], [1e-30, 2e-30]], device=device)
    exact = x.cpu().double() / x.cpu().double().square().mean(-1, keepdim=True).sqrt()
    assert beyond_one_unit(sm.rms_norm(x, torch.ones(2, device=device), 0.0), exact).numel() == 0
    assert sm.rms_norm(x[:2].bfloat16(), torch.ones(2, device=device)).eq(0).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_quantizer_has_the_bits_of_the_chain_in_float32(device, dtype, kind):
    x, residual, weight = operands(dtype, 2049, (5,), kind=kind)
    moved = [made.to(device) for made in (x, residual, weight)]
    y32, (sum32, total) = reference.rms_norm(x, weight), reference.add_rms_norm(x, residual, weight)
    for want, made in ((y32, sm.rms_norm(moved[0], moved[2], quantize="token")), (sum32, sm.add_rms_norm(*moved, quantize="token")[0])):
        for chain in (sm.quantize_int8(want), reference.token(want)):
            assert same_bits(made.q.cpu(), chain[0]) and same_bits(made.scale.cpu(), chain[1])
    for scale in (torch.tensor(0.02), torch.tensor([[0.5]])):
        for zero_point in (None, torch.tensor([-7], dtype=torch.int8), torch.tensor(300, dtype=torch.int32)):
            options = {"quantize": scale.to(device), "zero_point": None if zero_point is None else zero_point.to(device)}
            made = sm.rms_norm(moved[0], moved[2], **options)
            assert same_bits(made.q.cpu(), reference.static(y32, scale, zero_point)) and made.scale is options["quantize"]
            made, added = sm.add_rms_norm(*moved, **options)
            assert same_bits(made.q.cpu(), reference.static(sum32, scale, zero_point)) and same_bits(added.cpu(), total)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "unaligned"])
def test_the_sum_is_written_in_place_of_the_residual_or_of_x(device, layout):
    for dtype in FLOATS:
        x, residual, weight = operands(dtype, 40, (3, 5))
        want, want_total = reference.add_rms_norm(x, residual, weight)
        for place in (0, 1):
            both = [laid_out(made.clone(), layout).to(device) for made in (x, residual)]
            y, total = sm.add_rms_norm(*both, weight.to(device), total=both[place])
            assert total is both[place] and same_bits(total.cpu(), want_total) and same_bits(y.cpu(), want.to(dtype))
            assert same_bits(both[1 - place].cpu(), (residual, x)[place])


class Largest(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.numel = max(self.numel, result.numel() if isinstance(result, torch.Tensor) else 0)
        return result


@pytest.mark.parametrize("k, padded", [(1, 8), (8, 8), (9, 16), (128, 128), (129, 256), (2048, 2048), (2049, 4096)])
def test_short_rows_are_not_padded_to_all_lanes(k, padded):
    x, weight = torch.ones(3, k), torch.ones(k)
    with Largest() as largest:
        sm.rms_norm(x, weight)
    assert largest.numel == 3 * padded


def test_vmap_and_a_trace_give_the_same_bits():
    x, residual, weight = operands(torch.float32, 40, (3, 5))
    y, total = torch.vmap(lambda x, residual, total: sm.add_rms_norm(x, residual, weight, total=total))(x, residual, torch.zeros(3, 5, 40))
    want, want_total = sm.add_rms_norm(x, residual, weight)
    assert same_bits(y, want) and same_bits(total, want_total)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert same_bits(torch.jit.trace(lambda x: sm.rms_norm(x, weight), (x,))(x), sm.rms_norm(x, weight))


def test_inputs_are_left_alone_and_outputs_have_no_gradient():
    x, residual, weight = operands(torch.float32, 9, (2,))
    kept = [made.clone() for made in (x, residual, weight)]
    y, total = sm.add_rms_norm(x.requires_grad_(), residual, weight.requires_grad_())
    assert not y.requires_grad and not total.requires_grad and not sm.rms_norm(x, weight).requires_grad
    assert all(torch.equal(one, other) for one, other in zip((x, residual, weight), kept))


def test_a_scale_that_is_a_parameter_is_returned_without_its_gradient():
    scale = torch.nn.Parameter(torch.ones(1))
    for result in (sm.rms_norm(X, W, quantize=scale), sm.silu_and_mul(X, quantize=scale), sm.quantize_int8(X, scale=scale)):
        assert not result[1].requires_grad and result[1].data_ptr() == scale.data_ptr()
    assert not sm.quantize_int8(X, scale=scale, zero_point=torch.ones(1, dtype=torch.int8)).scale.requires_grad


def test_meta_tensors_give_shapes():
    x, weight = torch.empty(2, 3, 16, dtype=torch.float16, device="meta"), torch.empty(16, device="meta")
    (q, scale), total = sm.add_rms_norm(x, x, weight, quantize="token")
    assert (q.shape, q.dtype, scale.shape, total.dtype) == (x.shape, torch.int8, (2, 3, 1), torch.float16)


X, W = torch.ones(2, 4), torch.ones(4)
STATIC = {"quantize": torch.ones(1)}


@pytest.mark.parametrize("function", [sm.rms_norm, lambda x, *rest, **options: sm.add_rms_norm(x, x, *rest, **options)], ids=["norm", "add"])
@pytest.mark.parametrize(
    "error, message, arguments, options",
    [
        (BadParamError, "x: expected a tensor, got list", ([1.0], W), {}),
        (BadParamError, "x: expected a strided tensor", (X.to_sparse(), W), {}),
        (BadTensorDtypeError, "x: expected float16, bfloat16 or float32, got torch.float64", (X.double(), W), {}),
        (BadTensorShapeError, "x: expected 1 to 8 dimensions, got 0", (torch.tensor(1.0), W), {}),
        (BadTensorShapeError, "x: expected 1 to 8 dimensions, got 9", (torch.ones([1] * 9), W[:1]), {}),
        (BadTensorShapeError, "x: expected rows of at least 1 element", (torch.ones(2, 0), W[:0]), {}),
        (BadParamError, "weight: expected a tensor, got None", (X, None), {}),
        (BadTensorDtypeError, "weight: expected float16, .*got torch.int8", (X, W.to(torch.int8)), {}),
        (BadTensorShapeError, r"weight: expected \[4\], got \[5\]", (X, torch.ones(5)), {}),
        (BadTensorShapeError, r"weight: expected \[4\], got \[1, 4\]", (X, W[None]), {}),
        (BadTensorDeviceError, "weight: expected a tensor on cpu, got one on meta", (X, W.to("meta")), {}),
        *[(BadParamError, "epsilon: expected", (X, W, e), {}) for e in (float("nan"), -1e-6, float("inf"), 1e39, 10**400, True, "1", None, W[0])],
        *[(BadParamError, "quantize: expected None, ", (X, W), {"quantize": q}) for q in ("tensor", True, 0.5, ("token",), W.numpy())],
        (BadTensorDtypeError, "quantize: expected float32, got torch.float16", (X, W), {"quantize": torch.ones(1).half()}),
        (BadTensorShapeError, r"quantize: expected one value, got \[4\]", (X, W), {"quantize": W}),
        (BadTensorDeviceError, "quantize: expected a tensor on cpu", (X, W), {"quantize": torch.ones(1, device="meta")}),
        (BadParamError, "zero_point: expected None without", (X, W), {"zero_point": torch.zeros(1, dtype=torch.int8)}),
        (BadParamError, "zero_point: expected None without", (X, W), {"quantize": "token", "zero_point": torch.zeros(1, dtype=torch.int8)}),
        (BadParamError, "zero_point: expected a tensor, got int", (X, W), {**STATIC, "zero_point": 3}),
        (BadTensorDtypeError, "zero_point: expected int8 or int32, got torch.float32", (X, W), {**STATIC, "zero_point": torch.zeros(1)}),
        (BadTensorShapeError, "zero_point: expected one value", (X, W), {**STATIC, "zero_point": torch.zeros(4, dtype=torch.int8)}),
        (BadTensorDeviceError, "zero_point: ", (X, W), {**STATIC, "zero_point": torch.zeros(1, dtype=torch.int8, device="meta")}),
    ],
)
def test_what_is_wrong_is_refused_and_named(function, error, message, arguments, options):
    with pytest.raises(error, match="^" + message):
        function(*arguments, **options)


def test_a_wrong_residual_and_a_wrong_total_are_refused_and_named():
    for error, residual in (
        (BadParamError, None),
        (BadTensorDtypeError, X.half()),
        (BadTensorShapeError, X[:1]),
        (BadTensorDeviceError, X.to("meta")),
    ):
        with pytest.raises(error, match="^residual: expected"):
            sm.add_rms_norm(X, residual, W)
    for error, total in (
        (BadParamError, 1),
        (BadTensorDtypeError, X.half()),
        (BadTensorShapeError, X[:1]),
        (BadTensorDeviceError, X.to("meta")),
        (BadParamError, X.clone().requires_grad_()),
        (BadTensorStridesError, W.clone().expand(2, 4)),
        (BadTensorStridesError, torch.zeros(8).as_strided((2, 4), (3, 1))),
    ):
        with pytest.raises(error, match="^total: expected"):
            sm.add_rms_norm(X, X, W, total=total)
    memory = torch.ones(12)
    for name, operands in (("weight", (memory[4:8], None)), ("quantize", (W, memory[7]))):
        with pytest.raises(BadParamError, match=f"^total: expected memory apart from {name}, got an overlap"):
            sm.add_rms_norm(X, X, operands[0], quantize=operands[1], total=memory[:8].view(2, 4))
    sm.add_rms_norm(X, X, memory[8:], quantize=memory[8], total=memory[:8].view(2, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_compiled_graph_gives_the_same_bits(device, dtype):
    def layer(x, residual, weight, scale, epsilon):
        one = sm.rms_norm(x, weight, epsilon), sm.rms_norm(x.t().contiguous().t(), weight, quantize=scale)
        return *one, sm.add_rms_norm(x, residual, weight, quantize="token"), sm.add_rms_norm(x, residual, weight, total=residual)

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for rows, epsilon in ((3, 1e-6), (7, 1e-3)):
        made = [made.to(device) for made in (*operands(dtype, 33, (rows,)), torch.tensor(0.1))]
        eager, graph = ([each.clone() for each in made] for _ in range(2))
        results = layer(*eager, epsilon), compiled(*graph, epsilon)
        for one, other in zip(*(torch.utils._pytree.tree_leaves(result) for result in results)):
            assert same_bits(one, other) and one.is_contiguous() and other.is_contiguous()
        assert same_bits(eager[1], graph[1])


def test_opcheck_finds_nothing_wrong(device):
    for layout in ("contiguous", "transposed"):
        for dtype in (torch.float32, torch.bfloat16):
            x, residual, weight = (made.to(device) for made in operands(dtype, 12, (5,), layout))
            torch.library.opcheck(torch.ops.scaled_mm.rms_norm.default, (x, weight, 1e-6))
            torch.library.opcheck(torch.ops.scaled_mm.add_rms_norm.default, (x, residual, weight, 1e-6))


FUSED = [(False, None, None), (True, None, None), (False, torch.tensor(0.1), None), (False, torch.tensor(0.1), torch.tensor(3, dtype=torch.int32))]


@pytest.mark.parametrize("fused", FUSED, ids=str)
def test_opcheck_finds_nothing_wrong_with_what_a_compiler_calls(device, fused):
    fused = tuple(one.to(device) if isinstance(one, torch.Tensor) else one for one in fused)
    x, residual, weight = (made.to(device) for made in operands(torch.bfloat16, 12, (5,), "contiguous"))
    torch.library.opcheck(torch.ops.scaled_mm.rowwise_rms_norm.default, (x, weight, 1e-6, *fused))
    torch.library.opcheck(torch.ops.scaled_mm.rowwise_add_rms_norm.default, (x, residual, weight, 1e-6, *fused))


def test_a_compiler_calls_one_operator_for_a_fused_function():
    found = []

    def record(graph, _):
        found.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    x, residual, weight = operands(torch.bfloat16, 16, (5,), "contiguous")
    torch.compiler.reset()
    compiled = torch.compile(lambda *given: sm.add_rms_norm(*given, quantize="token"), fullgraph=True, backend=record)
    (q, scale), total = compiled(x, residual, weight)
    expected, added = sm.add_rms_norm(x, residual, weight, quantize="token")
    assert torch.equal(q, expected.q) and torch.equal(scale, expected.scale) and torch.equal(total, added)
    assert [target for target in found if "scaled_mm" in str(target)] == [torch.ops.scaled_mm.rowwise_add_rms_norm.default]


def test_functions_compute_while_something_else_is_being_compiled(device, monkeypatch):
    """The flag that says so is one of the process: another thread may be compiling."""
    x, residual, weight = (made.to(device) for made in operands(torch.bfloat16, 16, (5,), "contiguous"))
    gated = torch.cat((x, residual), 1)
    calls = [lambda: sm.rms_norm(x, weight, quantize="token"), lambda: sm.add_rms_norm(x, residual, weight), lambda: sm.silu_and_mul(gated)]
    calls += [lambda: sm.gelu_and_mul(gated, approximate="tanh"), lambda: sm.quantize_int8(x), lambda: sm.int8_linear(x, q, scale.view(-1))]
    q, scale = sm.quantize_int8(torch.randn(8, 16, device=device), "channel")
    expected = [call() for call in calls]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for call, result in zip(calls, expected):
        for one, other in zip(torch.utils._pytree.tree_leaves(call()), torch.utils._pytree.tree_leaves(result)):
            assert same_bits(one, other)


def test_epsilon_may_be_an_integer_beyond_64_bits():
    x, weight = torch.randn(3, 8), torch.ones(8)
    assert same_bits(sm.rms_norm(x, weight, 10**30), sm.rms_norm(x, weight, 1e30))
    assert all(map(same_bits, sm.add_rms_norm(x, x, weight, 10**30), sm.add_rms_norm(x, x, weight, 1e30)))
