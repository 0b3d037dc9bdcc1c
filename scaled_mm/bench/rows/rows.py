"""Times every row of a tile table on every case: the measurement that a tile table is chosen by.

`rows.json` is a list of {"shape", "M", "N", "K", "dispatched", "rows": {row: us}, "failed": {row: message}}:
`dispatched` is the row that the table picks today. A row whose bits differ from the first row's failed: it has no time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from scaled_mm.bench.int8.inputs import Inputs
from scaled_mm.bench.int8.peers import Ours, Peer
from scaled_mm.bench.int8.run import Options, Progress, close, describe, layers, no_progress
from scaled_mm.measure import timing
from scaled_mm.measure.record import Environment, write_atomically
from scaled_mm.measure.shapes import Case

ROWS_JSON = "rows.json"
ROWS_MD = "rows.md"

#: (row to force or None, name) -> a peer that runs it.
MakePeer = Callable[[str | None, str], Peer]


def row_names(text: str, arch: str) -> list[str]:
    """`all` or a comma list -> names of rows of the table that serves the architecture here. Raises KernelNotFoundError for others."""
    from scaled_mm.errors import KernelNotFoundError
    from scaled_mm.jit.dispatch import callable_table

    table = callable_table(arch)
    known = [row.name for row in table.rows]
    if text == "all":
        return known
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise KernelNotFoundError(f"row {name!r} is not in {table.source}: expected some of {', '.join(known)}")
    return names


def run_rows(
    cases: list[Case],
    names: list[str],
    device: torch.device,
    options: Options,
    progress: Progress = no_progress,
    make_peer: MakePeer = Ours,
) -> Iterator[list[dict]]:
    """Yields the entries of `rows.json` of one layer after another."""
    for layer in layers(cases, device, options):
        yield [rows_of_case(layer.inputs(case), names, options, progress, make_peer) for case in layer.cases]


def rows_of_case(inputs: Inputs, names: list[str], options: Options, progress: Progress, make_peer: MakePeer = Ours) -> dict:
    """One entry of `rows.json`."""
    case = inputs.case
    failed: dict[str, str] = {}
    runners: dict[str, timing.Runner] = {}
    peers: list[Peer] = []
    expected: torch.Tensor | None = None
    first = ""
    try:
        dispatched = _dispatched(inputs, make_peer)
        for name in names:
            progress(case, name)
            peer = make_peer(name, name)
            peers.append(peer)
            try:
                calls = peer.prepare(inputs)
                inputs.poison()
                out = calls[0]()
                timing.synchronize(inputs.device)
                if expected is None:
                    expected, first = out.clone(), name
                if not torch.equal(out, expected):
                    failed[name] = f"its bits differ from those of {first}"
                    continue
                runners[name] = timing.open_runner(calls, inputs.device, options.budget_ms, inputs.weights.cold)
            except Exception as error:  # noqa: BLE001 - recorded: a row that cannot run here is a result
                failed[name] = describe(error)
        progress(case, "timing")
        timed = timing.interleave(runners)
    finally:
        close(runners, peers)
    failed |= {name: describe(value) for name, value in timed.items() if isinstance(value, Exception)}
    times = {name: round(value.us, 3) for name, value in timed.items() if isinstance(value, timing.Timing)}
    return {
        "shape": case.shape,
        "M": case.M,
        "N": case.N,
        "K": case.K,
        "dispatched": dispatched,
        "rows": dict(sorted(times.items(), key=lambda item: item[1])),
        "failed": failed,
    }


def _dispatched(inputs: Inputs, make_peer: MakePeer) -> str:
    peer = make_peer(None, "dispatched")
    try:
        peer.prepare(inputs)
        return peer.details(inputs)["kernel"]
    finally:
        peer.release()


def best(entry: dict) -> tuple[str, float] | None:
    """(row, microseconds) of the fastest row; None when every row failed."""
    return min(entry["rows"].items(), key=lambda item: item[1], default=None)


def loss(entry: dict) -> float | None:
    """Time of the dispatched row over the best one's, minus one; None when the dispatched row was not timed."""
    fastest = best(entry)
    us = entry["rows"].get(entry["dispatched"])
    return None if fastest is None or us is None else us / fastest[1] - 1


def save_rows(entries: list[dict], directory: Path, environment: Environment, command: str) -> Path:
    """Writes `rows.json` and `rows.md` (the same by case, with the environment and the command); returns the first."""
    text = "[\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]\n"
    write_atomically(directory / ROWS_MD, rows_markdown(entries, environment, command))
    return write_atomically(directory / ROWS_JSON, text)


def rows_markdown(entries: list[dict], environment: Environment, command: str) -> str:
    """The best row of each case, what the table picks today and what that costs."""
    lines = [
        f"# Every row of the tile table: {environment.gpu} ({environment.arch})",
        "",
        f"`{command}`",
        "",
        f"torch {environment.torch}, CUDA {environment.cuda or 'none'}, driver {environment.driver or 'unknown'}, "
        f"CUTLASS {environment.cutlass or 'unknown'}, commit {environment.git_commit or 'none'}"
        f"{' with changes' if environment.git_dirty else ''}. Median microseconds per call.",
        "",
        "| shape | M | best row | µs | dispatched row | µs | loss | failed |",
        "|---|---:|---|---:|---|---:|---:|---:|",
    ]
    for entry in entries:
        fastest = best(entry)
        row, us = (fastest[0], f"{fastest[1]:.2f}") if fastest else ("every row failed", "")
        picked = entry["rows"].get(entry["dispatched"])
        cost = loss(entry)
        lines.append(
            f"| {entry['shape']} | {entry['M']} | {row} | {us} | {entry['dispatched']} | "
            f"{'failed' if picked is None else f'{picked:.2f}'} | {'' if cost is None else f'{cost:.1%}'} | "
            f"{len(entry['failed'])} |"
        )
    messages = sorted({(name, message) for entry in entries for name, message in entry["failed"].items()})
    if messages:
        lines += ["", "## Failures", ""] + [f"- `{name}`: {message}" for name, message in messages]
    return "\n".join(lines) + "\n"
