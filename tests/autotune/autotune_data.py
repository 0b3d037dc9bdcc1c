"""Stand-ins for the tests of the autotuner: a GPU's times out of a formula, kernels without a compiler, a clock, a child process."""

from __future__ import annotations

import sys
from pathlib import Path

from scaled_mm.autotune import worker
from scaled_mm.autotune.model import predict
from scaled_mm.errors import InternalError, KernelNotBuiltError
from scaled_mm.kernels.gpu import facts

H200 = facts("NVIDIA H200", "sm90", 132)

# A child that needs neither torch nor a GPU: the row's name says what it does.
CHILD = f"""\
import os, runpy, sys, time
serve = runpy.run_path({worker.__file__!r})["serve"]

class Bench:
    def start(self, setup):
        if setup.get("start") == "fails":
            print("no such GPU", file=sys.stderr)
            os._exit(4)
        self.lost = False
        return "a stand-in"

    def measure(self, request):
        print("chatter on stdout")
        os.system("echo chatter of a C library")
        name = request["row"]
        if name == "crashes":
            print("illegal memory access", file=sys.stderr, flush=True)
            os._exit(7)
        if name == "aborts":
            os.abort()
        if name == "hangs":
            time.sleep(600)
        if name == "loses the GPU":
            self.lost = True
        if name in ("fails", "loses the GPU"):
            return {{"outcome": "failed", "message": "RuntimeError: refused"}}
        return {{"outcome": "timed", "us": 5.0, "samples": [5.0], "spread": 0.0}}

    def usable(self):
        return not self.lost

raise SystemExit(serve(Bench()))
"""


def child_command(folder: Path) -> list[str]:
    """The command of the stand-in child."""
    script = folder / "child.py"
    script.write_text(CHILD)
    return [sys.executable, str(script)]


class Clock:
    """A clock that goes on when something is built or measured."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Kernels:
    """Kernels that take `seconds` to build; those in `broken` do not compile."""

    def __init__(self, clock: Clock, seconds: float = 0.0, broken: tuple[str, ...] = ()):
        self.clock, self.seconds, self.broken = clock, seconds, broken
        self.built: list[str] = []
        self.version = "1"

    def key(self, row) -> str:
        return f"{row.name} {self.version}"

    def build(self, row) -> Path:
        self.clock.now += self.seconds
        self.built.append(row.name)
        if row.name in self.broken:
            raise KernelNotBuiltError(f"{row.name}: the compiler failed")
        return Path(f"{row.name}.so")


class Measurer:
    """Times by the model, times `factor(row, product)`. outcomes: row -> another answer."""

    def __init__(
        self, rows, clock: Clock, seconds: float = 0.0, factor=lambda row, product: 1.0, outcomes=None, die_after: int | None = None, experts=1
    ):
        self.experts = experts
        self.rows, self.clock, self.seconds, self.factor, self.outcomes = rows, clock, seconds, factor, outcomes or {}
        self.die_after = die_after
        self.asked: list[tuple[str, tuple[int, int, int]]] = []
        self.limits: list[float | None] = []  # of those, in microseconds

    def measure(self, request):
        if self.die_after is not None and len(self.asked) >= self.die_after:
            raise InternalError("the process that times kernels ended with status 4: no such GPU")
        product = (request["M"], request["N"], request["K"])
        self.asked.append((request["row"], product))
        self.limits.append(request["limit_us"])
        self.clock.now += self.seconds
        assert request["library"] == f"{request['row']}.so"
        if request["row"] in self.outcomes:
            return {"outcome": self.outcomes[request["row"]], "message": "as the test wants it"}
        us = round(predict(self.rows[request["row"]], product, H200, self.experts) * self.factor(request["row"], product), 3)
        return {"outcome": "timed", "us": us, "samples": [us, us], "spread": 0.0}


class Silent:
    def __init__(self):
        self.phases: list[str] = []

    def phase(self, name: str, total: int) -> None:
        self.phases.append(name)

    def step(self, text: str) -> None: ...
