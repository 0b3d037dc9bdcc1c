"""The CUDA kernels of row-wise operators serve what they are made for, and give the bits of the CPU."""

from __future__ import annotations

import ctypes
import itertools
import random
import subprocess
from pathlib import Path

import pytest
import torch
from rowwise_data import FLOATS

import scaled_mm as sm
from scaled_mm.jit import library
from scaled_mm.reference import same_bits
from scaled_mm.rowwise import kernels

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """What kernels.launch returned."""
    answers, launch = [], kernels.launch
    monkeypatch.setattr(kernels, "launch", lambda *args: answers.append(launch(*args)) or answers[-1])
    return answers


def shapes(count: int, seed: int):
    """Rows of every length class: a warp, 128 and 256 threads, and longer than registers hold; few rows and many."""
    pick = random.Random(seed)
    for longest in itertools.islice(itertools.cycle((1024, 4096, 8192, 16384, 40000)), count):
        yield pick.choice((1, 2, 3, 7, 33, 257)), pick.randint(1, longest)


def same(got, expected) -> bool:
    if isinstance(expected, tuple):
        return len(got) == len(expected) and all(map(same, got, expected))
    return got.shape == expected.shape and same_bits(got.cpu(), expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_operator_on_random_shapes(launches, dtype):
    generator = torch.Generator().manual_seed(3)
    for m, k in shapes(25, 3):
        x, residual, weight = (torch.randn(*size, generator=generator).to(dtype) for size in ((m, k), (m, k), (k,)))
        scale, point = torch.tensor([0.02]), torch.tensor([3], dtype=torch.int32)
        gated = torch.cat((x, residual), 1)
        calls = {
            "token": lambda t: sm.quantize_int8(t["x"]),
            "smooth": lambda t: sm.dynamic_quant(t["x"], t["weight"]),
            "asymmetric": lambda t: tuple(sm.quantize_int8(t["x"], symmetric=False)),
            "channel": lambda t: sm.quantize_int8(t["x"], "channel"),
            "static": lambda t: tuple(sm.quantize_int8(t["x"], scale=t["scale"], zero_point=t["point"])),
            "multiply": lambda t: sm.quantize(t["x"], t["weight"], t["weight"]),
            "norm": lambda t: sm.rms_norm(t["x"], t["weight"]),
            "norm token": lambda t: tuple(sm.rms_norm(t["x"], t["weight"], quantize="token")),
            "norm static": lambda t: tuple(sm.rms_norm(t["x"], t["weight"], quantize=t["scale"], zero_point=t["point"])),
            "add": lambda t: sm.add_rms_norm(t["x"], t["residual"], t["weight"]),
            "add token": lambda t: tuple(map(tuple, sm.add_rms_norm(t["x"], t["residual"], t["weight"], quantize="token")[:1])),
            "silu": lambda t: sm.silu_and_mul(t["gated"]),
            "silu token": lambda t: tuple(sm.silu_and_mul(t["gated"], quantize="token")),
            "gelu": lambda t: sm.gelu_and_mul(t["gated"]),
            "gelu tanh": lambda t: tuple(sm.gelu_and_mul(t["gated"], approximate="tanh", quantize=t["scale"])),
        }
        tensors = dict(x=x, residual=residual, weight=weight, scale=scale, point=point, gated=gated)
        on_gpu = {name: t.cuda() for name, t in tensors.items()}
        for name, call in calls.items():
            launches.clear()
            assert same(call(on_gpu), call(tensors)), f"{name} of {m} x {k}"
            assert launches == [True], f"{name} of {m} x {k}: no kernel served"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_any_strides_and_leading_dimensions(launches, dtype):
    x = torch.randn(2, 6, 5, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    views = {
        "contiguous": lambda t: t,
        "columns apart": lambda t: t[..., ::2],
        "unaligned": lambda t: t[..., 1:],
        "a slice of heads": lambda t: t[:, 2:4],  # no single stride between rows: copied first
        "transposed": lambda t: t.transpose(1, 2),
        "expanded": lambda t: t[:1].expand(3, 6, 5, 96),
        "transposed rows": lambda t: t.transpose(-1, -2),
    }
    for name, view in views.items():
        launches.clear()
        got = sm.quantize_int8(view(x.cuda()))
        assert launches == [True] and same(got, sm.quantize_int8(view(x))), name
        assert got[0].is_contiguous()


def test_total_in_place_and_elsewhere(launches):
    x, residual, weight = (torch.randn(*size).bfloat16() for size in ((9, 640), (9, 640), (640,)))
    expected, total = sm.add_rms_norm(x, residual, weight, quantize="token")
    for place in ("x", "residual", "elsewhere", "overlap"):
        memory = torch.empty(10 * 640, dtype=torch.bfloat16, device="cuda")
        at = dict(x=x.cuda(), residual=residual.cuda())
        if place == "overlap":  # total begins one row after x: computed apart, then copied
            at["x"] = memory[: 9 * 640].view(9, 640).copy_(x)
            into = memory[640:].view(9, 640)
        else:
            into = at.get(place, torch.empty_like(x, device="cuda"))
        version = into._version
        (q, scale), written = sm.add_rms_norm(at["x"], at["residual"], weight.cuda(), quantize="token", total=into)
        assert written is into and same(into, total) and same((q, scale), tuple(expected)), place
        assert into._version > version
    assert all(launches)


def test_rows_without_elements_have_a_scale(launches):
    got = sm.quantize_int8(torch.empty(3, 0, device="cuda"))
    assert same(got, sm.quantize_int8(torch.empty(3, 0))) and launches == [True]
    assert sm.quantize_int8(torch.empty(0, 8, device="cuda"))[0].shape == (0, 8)


def test_one_launch_and_one_capture(launches):
    x, residual, weight = (torch.randn(*size, device="cuda").bfloat16() for size in ((64, 4096), (64, 4096), (4096,)))
    sm.add_rms_norm(x, residual, weight, quantize="token")  # builds and loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (q, scale), total = sm.add_rms_norm(x, residual, weight, quantize="token")
    x.copy_(torch.randn(64, 4096))
    graph.replay()
    (want_q, want_scale), want_total = sm.add_rms_norm(x.cpu(), residual.cpu(), weight.cpu(), quantize="token")
    assert same((q, scale, total), (want_q, want_scale, want_total))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        sm.add_rms_norm(x, residual, weight, quantize="token")
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(names) == 1, names


def test_a_compiled_graph_launches_the_kernel(launches):
    x = torch.randn(5, 300, device="cuda").half()
    compiled = torch.compile(lambda x: sm.quantize_int8(x), backend="eager")
    assert same(compiled(x), sm.quantize_int8(x.cpu()))
    assert len(launches) == 1


def test_every_inverse_of_a_sigmoid_is_that_of_a_division(tmp_path):
    nvcc, flags = library.nvcc_and_flags("sm80")
    target, source = tmp_path / "inverse.so", Path(__file__).with_name("inverse.cu")
    subprocess.run([str(nvcc.path), *flags, "-shared", str(source), "-o", str(target)], check=True, timeout=300)
    assert ctypes.CDLL(str(target)).count_different() == 0
