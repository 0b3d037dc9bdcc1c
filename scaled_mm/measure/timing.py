"""The only place that times.

On a GPU: a CUDA graph holds many calls, each on the next of R weight sets, so that no weight is still in the L2 cache
when its turn comes again and the gaps between launches are what a captured model would see. The graph is replayed
between CUDA events; one sample is one replay divided by its calls, and the result is the median of the samples. The
callables are captured back to back on one side stream with nothing between them, so that kernels which overlap with
their predecessor (programmatic dependent launch) do so here as they would in a model.

Before its samples the GPU rests for REST_MS, and the implementation then runs untimed for SETTLE_MS: a large product draws
all the power a GPU may have, and the clocks it gets in its first tens of milliseconds are those that the kernel before it
left over. Without either, the same kernel measured 12-17% faster on an H200 behind a light one than behind a heavy one;
without the rest 1-4%.

On a CPU: the same rotation and the same plan, with `time.perf_counter` around each pass. A CPU that other programs use can be a hundred
times slower than the plan expects; a runner then stops at OVERRUN times its budget, with the calls it has made.

All times are microseconds per call.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

Call = Callable[[], object]

GRAPH_COLD = "cuda_graph_l2_cold"
GRAPH_WARM = "cuda_graph_rotated_fits_l2"  # weights so small that even the most sets we rotate stay in the cache
CPU_ROTATED = "perf_counter_rotated"

CACHE_MULTIPLE = 3  # the rotated weights exceed the last-level cache this many times
MIN_ROTATION, MAX_ROTATION = 4, 64
MIN_CALLS, MAX_CALLS = 20, 256  # calls in a graph
MIN_PASS_US = 1000.0  # a graph this long makes the few microseconds of its launch invisible
MIN_PASSES, MAX_PASSES = 4, 60
DEFAULT_BUDGET_MS = 60.0
REST_MS = 50.0  # of an idle GPU before each round of an implementation: who ran before is forgotten
SETTLE_MS = 100.0  # of untimed replays before the samples of each round
ROUNDS = 4
HOST_WARM_UP_MS = 100.0  # of untimed calls before host time is sampled
OVERRUN = 4  # times its budget that a runner may take on a CPU
HOST_LIMIT_MS = 2000.0  # of sampled host time of one implementation


@dataclass(frozen=True)
class Timing:
    """One implementation on one case.

    `us`: median over `samples`, microseconds per call. `calls_per_graph`: calls behind each sample. `spread`: range of
    the rounds' medians over the overall median; a difference between implementations below it is noise.
    """

    us: float
    samples: list[float]
    calls_per_graph: int
    method: str
    spread: float = 0.0


@dataclass(frozen=True)
class Overhead:
    """Host microseconds per call: median of `samples`, each a batch of `calls` calls."""

    us: float
    samples: list[float]
    calls: int


@dataclass(frozen=True)
class Plan:
    """`calls` in one pass (a graph, or a timed loop) and how often the pass is sampled."""

    calls: int
    passes: int


def rotation(bytes_each: int, cache_bytes: int, limit_bytes: int) -> int:
    """How many weight sets of `bytes_each` bytes to rotate: beyond three caches, within `limit_bytes`, at least one."""
    wanted = math.ceil(CACHE_MULTIPLE * cache_bytes / bytes_each)
    wanted = min(max(wanted, MIN_ROTATION), MAX_ROTATION)
    return max(1, min(wanted, limit_bytes // bytes_each))


def is_cold(bytes_each: int, sets: int, cache_bytes: int) -> bool:
    """Whether a rotation over `sets` sets leaves nothing of a set in the cache by the time its turn comes again."""
    return bytes_each * sets >= CACHE_MULTIPLE * cache_bytes or bytes_each >= CACHE_MULTIPLE * cache_bytes


def plan(call_us: float, sets: int, budget_ms: float = DEFAULT_BUDGET_MS) -> Plan:
    """Calls per pass and passes for a call of about `call_us`, so that the samples cost about `budget_ms`.

    A pass is whole rotations, at least 20 calls and about a millisecond; a call so slow that this would not fit four
    times into the budget gets fewer, down to one rotation, and one that fills the budget alone gets single calls.
    """
    call_us = max(call_us, 0.1)
    budget_us = budget_ms * 1000
    if call_us * sets > budget_us:
        return Plan(calls=max(1, int(budget_us / ROUNDS / call_us)), passes=ROUNDS)
    wanted = min(max(MIN_CALLS, math.ceil(MIN_PASS_US / call_us)), MAX_CALLS)
    rotations = math.ceil(wanted / sets)
    affordable = max(1, int(budget_us / MIN_PASSES / (call_us * sets)))
    calls = sets * min(rotations, affordable)
    passes = min(max(int(budget_us / (calls * call_us)), MIN_PASSES), MAX_PASSES)
    return Plan(calls, passes)


class Runner:
    """Calls of one implementation, warmed up and ready to be sampled. Close it to free its graph."""

    method: str
    plan: Plan

    def sample(self, passes: int) -> list[float]:
        """Microseconds per call of each of `passes` timed passes."""
        raise NotImplementedError

    def replay(self) -> None:
        """One untimed pass, finished when this returns: for checks of what the timed work computes."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    # One stream for every warm-up and capture: libraries that keep a workspace per stream allocate it once, before the
    # capture, and capture is not allowed on the default stream.
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


