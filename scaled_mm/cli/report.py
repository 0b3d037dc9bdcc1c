"""`scaled-mm report DIR`: renders the report of a benchmark or a tuning run again, and compares two runs."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from scaled_mm.cli import common

if TYPE_CHECKING:
    from scaled_mm.measure.record import Document

HELP = "render the report of a bench or autotune run again, from its JSON, or compare two runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    files = "autotune.json, bench.json, bench_gguf.json, bench_block.json, path.json, experts.json, block_scaled.json, decoder.json or parallel.json"
    parser.add_argument("directory", type=Path, metavar="DIR", help=f"a folder with {files}, or some of them")
    parser.add_argument("--compare", type=Path, metavar="OTHER", help="print the times of DIR next to those of another run")


AUTOTUNE = "autotune"
#: Package in `scaled_mm.bench` -> (the class of its document, the name of a case's weight), of suites whose reports can be rendered again.
_SUITES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "int8": ("Int8Document", lambda case: "int8"),
    "gguf": ("GgufDocument", lambda case: case.fmt),
    "path": ("PathDocument", lambda case: case.part),
    "experts": ("ExpertsDocument", lambda case: case.weight),
    "block_scaled": ("BlockScaledDocument", lambda case: "block-scaled"),
    "decoder": ("DecoderDocument", lambda case: "decoder layer"),
    "parallel": ("ParallelDocument", lambda case: "parallel layer"),
}


def _document_of(kind: str) -> type[Document]:
    return getattr(importlib.import_module(f"scaled_mm.bench.{kind}.record"), _SUITES[kind][0])


def _report_of(kind: str) -> ModuleType:
    return importlib.import_module("scaled_mm.autotune.report" if kind == AUTOTUNE else f"scaled_mm.bench.{kind}.report")


def run(args: argparse.Namespace) -> int:
    """0; 2 (as an error) for a folder without a run, or for two runs without a common product."""
    if args.compare is not None:
        return _compare(args.directory, args.compare)
    from scaled_mm.measure import plots

    paths = []
    for kind, path in _runs("DIR", args.directory).items():
        with _naming(path):
            paths += _report_of(kind).render(args.directory, keep_plots=True)
    if (reason := plots.unavailable()) is not None:
        print(f"no plots were drawn, those that were there are kept: {reason}")
    print("wrote " + ", ".join(map(str, paths)))
    return 0


def _runs(option: str, directory: Path) -> dict[str, Path]:
    """The files of the runs in a folder by kind, the tuning run first."""
    from scaled_mm.autotune.record import AUTOTUNE_JSON
    from scaled_mm.errors import BadParamError

    files = {AUTOTUNE: (AUTOTUNE_JSON,), **{kind: _document_of(kind).FILES for kind in _SUITES}}
    there = {kind: [directory / name for name in names if (directory / name).is_file()] for kind, names in files.items()}
    found = {kind: paths[0] for kind, paths in there.items() if paths}
    if not found:
        *names, last = [name for names in files.values() for name in names]
        raise BadParamError(f"{option}: expected a folder with {', '.join(names)} or {last}, got {directory}")
    return found


class _naming:
    """Turns the error of an invalid record into a BadParamError that names the file."""

    def __init__(self, path: Path):
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, _, error: BaseException | None, __) -> None:
        from pydantic import ValidationError

        from scaled_mm.errors import BadParamError

        if isinstance(error, ValidationError):
            raise BadParamError(f"{self._path}: {error}") from error


#: (weight, as `_SUITES` names it, M, N, K)
Product = tuple[str, int, int, int]


def times(directory: Path, option: str = "DIR") -> dict[Product, float]:
    """Microseconds of our kernels by product. INT8: from the tuning run if there is one, else from the benchmark. The others: from theirs."""
    from scaled_mm.autotune import record as autotune_record
    from scaled_mm.bench.analysis import us_of
    from scaled_mm.measure.peer import OURS

    runs = _runs(option, directory)
    if AUTOTUNE in runs:
        runs.pop("int8", None)
    found: list[tuple[str, object, float | None]] = []
    for kind, path in runs.items():
        with _naming(path):
            if kind == AUTOTUNE:
                found += [("int8", one, one.us) for one in autotune_record.load(directory).products]
            else:
                found += [(_SUITES[kind][1](one), one, us_of(one, OURS)) for one in _document_of(kind).load(directory).cases]
    return {(weight, one.M, one.N, one.K): us for weight, one, us in found if us is not None}


def _compare(directory: Path, other: Path) -> int:
    from scaled_mm.errors import BadParamError
    from scaled_mm.measure.stats import geometric_mean

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
