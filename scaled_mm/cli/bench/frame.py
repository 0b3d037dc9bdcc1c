"""Shared by the suites of `scaled-mm bench`: options, the document of a run, and the loop."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaled_mm.cli import common
from scaled_mm.measure.regime import REGIMES, STANDARD

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from scaled_mm.measure.peer import Peer
    from scaled_mm.measure.record import Document, Environment
    from scaled_mm.measure.run import Options, Suite
    from scaled_mm.measure.shapes import Case

OK, FAILED, USAGE = 0, 1, 2


def add_grid_options(parser: argparse.ArgumentParser, shapes: str, m: str) -> None:
    """Adds the options of every suite. shapes, m: the help of --shapes and --m."""
    add = parser.add_argument
    add("--shapes", help=shapes)
    add("--m", help=m)
    add_measuring_options(parser, "60", "of the random inputs; default a new one, which the report records")


def add_measuring_options(parser: argparse.ArgumentParser, budget: str, seed: str, regime: str = STANDARD) -> None:
    """Adds where, how long and with which numbers. budget: the default of --budget-ms, as its help says it. seed: the help of --seed.
    regime: the default of --regime."""
    add = parser.add_argument
    add("--device", help="cuda:0, cpu, ...; default the first GPU, or the CPU when there is none")
    add("--out", type=Path, metavar="DIR", help="report directory; default reports/<arch>/<gpu>")
    positive = common.number("a number above 0", lambda value: value > 0)
    add("--budget-ms", type=positive, metavar="MS", help=f"timed milliseconds per implementation and case; default {budget}")
    states = "rested: 30 ms of rest before each turn; settled: 2 s of load before each case, 100 ms before each turn, no rest"
    add(
        "--regime",
        choices=tuple(REGIMES),
        default=regime,
        help=f"state of a GPU: {states}; loaded: 100 ms of load before each turn, no rest; brief: none of these; "
        f"standard: 50 ms of rest, then 100 ms of load; default {regime}",
    )
    add("--seed", type=common.seed, help=f"seed {seed}")
    add("--json", action="store_true", help="print the document on stdout")


def add_peer_options(parser: argparse.ArgumentParser, peers: str, kernel: bool = True) -> None:
    """Adds the options of suites that compare implementations. peers: the names that --peers takes. kernel: whether one can be forced."""
    add = parser.add_argument
    add("--peers", default="all", metavar="NAMES", help=f"all, none, or names: {peers}; default all")
    if kernel:
        add("--kernel", metavar="ROW", help="force ours to one row of the tile table")
    add("--no-check", action="store_true", help="do not compare with the reference")


def add_vllm_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vllm-lib", metavar="PATH", help="vLLM's _C_stable_libtorch library, when vllm is not installed")


def add_check_options(parser: argparse.ArgumentParser, file: str) -> None:
    """Adds those of INT8 products. file: the document that --render reads."""
    add = parser.add_argument
    add("--overhead", action="store_true", help="also measure host microseconds per call")
    limit = "check products of up to so many billion multiply-adds; default 8192, on a CPU 4"
    add("--check-limit", type=common.number("a number of 0 or more", lambda value: value >= 0), metavar="GMAC", help=limit)
    add("--render", type=Path, metavar="DIR", help=f"only render the report of DIR/{file} again")


def refuse_missing_library(option: str, path: str | None) -> None:
    """BadParamError for a library that is not there, before anything is timed."""
    from scaled_mm.errors import BadParamError

    if path is not None and not Path(path).is_file():
        raise BadParamError(f"{option}: expected the path of a library, got {path}")


class Former(argparse.Action):
    """An option of earlier versions that is now a suite: a usage error in one line that names the suite."""

    def __init__(self, option_strings: Sequence[str], dest: str, suite: str, nargs: int | str):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=nargs, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        self._suite = suite

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, values: object, option_string: str | None = None) -> None:
        parser.exit(USAGE, f"scaled-mm bench: {option_string}: expected `scaled-mm bench {self._suite}` in its place\n")


def usage(args: argparse.Namespace, message: str) -> int:
    """Prints in one line why the arguments are invalid."""
    common.say(f"scaled-mm bench: {message}")
    if args.json:
        common.print_json({"error": {"status": "BAD_PARAM", "message": message}}, indent=2)
    return USAGE


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Puts the option's name before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error


def options(args: argparse.Namespace, device: torch.device, check: bool = True, check_limit: float | None = None) -> Options:
    """The options of the measurement. check_limit: None for the default of this kind of device."""
    import secrets

    from scaled_mm.measure.run import CHECK_LIMIT_GMAC, Options
    from scaled_mm.measure.sampling import DEFAULT_BUDGET_MS

    return Options(
        budget_ms=DEFAULT_BUDGET_MS if args.budget_ms is None else args.budget_ms,
        check=check,
        check_limit_gmac=CHECK_LIMIT_GMAC[device.type] if check_limit is None else check_limit,
        seed=secrets.randbelow(2**31) if args.seed is None else args.seed,
        regime=args.regime,
    )


def int8_cases(args: argparse.Namespace, device: torch.device) -> list[Case]:
    """The cases of --shapes and --m, whose defaults depend on the device."""
    from scaled_mm.measure import shapes

    cpu = device.type == "cpu"
    with naming("--m"):
        ms = (shapes.CPU_M if cpu else shapes.LLM_M) if args.m is None else shapes.parse_ms(args.m)
    with naming("--shapes"):
        return shapes.parse_cases((shapes.CPU_SHAPES if cpu else "llm") if args.shapes is None else args.shapes, ms)


def command_line(args: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """The command line for `args`: every option of the suite that differs from its default."""
    words = ["scaled-mm", "bench", args.suite]
    defaults = vars(parser.parse_args([]))
    for key, default in defaults.items():
        value = getattr(args, key)
        if key == "parser" or value == default:
            continue
        words.append("--" + key.replace("_", "-"))
        if value is not True:
            words.append(str(value))
    return shlex.join(words)


def report_folder(args: argparse.Namespace, environment: Environment) -> Path:
    """--out, or the GPU's folder. BadParamError if it is not writable."""
    from scaled_mm.measure import environment as environments

    return common.writable_folder("--out", args.out or environments.report_folder(environment))


