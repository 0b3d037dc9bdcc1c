"""Descriptors of row-wise operators have the bits of the functions, and say what is wrong."""

from __future__ import annotations

import pytest
import torch

import scaled_mm as sm
from scaled_mm.rowwise import moe
from scaled_mm.rowwise.descriptor import OPERATORS

M, K = 6, 136
STATIC, POINT = torch.tensor([0.03]), torch.tensor([4], dtype=torch.int32)


def int8(*shape: int) -> torch.Tensor:
    return torch.full(shape, 77, dtype=torch.int8)


def numbers(dtype: torch.dtype) -> torch.Tensor:
    return torch.full((M,), -7, dtype=dtype)


def cases(x: torch.Tensor, residual: torch.Tensor, gated: torch.Tensor, weight: torch.Tensor) -> dict[str, tuple[str, dict, dict, object]]:
    """Name -> (operator, what is read, what is written, the results of the function in that order)."""
    scale, points, sums = numbers(torch.float32), numbers(torch.int32), numbers(torch.int32)
    y, total = torch.full_like(x, 77), torch.full_like(x, 77)
    blocks, experts = numbers(torch.float32).view(M, 1).expand(M, 2).contiguous(), torch.tensor([[2, 0]] * M, dtype=torch.int32)
    order, factors = sm.moe_sort(experts, 3), torch.rand(M, 2, generator=torch.Generator().manual_seed(1))
    copies, of_copies = int8(2 * M, K), lambda columns: torch.full((2 * M, columns), -7.0)  # noqa: E731
    sorted_into = dict(zip(("out", "ends", "inverse"), (torch.full_like(t, -7) for t in order)))
    asymmetric = dict(out=int8(M, K), out_scale=scale, out_zero_point=points, out_row_sums=sums)
    token, static = dict(out=int8(M, K), out_scale=scale), dict(scale=STATIC, zero_point=POINT)
    return {
        "quantize_int8": ("quantize_int8", dict(x=x), token, sm.quantize_int8(x)),
        "smoothed": ("quantize_int8", dict(x=x, factor=weight), token, sm.quantize_int8(x, smooth_scale=weight)),
        "asymmetric": ("quantize_int8", dict(x=x), asymmetric, sm.quantize_int8(x, symmetric=False)),
        "static": ("quantize_int8", dict(x=x, **static), dict(out=int8(M, K)), sm.quantize_int8(x, scale=STATIC, zero_point=POINT)[:1]),
        "quantize": ("quantize", dict(x=x, factor=weight, offset=weight), dict(out=int8(M, K)), (sm.quantize(x, weight, weight),)),
        "rms_norm": ("rms_norm", dict(x=x, weight=weight), dict(out=y), (sm.rms_norm(x, weight),)),
        "rms_norm, token": ("rms_norm", dict(x=x, weight=weight), token, sm.rms_norm(x, weight, quantize="token")),
        "rms_norm, static": (
            "rms_norm",
            dict(x=x, weight=weight, **static),
            dict(out=int8(M, K)),
            sm.rms_norm(x, weight, quantize=STATIC, zero_point=POINT)[:1],
        ),
        "add_rms_norm": ("add_rms_norm", dict(x=x, residual=residual, weight=weight), dict(out=y, total=total), sm.add_rms_norm(x, residual, weight)),
        "silu_and_mul": ("silu_and_mul", dict(x=gated), dict(out=y), (sm.silu_and_mul(gated),)),
        "silu_and_mul, token": ("silu_and_mul", dict(x=gated), token, sm.silu_and_mul(gated, quantize="token")),
        "gelu_and_mul": ("gelu_and_mul", dict(x=gated), dict(out=y), (sm.gelu_and_mul(gated),)),
        "gelu_tanh_and_mul": ("gelu_tanh_and_mul", dict(x=gated), dict(out=y), (sm.gelu_and_mul(gated, approximate="tanh"),)),
        "quantize_int8_block": ("quantize_int8_block", dict(x=x), dict(out=int8(M, K), out_scale=blocks), sm.quantize_int8_block(x)),
        "moe_sort": ("moe_sort", dict(topk_ids=experts), sorted_into, order),
        "moe_sort, mapped": (
            "moe_sort",
            dict(topk_ids=experts.long() + 1, expert_map=torch.arange(-1, 3, dtype=torch.int32)),
            sorted_into,
            order,
        ),
        "moe_quantize": (
            "moe_quantize",
            dict(x=x, rows=order.inverse),
            dict(out=copies, out_scale=of_copies(1)),
            moe.quantize_to_rows(x, order.inverse, False),
        ),
        "moe_quantize_block": (
            "moe_quantize_block",
            dict(x=x, rows=order.inverse),
            dict(out=copies, out_scale=of_copies(2)),
            moe.quantize_to_rows(x, order.inverse, True),
        ),
        "moe_combine": (
            "moe_combine",
            dict(y=gated.view(2 * M, K), topk_weights=factors, rows=order.inverse),
            dict(out=y),
            (moe.combine(gated.view(2 * M, K), factors, order.inverse),),
        ),
        **{
            f"topk_softmax{suffix}": (
                f"topk_softmax{suffix}",
                dict(logits=x),
                dict(out=torch.full((M, 3), -7.0), ids=torch.full((M, 3), -7, dtype=torch.int32)),
                sm.topk_softmax(x, 3, renormalize=bool(suffix)),
            )
            for suffix in ("", "_renormalized")
        },
    }