class CudaRunner(Runner):
    """CUDA graph over the rotation. The graph's private memory is freed by `close`."""

    def __init__(self, calls: Sequence[Call], device: torch.device, budget_ms: float, cold: bool):
        self._calls = list(calls)
        self._device = device
        self._stream = _side_stream(device)
        self.method = GRAPH_COLD if cold else GRAPH_WARM
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # the inputs were filled on another stream
            with torch.cuda.stream(self._stream):
                call_us = self._warm_up(budget_ms)
                self.plan = plan(call_us, len(self._calls), budget_ms)
                self._settle = max(1, math.ceil(SETTLE_MS * 1000 / (self.plan.calls * call_us)))
                self._graph = self._capture(self.plan.calls)
                self._graph.replay()
                self._stream.synchronize()

    def _warm_up(self, budget_ms: float) -> float:
        """Runs every call once (lazy loading, handles, workspaces stay out of the numbers); about the time of one."""
        self._calls[0]()
        first = self._elapsed_us(self._calls[:1])
        if first > budget_ms * 1000:
            return first
        return self._elapsed_us(self._calls) / len(self._calls)

    def _elapsed_us(self, calls: Sequence[Call]) -> float:
        start, end = _timing_event(), _timing_event()
        start.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1000

    def _capture(self, count: int) -> torch.cuda.CUDAGraph:
        # Not `torch.cuda.graph`: it empties the allocator's cache and runs the garbage collector on entry, which over a
        # grid of several hundred captures costs more than all the timing.
        graph = torch.cuda.CUDAGraph()
        self._stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for i in range(count):
                self._calls[i % len(self._calls)]()
        except Exception as error:
            try:
                graph.capture_end()  # the stream must leave capture mode whatever happened
            except RuntimeError as end:
                raise RuntimeError(f"{type(error).__name__} during graph capture: {error} (then: {end})") from error
            raise
        graph.capture_end()
        return graph

    def sample(self, passes: int) -> list[float]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            events = [(_timing_event(), _timing_event()) for _ in range(passes)]
            self._stream.synchronize()
            time.sleep(REST_MS / 1000)
            for _ in range(self._settle):  # and the GPU is busy while the host queues the timed replays
                self._graph.replay()
            for start, end in events:
                start.record()
                self._graph.replay()
                end.record()
            self._stream.synchronize()
        return [start.elapsed_time(end) * 1000 / self.plan.calls for start, end in events]

    def replay(self) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            torch.cuda.synchronize()
            self._graph.replay()
            self._stream.synchronize()

    def close(self) -> None:
        self._graph.reset()
        self._calls.clear()


