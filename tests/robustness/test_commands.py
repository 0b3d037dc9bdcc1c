"""Commands with streams that are closed or full, terminals of no width, locales that are not UTF-8, and names with brackets in them."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scaled_mm import cli
from scaled_mm.cli import COMMANDS, common, doctor, main
from scaled_mm.tables import configs_dir

BARE_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
NESTED = {"table": ("show", "check", "explain"), "schema": ("list", "show", "validate", "draw", "run")}


def shell(arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """`scaled-mm` as a shell starts it; "$TABLE" is a file that is there."""
    environment = {**os.environ, "TABLE": str(configs_dir() / "sm90.yaml"), **variables}
    environment.pop("PYTHONUNBUFFERED", None)  # with it argparse drops what it cannot write
    return subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -m scaled_mm {arguments}'], env=environment, capture_output=True, timeout=120, stdin=subprocess.DEVNULL
    )


def without_readers(*arguments: str, stdout: int | None = subprocess.PIPE) -> tuple[int, bytes]:
    """Exit status and stdout of `scaled-mm` with a stderr, and where stdout is None a stdout, of one pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "scaled_mm", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=writer if stdout is None else stdout,
            stderr=writer,
            timeout=120,
        )
    finally:
        os.close(writer)
    return done.returncode, done.stdout


# ---- streams ------------------------------------------------------------------------------------------------------------


def test_a_closed_stdout_is_one_line_and_status_two_and_no_file_takes_its_place():
    done = shell("table explain 1 2 3 <&- >&-")
    assert done.returncode == 2 and done.stderr == b"scaled-mm table: stdout: expected an open file, got a closed one\n"


def test_errors_go_nowhere_but_to_stderr_even_if_it_is_closed():
    done = shell("build --json --arch sm10 2>&-")
    assert done.returncode == 2 and json.loads(done.stdout)["error"]["status"] == "ARCHITECTURE_NOT_SUPPORTED"


@pytest.mark.parametrize(
    "arguments, status",
    [
        ("--help > /dev/full", 2),
        ("table show --frob 2> /dev/full", 2),
        ("table show --table /nowhere/x.yaml 2> /dev/full", 2),
        ("table explain 1 2 3 <&-", 0),
    ],
)
def test_a_full_stream_leaves_the_exit_status_one_that_is_documented(arguments, status):
    done = shell(arguments)
    assert done.returncode == status and b"Traceback" not in done.stderr and b"Exception ignored" not in done.stderr


