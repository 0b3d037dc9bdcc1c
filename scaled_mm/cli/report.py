"""`scaled-mm report DIR`: render the report of a benchmark or a tuning run again, and compare two runs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from scaled_mm.cli import common

HELP = "render the report of a bench or autotune run again, from its JSON, or compare two runs"

RUNS = ("autotune.json", "bench.json", "bench_block.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="a folder with autotune.json, bench.json or bench_block.json, or some of them")
    parser.add_argument("--compare", type=Path, metavar="OTHER", help="print the times of DIR next to those of another run")


def run(args: argparse.Namespace) -> int:
    """0; 2 (as an error) for a folder without a run, or runs without a product in common."""
    if args.compare is not None:
        return _compare(args.directory, args.compare)
    from scaled_mm.autotune import report as autotune_report
    from scaled_mm.bench.gguf import report as block_report
    from scaled_mm.bench.int8 import plots
    from scaled_mm.bench.int8 import report as bench_report

    renderers = {"autotune.json": autotune_report.render, "bench.json": bench_report.render, "bench_block.json": block_report.render}
    paths = []
    for name in _runs("DIR", args.directory):
        with _naming(args.directory / name):
            paths += renderers[name](args.directory, keep_plots=True)
    if (reason := plots.unavailable()) is not None:
        print(f"no plots were drawn, those that were there are kept: {reason}")
    print("wrote " + ", ".join(map(str, paths)))
    return 0


def _runs(option: str, directory: Path) -> list[str]:
    """The JSON files of a folder that are runs, the tuning run first."""
    from scaled_mm.errors import BadParamError

    found = [name for name in RUNS if (directory / name).is_file()]
    if not found:
        raise BadParamError(f"{option}: expected a folder with {', '.join(RUNS[:-1])} or {RUNS[-1]}, got {directory}")
    return found


class _naming:
    """BadParamError that names the file, in the place of a record that does not fit."""

    def __init__(self, path: Path):
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, _, error: BaseException | None, __) -> None:
        from pydantic import ValidationError

        from scaled_mm.errors import BadParamError

        if isinstance(error, ValidationError):
            raise BadParamError(f"{self._path}: {error}") from error


#: (weight: int8 or a block format, M, N, K)
Product = tuple[str, int, int, int]


def times(directory: Path, option: str = "DIR") -> dict[Product, float]:
    """Microseconds of ours by product: of a tuning run the tuned rows', else of a benchmark of INT8 ours; and ours of block products."""
    from scaled_mm.autotune import record as autotune_record
    from scaled_mm.bench.gguf import record as block_record
    from scaled_mm.bench.int8.analysis import us_of
    from scaled_mm.bench.int8.peers import OURS
    from scaled_mm.measure import record as bench_record

    names = _runs(option, directory)
    found: list[tuple[str, object, float | None]] = []
    with _naming(directory / names[0]):
        if names[0] == "autotune.json":
            found += [("int8", one, one.us) for one in autotune_record.load(directory).products]
        elif names[0] == "bench.json":
            found += [("int8", one, us_of(one, OURS)) for one in bench_record.load(directory).cases]
    with _naming(directory / names[-1]):
        if names[-1] == block_record.BLOCK_JSON:
            found += [(one.fmt, one, us_of(one, OURS)) for one in block_record.load(directory).cases]
    return {(weight, one.M, one.N, one.K): us for weight, one, us in found if us is not None}


def _compare(directory: Path, other: Path) -> int:
    from scaled_mm.bench.int8.analysis import geometric_mean
    from scaled_mm.errors import BadParamError

    these, those = times(directory), times(other, "--compare")
    common_products = [product for product in these if product in those]
    if not common_products:
        raise BadParamError(f"--compare: expected a run with products of {directory}, got none of them in {other}")
    _print(common_products, these, those, directory, other)
    mean = geometric_mean(those[product] / these[product] for product in common_products)
    print(f"{directory} is {mean:.3f}x as fast as {other}, geometric mean of {len(common_products)} product{'s' * (len(common_products) != 1)}")
    return 0


def _print(products: list[Product], these: Mapping, those: Mapping, directory: Path, other: Path) -> None:
    table = common.narrow_table("microseconds per call")
    for header in ("weight", "M", "N", "K", str(directory), str(other), "times as fast"):
        table.add_column(header, justify="right")
    for product in products:
        table.add_row(*map(str, product), f"{these[product]:.2f}", f"{those[product]:.2f}", f"{those[product] / these[product]:.2f}")
    common.console(markup=False).print(table)