NAMES = tuple(cases(*(torch.zeros(M, K), torch.zeros(M, K), torch.zeros(M, 2 * K), torch.zeros(K))))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_bits_are_those_of_the_function(device, name, dtype):
    generator = torch.Generator().manual_seed(3)
    x, residual, gated = (torch.randn(M, k, generator=generator).to(dtype) for k in (K, K, 2 * K))
    operator, read, written, expected = cases(x, residual, gated, torch.rand(K, generator=generator).to(dtype))[name]
    read, written = ({key: tensor.to(device) for key, tensor in group.items()} for group in (read, written))
    with sm.create_rowwise_descriptor(sm.Handle(device), operator, **read, **written) as desc:
        desc.calculate(**read, **written)
    for got, result in zip(written.values(), expected, strict=True):
        assert torch.equal(got.cpu(), result.view(got.shape))


def test_every_operator_is_tested():
    assert {one[0] for one in cases(torch.zeros(M, K), torch.zeros(M, K), torch.zeros(M, 2 * K), torch.zeros(K)).values()} == set(OPERATORS)


def test_what_is_wrong_is_refused_and_named(device):
    x, q, scale = torch.zeros(M, K, device=device), int8(M, K).to(device), numbers(torch.float32).to(device)
    handle = sm.Handle(device)
    for operator, operands, error, message in (
        ("norm", {}, sm.BadParamError, "operator: expected one of quantize_int8"),
        ("quantize_int8", dict(x=x, out=q, out_scale=scale, weight=scale), sm.BadParamError, "weight: expected an operand of quantize_int8"),
        ("quantize_int8", dict(x=x, out=q), sm.NullPointerError, "out_scale: expected a tensor"),
        ("quantize_int8", dict(x=x[0], out=q, out_scale=scale), sm.BadTensorShapeError, "x: expected"),
        ("rms_norm", dict(x=x, out=x.clone()), sm.NullPointerError, "weight: expected a tensor"),
        ("rms_norm", dict(x=x, out=x.clone(), weight=x[0], epsilon=-1.0), sm.BadParamError, "epsilon: expected"),
        ("silu_and_mul", dict(out=x), sm.BadParamError, "x: expected a tensor or a TensorDesc, got None"),
    ):
        with pytest.raises(error, match=message):
            sm.create_rowwise_descriptor(handle, operator, **operands)
    with sm.create_rowwise_descriptor(handle, "quantize_int8", x=x, out=q, out_scale=scale) as desc:
        for wrong, error in ((dict(x=x[:3]), sm.BadTensorShapeError), (dict(x=x.half()), sm.BadTensorDtypeError)):
            with pytest.raises(error, match="x: expected"):
                desc.calculate(**{**dict(x=x, out=q, out_scale=scale), **wrong})


@pytest.mark.gpu
def test_without_the_extension_the_c_interface_is_called(monkeypatch):
    from scaled_mm.core import fast

    x, q, scale = torch.randn(M, K, device="cuda:0"), int8(M, K).cuda(), numbers(torch.float32).cuda()
    expected = sm.quantize_int8(x)
    with sm.create_rowwise_descriptor(sm.Handle("cuda:0"), "quantize_int8", x=x, out=q, out_scale=scale) as desc:
        monkeypatch.setattr(fast, "module", None)
        desc.calculate(x=x, out=q, out_scale=scale)
    assert torch.equal(q, expected[0]) and torch.equal(scale, expected[1].view(-1))


def test_what_is_written_besides_out_is_checked_and_marked(device):
    x, weight = torch.randn(M, K, device=device), torch.rand(K, device=device)
    operands = dict(out=torch.empty_like(x), x=x, residual=x.clone(), weight=weight, total=torch.empty_like(x))
    with sm.create_rowwise_descriptor(sm.Handle(device), "add_rms_norm", **operands) as desc:
        before = operands["total"]._version
        desc.calculate(**operands)
        assert operands["total"]._version > before
        watched = torch.empty_like(x, requires_grad=True)
        with pytest.raises(sm.BadParamError, match="total: expected a tensor that requires no gradient"):
            desc.calculate(**{**operands, "total": watched})


