"""From measured times to the buckets of a table.

The cliff rule: for products that differ in M alone, `time(M) <= 1.05 * time(M')`, M' being the next larger measured M. Fewer tokens
may not take longer, but for 5% that are noise. Per token a smaller M is always slower where memory sets the pace (one token reads as
many weights as sixteen), so a bound on time per token would forbid what no kernel can avoid; a product of M tokens, however, can
always be computed as one of M' with rows that nobody reads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from scaled_mm.tables import Bucket, KernelRow, TileTable

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
    """The row of one product. how: measured, or inherited from the next larger M, where it was not measured. us: microseconds, of a measured one."""

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

    times: of rows that may win, the others left out. Each product gets its fastest row, out of the fewest that serve all; that minimizes the
    sum, for no choice at one M changes another's time. Where that breaks the cliff rule, and the next M's row was not measured here,
    the product takes that row: it computes what it would for the next M.
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


def buckets(choices: Sequence[Choice], base: TileTable, rows: Iterable[KernelRow], times: Times) -> list[Bucket]:
    """Buckets that give each product its chosen row where that was faster than the row of `base`; a table adds the buckets of `base` behind.

    rows: at least the chosen ones. A bucket serves what lies near a product: the same N and K, and M down to half or the next smaller
    chosen M, as long as `base` has one row for all of these M. Rows that load weights early serve constant weights alone, with which
    they were measured.
    """
    of = {choice.product: choice for choice in choices}
    early = {row.name for row in rows if row.early_weights or row.generation == "decode"}
    found: list[Bucket] = []
    for (N, K), ms in ladders(of).items():
        for smaller, M in zip([0, *ms], ms):
            choice, own = of[M, N, K], base.select(M, N, K, constant_b=True).row.name
            if choice.row == own or (choice.us or 0.0) >= times[M, N, K].get(own, math.inf):
                continue
            least = max(smaller + 1, M // 2 + 1, _least_with_one_row(base, M, N, K))
            found.append(Bucket(m=M, m_min=least, n=N, n_min=N, k=K, k_min=K, constant_b=choice.row in early, kernel=choice.row))
    return found


def _least_with_one_row(base: TileTable, M: int, N: int, K: int) -> int:
    """The smallest M' for which `base` has one row from M' to M."""
    row = base.select(M, N, K, constant_b=True).row.name
    edges = {0, *(edge for bucket in base.buckets for edge in (bucket.m_min, (bucket.m or 0) + 1) if edge <= M)}  # where the row may change
    least = M
    for edge in sorted(edges, reverse=True):
        if base.select(edge, N, K, constant_b=True).row.name != row:
            break
        least = edge
    return least
