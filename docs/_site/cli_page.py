"""Writes docs/reference/cli.md from the parsers of `scaled-mm`: `python docs/_site/cli_page.py`. A test holds the page to it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from scaled_mm.cli import build_parser

PAGE = Path(__file__).resolve().parents[1] / "reference" / "cli.md"

HEAD = """# Commands

<!-- Made by `python docs/_site/cli_page.py` from the parsers; do not edit. -->

`scaled-mm COMMAND`, or `python -m scaled_mm COMMAND`. `scaled-mm --version` prints the version, `scaled-mm COMMAND --help` the options.

Exit status: 0 success; 1 the answer is no (a check failed); 2 the command could not be carried out; 130 interrupted (Ctrl-C); 141 the pipe
of stdout was closed; 143 `quantize` was ended by SIGTERM. A stderr that cannot be written does not change the status. With `--json`, stdout
gets one JSON document; for an error it is `{"error": {"status", "message"}}`, but nothing for arguments that the parser refuses. Numbers that
JSON lacks are the strings "NaN", "Infinity" and "-Infinity".

Guides: [measuring](../guide/measuring.md), [tuning](../guide/tuning.md), [schemas](../../schemas/README.md).

"""


def page() -> str:
    """The text of the page."""
    return HEAD + "\n".join(_command(parser, text) for parser, text in commands(build_parser())).rstrip() + "\n"


def commands(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """(parser, what it is for) of every command, each before its own commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help for choice in action._choices_actions}
            for name, subparser in action.choices.items():
                yield subparser, helps[name]
                yield from commands(subparser)


def _command(parser: argparse.ArgumentParser, text: str) -> str:
    level = "##" if parser.prog.count(" ") == 1 else "###"
    actions = [action for action in parser._actions if not isinstance(action, (argparse._HelpAction, argparse._SubParsersAction))]
    actions = [action for action in actions if action.help != argparse.SUPPRESS]  # options of earlier versions, which only say what to use
    lines = [f"{level} `{parser.prog}`", "", _sentence(text), ""]
    if actions:
        lines += ["| argument | |", "|---|---|", *(f"| {_name(action)} | {_cell(action.help or '')} |" for action in actions), ""]
    return "\n".join(lines)


def _name(action: argparse.Action) -> str:
    value = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper())
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    if action.nargs == 0:
        return ", ".join(f"`{option}`" for option in action.option_strings)
    shown = f"[{value}]" if action.nargs == "?" else value
    return ", ".join(f"`{option} {shown}`" for option in action.option_strings)


def _cell(text: str) -> str:
    return (text.replace("%%", "%")).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _sentence(text: str) -> str:
    text = _cell(text)
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
