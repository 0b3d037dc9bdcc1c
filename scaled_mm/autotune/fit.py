"""Fits the coefficients of the predicted times of a table's kernel configs to measured times."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from scaled_mm.autotune.choose import Times as MeasuredTimes
from scaled_mm.autotune.model import Product
from scaled_mm.kernels.gpu import GpuFacts
from scaled_mm.kernels.sections import SECTIONS
from scaled_mm.kernels.time_model import TimeModel
from scaled_mm.measure.stats import geometric_mean
from scaled_mm.tables import TileTable, Times

LEAST_PRODUCTS = 12  # measured ones, to fit a kernel config
_FITTED = {"start": "start_us", "step": "step_us", "tile": "tile_us", "memory": "memory"}  # fields of `Times`: those of `TimeModel`
_FITTED_CLUSTER = {"start": "start_us", "step": "step_us", "tile": "tile_us"}
_FITTED_SHARED = {"start": "start_us", "step": "step_us", "tile": "tile_us", "sharing": "sharing_us", "two_tiles": "two_tiles_us"}
_MOST = {"memory": 3.0}  # of a coefficient; others: 1000
_LEAST = 1e-4  # of a coefficient: they are fitted as logarithms
# A product says little about a kernel config that is far from the fastest on it: one half as fast counts exp(-1 / 0.5) + 0.05.
_NEAR, _FLOOR = 0.5, 0.05
_OUTLIER = 0.05  # of the relative error; beyond it errors count linearly


def fit(table: TileTable, measured: MeasuredTimes, gpu: GpuFacts, least_tile_us: float = 0.0) -> dict[str, Times]:
    """Coefficients by kernel config, for those with at least LEAST_PRODUCTS measured products; in the section gguf, of those that round weights.

    measured: microseconds by product and kernel config, with constant weights. A product may have a fourth number, `count` of `TileTable.fastest`.
    gpu: where they were measured. least_tile_us: lower bound of `tile`, for products with a long K only: the fit cannot separate it from `start`.
    Least squares of the logarithms of predicted over measured time, by scipy.
    """
    found = {}
    for row in table.rows:
        times = {product: us[row.name] for product, us in measured.items() if row.name in us}
        model = table.time_model(row)
        has_times = SECTIONS[table.section].same_bits or model.most_parts > 0
        if row.name == table.fallback or not has_times or len(times) < LEAST_PRODUCTS:
            continue
        weights = [_FLOOR + math.exp(-(times[product] / min(measured[product].values()) - 1) / _NEAR) for product in times]
        model = _fit(model, list(times.items()), weights, gpu, _mean_m(table), max(_LEAST / 2, least_tile_us))
        rounded = {key: float(f"{getattr(model, name):.3g}") for key, name in _fitted(model).items()}
        found[row.name] = Times(**rounded, wait=model.wait_us)
    return found


def _fitted(model: TimeModel) -> dict[str, str]:
    if not model.most_parts:
        return _FITTED
    return _FITTED_SHARED if model.cluster == 1 else _FITTED_CLUSTER


def _mean_m(table: TileTable) -> bool:
    return SECTIONS[table.section].mean_m


def _predicted(model: TimeModel, product: Sequence[int], gpu: GpuFacts, mean_m: bool) -> float:
    M, N, K, *count = product
    return model.us(M, N, K, gpu, *count, mean_m=mean_m)


def _fit(
    model: TimeModel, times: Sequence[tuple[Product, float]], weights: Sequence[float], gpu: GpuFacts, mean_m: bool, least_tile_us: float
) -> TimeModel:
    from scipy.optimize import least_squares

    names = tuple(_fitted(model).values())

    def with_logarithms(values: Sequence[float]) -> TimeModel:
        return dataclasses.replace(model, **dict(zip(names, map(math.exp, values))))

    def errors(values: Sequence[float]) -> list[float]:
        trial = with_logarithms(values)
        return [math.sqrt(weight) * math.log(_predicted(trial, product, gpu, mean_m) / us) for weight, (product, us) in zip(weights, times)]

    least = {"tile_us": least_tile_us, "memory": 0.3}
    start = [math.log(max(_LEAST, 1.01 * least.get(name, 0.0), getattr(model, name))) for name in names]
    bounds = ([math.log(least.get(name, _LEAST / 2)) for name in names], [math.log(_MOST.get(name, 1e3)) for name in names])
    return with_logarithms(least_squares(errors, start, bounds=bounds, loss="soft_l1", f_scale=_OUTLIER).x)


@dataclasses.dataclass(frozen=True)
class Choice:
    """How far the fastest by prediction is from the fastest measured: ratios of their times, over products with two measured kernel configs.

    worst_at: the product of the worst ratio. within_3, within_15: the fraction of products within 3 % and within 15 %.
    """

    products: int
    mean: float
    worst: float
    worst_at: Product
    within_3: float
    within_15: float


def judge(table: TileTable, measured: Mapping[Product, Mapping[str, float]], gpu: GpuFacts) -> Choice | None:
    """The choice among the measured kernel configs of each product by the table's predictions; None without such products."""
    models = {row.name: table.time_model(row) for row in table.predicted_rows}
    ratios: dict[Product, float] = {}
    mean_m = _mean_m(table)
    for product, us in measured.items():
        known = {name: time for name, time in us.items() if name in models}
        if len(known) >= 2:
            picked = min(known, key=lambda name: _predicted(models[name], product, gpu, mean_m))
            ratios[product] = known[picked] / min(known.values())
    if not ratios:
        return None
    worst_at = max(ratios, key=lambda product: ratios[product])
    within_3, within_15 = (sum(ratio <= limit for ratio in ratios.values()) / len(ratios) for limit in (1.03, 1.15))
    return Choice(len(ratios), geometric_mean(list(ratios.values())), ratios[worst_at], worst_at, within_3, within_15)
