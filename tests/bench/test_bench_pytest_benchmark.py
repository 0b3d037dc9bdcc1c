"""The same harness under pytest-benchmark: `pytest tests/bench --benchmark-only`, and its own history and comparison.

A round is one pass of the runner (a graph replay on a GPU); `extra_info` has the harness's own microseconds per call.
"""

import pytest
import torch

from scaled_mm.bench.gguf import peers as gguf_peers
from scaled_mm.bench.gguf.cases import GgufCase
from scaled_mm.bench.gguf.suite import GgufSuite
from scaled_mm.bench.int8.peers import Ours, every_peer
from scaled_mm.bench.int8.suite import Int8Suite
from scaled_mm.gguf_formats import WEIGHT_FORMATS
from scaled_mm.measure import timing
from scaled_mm.measure.peer import OURS
from scaled_mm.measure.run import Suite
from scaled_mm.measure.shapes import LLM_SHAPES, Case

pytest.importorskip("pytest_benchmark", reason="pytest-benchmark is not installed")

INT8 = Int8Suite()


def benchmark_peer(benchmark, peer, case: Case, device: torch.device, sets: int | None = None, suite: Suite = INT8) -> None:
    if (reason := peer.available(device)) is not None:
        pytest.skip(f"{peer.name}: {reason}")
    generator = torch.Generator(device).manual_seed(0)
    inputs = suite.inputs(case, suite.weights(case, device, generator, sets), generator)
    runner = timing.open_runner(peer.prepare(inputs), device, budget_ms=10, cold=inputs.weights.cold)
    try:
        timed = timing.interleave({peer.name: runner})[peer.name]
        assert isinstance(timed, timing.Timing), timed
        benchmark.group = str(case)
        benchmark.extra_info.update(us_per_call=timed.us, calls_per_round=timed.calls_per_graph, method=timed.method)
        benchmark.pedantic(runner.replay, rounds=5, warmup_rounds=1)
    finally:
        runner.close()
        peer.release()
    assert timed.us > 0


@pytest.mark.parametrize("name", [OURS, "bf16", "fp32", "intmm_epilogue"])
def test_benchmark_on_a_cpu(benchmark, name):
    peer = next(peer for peer in [Ours(), *every_peer()] if peer.name == name)
    benchmark_peer(benchmark, peer, Case("256x256", 16, 256, 256), torch.device("cpu"), sets=4)


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 16, 64, 256, 4096])
@pytest.mark.parametrize("shape", ["8B_qkv", "8B_down"])
@pytest.mark.parametrize("name", [OURS, "bf16", "intmm", "fp8row", "vllm", "sgl"])
def test_benchmark_on_a_gpu(benchmark, name, shape, M):
    peer = next(peer for peer in [Ours(), *every_peer()] if peer.name == name)
    benchmark_peer(benchmark, peer, Case(shape, M, *LLM_SHAPES[shape]), torch.device("cuda:0"))


def gguf_peer(name: str):
    return next(peer for peer in gguf_peers.every_peer() if peer.name == name)


@pytest.mark.parametrize("fmt", ["q4_0", "q8_0"])
@pytest.mark.parametrize("name", [OURS, "ours_q8_1", "mm", "dequantize_mm"])
def test_benchmark_of_gguf_products_on_a_cpu(benchmark, name, fmt):
    benchmark_peer(benchmark, gguf_peer(name), GgufCase("256x256", 16, 256, 256, fmt), torch.device("cpu"), sets=4, suite=GgufSuite())


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 16, 512])
@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
@pytest.mark.parametrize("name", [OURS, "ours_w4a8"])
def test_benchmark_of_gguf_products_on_a_gpu(benchmark, name, fmt, M):
    benchmark_peer(benchmark, gguf_peer(name), GgufCase("8B_down", M, *LLM_SHAPES["8B_down"], fmt), torch.device("cuda:0"), suite=GgufSuite())
