"""The check of suites whose outputs are too large to compute again whole: some rows are compared with the CPU backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from scaled_mm.bench.int8.suite import relative_error
from scaled_mm.measure.peer import Peer, TensorCall
from scaled_mm.measure.record import Result
from scaled_mm.measure.rotation import RotatedOutputs
from scaled_mm.measure.run import Check, Options, plain_call


class RowsCheck(Check):
    """inputs: with `checked_rows`, indices of rows of the output, and `expected`, these rows. names: peers whose bits must be the same, also after
    timing. status: how many rows are compared, or why none."""

    def __init__(self, inputs: RotatedOutputs, options: Options, names: Sequence[str]):
        self._names = names
        self._inputs, self._switched_on = inputs, options.check and len(inputs.checked_rows) > 0
        self.status = f"checked: {len(inputs.checked_rows)} rows" if self._switched_on else "not checked"

    def once(self, peer: Peer, call: TensorCall) -> dict[str, float | bool]:
        if not self._switched_on:
            return {}
        found = peer.finish(plain_call(call, self._inputs), self._inputs)[self._inputs.checked_rows]
        return {"error": relative_error(found, self._inputs.expected), "bit_equal": torch.equal(found, self._inputs.expected)}

    def covers(self, peer: Peer) -> bool:
        return peer.name in self._names and self._switched_on

    def after_timing(self, peer: Peer, result: Result) -> Result:
        if torch.equal(self._inputs.out(0)[self._inputs.checked_rows], self._inputs.expected) == result.bit_equal:
            return result
        return result.model_copy(update={"bit_equal": False, "note": "a plain call and the timed graph give different bits"})
