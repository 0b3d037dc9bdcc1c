"""`scaled-mm bench` end to end on a CPU."""

import argparse
import json

import pytest
import torch
from bench_data import case_record, document, measured

from scaled_mm.bench import ours
from scaled_mm.bench.int8 import peers
from scaled_mm.bench.int8.record import Int8Document
from scaled_mm.cli import bench, main
from scaled_mm.cli.bench import frame, int8
from scaled_mm.errors import KernelNotFoundError
from scaled_mm.measure import record

PARSER = argparse.ArgumentParser()
bench.add_arguments(PARSER)


def parse(*words: str) -> argparse.Namespace:
    return PARSER.parse_args(list(words))


@pytest.mark.parametrize(
    "words",
    [
        ["--shapes", "1x64x64", "--no-check", "--overhead", "--seed", "3", "--out", "a folder", "--check-limit", "2.0"],
        ["gguf", "--formats", "q4_0", "--sweep", "--no-check", "--seed", "3", "--out", "a folder", "--llama", "a program"],
        ["rows", "--shapes", "1x64x64", "--only", "a,b", "--seed", "3", "--out", "a folder"],
    ],
)
def test_the_recorded_command_gives_the_same_arguments(words):
    import shlex

    args = parse(*words)
    line = frame.command_line(args, args.parser)
    assert line.startswith("scaled-mm bench ")
    assert parse(*shlex.split(line)[2:]) == args


def test_options_of_the_program_are_not_taken_for_the_commands():
    args = parse("--json")
    args.command = "bench"
    assert frame.command_line(args, args.parser) == "scaled-mm bench int8 --json"


def test_bench_on_a_cpu_writes_a_report_with_equal_bits(tmp_path, capsys):
    words = [
        "--device",
        "cpu",
        "--shapes",
        "3x64x96,17x64x96",
        "--budget-ms",
        "2",
        "--overhead",
        "--seed",
        "1",
        "--json",
    ]
    assert bench.run(parse(*words, "--out", str(tmp_path))) == frame.OK
    printed = json.loads(capsys.readouterr().out)
    document = Int8Document.load(tmp_path)
    assert printed == document.model_dump(mode="json")
    assert [(case.M, case.check) for case in document.cases] == [(3, "checked"), (17, "checked")]
    for case in document.cases:
        assert set(case.results) == {"ours", "bf16", "fp32", "intmm_epilogue"}
        assert all(result.failed is None for result in case.results.values())
        assert case.results["ours"].bit_equal is True
    assert {"ours: desc.calculate", "ours: scaled_mm", "bf16"} <= {one.name for one in document.overhead}
    assert "64x96" in (tmp_path / "bench.md").read_text()


def test_bench_without_json_prints_a_table(tmp_path, capsys):
    words = ["--device", "cpu", "--shapes", "2x64x64", "--budget-ms", "1", "--peers", "none", "--out", str(tmp_path)]
    assert bench.run(parse(*words)) == frame.OK
    shown = capsys.readouterr().out
    assert "microseconds per call" in shown and "64x64" in shown and "equal" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shapes", "nonsense"], "nonsense"),
        (["--shapes", ""], "--shapes: "),
        (["--m", "0"], "--m: M must be a positive integer"),
        (["--m", "a"], "--m: M must be a positive integer or a range like 1-64, got 'a'"),
        (["--m", "9-3"], "--m: M: expected a range from a number to one not below it, of at most 4096, got '9-3'"),
        (["--peers", "vllm"], "unknown peer 'vllm' on cpu"),
        (["--device", "toaster"], "--device: expected cuda, cuda:<index> or cpu, got 'toaster'"),
        (["--device", "meta"], "expected cuda"),
        (["--kernel", "foo"], "--kernel: rows of a tile table are kernels for a GPU"),
        (["--vllm-lib", "/nope"], "--vllm-lib: expected the path of a library, got /nope"),
        (["--sgl-lib", "/nope"], "--sgl-lib: expected the path of a library, got /nope"),
    ],
)
def test_arguments_that_make_no_sense_end_with_status_two(words, message, capsys):
    assert bench.run(parse("--device", "cpu", *words)) == frame.USAGE
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == "" and len(printed.err.splitlines()) == 1


def test_the_row_to_force_on_a_gpu_is_looked_up_before_anything_is_timed(monkeypatch):
    monkeypatch.setattr(ours, "our_handle", lambda device: argparse.Namespace(arch="sm90"))
    gpu = torch.device("cuda:0")
    int8.check_names(parse("--kernel", "generic_64x64x64"), gpu)
    for name in ("foo", "all", "generic_64x64x64,generic_64x64x64"):
        with pytest.raises(KernelNotFoundError, match="--kernel: expected one of decode_.*, c3x_.*, got "):
            int8.check_names(parse("--kernel", name), gpu)


@pytest.mark.parametrize(
    ("option", "values"),
    [("--budget-ms", ["0", "-1", "nan", "inf", "x"]), ("--check-limit", ["-1", "nan", "x"]), ("--seed", ["-1", "x", str(2**64)])],
)
def test_numbers_out_of_range_are_refused_with_the_option_and_what_came(option, values, capsys):
    for value in values:
        with pytest.raises(SystemExit) as caught:
            main(["bench", f"{option}={value}"])
        assert caught.value.code == frame.USAGE
        assert f"argument {option}: expected a" in (printed := capsys.readouterr().err) and repr(value) in printed


