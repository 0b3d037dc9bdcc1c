"""From measured times to the buckets of a table.

The cliff rule: for products that differ in M alone, `time(M) <= 1.05 * time(M')`, M' being the next larger measured M. Fewer tokens
may not take longer, but for 5% that are noise. Per token a smaller M is always slower where memory sets the pace (one token reads as
many weights as sixteen), so a bound on time per token would forbid what no kernel can avoid; a product of M tokens, however, can
always be computed as one of M' with rows that nobody reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal

from scaled_mm.errors import BadParamError
from scaled_mm.tables import Bucket

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
    """The row of one product. how: measured; inherited from the next larger M, where it was not measured; predicted by the model.

    us: microseconds, for a measured one.
    """

    product: Product
    row: str
    us: float | None
    how: Literal["measured", "inherited", "predicted"]


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


def choose(times: Times, products: Collection[Product], predicted: Callable[[Sequence[str], Product], str], rows: Sequence[str] = ()) -> list[Choice]:
    """A row for every product, by N, K and M.

    times: of rows that may win, the others left out. predicted(rows, product): the model's row for a product nobody measured, out of
    the rows that others need, or of `rows` where nothing was measured at all. Each product gets its fastest row; that minimizes the
    sum, for no choice at one M changes another's time. Where that breaks the cliff rule, and the next M's row was not measured here,
    the product takes that row: it computes what it would for the next M.
    """
    kept = few_rows(times)
    if not kept and not rows:
        raise BadParamError("rows: expected at least one where nothing was measured, got none")
    found: list[Choice] = []
    for (N, K), ms in ladders(products).items():
        above: Choice | None = None
        for M in reversed(ms):
            product = (M, N, K)
            measured = {row: us for row, us in times.get(product, {}).items() if row in kept}
            if measured:
                row = min(measured, key=lambda name: (measured[name], name))
                choice = Choice(product, row, measured[row], "measured")
                if above and above.us and choice.us > CLIFF * above.us and above.row not in times[product]:
                    choice = Choice(product, above.row, None, "inherited")
            else:
                choice = Choice(product, predicted(kept or rows, product), None, "predicted")
            found.append(choice)
            above = choice
    return sorted(found, key=lambda choice: (*choice.product[1:], choice.product[0]))


def buckets(choices: Sequence[Choice]) -> list[Bucket]:
    """Buckets that give each product its chosen row, and every other the row of the next larger N, K and M that has one.

    The largest of each is open. Cases and edges that change nothing are left out.
    """
    of = {choice.product: choice.row for choice in choices}
    groups = ladders(of)
    edges = sorted({M for ms in groups.values() for M in ms})
    found: list[tuple[int | None, list[Bucket]]] = []
    for M in reversed(edges):
        m = None if M == edges[-1] else M
        cases = _cases(m, [(N, K, of[_at_least(M, ms), N, K]) for (N, K), ms in groups.items()])
        if found and _without_m(cases) == _without_m(found[-1][1]):
            continue  # the next larger M has the same rows
        found.append((m, cases))
    return [bucket for _, cases in reversed(found) for bucket in cases]


def _at_least(M: int, ms: Sequence[int]) -> int:
    return next((m for m in ms if m >= M), ms[-1])


def _without_m(cases: Sequence[Bucket]) -> list[tuple[int | None, int | None, str]]:
    return [(case.n, case.k, case.kernel) for case in cases]


def _cases(m: int | None, rows: Sequence[tuple[int, int, str]]) -> list[Bucket]:
    """The buckets of one edge of M, from (N, K, row) by N and K."""
    kept: list[Bucket] = []
    for index in reversed(range(len(rows))):
        N, K, row = rows[index]
        last_k = index + 1 == len(rows) or rows[index + 1][0] != N
        case = Bucket(m=m, n=None if N == rows[-1][0] else N, k=None if last_k else K, kernel=row)
        behind = kept[-1] if kept else None
        if behind and behind.kernel == row and (behind.k is None or (case.k is not None and behind.k >= case.k)):
            continue
        kept.append(case)
    return kept[::-1]
