"""The CUDA kernels of rope, `quantize_int8_block`, the GGUF quantizers and what surrounds the products of experts serve what they are made for,
and give the bits of the CPU."""

from __future__ import annotations

import pytest
import torch
from rowwise_data import FLOATS, LAYOUTS, laid_out, values

import scaled_mm as sm
from scaled_mm.gguf_formats import FORMATS, RULES
from scaled_mm.reference import same_bits
from scaled_mm.rowwise import kernels, moe, reference

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """What kernels.launch returned."""
    answers, launch = [], kernels.launch
    monkeypatch.setattr(kernels, "launch", lambda *args: answers.append(launch(*args)) or answers[-1])
    return answers


def same(got, expected) -> bool:
    if isinstance(expected, tuple):
        return len(got) == len(expected) and all(map(same, got, expected))
    equal = same_bits if expected.is_floating_point() else torch.equal
    return got.shape == expected.shape and got.is_contiguous() and equal(got.cpu(), expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rope(launches, dtype, interleaved):
    for tokens, (hq, hk), d, layout in (
        ((1,), (32, 8), 128, "contiguous"),
        ((3, 700), (40, 8), 128, "contiguous"),
        ((5000,), (16, 16), 64, "contiguous"),
        ((9,), (3, 0), 130, "contiguous"),
        ((2, 7), (4, 2), 96, "strided"),
        ((7,), (4, 2), 64, "unaligned"),
        ((), (4, 2), 64, "contiguous"),
        ((2, 3), (4, 2), 64, "transposed"),  # no single stride between tokens: copied first
    ):
        query, key = (laid_out(values((*tokens, h, d), dtype, "special", seed=h), layout) for h in (hq, hk))
        for angle_dtype, width in zip(FLOATS, (d, d // 2, d)):
            cos, sin = (laid_out(values((*tokens, width), angle_dtype, seed=seed), layout) for seed in (1, 2))
            launches.clear()
            got = sm.rope(*map(on_gpu, (query, key, cos, sin)), interleaved=interleaved)
            assert same(got, sm.rope(query, key, cos, sin, interleaved=interleaved)), (tokens, d, layout)
            assert launches == [True]


def on_gpu(t: torch.Tensor) -> torch.Tensor:
    """The same memory, strides and offset."""
    memory = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()).cuda()
    return memory.as_strided(t.shape, t.stride(), t.storage_offset())


@pytest.mark.parametrize("dim", ["token", "weight"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_groupwise_int8(launches, dtype, dim):
    for shape in ((1, 1), (33, 128), (257, 4096), (1000, 7168), (130, 1300), (2, 3, 200, 264), (0, 300), (4, 0)):
        for layout in LAYOUTS if len(shape) == 4 else ("contiguous", "unaligned"):
            x = laid_out(values(shape, dtype, "special", seed=shape[-1]), layout)
            for size in (128, 64):
                launches.clear()
                found, expected = (sm.quantize_int8_block(t, dim, block_size=size) for t in (on_gpu(x), x))
                assert same(found, expected), (shape, layout, size)
                assert launches == [True]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gguf_quantizers(launches, fmt, dtype):
    for shape in ((32,), (1, 64), (7, 32), (257, 4096), (1000, 2880), (2, 3, 5, 96), (0, 32), (3, 0)):
        for layout in LAYOUTS if len(shape) == 4 else ("contiguous", "unaligned"):
            x = laid_out(values(shape, dtype, "special", seed=shape[-1]), layout)
            for rule in RULES:
                launches.clear()
                assert same(sm.quantize_block(on_gpu(x), fmt, rule), sm.quantize_block(x, fmt, rule)), (shape, layout, rule)
                assert launches == [True]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_surrounds_the_products_of_experts(launches, dtype):
    """Every length class of the quantizers, one and several thread blocks of the sort, aligned and not."""
    for tokens, k, choices, experts in ((1, 7, 1, 1), (3, 1024, 2, 8), (600, 4096, 8, 128), (40, 7168, 8, 256), (5, 16384, 2, 4), (5, 20003, 2, 4)):
        ids = torch.randint(-1, experts, (tokens, choices), generator=torch.Generator().manual_seed(k))
        order = sm.moe_sort(ids, experts)
        launches.clear()
        assert same(tuple(sm.moe_sort(ids.cuda(), experts)), tuple(order)) and launches == [True]
        x, y, weights = (values(shape, dtype, seed=k) for shape in ((tokens, k), (tokens * choices, k), (tokens, choices)))
        named, rows = order.inverse[order.inverse >= 0].long(), order.inverse.cuda()
        for layout in ("contiguous", "unaligned"):
            for block in (False, True):
                launches.clear()
                got = moe.quantize_to_rows(on_gpu(laid_out(x, layout)), rows, block)
                expected = moe.quantize_to_rows(x, order.inverse, block)
                assert launches == [True] and all(same(g[named.cuda()], e[named]) for g, e in zip(got, expected))
            launches.clear()
            assert same(moe.combine(on_gpu(laid_out(y, layout)), weights.cuda(), rows), moe.combine(y, weights, order.inverse))
            assert launches == [True]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_router_of_experts(launches, dtype):
    """Every kernel, one and several thread blocks, every layout."""
    for rows, experts, k in (
        ((1,), 1, 1),
        ((), 8, 2),
        ((7,), 64, 6),
        ((16,), 128, 8),
        ((2, 33), 129, 1),
        ((1023,), 256, 8),
        ((5,), 511, 32),
        ((3, 2), 1000, 10),
        ((70000,), 128, 8),
        ((0,), 8, 2),
    ):
        for kind in ("plain", "special"):
            logits = values((*rows, experts), dtype, kind, seed=experts)
            logits[..., experts // 2] = logits[..., 0]  # a tie
            for layout in LAYOUTS if len(rows) < 2 else ("contiguous", "unaligned"):
                x = laid_out(logits, layout)
                for renormalize in (False, True):
                    launches.clear()
                    got = sm.topk_softmax(on_gpu(x), k, renormalize=renormalize)
                    assert same(got, sm.topk_softmax(x, k, renormalize=renormalize)), (rows, experts, k, kind, layout)
                    assert launches == [True]
    x = values((5, 300), dtype)
    assert same(sm.topk_softmax(x.cuda(), 8), reference.topk_softmax(x, 8))


def test_one_launch_and_one_capture(launches):
    query, key, cos = (torch.randn(64, h, 128, device="cuda").bfloat16() for h in (32, 8, 1))
    cos = cos[:, 0]
    ids = torch.randint(0, 8, (64, 2), device="cuda")
    rows, weights = sm.moe_sort(ids, 8).inverse, torch.rand(64, 2, device="cuda")
    calls = {
        "rope": lambda: sm.rope(query, key, cos, cos),
        "token": lambda: sm.quantize_int8_block(query),
        "weight": lambda: sm.quantize_int8_block(query, "weight"),
        "q4_0": lambda: sm.quantize_block(query, "q4_0"),
        "sort by expert": lambda: tuple(sm.moe_sort(ids, 8)),
        "to rows of experts": lambda: moe.quantize_to_rows(query[:, 0], rows, False),
        "blocks to rows of experts": lambda: moe.quantize_to_rows(query[:, 0], rows, True),
        "router": lambda: sm.topk_softmax(query[:, 0], 8),
        "weighted sum": lambda: moe.combine(query.view(-1, 128)[:128], weights, rows),
    }
    for name, call in calls.items():
        expected = call()  # builds and loads the kernel
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
        graph.replay()
        pairs = zip(captured, expected) if isinstance(expected, tuple) else [(captured, expected)]
        assert all(torch.equal(one, other) for one, other in pairs), name
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        assert len(names) == 1, (name, names)


def test_a_compiled_graph_launches_the_kernels(launches):
    x = torch.randn(5, 256, device="cuda").half()
    torch.compiler.reset()
    compiled = torch.compile(lambda x: (*sm.quantize_int8_block(x), sm.quantize_block(x, "q5_1")), backend="eager")
    assert same(compiled(x), (*sm.quantize_int8_block(x.cpu()), sm.quantize_block(x.cpu(), "q5_1")))
    assert launches == [True, True]
