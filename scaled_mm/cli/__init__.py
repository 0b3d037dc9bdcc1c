"""The `scaled-mm` command. Each subcommand is a module here with HELP, add_arguments(parser) and run(args) -> exit status."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

COMMANDS = ("verify", "doctor", "table", "build", "bench", "autotune", "report", "schema")
OK, NO, NOT_DONE, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141


def main(argv: list[str] | None = None) -> int:
    """Entry point. Exit status: 0 fine, 1 the answer is no (a check failed), 2 the command could not be carried out."""
    from scaled_mm import __version__
    from scaled_mm.errors import ScaledMMError

    parser = argparse.ArgumentParser(prog="scaled-mm", description="Quantized matrix multiplication: check, build, inspect, measure.")
    parser.add_argument("--version", action="version", version=f"scaled-mm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"scaled_mm.cli.{name}")
        subparser = commands.add_parser(name, help=module.HELP, description=module.HELP)
        # A command with commands of its own sets the parser of the one that was called.
        subparser.set_defaults(run=module.run, parser=subparser)
        module.add_arguments(subparser)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")  # with the usage of this command

    try:
        status = args.run(args)
        sys.stdout.flush()  # a reader that has gone is noticed here, not while the interpreter ends
        return status
    except ScaledMMError as error:
        print(f"scaled-mm {args.command}: {error.status.name}: {error}", file=sys.stderr)
        return NOT_DONE
    except BrokenPipeError:
        _discard_stdout()
        return BROKEN_PIPE
    except (OSError, UnicodeError) as error:
        # A file that cannot be read or written: neither an answer nor a bug here, so it is one line and not a traceback.
        print(f"scaled-mm {args.command}: {error}", file=sys.stderr)
        _drop_unwritten()
        return NOT_DONE
    except KeyboardInterrupt:
        print(f"scaled-mm {args.command}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _discard_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _drop_unwritten() -> None:
    """What stdout did not take (a full disk) is not tried again while the interpreter ends, which would end it with a status of its own."""
    try:
        sys.stdout.flush()
    except OSError:
        _discard_stdout()