def test_an_out_that_cannot_be_written_to_is_refused_before_anything_is_timed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(peers.Ours, "prepare", lambda self, inputs: pytest.fail("timed"))
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert main(["bench", "--device", "cpu", "--shapes", "1x64x64", "--out", str(out)]) == frame.USAGE
        assert f"--out: expected a folder that can be written to, got {out}" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:No artists with labels")
def test_a_run_in_which_ours_fails_says_why(tmp_path, capsys, monkeypatch):
    def fail(self, inputs):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(peers.Ours, "prepare", fail)
    words = ["--device", "cpu", "--shapes", "1x64x64", "--peers", "none", "--out", str(tmp_path)]
    assert bench.run(parse(*words)) == frame.FAILED
    assert "64x64 M=1: RuntimeError: no such thing" in capsys.readouterr().out


def test_render_draws_an_existing_report_again(tmp_path, capsys):
    cases = [case_record("8B_o", 1, 4096, 4096, ours=measured(8.0, bit_equal=True), vllm=measured(9.0))]
    document(cases).save(tmp_path)
    assert bench.run(parse("--render", str(tmp_path))) == frame.OK
    assert "1.12x" in (tmp_path / "bench.md").read_text()
    assert bench.run(parse("--render", str(tmp_path / "missing"))) == frame.USAGE
    assert "missing" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_one_line_and_status_two(tmp_path, capsys):
    cases = [case_record("8B_o", 1, 4096, 4096, ours=measured(8.0, bit_equal=True), vllm=measured(9.0))]
    document(cases).save(tmp_path)
    (tmp_path / "bench.md").mkdir()
    for words in (["report", str(tmp_path)], ["bench", "--render", str(tmp_path)]):
        assert main(words) == frame.USAGE
        printed = capsys.readouterr()
        assert "bench.md" in printed.err and len(printed.err.splitlines()) == 1 and printed.out == ""
    assert not list(tmp_path.glob("*.tmp"))


def test_a_folder_without_write_permission_is_one_line_and_status_two(tmp_path, capsys, monkeypatch):
    cases = [case_record("8B_o", 1, 4096, 4096, ours=measured(8.0, bit_equal=True), vllm=measured(9.0))]
    document(cases).save(tmp_path)

    def refused(dir, **_):  # by the system, unless root asks
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr(record.tempfile, "mkstemp", refused)
    assert main(["report", str(tmp_path)]) == frame.USAGE
    assert capsys.readouterr().err == f"scaled-mm report: [Errno 13] Permission denied: '{tmp_path}'\n"


@pytest.mark.parametrize("name", ["bench.json", "autotune.json"])
def test_a_run_that_is_not_utf_8_is_refused_by_name_with_status_two(tmp_path, capsys, name):
    (tmp_path / name).write_bytes(b'{"command": "\xff"}')
    for words in [["report", str(tmp_path)]] + [["bench", "--render", str(tmp_path)]] * (name == "bench.json"):
        assert main(words) == frame.USAGE
        assert f"{tmp_path / name}: " in capsys.readouterr().err


def test_a_record_is_utf_8_whatever_the_locale(tmp_path, monkeypatch):
    made = document([])
    made.command = "scaled-mm bench --out größer"
    with monkeypatch.context() as context:
        context.setattr(record.os, "fdopen", lambda handle, mode, encoding="ascii": open(handle, mode, encoding=encoding))
        made.save(tmp_path)
    assert Int8Document.load(tmp_path).command == made.command


@pytest.mark.parametrize(
    ("words", "suite"),
    [
        (["--block"], "gguf"),
        (["--device", "cpu", "--formats", "q4_0", "--block", "--json"], "gguf"),
        (["--rows"], "rows [--only NAMES]"),
        (["--shapes", "16x4096x4096", "--rows", "a,b", "--device", "cpu"], "rows [--only NAMES]"),
    ],
)
def test_an_option_that_is_a_suite_now_is_refused_in_a_line_that_names_the_suite(words, suite, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["bench", *words])
    printed = capsys.readouterr()
    assert caught.value.code == frame.USAGE and printed.out == ""
    [option] = {"--block", "--rows"} & set(words)
    assert printed.err == f"scaled-mm bench: {option}: expected `scaled-mm bench {suite}` in its place\n"


@pytest.mark.parametrize(
    "words",
    [
        *(["gguf", *more] for more in (["--overhead"], ["--vllm-lib", "x"], ["--check-limit", "1"], ["--render", "x"], ["--only", "x"], ["--rows"])),
        *(["rows", *more] for more in (["--kernel", "x"], ["--data", "gauss"], ["--overhead"], ["--no-check"], ["--sweep"], ["--render", "x"])),
        *([*suite, *more] for suite in ([], ["int8"]) for more in (["--formats", "q4_0"], ["--sweep"], ["--llama", "x"], ["--only", "x"])),
    ],
)
def test_a_suite_has_its_own_options_alone(words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["bench", *words])
    assert caught.value.code == frame.USAGE
    assert "error: unrecognized arguments: --" in capsys.readouterr().err


def test_int8_is_the_suite_that_is_meant_when_none_is_named(capsys):
    assert bench.with_suite([]) == ["int8"] and bench.with_suite(["--json"]) == ["int8", "--json"]
    assert bench.with_suite(["gguf", "--json"]) == ["gguf", "--json"] and bench.with_suite(["--help"]) == ["--help"]
    assert parse("--seed", "3").suite == parse("int8", "--seed", "3").suite == "int8"
    with pytest.raises(SystemExit) as caught:
        main(["bench", "--help"])
    shown = capsys.readouterr().out
    named = {line.split()[0] for line in shown.splitlines() if line.startswith("    ")}
    assert caught.value.code == 0 and named.issuperset(bench.SUITES)