def document_fields(
    args: argparse.Namespace, environment: Environment, device: torch.device, peers: list[Peer], options: Options
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the fields common to the documents of all suites, the fields of the settings)."""
    from datetime import datetime, timezone

    from scaled_mm.measure.environment import read_clocks
    from scaled_mm.measure.peer import implementations
    from scaled_mm.measure.sampling import ROUNDS

    clocks = read_clocks(device, "before")
    document = {
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command_line(args, args.parser),
        "environment": environment,
        "clocks": [] if clocks is None else [clocks],
        "implementations": implementations(peers, device),
    }
    settings = {"budget_ms": options.budget_ms, "rounds": ROUNDS, "check": options.check, "seed": options.seed, "regime": options.regime}
    settings["kernel"] = getattr(args, "kernel", None)
    return document, settings


def available(document: Document, peers: list[Peer]) -> list[Peer]:
    """The peers that can run here."""
    return [peer for peer, one in zip(peers, document.implementations, strict=True) if one.unavailable is None]


def fill(
    document: Document, suite: Suite, cases: list[Case], peers: list[Peer], device: torch.device, options: Options, out: Path, console: Console
) -> None:
    """Runs the grid and saves the document after every weight, so that an interrupted run keeps its results."""
    from scaled_mm.measure.environment import read_clocks

    for records in grid(suite, cases, peers, device, options, console):
        document.cases += records
        weight = records[0].weight
        if (clocks := read_clocks(device, f"after {weight}")) is not None:
            document.clocks.append(clocks)
        document.save(out)
        log(console, weight, records)
    document.save(out)


def grid(suite: Suite, cases: list[Case], peers: list[Peer], device: torch.device, options: Options, console: Console) -> Iterator[list[Any]]:
    """Yields the records of each weight, with a progress bar."""
    from scaled_mm.measure.run import OTHER_STEPS, run_grid

    with common.progress_bar(console, len(cases) * (len(peers) + OTHER_STEPS)) as step:
        yield from run_grid(suite, cases, peers, device, options, step)


def log(console: Console, weight: str, records: Sequence[object]) -> None:
    common.log(console, f"{weight}: {len(records)} case{'s' * (len(records) > 1)}")
