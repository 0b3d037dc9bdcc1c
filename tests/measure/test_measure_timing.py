"""The plan of a timing, and the CPU path that shares it with the GPU's."""

import contextlib
import math
import statistics
import time

import pytest
import torch

from scaled_mm.measure import cuda_runner, device, host, regime, rotation, runner, sampling, timing
from scaled_mm.measure.sampling import Plan
from scaled_mm.measure.timing import Timing

CPU = torch.device("cpu")
MIB = 1 << 20
GIB = 1 << 30
H200_L2 = 60 * MIB


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (6144, 4096), (28672, 4096), (57344, 8192)])
def test_every_llm_weight_rotates_beyond_three_caches_within_the_limit(n, k):
    sets = rotation.rotation(n * k, H200_L2, 2 * GIB)
    assert rotation.MIN_ROTATION <= sets <= rotation.MAX_ROTATION
    assert sets * n * k <= 2 * GIB
    assert rotation.is_cold(n * k, sets, H200_L2)


def test_a_weight_too_small_to_be_cold_is_called_warm():
    sets = rotation.rotation(256 * 256, H200_L2, 2 * GIB)
    assert sets == rotation.MAX_ROTATION
    assert not rotation.is_cold(256 * 256, sets, H200_L2)


def test_memory_limits_the_rotation_but_leaves_one_set():
    assert rotation.rotation(GIB, H200_L2, 2 * GIB) == 2
    assert rotation.rotation(4 * GIB, H200_L2, 2 * GIB) == 1


@pytest.mark.parametrize("call_us", [0.0, 1.0, 9.7, 40.0, 300.0, 3000.0, 6400.0, 12000.0, 14000.0, 1e6])
@pytest.mark.parametrize("sets", [1, 4, 7, 12, 64])
@pytest.mark.parametrize("budget_ms", [1.0, 60.0])
def test_every_plan_has_whole_rotations_and_keeps_to_the_budget(call_us, sets, budget_ms):
    plan = sampling.plan(call_us, sets, budget_ms)
    rotation_us = max(call_us, 0.1) * sets
    assert plan.calls >= 1 and plan.passes >= sampling.ROUNDS
    if rotation_us > budget_ms * 1000:
        assert plan.passes == sampling.ROUNDS and plan.calls <= sets
        assert plan.calls == 1 or plan.calls * plan.passes * call_us <= budget_ms * 1000
    else:
        assert plan.calls % sets == 0
        assert sampling.MIN_PASSES <= plan.passes <= sampling.MAX_PASSES
        # the budget, or the fewest passes of one rotation where that alone exceeds it
        cost = plan.calls * plan.passes * max(call_us, 0.1)
        assert cost <= max(budget_ms * 1000, sampling.MIN_PASSES * rotation_us) * (1 + 1e-9)


def test_a_short_call_gets_a_graph_of_a_millisecond():
    plan = sampling.plan(9.7, 12)
    assert plan.calls == 108
    assert plan.calls * 9.7 >= sampling.MIN_PASS_US


def test_a_long_call_gets_one_rotation_a_graph():
    assert sampling.plan(6400.0, 4) == Plan(calls=4, passes=sampling.MIN_PASSES)


def test_a_call_that_fills_the_budget_is_still_sampled_in_every_round():
    assert sampling.plan(1e6, 4) == Plan(calls=1, passes=sampling.ROUNDS)


def test_cpu_timing_is_the_median_of_its_samples_and_names_its_method():
    result = timing.measure([lambda: time.sleep(0.002)], CPU, budget_ms=60)
    assert isinstance(result, Timing)
    assert result.us == statistics.median(result.samples)
    assert 2000 <= result.us < 200_000
    assert result.method == runner.CPU_ROTATED
    assert result.calls_per_graph >= 1


