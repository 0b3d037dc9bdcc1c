"""The goals of INT8 products, and whether a run meets them: on the grid (`bench int8`) and on random products (`bench random`).

The rivals in INT8 are vLLM and SGLang. Where SGLang was not timed, its time is vLLM's of this run by the ratio of the recorded times of the two
(`scaled_mm.bench.recorded`), for the products that have one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scaled_mm.bench.analysis import us_of
from scaled_mm.bench.goals import Goal, Outcome, outcome
from scaled_mm.bench.int8.analysis import Recorded
from scaled_mm.bench.int8.libraries import Sgl, Vllm
from scaled_mm.bench.int8.peers import Fp8, Fp8Row
from scaled_mm.bench.int8.record import Int8CaseRecord
from scaled_mm.measure.peer import OURS

#: (least M, most M, floor of the mean speed-up over the faster of vLLM and SGLang).
BANDS = ((1, 16, 1.30), (17, 128, 1.20), (129, 256, 1.17), (257, 512, 1.08), (513, 4096, 1.05), (4097, 8192, 1.12))


@dataclass(frozen=True)
class Timed:
    """A product: ours and the others' microseconds, and recorded ones by library."""

    label: str
    M: int
    ours: float | None
    us: Mapping[str, float]
    recorded: Mapping[str, float]


def of_case(case: Int8CaseRecord, recorded: Recorded) -> Timed:
    """A case of `bench int8`."""
    us = {name: time for name in case.results if name != OURS and (time := us_of(case, name)) is not None}
    earlier = {} if Sgl.name in case.results else recorded.us.get((case.shape, case.M), {})  # where it ran and failed, nothing is estimated
    return Timed(case.label, case.M, us_of(case, OURS), us, earlier)


def of_entry(entry: Mapping) -> Timed:
    """An entry of `random.json`."""
    return Timed(f"{entry['shape']} M={entry['M']}", entry["M"], entry["rows"].get(entry["dispatched"]), entry.get("peers", {}), {})


def over_int8(product: Timed) -> float | None:
    """The speed-up over the faster of vLLM and SGLang."""
    us = {name: product.us[name] for name in (Vllm.name, Sgl.name) if name in product.us}
    if Vllm.name in us and Sgl.name not in us and {Vllm.name, Sgl.name} <= product.recorded.keys():
        us[Sgl.name] = us[Vllm.name] * product.recorded[Sgl.name] / product.recorded[Vllm.name]
    return None if product.ours is None or not us else min(us.values()) / product.ours


def over_fp8(product: Timed) -> float | None:
    """The speed-up over the faster of FP8 with scales for rows and FP8 with one scale."""
    us = [product.us[name] for name in (Fp8Row.name, Fp8.name) if name in product.us]
    return None if product.ours is None or not us else min(us) / product.ours


def goals() -> list[Goal[Timed]]:
    found = [
        Goal(f"over the faster of vLLM and SGLang, M of {least} to {most}, mean", over_int8, floor, _within(least, most), group=lambda product: 0)
        for least, most, floor in BANDS
    ]
    found.append(Goal("over the faster of vLLM and SGLang, each", over_int8, 1.0, _within(1, BANDS[-1][1])))
    found.append(Goal("over the faster of FP8 with scales for rows and with one scale, each", over_fp8, 1.0, _within(1, BANDS[-1][1])))
    return found


def outcomes(products: Sequence[Timed]) -> list[Outcome[Timed]]:
    """One for every goal that a timed product says something of."""
    found = [outcome(goal, products, lambda product: product.label) for goal in goals()]
    return [one for one in found if one.met is not None]


def _within(least: int, most: int) -> Callable[[Timed], bool]:
    return lambda product: least <= product.M <= most
