"""From measured times to the buckets of a table.

The cliff rule: for products that differ in M alone, `time(M) <= 1.05 * time(M')`, M' being the next larger measured M. Fewer tokens must
not take longer, within 5% noise. Time per token cannot be bounded: a memory-bound kernel reads the same weights for 1 token as for 16.
Total time can: M tokens can be padded to M'.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from scaled_mm.kernels.config import KernelConfig
from scaled_mm.kernels.gpu import GpuFacts
from scaled_mm.kernels.registry import family_of
from scaled_mm.tables import Bucket, TileTable

Product = tuple[int, int, int]  # M, N, K
Times = Mapping[Product, Mapping[str, float]]  # microseconds by row

CLIFF = 1.05
NEAR = 1.01  # a row this close to the best is as good: two measurements differ by that


@dataclasses.dataclass(frozen=True)
class Cliff:
    """A product that takes longer than the same one with more tokens. Times in microseconds."""

    M: int
    N: int
    K: int
    us: float
    next_M: int
    next_us: float

    def __str__(self) -> str:
        over = self.us / self.next_us - 1
        return f"N={self.N} K={self.K}: M={self.M} takes {self.us:.2f} us, {over:.1%} more than M={self.next_M} with {self.next_us:.2f} us"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The row of one product. how: "inherited" if taken from the next larger M, untimed; us (microseconds) is then None."""

    product: Product
    row: str
    us: float | None
    how: Literal["measured", "inherited"]


def ladders(products: Iterable[Product]) -> dict[tuple[int, int], list[int]]:
    """(N, K) -> its M, ascending; groups by N, then K."""
    found: dict[tuple[int, int], set[int]] = {}
    for M, N, K in products:
        found.setdefault((N, K), set()).add(M)
    return {group: sorted(found[group]) for group in sorted(found)}


def cliffs(us: Mapping[Product, float], limit: float = CLIFF) -> list[Cliff]:
    """Every product of `us` (microseconds) that takes more than `limit` times its next larger M, by N, K and M."""
    found = []
    for (N, K), ms in ladders(us).items():
        for M, above in zip(ms, ms[1:]):
            here, there = us[M, N, K], us[above, N, K]
            if here > limit * there:
                found.append(Cliff(M, N, K, here, above, there))
    return found


def few_rows(times: Times, near: float = NEAR) -> list[str]:
    """Rows that together have one within `near` of the best for every product: greedily, the row that serves most comes first."""
    waiting = {product: {row for row, us in rows.items() if us <= near * min(rows.values())} for product, rows in times.items() if rows}
    kept: list[str] = []
    while waiting:
        served: dict[str, int] = {}
        for rows in waiting.values():
            for row in rows:
                served[row] = served.get(row, 0) + 1
        kept.append(min(served, key=lambda row: (-served[row], row)))
        waiting = {product: rows for product, rows in waiting.items() if kept[-1] not in rows}
    return kept


def choose(times: Times, products: Collection[Product]) -> list[Choice]:
    """A row for every product that was measured, by N, K and M.

    times: eligible rows only. Each product takes its fastest row among `few_rows`. On a cliff it inherits the row of the next larger M, if
    that row was not timed here: it then computes what it would for the next M.
    """
    kept = few_rows(times)
    found: list[Choice] = []
    for (N, K), ms in ladders(products).items():
        above: Choice | None = None
        for M in reversed(ms):
            product = (M, N, K)
            measured = {row: us for row, us in times.get(product, {}).items() if row in kept}
            if not measured:
                above = None
                continue
            row = min(measured, key=lambda name: (measured[name], name))
            choice = Choice(product, row, measured[row], "measured")
            if above and above.us and choice.us > CLIFF * above.us and above.row not in times[product]:
                choice = Choice(product, above.row, None, "inherited")
            found.append(choice)
            above = choice
    return sorted(found, key=lambda choice: (*choice.product[1:], choice.product[0]))


def buckets(choices: Sequence[Choice], base: TileTable, rows: Iterable[KernelConfig], times: Times, gpu: GpuFacts, experts: int = 1) -> list[Bucket]:
    """Buckets for the products whose chosen row beats the row of `base`, or was inherited to close a cliff; the table appends `base`'s buckets.

    rows: at least the chosen ones. A bucket covers one N and K, and m <= M as far down as `near` says, above the next smaller chosen M. A
    product whose base row was not timed gets none. It serves constant weights only, with which rows were measured, if the chosen row loads
    weights early or `base` has another row for other weights. experts: those of each product, for sections of experts.
    """
    of = {choice.product: choice for choice in choices}
    chosen = {row.name: row for row in rows}
    found: list[Bucket] = []
    for (N, K), ms in ladders(of).items():
        for smaller, M in zip([0, *ms], ms):
            choice = of[M, N, K]
            own, of_others = (base.select(M, N, K, constant_b, gpu=gpu, count=experts).row.name for constant_b in (True, False))
            base_us = times[M, N, K].get(own)
            if choice.row == own or base_us is None or (choice.us is not None and choice.us >= base_us):
                continue
            row = chosen[choice.row]
            constant_only = family_of(row).loads_weights_early(row) or of_others != own
            ratio = 1.0 if choice.us is None else choice.us / base_us
            kinds = (True,) if constant_only else (True, False)
            least = max(smaller + 1, *(near(base, (M, N, K), row, ratio, gpu, constant_b, experts) for constant_b in kinds))
            found.append(Bucket(m=M, m_min=least, n=N, n_min=N, k=K, k_min=K, constant_b=constant_only, kernel=choice.row))
    return found


def near(base: TileTable, product: Product, row: KernelConfig, ratio: float, gpu: GpuFacts, constant_b: bool = True, experts: int = 1) -> int:
    """The smallest m above M / 2 from which on up to M `base` selects one row, and `row` is not predicted to be slower.

    product: where `row` took `ratio` times as long as the row of `base`. Its predicted times are corrected by what the prediction of the
    ratio there was wrong by.
    """
    M, N, K = product

    def predicted(one: KernelConfig, m: int) -> float:
        return base.predicted_us(one, m, N, K, gpu, constant_b, experts)

    own = base.select(M, N, K, constant_b, gpu=gpu, count=experts).row
    correction = ratio * predicted(own, M) / predicted(row, M)
    m = M
    while m - 1 > M // 2 and base.select(m - 1, N, K, constant_b, gpu=gpu, count=experts).row == own:
        if correction * predicted(row, m - 1) > predicted(own, m - 1):
            break
        m -= 1
    return m