def test_forms_that_the_functions_do_not_have_are_refused(device):
    handle, x = sm.Handle(device), torch.zeros(M, K, device=device)
    q, scales = int8(M, K).to(device), numbers(torch.float32).to(device)
    with pytest.raises(sm.BadTensorShapeError, match="scale: expected one value"):
        sm.create_rowwise_descriptor(handle, "rms_norm", out=q, x=x, weight=x[0], scale=scales)
    with pytest.raises(sm.BadParamError, match="factor: expected a tensor"):
        sm.create_rowwise_descriptor(handle, "quantize", out=q, x=x)


def test_tokens_may_be_quantized_to_any_number_of_rows(device):
    """Two tokens of one choice each, to rows 4 and 1 of 5."""
    x, rows = torch.randn(2, K, generator=torch.Generator().manual_seed(5)).to(device), torch.tensor([[4], [1]], dtype=torch.int32, device=device)
    q, scale = int8(5, K).to(device), torch.full((5, 1), -7.0, device=device)
    with sm.create_rowwise_descriptor(sm.Handle(device), "moe_quantize", x=x, rows=rows, out=q, out_scale=scale) as desc:
        desc.calculate(x=x, rows=rows, out=q, out_scale=scale)
    expected, of_tokens = sm.quantize_int8(x)
    assert torch.equal(q[[4, 1]], expected) and torch.equal(scale[[4, 1]], of_tokens)


def test_rows_that_are_not_there_are_refused_on_a_cpu():
    x, rows, handle = torch.zeros(2, K), torch.tensor([[0], [2]], dtype=torch.int32), sm.Handle("cpu")
    of_quantizer = dict(x=x, rows=rows, out=int8(2, K), out_scale=torch.zeros(2, 1))
    of_sum = dict(y=x, rows=rows, topk_weights=torch.ones(2, 1), out=torch.zeros(2, K))
    for operator, operands in (("moe_quantize", of_quantizer), ("moe_combine", of_sum)):
        with (
            sm.create_rowwise_descriptor(handle, operator, **operands) as desc,
            pytest.raises(sm.BadParamError, match="^rows: expected values below 2"),
        ):
            desc.calculate(**operands)


def test_outputs_are_apart_from_each_other_and_from_what_is_read(device):
    ids, memory, handle = torch.zeros(4, 2, dtype=torch.int32, device=device), torch.zeros(64, dtype=torch.int32, device=device), sm.Handle(device)
    t = dict(topk_ids=ids, out=memory[:8], ends=memory[8:12], inverse=memory[16:24].view(4, 2))
    x, scale = torch.zeros(M, K, device=device), torch.zeros(M, device=device)
    norm = dict(x=x, residual=torch.zeros_like(x), weight=x[0].clone(), out=torch.zeros_like(x), total=torch.zeros_like(x))
    shifted = torch.zeros(M + 1, K, device=device)
    for operator, operands, changed, message in (
        ("moe_sort", t, dict(inverse=memory[10:18].view(4, 2)), "(ends|inverse): expected memory apart from (inverse|ends)"),
        ("moe_sort", t, dict(ends=ids.view(-1)[2:6]), "ends: expected memory apart from topk_ids"),
        ("quantize_int8", dict(x=x, out=int8(M, K).to(device), out_scale=scale), dict(out_scale=x[0, :M]), "out_scale: expected memory apart from x"),
        ("add_rms_norm", norm, dict(x=shifted[1:], total=shifted[:-1]), "total: expected memory apart from x"),  # it may be x, but as a whole
    ):
        with sm.create_rowwise_descriptor(handle, operator, **operands) as desc:
            desc.calculate(**operands)
            with pytest.raises(sm.BadParamError, match="^" + message):
                desc.calculate(**{**operands, **changed})
    with sm.create_rowwise_descriptor(handle, "add_rms_norm", **norm) as desc:
        desc.calculate(**{**norm, "total": norm["residual"]})
    one = dict(norm, x=torch.ones(1, K, device=device), residual=torch.ones(1, K, device=device), out=torch.zeros(1, K, device=device))
    one["total"] = torch.as_strided(one["x"], (1, K), (K + 5, 1))  # x itself: a stride along one row means nothing
    with sm.create_rowwise_descriptor(handle, "add_rms_norm", **one) as desc:
        desc.calculate(**one)
    assert (one["x"] == 2).all()
