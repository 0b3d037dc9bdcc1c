"""Times the row that the table picks, and nothing else, on each product."""

from __future__ import annotations

from typing import Any

from scaled_mm.bench.int8.inputs import Inputs
from scaled_mm.bench.int8.suite import Int8Suite
from scaled_mm.measure.peer import OURS
from scaled_mm.measure.record import Result
from scaled_mm.measure.run import Check, Options


class CliffsSuite(Int8Suite):
    def check(self, inputs: Inputs, options: Options) -> Check:
        return Check()

    def record(self, inputs: Inputs, check: Check, results: dict[str, Result]) -> dict[str, Any]:
        """`us` and `kernel`, or `failed`, the message."""
        case, result = inputs.case, results[OURS]
        said = {"failed": result.failed} if result.us is None else {"us": result.us, "kernel": result.kernel}
        return {"shape": case.shape, "M": case.M, "N": case.N, "K": case.K, **said}
