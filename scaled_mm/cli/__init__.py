"""The `scaled-mm` command. Each subcommand is a module here with HELP, add_arguments(parser) and run(args) -> exit status."""

from __future__ import annotations

import argparse
import importlib
import sys

COMMANDS = ("verify", "doctor", "table", "build", "bench")


def main(argv: list[str] | None = None) -> int:
    """Entry point. Exit status: 0 fine, 1 the answer is no (a check failed), 2 the command could not be carried out."""
    parser = argparse.ArgumentParser(prog="scaled-mm", description="Quantized matrix multiplication: check, build, inspect, measure.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"scaled_mm.cli.{name}")
        subparser = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    args = parser.parse_args(argv)

    from scaled_mm.errors import ScaledMMError

    try:
        return args.run(args)
    except ScaledMMError as error:
        print(f"scaled-mm {args.command}: {error.status.name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"scaled-mm {args.command}: interrupted", file=sys.stderr)
        return 130