def test_every_weight_set_is_called_equally_often_in_turn():
    seen = []
    runner = timing.open_runner([lambda i=i: seen.append(i) for i in range(5)], CPU, budget_ms=1000)
    seen.clear()
    runner.sample(2)
    assert seen == list(range(5)) * (2 * runner.plan.calls // 5)
    seen.clear()
    runner.replay()
    assert seen == list(range(5)) * (runner.plan.calls // 5)


def test_a_cpu_that_becomes_busy_ends_the_samples_at_a_multiple_of_the_budget():
    seconds = iter([1e-4] * 3)  # the calls that the plan sees; then every one takes as long as a thousand of them

    start = time.perf_counter()
    result = timing.measure([lambda: time.sleep(next(seconds, 0.1))], CPU, budget_ms=20)
    assert time.perf_counter() - start < 20 * runner.OVERRUN / 1000 + sampling.ROUNDS * 0.1 + 0.5
    assert len(result.samples) >= sampling.ROUNDS and result.us >= 1e5


def test_the_warm_up_of_many_weight_sets_ends_at_a_multiple_of_the_budget():
    seconds = iter([1e-5] * 2)  # then every call is slow, before the first pass over the sets has ended
    calls = []
    cpu_runner = runner.CpuRunner([lambda: (calls.append(1), time.sleep(next(seconds, 0.02)))] * 200, budget_ms=10)
    assert len(calls) <= 2 + 10 * runner.OVERRUN / 20 + 2
    cpu_runner.close()


def test_a_call_that_reached_the_limit_of_host_time_is_not_called_again(monkeypatch):
    monkeypatch.setattr(host, "HOST_WARM_UP_MS", 0.0)
    monkeypatch.setattr(host, "HOST_LIMIT_MS", 30.0)
    calls = []
    host.host_overhead({"slow": lambda: (calls.append(1), time.sleep(0.01))}, CPU, count=1, batches=400)
    assert len(calls) <= 2 + 4  # the one that may load a library, the one that begins the round, and samples of 30 ms


def test_host_overhead_of_a_call_that_becomes_slow_is_bounded(monkeypatch):
    monkeypatch.setattr(host, "HOST_WARM_UP_MS", 0.0)
    monkeypatch.setattr(host, "HOST_LIMIT_MS", 30.0)
    measured = host.host_overhead({"slow": lambda: time.sleep(0.01)}, CPU, count=2, batches=400)["slow"]
    assert 1 <= len(measured.samples) <= 2 and measured.us >= 1e4


def test_rounds_alternate_between_implementations():
    order = []
    runners = {name: timing.open_runner([lambda name=name: order.append(name)], CPU, budget_ms=0.2) for name in "ab"}
    order.clear()
    timing.interleave(runners, rounds=2)
    turns = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    assert turns == ["a", "b", "a"]  # the second round goes backwards


def test_the_device_is_loaded_once_before_the_first_turn():
    class Recorded(timing.CpuRunner):
        def load(self):
            order.append("load")

    order = []
    runners = {name: Recorded([lambda name=name: order.append(name)], budget_ms=0.2) for name in "ab"}
    order.clear()
    timing.interleave(runners, rounds=2)
    assert order[:2] == ["load", "a"] and order.count("load") == 1
    assert timing.interleave({}) == {}


@pytest.mark.parametrize("name", regime.REGIMES)
def test_a_regime_is_described_by_its_own_numbers(name):
    one = regime.REGIMES[name]
    text = one.describe()
    assert ("does not rest" in text) == (one.rest_ms == 0) and f"untimed for {one.settle_ms:g} ms" in text
    assert (f"under load for {one.load_ms:g} ms" in text) == (one.load_ms > 0)


@pytest.mark.gpu
def test_a_regime_sets_rest_settling_and_load(monkeypatch):
    device, rests = torch.device("cuda:0"), []
    x = torch.rand(2048, 2048, device=device)
    monkeypatch.setattr(cuda_runner.time, "sleep", rests.append)
    monkeypatch.setitem(regime.REGIMES, "test", regime.Regime(70, 20, load_ms=150))
    runners = {name: timing.open_runner([lambda: x @ x], device, 5, regime=name) for name in ("test", regime.BRIEF)}
    replays = {name: runner._settle * runner.plan.calls for name, runner in runners.items()}
    assert replays["test"] > 5 * replays[regime.BRIEF]
    start = time.perf_counter()
    runners["test"].load()
    assert time.perf_counter() - start >= 0.15
    for one in runners.values():
        one.sample(2)
        one.close()
    assert rests == [0.07, 0]


def test_every_round_has_all_in_an_order_of_its_own_and_nobody_always_runs_behind_the_same():
    names = ["ours", "bf16", "intmm", "fp8row", "vllm"]
    orders = sampling.turns(names, sampling.ROUNDS)
    assert [sorted(order) for order in orders] == [sorted(names)] * sampling.ROUNDS
    assert len({tuple(order) for order in orders}) == sampling.ROUNDS
    before = {name: {order[order.index(name) - 1] for order in orders if order.index(name)} for name in names}
    assert all(len(others) >= 2 for others in before.values())
    assert sampling.turns(["one"], 3) == [["one"]] * 3 and sampling.turns([], 2) == [[], []]


def test_a_runner_that_fails_does_not_take_the_others_along():
    def fails_later():
        if calls[0] > 40:
            raise RuntimeError("later")
        calls[0] += 1

    calls = [0]
    runners = {
        "good": timing.open_runner([lambda: time.sleep(1e-4)], CPU, budget_ms=2),
        "bad": timing.open_runner([fails_later], CPU, budget_ms=2),
    }
    result = timing.interleave(runners)
    assert isinstance(result["good"], Timing)
    assert isinstance(result["bad"], RuntimeError)


def test_a_runner_beyond_the_limit_keeps_the_samples_of_its_first_round():
    runners = {name: timing.open_runner([lambda ms=ms: time.sleep(ms / 1000)], CPU, budget_ms=8) for name, ms in (("fast", 0.1), ("slow", 2))}
    result = timing.interleave(runners, limit_us=1500)
    assert len(result["slow"].samples) == max(1, runners["slow"].plan.passes // sampling.ROUNDS) and result["slow"].us > 1500
    assert len(result["fast"].samples) == sampling.ROUNDS * (runners["fast"].plan.passes // sampling.ROUNDS)


def test_measure_raises_what_a_call_raises():
    def broken():
        raise RuntimeError("no kernel")

    with pytest.raises(RuntimeError, match="no kernel"):
        timing.measure([broken], CPU)


def test_nothing_to_time_is_refused():
    with pytest.raises(ValueError, match="at least one call"):
        timing.open_runner([], CPU)


def test_spread_is_the_range_of_the_rounds_medians():
    result = timing.summarize([[1.0, 1.0, 1.0], [1.2, 1.2, 1.2]], calls=3, method="m")
    assert result.us == pytest.approx(1.1)
    assert result.spread == pytest.approx(0.2 / 1.1)


def test_host_overhead_is_the_median_over_batches_without_those_that_begin_a_turn(monkeypatch):
    monkeypatch.setattr(host, "HOST_WARM_UP_MS", 0.0)
    count = [0]

    def call():
        count[0] += 1

    result = host.host_overhead({"one": call}, CPU, count=10, batches=8, rounds=4)["one"]
    assert count[0] == 10 * (1 + 8 + 4)
    assert len(result.samples) == 8
    assert result.us == statistics.median(result.samples)
    assert 0 < result.us < 1000


def test_host_overhead_takes_its_batches_in_rounds_over_all_calls(monkeypatch):
    monkeypatch.setattr(host, "HOST_WARM_UP_MS", 0.0)
    order = []
    host.host_overhead({name: lambda name=name: order.append(name) for name in "ab"}, CPU, count=1, batches=4, rounds=2)
    assert "".join(order[2:]) == "aaabbb" + "bbbaaa"  # the first two may load libraries


def test_a_call_that_raises_is_left_out_of_host_overhead(monkeypatch):
    monkeypatch.setattr(host, "HOST_WARM_UP_MS", 1.0)

    def refuse():
        raise RuntimeError("launch failed")

    measured = host.host_overhead({"bad": refuse, "good": lambda: None}, CPU, count=3, batches=4)
    assert str(measured["bad"]) == "launch failed" and len(measured["good"].samples) == 4


def test_host_overhead_warms_up_for_a_while_first(monkeypatch):
    monkeypatch.setattr(host, "HOST_WARM_UP_MS", 20.0)
    calls = []
    host.host_overhead({"one": lambda: calls.append(time.perf_counter())}, CPU, count=10, batches=4)
    assert calls[-10 * (4 + 4)] - calls[0] >= 0.015


def test_the_cpu_cache_is_read_in_either_unit(tmp_path):
    assert device._cpu_cache_bytes(str(tmp_path)) == 32 * MIB
    for index, size in enumerate(["48K", "2048K", "36M"]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert device._cpu_cache_bytes(str(tmp_path)) == 36 * MIB


@pytest.mark.gpu
def test_a_graph_times_what_it_captured():
    device = torch.device("cuda:0")
    x = torch.rand(2048, 2048, device=device)
    outs = [torch.zeros_like(x) for _ in range(3)]
    runner = timing.open_runner([lambda out=out: torch.mm(x, x, out=out) for out in outs], device, budget_ms=20)
    try:
        for out in outs:
            out.zero_()
        runner.replay()
        assert all(torch.equal(out, torch.mm(x, x)) for out in outs)
        result = timing.interleave({"mm": runner})["mm"]
    finally:
        runner.close()
    assert result.method == cuda_runner.GRAPH_COLD
    assert result.calls_per_graph % 3 == 0
    assert 2 * 2048**3 / (result.us * 1e-6) < 3e15, "faster than any GPU: the graph did not do the work"


@pytest.mark.gpu
def test_a_call_that_fails_in_capture_leaves_the_device_usable():
    device = torch.device("cuda:0")
    x = torch.rand(64, 64, device=device)

    def synchronizes():
        return x.sum().item()

    with pytest.raises(RuntimeError):
        timing.measure([synchronizes], device)
    assert timing.measure([lambda: x @ x], device).us > 0


@pytest.mark.parametrize("times, expected", [([9000.0, 30.0, 40.0], 20.0), ([9000.0, 8500.0], 8500.0), ([30.0, 40.0], 20.0)])
def test_a_first_call_that_waited_for_the_host_is_no_slow_call(times, expected):
    """Two calls, a budget of 8 ms. Taken for slow, each would be a graph of its own, whose launch of 15 us would show."""
    runner, left = object.__new__(cuda_runner.CudaRunner), list(times)
    runner._calls = [lambda: None] * 2
    runner._elapsed_us = lambda calls: left.pop(0)
    assert runner._warm_up(8.0) == expected and not left


@pytest.mark.parametrize("graph_us, calls", [(80.0, [4, 20]), (850.0, [4])])
def test_a_graph_that_the_slow_host_made_short_is_captured_again(graph_us, calls, monkeypatch):
    """Four weight sets; the host takes 900 us for a call, the GPU graph_us."""
    captured = []

    class Graph:
        def reset(self):
            captured.append("reset")

    def capture(self):
        captured.append(self.plan.calls)
        return Graph(), graph_us

    monkeypatch.setattr(cuda_runner, "_side_stream", lambda device: contextlib.nullcontext())
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda given: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cuda_runner.CudaRunner, "_warm_up", lambda self, budget_ms: 900.0)
    monkeypatch.setattr(cuda_runner.CudaRunner, "_captured", capture)
    made = cuda_runner.CudaRunner([lambda: None] * 4, torch.device("cuda:0"), 15.0, True, "loaded")
    assert [one for one in captured if one != "reset"] == calls and captured.count("reset") == len(calls) - 1
    assert made.plan.calls == calls[-1] and made._settle == math.ceil(100_000 / (calls[-1] * graph_us))
