"""Host microseconds of a call: how they are measured, recorded and reported."""

from __future__ import annotations

from collections.abc import Callable

import torch

from scaled_mm.measure.document import Heading, Part, Table, Text
from scaled_mm.measure.host import Overhead, host_overhead
from scaled_mm.measure.peer import Peer, TensorCall
from scaled_mm.measure.record import Model, describe
from scaled_mm.measure.rotation import RotatedOutputs
from scaled_mm.measure.run import close


class OverheadRecord(Model):
    """Host microseconds per call of a tiny product, or why it failed."""

    name: str
    us: float | None = None
    samples: list[float] = []
    calls: int | None = None
    failed: str | None = None


def measure_overhead(peers: list[Peer], inputs: RotatedOutputs, named: Callable[[str], str] = str) -> list[OverheadRecord]:
    """Host microseconds per call of every peer on `inputs`, which are tiny. named: from a call's name to the record's."""
    calls: dict[str, TensorCall] = {}
    refused = []
    try:
        for peer in peers:
            try:
                calls |= {named(name): call for name, call in peer.overhead_calls(inputs).items()}
            except Exception as error:  # noqa: BLE001 - recorded
                refused.append(OverheadRecord(name=named(peer.name), failed=describe(error)))
        measured = host_overhead(calls, torch.device(inputs.device))
    finally:
        close({}, peers)
    return [_record(name, one) for name, one in measured.items()] + refused


def _record(name: str, one: Overhead | Exception) -> OverheadRecord:
    if isinstance(one, Exception):
        return OverheadRecord(name=name, failed=describe(one))
    samples = [round(sample, 3) for sample in one.samples]
    return OverheadRecord(name=name, us=round(one.us, 3), samples=samples, calls=one.calls)


def overhead_section(overhead: list[OverheadRecord], arch: str, said: str = "") -> list[Part]:
    """The section of a report; nothing without records. said: sentences after the first."""
    if not overhead:
        return []
    rows = [[f"`{one.name}`", f"failed: {one.failed}" if one.us is None else f"{one.us:.2f}"] for one in overhead]
    what = "the whole call, there is no queue" if arch == "cpu" else "the GPU's work not included"
    text = f"Microseconds per call on the host, {what}.{' ' if said else ''}{said}"
    return [Heading(2, "Host overhead"), Text(text), Table(["call", "µs"], rows, "lr")]