class CpuRunner(Runner):
    """`time.perf_counter` around whole passes over the rotation."""

    method = CPU_ROTATED

    def __init__(self, calls: Sequence[Call], budget_ms: float):
        self._calls = list(calls)
        self._left_us = OVERRUN * budget_ms * 1000
        self._calls[0]()
        first = self._elapsed_us(1)
        self.plan = Plan(calls=len(self._calls), passes=1)  # every call once, unless they take longer than the budget
        call_us = first if first > budget_ms * 1000 else self._pass()
        self.plan = plan(call_us, len(self._calls), budget_ms)

    def _elapsed_us(self, count: int) -> float:
        begin = time.perf_counter()
        for i in range(count):
            self._calls[i % len(self._calls)]()
        return (time.perf_counter() - begin) * 1e6

    def _pass(self) -> float:
        """Microseconds per call of a pass, which ends early once no time is left."""
        begin = now = time.perf_counter()
        deadline = begin + self._left_us / 1e6
        done = 0
        while done < self.plan.calls and (now < deadline or done == 0):
            self._calls[done % len(self._calls)]()
            done += 1
            now = time.perf_counter()
        self._left_us -= (now - begin) * 1e6
        return (now - begin) * 1e6 / done

    def sample(self, passes: int) -> list[float]:
        samples = [self._pass()]
        while len(samples) < passes and self._left_us > 0:
            samples.append(self._pass())
        return samples

    def replay(self) -> None:
        self._elapsed_us(self.plan.calls)

    def close(self) -> None:
        self._calls.clear()


def open_runner(calls: Sequence[Call], device: torch.device, budget_ms: float = DEFAULT_BUDGET_MS, cold: bool = True) -> Runner:
    """Warms up `calls` (one zero-argument callable per weight set) and readies them: a captured graph on a GPU.

    cold: whether the sets exceed the cache (`is_cold`); it only names the method. Errors of the callables pass through.
    """
    if not calls:
        raise ValueError("expected at least one call to time, got none")
    if device.type == "cuda":
        return CudaRunner(calls, device, budget_ms, cold)
    return CpuRunner(calls, budget_ms)


def turns(names: Sequence[str], rounds: int) -> list[list[str]]:
    """An order for each round: forwards and backwards in turn, and each pair of rounds starts further on."""
    orders = []
    for number in range(rounds):
        first = number // 2 * max(1, len(names) // 2) % max(1, len(names))
        order = [*names[first:], *names[:first]]
        orders.append(order[::-1] if number % 2 else order)
    return orders


