"""The goals of GGUF products, and whether a document meets them; and their speed-up over bfloat16 by number of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

from scaled_mm.bench import analysis
from scaled_mm.bench.gguf.analysis import LIKE_LLAMA, llama_ratio
from scaled_mm.bench.gguf.cases import BANDS
from scaled_mm.bench.gguf.peers import BF16, OURS_BF16, OURS_F32
from scaled_mm.bench.gguf.record import GgufCaseRecord, GgufDocument
from scaled_mm.bench.goals import Goal, Outcome, outcome
from scaled_mm.gguf_formats import lookup
from scaled_mm.measure.peer import OURS
from scaled_mm.measure.stats import geometric_mean

#: (what, least tokens, most tokens, floor of the mean speed-up over bfloat16).
OVER_BF16 = (
    ("9 to 16 tokens", 9, 16, 2.5),
    ("33 to 64 tokens", 33, 64, 1.8),
    ("65 to 256 tokens", 65, 256, 1.2),
    ("from 512 tokens", 512, math.inf, 1.0),
)
FOUR_BITS_FLOOR = 3.3
STEP = 1.1
"""How many times as long 9 tokens may take as 8."""


def goals(document: GgufDocument) -> list[Goal[GgufCaseRecord]]:
    over = f"over `{BF16}`"
    found = [Goal(f"{over}, formats of 4 bits, 1 token, mean", _over_bf16, FOUR_BITS_FLOOR, _four_bits, group=_all)]
    found += [Goal(f"{over}, {what}, mean", _over_bf16, floor, _within(least, most), group=_all) for what, least, most, floor in OVER_BF16]
    found.append(Goal(f"{over}, each", _over_bf16, 1.0, _within(1, math.inf)))
    eights = {case.weight: analysis.us_of(case, OURS) for case in document.cases if case.M == 8}
    found.append(Goal("time of 8 tokens over that of 9, each", lambda case: _step(eights.get(case.weight), case), 1 / STEP, _within(9, 9)))
    name = OURS_F32 if any(one.name == OURS_F32 for one in document.implementations) else OURS
    found.append(Goal(f"`{name}` over llama.cpp, 1 and 2 tokens, mean", lambda case: llama_ratio(case, name), 1.5, _within(1, 2), group=_all))
    found.append(Goal(f"`{name}` over llama.cpp, from 8 tokens, mean", lambda case: llama_ratio(case, name), 3.0, _within(8, math.inf), group=_all))
    return found


def outcomes(document: GgufDocument) -> list[Outcome[GgufCaseRecord]]:
    """One for every goal; none without times of bfloat16."""
    if not any(BF16 in case.results for case in document.cases):
        return []
    return [outcome(goal, document.cases, lambda case: case.label) for goal in goals(document)]


def speedups(document: GgufDocument) -> list[tuple[str, str, list[tuple[float, GgufCaseRecord]]]]:
    """(tokens, implementation, bfloat16's time over its own on each case), for each band of tokens that has cases."""
    found = []
    for least, most in BANDS:
        for name in (OURS, OURS_BF16, *LIKE_LLAMA[1:]):
            values = [(value, case) for case in document.cases if least <= case.M <= most and (value := _over(case, name)) is not None]
            if values:
                found.append((f"{least} to {most}" if least < most else f"{least}", name, values))
    return found


def mean(values: list[tuple[float, GgufCaseRecord]]) -> float:
    return geometric_mean(value for value, _ in values)


def _over(case: GgufCaseRecord, name: str) -> float | None:
    ours, bf16 = analysis.us_of(case, name), analysis.us_of(case, BF16)
    return None if ours is None or bf16 is None else bf16 / ours


def _over_bf16(case: GgufCaseRecord) -> float | None:
    return analysis.over(case, BF16)


def _step(us_of_8: float | None, case: GgufCaseRecord) -> float | None:
    us = analysis.us_of(case, OURS)
    return None if us is None or us_of_8 is None else us_of_8 / us


def _four_bits(case: GgufCaseRecord) -> bool:
    return case.M == 1 and lookup(case.fmt).bits == 4


def _within(least: float, most: float) -> Callable[[GgufCaseRecord], bool]:
    return lambda case: least <= case.M <= most


def _all(case: GgufCaseRecord) -> int:
    """One group."""
    return 0
