"""Times the ways on the ranks of a group, beside what the cost model says, and compares their bits with those of one GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from scaled_mm.bench.experts.cases import MODELS, Model
from scaled_mm.bench.parallel.cases import LINEAR, TINY
from scaled_mm.bench.parallel.record import MeasuredRecord, MeasuredWay
from scaled_mm.bench.parallel.timer import agreed, samples_of
from scaled_mm.bench.parallel.ways import ONE_GPU, ExpertsLayer, LinearLayer, Way
from scaled_mm.parallel import choice, cost
from scaled_mm.parallel.cost.linear import EXACT
from scaled_mm.parallel.ranks import Ranks

Progress = Callable[[str], None]
OVERLAP_FROM = 256  # tokens, below which chunks are not tried


def linear(shapes: Iterable[str], ms: Sequence[int], ranks: Ranks, device: torch.device, seed: int, progress: Progress) -> Iterator[MeasuredRecord]:
    """The layers of `cases.LINEAR` and TINY with these names, with each number of tokens."""
    gpu = choice.common_gpu(ranks.gather_facts(lambda: {"gpu": choice.gpu_of(device, ranks)}))
    for shape in shapes:
        n, k = (LINEAR | TINY)[shape]
        for m in ms:
            progress(f"{shape}, {m} tokens")
            chunks = {1} if m < OVERLAP_FROM else {1, 2, 4}
            if gpu and ranks.size > 1:
                chunks.add(cost.best_chunks(m, n, k, ranks.size, gpu=gpu))  # 1, as long as chunks hide no time
            layer = LinearLayer(m, n, k, ranks, device, seed)
            wanted = {static: layer.one_gpu(static) for static in (False, True)}
            ways = []
            for way in layer.ways(tuple(sorted(chunks))):
                made = _measured(way, wanted[way.static], ranks, device)
                if gpu and way.name in (*cost.WAYS, ONE_GPU):
                    size, name = (1, EXACT) if way.name == ONE_GPU else (ranks.size, way.name)
                    made.predicted_us = round(cost.predict(m, n, k, size, gpu=gpu, way=name, static=way.static, chunks=way.chunks).us, 2)
                ways.append(made)
            del layer, way  # their tensors, before the next are made
            yield MeasuredRecord(shape=shape, M=m, N=n, K=k, ranks=ranks.size, ways=ways)


def experts(models: Iterable[str], ms: Sequence[int], ranks: Ranks, device: torch.device, seed: int, progress: Progress) -> Iterator[MeasuredRecord]:
    """The models of `bench.experts.cases.MODELS` with these names, with each number of tokens of all ranks together."""
    for name in models:
        model: Model = MODELS[name]
        for m in ms:
            progress(f"experts of {name}, {m} tokens")
            layer = ExpertsLayer(m, model, ranks, device, seed)
            wanted = layer.one_gpu()
            ways = [_measured(way, wanted, ranks, device) for way in layer.ways()]
            del layer
            yield MeasuredRecord(shape=f"experts of {name}", M=m, N=model.hidden, K=model.inner, ranks=ranks.size, ways=ways)


def _measured(way: Way, wanted: torch.Tensor, ranks: Ranks, device: torch.device) -> MeasuredWay:
    """A failure on one rank stops all: it raises."""
    equal = None if way.result is None else torch.equal(way.result(way.call()), wanted)
    if equal is not None:
        equal = agreed([float(not equal)], ranks, device) == [0.0]
    samples, calls = samples_of(way.call, ranks, device, way.graph)
    us = statistics.median(samples)
    return MeasuredWay(
        name=way.name,
        static=way.static,
        chunks=way.chunks,
        us=round(us, 2),
        samples=[round(one, 2) for one in samples],
        calls=calls,
        graph=way.graph and device.type == "cuda",
        bit_equal=equal,
    )