def interleave(runners: Mapping[str, Runner], rounds: int = ROUNDS, limit_us: float | None = None) -> dict[str, Timing | Exception]:
    """Samples every runner in turn, `rounds` times over, so that a drift of the clocks meets all of them alike.

    Each round has an order of its own (`turns`), and a rest stands between two runners (REST_MS): on a GPU at its power
    limit a runner is 1-4% faster or slower by who ran before it, 100 ms of settling notwithstanding.

    A runner that raises is left out of later rounds and its exception stands in its Timing's place. So is one that takes more
    than limit_us in the median of a round: it keeps the samples that it has.
    """
    collected: dict[str, list[list[float]]] = {name: [] for name in runners}
    failed: dict[str, Exception] = {}
    slow: set[str] = set()
    for order in turns(list(runners), rounds):
        for name in order:
            if name in failed or name in slow:
                continue
            runner = runners[name]
            try:
                collected[name].append(runner.sample(max(1, runner.plan.passes // rounds)))
            except Exception as error:  # noqa: BLE001 - handed to the caller, who records it
                failed[name] = error
                continue
            if limit_us is not None and statistics.median(collected[name][-1]) > limit_us:
                slow.add(name)
    return {
        name: failed[name] if name in failed else summarize(collected[name], runner.plan.calls, runner.method) for name, runner in runners.items()
    }


def summarize(rounds: Sequence[Sequence[float]], calls: int, method: str) -> Timing:
    """The Timing of samples that were taken in `rounds`."""
    samples = [sample for one in rounds for sample in one]
    median = statistics.median(samples)
    medians = [statistics.median(one) for one in rounds]
    spread = (max(medians) - min(medians)) / median if median > 0 else 0.0
    return Timing(us=median, samples=samples, calls_per_graph=calls, method=method, spread=spread)


def measure(calls: Sequence[Call], device: torch.device, budget_ms: float = DEFAULT_BUDGET_MS, cold: bool = True) -> Timing:
    """Times one implementation alone; raises what its calls raise."""
    runner = open_runner(calls, device, budget_ms, cold)
    try:
        timing = interleave({"": runner})[""]
    finally:
        runner.close()
    if isinstance(timing, Exception):
        raise timing
    return timing


def host_overhead(
    calls: Mapping[str, Call], device: torch.device, count: int = 200, batches: int = 32, rounds: int = ROUNDS
) -> dict[str, Overhead | Exception]:
    """Host microseconds that one call of each of `calls` costs, launches included, the GPU's work not.

    Each sample is a batch of `count` calls. The batches are taken in `rounds` over all of `calls` (`turns`), for a host
    that others use too is half as fast again for seconds on end; each turn begins with a batch that is not counted.

    The device is idle when a batch starts and a batch is far shorter than the driver's launch queue, so the host never
    waits for the GPU inside the timed loop; use a product small enough that neither side is held up by the other. On a
    CPU there is no queue and the figure is the whole call.

    A call that raises is left out of later rounds and its exception stands in its Overhead's place. One whose batches took HOST_LIMIT_MS
    gets no more of them.
    """

    def batch(call: Call) -> float:
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(count):
            call()
        elapsed = time.perf_counter() - begin
        synchronize(device)
        return elapsed * 1e6 / count

    samples: dict[str, list[float]] = {name: [] for name in calls}
    failed: dict[str, Exception] = {}

    def turn(name: str, many: int) -> None:
        if sum(samples[name]) * count >= HOST_LIMIT_MS * 1000:
            return
        try:
            batch(calls[name])  # may load a library
            for _ in range(many):
                if sum(samples[name]) * count < HOST_LIMIT_MS * 1000:
                    samples[name].append(batch(calls[name]))
        except Exception as error:  # noqa: BLE001 - handed to the caller, who records it
            failed[name] = error

    for name in calls:
        turn(name, 0)
    awake = time.perf_counter() + HOST_WARM_UP_MS / 1000
    while len(failed) < len(calls) and time.perf_counter() < awake:  # a core that slept takes milliseconds to its clock
        turn(next(name for name in calls if name not in failed), 0)
    for order in turns(list(calls), rounds):
        for name in order:
            if name not in failed:
                turn(name, batches // rounds)
    return {name: failed[name] if name in failed else Overhead(statistics.median(samples[name]), samples[name], count) for name in calls}


def wake(device: torch.device, ms: float = 200.0) -> None:
    """Keeps a GPU busy for about `ms` milliseconds so that the first case does not meet idle clocks."""
    if device.type != "cuda":
        return
    x = torch.rand(4096, 4096, device=device, dtype=torch.float16)
    out = torch.empty_like(x)
    deadline = time.perf_counter() + ms / 1000
    while time.perf_counter() < deadline:
        for _ in range(20):
            torch.mm(x, x, out=out)
        torch.cuda.synchronize(device)


def synchronize(device: torch.device) -> None:
    """Waits for the device's queue; nothing to do on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def last_level_cache_bytes(device: torch.device) -> int:
    """Bytes of the GPU's L2, or of the CPU's largest cache as Linux reports it (32 MiB where it does not)."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return _cpu_cache_bytes()


def _cpu_cache_bytes(root: str = "/sys/devices/system/cpu/cpu0/cache") -> int:
    reported = []
    for file in sorted(Path(root).glob("index*/size")):
        text = file.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            reported.append(int(text[:-1]) << 10)
        elif text.endswith("M") and text[:-1].isdigit():
            reported.append(int(text[:-1]) << 20)
    return max(reported, default=32 << 20)
