"""Which candidates are worth measuring, by their predicted times (`scaled_mm.kernels.time_model`), and how good the predictions are.

docs/design/autotuner.md says how well the model for unmeasured kernel configs does on an H200. For GPUs of other architectures the facts
change and the constants stay: a guess, which is why the autotuner measures.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from scaled_mm.kernels.config import KernelConfig
from scaled_mm.kernels.gpu import GpuFacts
from scaled_mm.kernels.sections import SECTIONS
from scaled_mm.kernels.time_model import TimeModel, estimate
from scaled_mm.tables import TileTable

Product = tuple[int, int, int]  # M, N, K

_estimate: Callable[[KernelConfig, str], TimeModel] = functools.lru_cache(maxsize=None)(estimate)


def predict(row: KernelConfig, product: Product, gpu: GpuFacts, experts: int = 1) -> float:
    """Microseconds of out [M,N] = a [M,K] x b [K,N] with 16-bit out and constant weights, from the architecture's numbers. Positive, finite.

    experts: products of this size in one launch, for sections of experts.
    """
    return _estimate(row, gpu.arch).us(*product, gpu, experts, mean_m=SECTIONS[row.section].mean_m)


def shortlist(rows: Sequence[KernelConfig], base: TileTable, product: Product, gpu: GpuFacts, count: int, experts: int = 1) -> list[KernelConfig]:
    """The `count` rows that are worth measuring, by predicted time: half of them from `base`, whose rows have proven good. Its own choice is one.

    Rows that differ in cluster, swizzle, stages or schedule alone are nearly equal to the model. At most two of one tile and side
    are taken, so that they are not all of the list. Rows of `base` are predicted by its coefficients, which may be fitted.
    """
    known = {row.name for row in base.rows}

    def rank(row: KernelConfig) -> tuple:
        stages = -row.stages if isinstance(row.stages, int) else -math.inf  # of rows that are equal, those that hide more latency
        us = base.predicted_us(row, *product, gpu, count=experts) if row.name in known else predict(row, product, gpu, experts)
        return us, row.cluster, row.swizzle, stages, row.name

    ranked = sorted(rows, key=rank)
    own = base.select(*product, constant_b=True, gpu=gpu, count=experts).row
    found = ([own] if own in rows else []) + [row for row in ranked if row.name in known and row != own]
    del found[count // 2 :]
    taken: dict[tuple, int] = {}
    for row in ranked:
        kind = (row.tile.m, row.tile.n, row.swap_ab, row.split_k)
        taken[kind] = taken.get(kind, 0) + 1
        if len(found) < count and taken[kind] <= 2 and row not in found:
            found.append(row)
    return sorted(found, key=ranked.index)


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """The model's first choice among the measured rows of each product. Losses: its time over the best one's, minus one.

    top1, top3: products whose best row is the model's first, or among its first three. chance: the median loss of all rows.
    """

    products: int
    top1: int
    top3: int
    median_loss: float
    mean_loss: float
    worst_loss: float
    chance: float


def accuracy(times: Mapping[Product, Mapping[str, float]], rows: Mapping[str, KernelConfig], gpu: GpuFacts, experts: int = 1) -> Accuracy | None:
    """How well the model predicts measured winners; of products with two rows or more, None where there are none.

    times: microseconds by product and row; rows: by name. experts: see `predict`.
    """
    losses, everyone, top1, top3 = [], [], 0, 0
    for product, us in times.items():
        if len(us) < 2:
            continue
        best = min(us.values())
        ranked = sorted(us, key=lambda name: (predict(rows[name], product, gpu, experts), name))
        losses.append(us[ranked[0]] / best - 1)
        everyone += [time / best - 1 for time in us.values()]
        top1 += us[ranked[0]] == best
        top3 += any(us[name] == best for name in ranked[:3])
    if not losses:
        return None
    return Accuracy(len(losses), top1, top3, statistics.median(losses), statistics.mean(losses), max(losses), statistics.median(everyone))
