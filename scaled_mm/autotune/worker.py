"""The isolated process: times rows one at a time on request, `python -m scaled_mm.autotune.worker`.

JSON, one object a line. First `{"table", "section", "experts", "device", "budget_ms", "seed"}`, answered by `{"ready": ...}`; then
requests `{"row", "library", "M", "N", "K", "limit_us"}`, each answered by `{"outcome", "us", "samples", "spread", "message", "ending"}`. What a
library prints goes to stderr. ending: after an error that the GPU keeps (an illegal access) the process ends; its parent starts another.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Protocol


class Bench(Protocol):
    """What answers the requests: the GPU's, or a test's."""

    def start(self, setup: dict[str, Any]) -> str: ...

    def measure(self, request: dict[str, Any]) -> dict[str, Any]: ...

    def usable(self) -> bool: ...


class GpuBench:
    """Times a row with the machinery of `scaled_mm.measure`, and compares it with the reference before and after."""

    def start(self, setup: dict[str, Any]) -> str:
        import torch

        from scaled_mm.autotune.workbench import WORKBENCHES
        from scaled_mm.core import binding
        from scaled_mm.measure.device import wake
        from scaled_mm.measure.run import Options
        from scaled_mm.tables import TileTable

        self.device = torch.device(setup["device"])
        torch.cuda.set_device(self.device)
        self.options = Options(budget_ms=setup["budget_ms"], seed=setup["seed"])
        binding.register_table(TileTable.model_validate(setup["table"]))
        generator = torch.Generator(self.device).manual_seed(setup["seed"])
        self.bench = WORKBENCHES[setup["section"]](self.device, generator, self.options, setup["experts"])
        self.product = self.weights = self.inputs = self.check = None
        self.loaded: set[str] = set()
        wake(self.device)
        return torch.cuda.get_device_name(self.device)

    def measure(self, request: dict[str, Any]) -> dict[str, Any]:
        from scaled_mm.core import binding
        from scaled_mm.measure.peer import OURS
        from scaled_mm.measure.record import describe
        from scaled_mm.measure.run import time_peers

        try:
            if request["library"] not in self.loaded:
                binding.call("scaledMMLoadKernels", request["library"].encode())
                self.loaded.add(request["library"])
            self._prepare(request["M"], request["N"], request["K"])
            peer = self.bench.peer(request["row"])
            result = time_peers(self.inputs, [peer], self.check, self.options, limit_us=request["limit_us"])[OURS]
        except Exception as error:  # noqa: BLE001 - answered: the parent records it
            return {"outcome": "failed", "message": describe(error)}
        if result.failed is not None:
            return {"outcome": "failed", "message": result.failed}
        if result.bit_equal is not True:
            return {"outcome": "wrong", "message": result.note or f"relative error {result.error:.3g} against the reference"}
        return {"outcome": "timed", "us": result.us, "samples": result.samples, "spread": result.spread}

    def _prepare(self, M: int, N: int, K: int) -> None:
        """Weights of one (N, K), inputs and check of one product, kept until another is asked for."""
        import torch

        from scaled_mm.measure.shapes import Case

        if self.product == (M, N, K):
            return
        same_weight = self.product is not None and self.product[1:] == (N, K)
        self.product = self.inputs = self.check = None
        if not same_weight:
            self.weights = None
            torch.cuda.empty_cache()
            self.weights = self.bench.weights(N, K)
        self.inputs = self.bench.inputs(Case(f"{N}x{K}", M, N, K), self.weights)
        self.check = self.bench.check(self.inputs)
        self.product = (M, N, K)

    def usable(self) -> bool:
        import torch

        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            return False  # the answer to the request has said what happened
        return True


def serve(bench: Bench) -> int:
    """Answers requests until stdin ends. Exit status 0; 3 when the GPU is not usable any more."""
    # Answers go to what was stdout; anything else that prints, C libraries included, goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    answer({"ready": bench.start(json.loads(sys.stdin.readline()))})
    for line in sys.stdin:
        result = bench.measure(json.loads(line))
        ending = result["outcome"] == "failed" and not bench.usable()
        answer({**result, "ending": ending})
        if ending:
            return 3
    return 0


if __name__ == "__main__":
    raise SystemExit(serve(GpuBench()))
