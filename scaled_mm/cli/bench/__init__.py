"""`scaled-mm bench`. Each suite is a module here (- in its name: _) with HELP, add_arguments(parser) and run(args)."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

HELP = "time INT8, GGUF, block-scaled or grouped products, rows of a tile table, their selection, linear or decoder layers, experts; default int8"

SUITES = ("int8", "gguf", "rows", "random", "cliffs", "path", "experts", "block-scaled", "decoder", "parallel")
DEFAULT = "int8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the suites, each with its options."""
    suites = parser.add_subparsers(dest="suite", required=True, metavar="SUITE")
    for name in SUITES:
        module = _module(name)
        suite = suites.add_parser(name, help=module.HELP, description=module.HELP)
        suite.set_defaults(parser=suite)
        module.add_arguments(suite)
    parse = parser.parse_known_args
    # argparse has no default subcommand. The program and the tests both parse through this method.
    parser.parse_known_args = lambda args=None, namespace=None: parse(with_suite(sys.argv[1:] if args is None else args), namespace)


def with_suite(words: Sequence[str]) -> list[str]:
    """The words after `scaled-mm bench`. If they begin with an option, the default suite is inserted."""
    named = words and (not words[0].startswith("-") or words[0] in ("-h", "--help"))
    return [*words] if named else [DEFAULT, *words]


def run(args: argparse.Namespace) -> int:
    """Runs a suite. 0: done; 1: one of our kernels failed or is wrong; 2: the arguments are invalid."""
    from scaled_mm.jit import mode

    mode.always_wait()
    return _module(args.suite).run(args)


def _module(suite: str):
    return importlib.import_module(f"scaled_mm.cli.bench.{suite.replace('-', '_')}")