@pytest.mark.parametrize(
    "arguments, status",
    [
        (["table", "explain", "1", "2", "3", "--json"], 0),
        (["table", "check", "--table", "/nowhere/x.yaml", "--json"], 1),
        (["table", "show", "--frob"], 2),
        (["table", "show", "--table", "/nowhere/x.yaml", "--json"], 2),
        (["schema", "run", "--root", "/nowhere", "--json"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_a_stderr_whose_reader_has_gone_changes_neither_the_answer_nor_the_exit_status(arguments, status):
    answer = shell(" ".join(arguments)).stdout
    assert without_readers(*arguments) == (status, answer) and bool(answer) is ("--json" in arguments)


def test_a_stdout_and_a_stderr_whose_one_reader_has_gone_end_a_command():
    """As `scaled-mm ... |& head` does: nobody reads the answer either."""
    for arguments in (["table", "show"], ["schema", "run", "--root", "/nowhere", "--json"]):
        assert without_readers(*arguments, stdout=None)[0] == 141


def test_problems_that_a_full_stderr_does_not_take_are_problems_still():
    assert shell("table check --table /nowhere/x.yaml 2> /dev/full").returncode == 1


def test_a_log_that_is_full_does_not_end_a_command(monkeypatch):
    with open(os.open("/dev/full", os.O_WRONLY), "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        common.say("a line")
        common.LogLines(terminal=False).begin("another")


# ---- JSON ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, status",
    [
        (["verify", "--device", "foo"], "BAD_PARAM"),
        (["table", "show", "--table", "/nowhere/x.yaml"], "BAD_PARAM"),
        (["table", "show", "--arch", "sm10"], "ARCHITECTURE_NOT_SUPPORTED"),
        (["table", "explain", "1", "2", "3", "--table", "/nowhere/x.yaml"], "BAD_PARAM"),
        (["build", "--row", "c3x_1x1x1"], "KERNEL_NOT_FOUND"),
        (["build", "--arch", "sm10"], "ARCHITECTURE_NOT_SUPPORTED"),
        (["build", "--row", "generic_64x64x64", "--out", "x.so"], "BAD_PARAM"),
        (["schema", "list", "--root", "/nowhere"], "BAD_PARAM"),
        (["schema", "run", "no_such_definition"], "BAD_PARAM"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_an_error_is_text_on_stderr_and_with_json_one_document_on_stdout(capsys, arguments, status):
    assert main(arguments) == 2
    text = capsys.readouterr()
    assert text.out == "" and text.err
    assert main([*arguments, "--json"]) == 2
    printed = capsys.readouterr()
    error = json.loads(printed.out)["error"]
    assert error["status"] == status and error["message"] in printed.err and printed.err == text.err


@pytest.mark.parametrize(
    "error, status",
    [
        (RuntimeError("a bug"), "INTERNAL_ERROR"),
        (FileNotFoundError(2, "No such file", "/x"), "OS_ERROR"),
        (MemoryError(), "OUT_OF_MEMORY"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"), "OUT_OF_MEMORY"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 bytes"), "OUT_OF_MEMORY"),
    ],
)
def test_no_exception_exits_with_one_which_is_an_answer(capsys, monkeypatch, error, status):
    def fail():
        raise error

    monkeypatch.setattr(doctor, "examine", fail)
    assert main(["doctor", "--json"]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["error"]["status"] == status
    assert ("Traceback" in printed.err) is (status == "INTERNAL_ERROR")


def test_an_interrupt_is_one_line_and_a_status_of_its_own(capsys, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", interrupt)
    assert main(["doctor"]) == 130
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err == "scaled-mm doctor: interrupted\n"


def test_the_reference_names_every_exit_status():
    page = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
    statuses = page.read_text().partition("Exit status: ")[2].partition(".")[0]
    named = [int(number) for number in re.findall(r"(?:^|; )(\d+) ", statuses)]
    assert named == [cli.OK, cli.NO, cli.NOT_DONE, cli.INTERRUPTED, cli.BROKEN_PIPE, cli.TERMINATED]
    assert "Ctrl-C" in statuses


def test_a_document_has_no_number_that_json_lacks(capsys):
    common.print_json({"a": [math.nan, {"b": (math.inf, -math.inf, 1.5, True, None)}]})
    assert capsys.readouterr().out == '{"a": ["NaN", {"b": ["Infinity", "-Infinity", 1.5, true, null]}]}\n'


# ---- terminals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variables",
    [
        {"COLUMNS": "1"},
        {"COLUMNS": "20"},
        {"COLUMNS": "x"},
        {"COLUMNS": "1", "FORCE_COLOR": "1"},
        {"TERM": "dumb", "FORCE_COLOR": "1"},
        {"TERM": None},
    ],
    ids=str,
)
def test_any_terminal_will_do(capsys, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    for arguments in (["table", "show"], ["table", "explain", "1", "2", "3"], ["schema", "list", "--group", "gemm"]):
        assert main(arguments) == 0
        assert capsys.readouterr().out


@pytest.mark.parametrize("columns", ["1", "20"])
def test_the_help_of_every_command_fits_any_width(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    for command in ([name, *more] for name in COMMANDS for more in ([], *([one] for one in NESTED.get(name, ())))):
        with pytest.raises(SystemExit) as caught:
            main([*command, "--help"])
        assert caught.value.code == 0 and capsys.readouterr().out.startswith("usage: scaled-mm ")


# ---- names --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["[/red] x", "[bold]", "a\\[b]"])
def test_brackets_in_the_name_of_a_file_are_no_markup(capsys, tmp_path, name):
    (tmp_path / name).mkdir(parents=True)
    table = tmp_path / name / "sm90.yaml"
    shutil.copy(configs_dir() / "sm90.yaml", table)
    for command in ("show", "check"):
        assert main(["table", command, "--table", str(table)]) == 0
        assert str(table) in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize(
    "variables, printed", [(BARE_LOCALE, "é".encode()), ({"PYTHONIOENCODING": "ascii"}, rb"\xe9")], ids=["the C locale", "ascii"]
)
def test_a_name_that_the_locale_cannot_print_fails_no_command(tmp_path, variables, printed):
    name = os.fsencode(tmp_path) + "/é".encode() + b"\xff.yaml"
    shutil.copy(configs_dir() / "sm90.yaml", name)
    done = shell('table show --table "$NAME"', NAME=os.fsdecode(name), **variables)
    assert done.returncode == 0 and done.stdout.startswith(os.fsencode(tmp_path) + b"/" + printed + b"\xff.yaml: sm90"), done.stderr
