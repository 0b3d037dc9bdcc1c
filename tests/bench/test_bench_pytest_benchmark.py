"""The same harness under pytest-benchmark: `pytest tests/bench --benchmark-only`, and its own history and comparison.

A round is one pass of the runner (a graph replay on a GPU); `extra_info` has the harness's own microseconds per call.
"""

import pytest
import torch

from scaled_mm.bench import timing
from scaled_mm.bench.inputs import Inputs, WeightSets
from scaled_mm.bench.peers import OURS, Ours, every_peer
from scaled_mm.bench.shapes import LLM_SHAPES, Case

pytest.importorskip("pytest_benchmark", reason="pytest-benchmark is not installed")


def benchmark_peer(benchmark, peer, case: Case, device: torch.device, sets: int | None = None) -> None:
    if (reason := peer.available(device)) is not None:
        pytest.skip(f"{peer.name}: {reason}")
    generator = torch.Generator(device).manual_seed(0)
    inputs = Inputs(case, WeightSets(case.N, case.K, device, generator, sets), generator)
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
