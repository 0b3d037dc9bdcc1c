"""The state of the GPU in which an implementation is timed: its clocks follow from what ran before.

A large product draws all the power that a GPU may have, and the clocks of its first tens of milliseconds are those that the kernel before it
left over. Without rest and settling the same kernel measured 12-17% faster on an H200 behind a light one than behind a heavy one; without the
rest 1-4%.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Regime:
    """Milliseconds. rest: of an idle GPU before each turn of an implementation. settle: of its untimed replays after that. load: of replays
    without a rest before the first turn of a case. meter: of replays whose energy is metered, after the timed ones."""

    rest_ms: float
    settle_ms: float
    load_ms: float = 0.0
    meter_ms: float = 0.0

    def describe(self) -> str:
        """A sentence for a report."""
        load = f"Before each case the GPU is under load for {self.load_ms:g} ms. " if self.load_ms else ""
        rest = f"rests for {self.rest_ms:g} ms" if self.rest_ms else "does not rest"
        return f"{load}Before each turn of an implementation the GPU {rest}, then the implementation runs untimed for {self.settle_ms:g} ms."


STANDARD, BRIEF = "standard", "brief"
#: rested: a request after a pause. settled: a server under load, with its energy. loaded: the same without the 2 s and without energy, for many
#: kernels or products. brief: to compare many kernels of one product with each other, at the clocks of a GPU that is not at its power limit.
REGIMES = {
    STANDARD: Regime(50, 100),
    "rested": Regime(30, 2),
    "settled": Regime(0, 100, load_ms=2000, meter_ms=300),
    "loaded": Regime(0, 100),
    BRIEF: Regime(0, 2),
}
