"""Times every tile configuration of a table on every case: the measurement that a tile table is chosen by.

`rows.json` is a list of {"shape", "M", "N", "K", "dispatched", "fallback", "rows": {row: us}, "peers": {peer: us}, "failed": {name: why}}:
`dispatched` is the row that the table picks today, `fallback` its fallback, `peers` other libraries that were timed in the same turns. A row
whose bits differ from the first row's failed: it has no time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from scaled_mm.bench.int8.inputs import Inputs
from scaled_mm.bench.int8.peers import Ours
from scaled_mm.bench.int8.suite import Int8Suite
from scaled_mm.bench.ours import table_of
from scaled_mm.measure.peer import Peer, TensorCall
from scaled_mm.measure.record import Result
from scaled_mm.measure.run import Check, Options, WrongResult, plain_call

#: In place of the names of rows: only the row that the table picks for a product.
DISPATCHED = "dispatched"
#: (row to force or None, name) -> a peer that runs it.
MakePeer = Callable[[str | None, str], Peer]


def row_names(text: str, device: torch.device) -> list[str]:
    """`all`, DISPATCHED or a comma list -> names of rows of the table that serves a GPU, or DISPATCHED. Raises KernelNotFoundError for others."""
    from scaled_mm.errors import KernelNotFoundError

    table = table_of(device)
    known = [row.name for row in table.rows]
    if text == "all":
        return known
    if text == DISPATCHED:
        return [DISPATCHED]
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise KernelNotFoundError(f"row {name!r} is not in {table.source}: expected some of {', '.join(known)}")
    return list(dict.fromkeys(names))


def row_peers(names: list[str], make_peer: MakePeer = Ours) -> list[Peer]:
    """A peer a row, by its name."""
    return [make_peer(None if name == DISPATCHED else name, name) for name in names]


class RowsSuite(Int8Suite):
    """fallback: the name of the table's fallback. make_peer: what runs a row, and what runs the row that the table picks. others: the names of
    peers that are not rows; their bits are not compared."""

    def __init__(self, fallback: str, make_peer: MakePeer = Ours, *, others: Collection[str] = ()):
        super().__init__()
        self._fallback, self._others = fallback, frozenset(others)
        self._dispatched = make_peer(None, DISPATCHED)

    def check(self, inputs: Inputs, options: Options) -> SameBits:
        try:
            self._dispatched.prepare(inputs)
            return SameBits(inputs, self._dispatched.details(inputs)["kernel"], self._others)
        finally:
            self._dispatched.release()

    def record(self, inputs: Inputs, check: SameBits, results: dict[str, Result]) -> dict[str, Any]:
        case = inputs.case
        named = {check.dispatched if name == DISPATCHED else name: result for name, result in results.items()}
        times = {name: result.us for name, result in named.items() if result.us is not None}
        return {
            "shape": case.shape,
            "M": case.M,
            "N": case.N,
            "K": case.K,
            "dispatched": check.dispatched,
            "fallback": self._fallback,
            "rows": dict(sorted(((name, us) for name, us in times.items() if name not in self._others), key=lambda item: item[1])),
            "peers": {name: us for name, us in times.items() if name in self._others},
            "failed": {name: result.failed for name, result in named.items() if result.failed is not None},
        }


class SameBits(Check):
    """Every row has the bits of the first that ran. dispatched: the row that the table picks. others: names that are not rows."""

    def __init__(self, inputs: Inputs, dispatched: str, others: Collection[str] = ()):
        self.dispatched = dispatched
        self._others = others
        self._inputs = inputs
        self._expected: torch.Tensor | None = None
        self._first = ""

    def once(self, peer: Peer, call: TensorCall) -> dict[str, Any]:
        if peer.name in self._others:
            return {}
        out = plain_call(call, self._inputs)
        if self._expected is None:
            self._expected, self._first = out.clone(), peer.name
        if not torch.equal(out, self._expected):
            raise WrongResult(f"its bits differ from those of {self._first}")
        return {}
