"""The `scaled-mm` command. Each subcommand is a module here with HELP, add_arguments(parser) and run(args) -> exit status."""

from __future__ import annotations

import argparse
import codecs
import importlib
import io
import os
import sys
import traceback
from typing import Any

from scaled_mm.cli import common

COMMANDS = ("verify", "doctor", "table", "build", "bench", "autotune", "report", "schema", "quantize", "eval", "generate")
_MEASURING = ("bench", "autotune", "schema")  # and `verify --time`: they must run the kernels that the table selects
OK, NO, NOT_DONE, INTERRUPTED, BROKEN_PIPE, TERMINATED = 0, 1, 2, 130, 141, common.TERMINATED


def main(argv: list[str] | None = None) -> int:
    """Entry point. Exit status: 0 success; 1 the answer is no (a check failed); 2 the command could not be carried out.

    With --json, stdout gets one JSON document; for an error {"error": {"status", "message"}}. stderr always gets the error as text. Refused
    arguments print nothing on stdout.
    """
    _standard_streams()
    try:
        return _answer(argv)
    except BrokenPipeError:  # of stdout, during the command or during its last messages
        _discard_stdout()
        return BROKEN_PIPE


def _answer(argv: list[str] | None) -> int:
    command = "scaled-mm"
    try:
        args = _arguments(argv)
        command = f"scaled-mm {args.command}"
        if sys.stdout is None:  # nobody would read the answer, so nothing is started
            return _not_done(command, "stdout: expected an open file, got a closed one")
        status = _run(args, command)
        sys.stdout.flush()  # a closed pipe is noticed here instead of during the interpreter's exit
        return status
    except SystemExit:  # from argparse: --help, --version, or refused arguments
        common.say()
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            return _not_done(command, error)
        raise
    except BrokenPipeError:
        raise
    except OSError as error:
        return _not_done(command, error)
    except KeyboardInterrupt:
        common.say(f"{command}: interrupted")
        return INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command and all its subcommands. docs/reference/cli.md is generated from it."""
    from scaled_mm import __version__

    parser = argparse.ArgumentParser(prog="scaled-mm", description="Quantized matrix multiplication: check, build, inspect, measure.")
    parser.add_argument("--version", action="version", version=f"scaled-mm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"scaled_mm.cli.{name}")
        subparser = commands.add_parser(name, help=module.HELP, description=module.HELP)
        # A command with subcommands overrides `parser` with that of the subcommand.
        subparser.set_defaults(run=module.run, parser=subparser)
        module.add_arguments(subparser)
    return parser


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")  # prints the usage of this command
    return args


def _run(args: argparse.Namespace, command: str) -> int:
    from scaled_mm.errors import ScaledMMError, lacks_memory
    from scaled_mm.jit import mode

    try:
        if args.command in _MEASURING or (args.command == "verify" and args.time):
            mode.always_wait()
        return args.run(args)
    except ScaledMMError as error:
        status, message = error.status.name, str(error)
        common.say(f"{command}: {status}: {message}")
    except BrokenPipeError:
        raise
    except (OSError, UnicodeError) as error:
        if getattr(error, "errno", None) is not None and error.filename is None:
            raise  # an error of stdout, which could not take a document either
        # A file that cannot be read or written is neither an answer nor a bug: one line without a traceback.
        status, message = "OS_ERROR", str(error)
        common.say(f"{command}: {message}")
    except Exception as error:
        if lacks_memory(error):
            status, message = "OUT_OF_MEMORY", f"out of memory: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            common.say(f"{command}: {message}")
        else:  # a bug; without this the exit status would be 1, which means "no"
            status, message = "INTERNAL_ERROR", f"{type(error).__name__}: {error}"
            common.say(traceback.format_exc().rstrip())
    if getattr(args, "json", False):
        common.print_json({"error": {"status": status, "message": message}}, indent=2)
    return NOT_DONE


def _standard_streams() -> None:
    """Makes the standard streams usable, whatever the shell provided.

    A closed descriptor is opened on the null device. Otherwise the next opened file would take its number and receive the output. sys.stdout
    stays None in that case. Characters that stdout's encoding lacks are not an error: `_without_encoding`.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    if sys.stderr is None:  # print(file=None) prints to stdout
        sys.stderr = open(os.devnull, "w")
    elif sys.stderr is sys.__stderr__:  # not replaced by a caller
        encoding, errors = sys.stderr.encoding, sys.stderr.errors
        sys.stderr = io.TextIOWrapper(io.BufferedWriter(_Messages(2, "w", closefd=False)), encoding, errors, line_buffering=True)
    if isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error("scaled_mm", _without_encoding)
        sys.stdout.reconfigure(errors="scaled_mm")


class _Messages(io.FileIO):
    """stderr. Text that cannot be written (a full disk, a closed pipe) is lost; it does not change the exit status.

    BrokenPipeError if stdout is the same pipe, because then nobody reads the answer.
    """

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            nobody = isinstance(error, BrokenPipeError) and os.path.sameopenfile(1, self.fileno())
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # otherwise the interpreter would retry at its exit, and exit with 120
            if nobody:
                raise
            return memoryview(data).nbytes


def _without_encoding(error: UnicodeEncodeError) -> tuple[str | bytes, int]:
    """Prints bytes of a file name that are not text unchanged, and characters that the encoding lacks as escapes."""
    error.end = error.start + 1
    code = ord(error.object[error.start])
    return (bytes([code - 0xDC00]), error.end) if 0xDC80 <= code <= 0xDCFF else codecs.backslashreplace_errors(error)


def _not_done(command: str, error: object) -> int:
    common.say(f"{command}: {error}")
    _drop_unwritten()
    return NOT_DONE


def _discard_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _drop_unwritten() -> None:
    """Discards what stdout could not take (a full disk). Otherwise the interpreter would retry at its exit and change the exit status."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        _discard_stdout()
