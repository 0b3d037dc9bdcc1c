"""Timing on a GPU: a CUDA graph over the rotation of weight sets, replayed between events."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

from scaled_mm.measure.energy import meter
from scaled_mm.measure.regime import REGIMES, STANDARD
from scaled_mm.measure.runner import Call, Draw, Runner
from scaled_mm.measure.sampling import plan

GRAPH_COLD = "cuda_graph_l2_cold"
GRAPH_WARM = "cuda_graph_rotated_fits_l2"  # weights so small that even the most sets we rotate stay in the cache

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

    def __init__(self, calls: Sequence[Call], device: torch.device, budget_ms: float, cold: bool, regime: str = STANDARD):
        self._regime = REGIMES[regime]
        self._calls = list(calls)
        self._device = device
        self._stream = _side_stream(device)
        self.method = GRAPH_COLD if cold else GRAPH_WARM
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # the inputs were filled on another stream
            with torch.cuda.stream(self._stream):
                self.plan = plan(self._warm_up(budget_ms), len(self._calls), budget_ms)
                self._graph, call_us = self._captured()
                again = plan(call_us, len(self._calls), budget_ms)
                if again.calls > 1.5 * self.plan.calls:  # the host was slower than the GPU: so short a graph would show its start
                    self._graph.reset()
                    self.plan = again
                    self._graph, call_us = self._captured()
                self._settle = max(1, math.ceil(self._regime.settle_ms * 1000 / (self.plan.calls * call_us)))

    def _warm_up(self, budget_ms: float) -> float:
        """Runs every call at least once (lazy loading, handles, workspaces stay out of the numbers). An upper bound of the time of one: host
        included."""
        self._calls[0]()
        if self._elapsed_us(self._calls[:1]) > budget_ms * 1000:
            again = self._elapsed_us(self._calls[:1])  # the first one may have waited for a busy host
            if again > budget_ms * 1000:
                return again
        return self._elapsed_us(self._calls) / len(self._calls)

    def _elapsed_us(self, calls: Sequence[Call]) -> float:
        start, end = _timing_event(), _timing_event()
        start.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1000

    def _captured(self) -> tuple[torch.cuda.CUDAGraph, float]:
        """(A graph of the plan's calls, which has run; about the time of a call in it, microseconds)."""
        graph, start, end = self._capture(self.plan.calls), _timing_event(), _timing_event()
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        self._stream.synchronize()
        return graph, max(start.elapsed_time(end) * 1000 / self.plan.calls, 0.1)

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
            time.sleep(self._regime.rest_ms / 1000)
            for _ in range(self._settle):  # and the GPU is busy while the host queues the timed replays
                self._graph.replay()
            for start, end in events:
                start.record()
                self._graph.replay()
                end.record()
            self._stream.synchronize()
        return [start.elapsed_time(end) * 1000 / self.plan.calls for start, end in events]

    def load(self) -> None:
        self._replay_for(self._regime.load_ms)

    def draw(self) -> Draw | None:
        one = meter(self._device) if self._regime.meter_ms else None
        if one is None:
            return None
        self._replay_for(self._regime.meter_ms / 2)  # the counter lags behind
        before = one.joules()
        replays = self._replay_for(self._regime.meter_ms)
        return Draw((one.joules() - before) / (replays * self.plan.calls), one.sm_mhz())

    def _replay_for(self, ms: float) -> int:
        """Replays for `ms` milliseconds, one queued behind the other; returns their number."""
        deadline, replays, behind = time.perf_counter() + ms / 1000, 0, _timing_event()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            while time.perf_counter() < deadline:
                self._graph.replay()
                replays += 1
                behind.synchronize()  # waits for the replay before only, so that the GPU is never idle
                behind.record()
            self._stream.synchronize()
        return replays

    def replay(self) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            torch.cuda.synchronize()
            self._graph.replay()
            self._stream.synchronize()

    def close(self) -> None:
        self._graph.reset()
        self._calls.clear()
