"""One command, and the JSON that it prints."""

from __future__ import annotations

import json

from scaled_mm.cli import main


def run_json(capsys, *arguments: str) -> tuple[int, dict]:
    """Exit status and document, which must be JSON as RFC 8259 has it: without NaN and Infinity."""

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is no JSON")

    status = main([*arguments, "--json"])
    return status, json.loads(capsys.readouterr().out, parse_constant=refuse)
