"""The command line: usage errors, exit statuses, and what a command prints beside its answer."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import types

import pytest
import torch
from cli_run import run_json

import scaled_mm as sm
from scaled_mm import cli
from scaled_mm.cli import common, main
from scaled_mm.jit import library, mode
from scaled_mm.tables import load_table


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["verify", "--seed", "99999999999999999999999"], "argument --seed: expected an integer from 0 to "),
        (["verify", "--shape", f"1x{2**31}x1"], "argument --shape: "),
        (["build", "--jobs", "-4"], "argument --jobs: expected an integer of 1 or more, got '-4'"),
        (["build", "--jobs", "0"], "argument --jobs: expected an integer of 1 or more, got '0'"),
        (["verify", "--frob"], "usage: scaled-mm verify"),
        (["table", "show", "--frob"], "usage: scaled-mm table show"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_with_the_usage_of_their_command(capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["verify", "--device", "foo"], "--device: expected cuda, cuda:<index> or cpu, got 'foo'"),
        (["verify", "--device", "meta"], "--device: expected cuda"),
        (["verify", "--device", "cuda:-1"], "--device: expected cuda"),
        (["verify", "--device", "cuda:9999"], "--device: "),
        (["build", "--arch", "tuned/h200.yaml"], "--arch: expected an architecture or a file, there is no tuned/h200.yaml; `scaled-mm autotune`"),
        (["build", "--arch", "sm90x"], "--arch: no tile table for 'sm90x'; there are: "),
        (["build", "--out", "/dev/null/below/kernels.so"], "--out: expected a folder that can be written to"),
        (["build", "--out", "/"], "--out: expected the name of a file, got the folder /"),
    ],
)
def test_what_cannot_be_carried_out_is_one_line_and_status_two(capsys, arguments, message):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err and len(printed.err.splitlines()) == 1 and printed.out == ""


def test_a_build_of_a_whole_table_that_nobody_named_says_what_it_does_and_how_to_do_less(capsys, monkeypatch, tmp_path):
    built = []

    def build_arch(table, jobs, on_kernel):
        built.append(table.arch)
        (tmp_path / "kernels.so").write_bytes(b"kernels")
        return tmp_path / "kernels.so"

    monkeypatch.setattr(library, "build_arch", build_arch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("SCALED_MM_ARCH", raising=False)
    number = len(library.kernel_names(load_table("sm90")))
    assert main(["build", "--jobs", "3"]) == 0
    narrower = "; --arch names another table, --row, --out-dtype and --format build a part of it\n"
    assert capsys.readouterr().err == f"{number} kernels of sm90, 3 at a time{narrower}"
    assert main(["build", "--jobs", "3", "--arch", "sm90"]) == 0
    assert capsys.readouterr().err == f"{number} kernels of sm90, 3 at a time\n"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sm, "Handle", lambda device: types.SimpleNamespace(arch={"cuda:0": "sm80"}[device]))
    assert main(["build"]) == 0
    monkeypatch.setenv("SCALED_MM_ARCH", "sm75")
    assert main(["build"]) == 0
    assert capsys.readouterr().err.count(narrower) == 2 and built == ["sm90", "sm90", "sm80", "sm75"]


def test_explain_answers_for_the_architecture_that_calls_are_forced_to(capsys, monkeypatch):
    def explained(*more: str) -> str:
        return run_json(capsys, "table", "explain", "64", "4096", "4096", *more)[1]["arch"]

    monkeypatch.delenv("SCALED_MM_ARCH", raising=False)
    assert explained() == "sm90"
    monkeypatch.setenv("SCALED_MM_ARCH", "sm80")
    assert explained() == "sm80" and explained("--arch", "sm89") == "sm89"
    for command in (["table", "explain", "1", "2", "3"], ["build"]):
        monkeypatch.setenv("SCALED_MM_ARCH", "/x")
        assert main(command) == 2
        assert "SCALED_MM_ARCH: expected the name of an architecture, as sm80, got /x" in capsys.readouterr().err


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0 and capsys.readouterr().out == f"scaled-mm {sm.__version__}\n"


def test_the_package_runs_as_a_module_and_a_reader_that_leaves_early_is_no_error():
    command = f"{shlex.quote(sys.executable)} -m scaled_mm"
    script = "".join(f"{command} {arguments} | true; echo ${{PIPESTATUS[0]}}; " for arguments in ("table show --json", "table show"))
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stderr == "" and done.stdout.split() == ["141", "141"]


def test_a_full_disk_is_no_answer_but_one_line_and_status_two():
    for arguments in (["table", "explain", "1", "2", "3"], ["verify", "--device", "cpu", "--shape", "2x2x2", "--json"]):
        command = [sys.executable, "-m", "scaled_mm", *arguments]
        # The first command in an empty cache compiles the C core, which takes two more lines, and on a busy machine minutes.
        assert subprocess.run(command, capture_output=True, timeout=600).returncode == 0
        with open("/dev/full", "w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=600)
        assert done.returncode == 2 and re.fullmatch(rf"scaled-mm {arguments[0]}: .*No space left on device\n", done.stderr), done.stderr


def test_a_log_gets_a_line_at_the_start_and_now_and_then_and_a_terminal_none(capsys):
    for terminal, seconds in ((False, 0.0), (True, 0.0), (False, 3600.0)):
        log = common.LogLines(terminal, seconds)
        log.begin("3 kernels")
        log.say("1 of 3 kernels")
        log.say("2 of 3 kernels")
    assert re.fullmatch(r"3 kernels\n1 of 3 kernels, \d+ s\n2 of 3 kernels, \d+ s\n3 kernels\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    "command, timed, expected",
    [("bench", None, "wait"), ("autotune", None, "wait"), ("schema", None, "wait"), ("verify", True, "wait"), ("verify", False, "background")],
)
def test_a_command_that_measures_waits_for_its_kernels_and_no_other_does(monkeypatch, capsys, command, timed, expected):
    monkeypatch.setenv("SCALED_MM_JIT", "background")
    seen = []
    arguments = types.SimpleNamespace(command=command, time=timed, run=lambda args: seen.append(mode.current()) or 0)
    monkeypatch.setattr(cli, "_arguments", lambda argv: arguments)
    assert main([command]) == 0 and seen == [expected]
    monkeypatch.setenv("SCALED_MM_JIT", "soon")
    assert main([command]) == 2 and "SCALED_MM_JIT: expected background, wait or off, got soon" in capsys.readouterr().err
