"""`scaled-mm bench path` end to end on a CPU."""

import argparse
import json
import os
import shlex

import pytest
from path_bench_data import FakeVllm, document, register

from scaled_mm.bench.path import peers, rows
from scaled_mm.bench.path.record import PathDocument
from scaled_mm.cli import bench, main
from scaled_mm.cli.bench import frame

PARSER = argparse.ArgumentParser()
bench.add_arguments(PARSER)
SMALL = ["path", "--device", "cpu", "--budget-ms", "0.5", "--seed", "1"]
TINY = [*SMALL, "--shapes", "3x64x96", "--random", "1", "--sizes", "3x64"]


def parse(*words: str) -> argparse.Namespace:
    return PARSER.parse_args(list(words))


def test_the_recorded_command_gives_the_same_arguments():
    words = [*TINY, "--operators", "silu_and_mul,quantize_int8", "--overhead", "--check-limit", "2.0", "--out", "a folder", "--no-check"]
    args = parse(*words)
    line = frame.command_line(args, args.parser)
    assert line.startswith("scaled-mm bench path ") and parse(*shlex.split(line)[2:]) == args


def test_path_on_a_cpu_writes_a_report_with_equal_bits(tmp_path, capsys):
    assert bench.run(parse(*TINY, "--json", "--out", str(tmp_path))) == frame.OK
    printed = json.loads(capsys.readouterr().out)
    made = PathDocument.load(tmp_path)
    assert printed == made.model_dump(mode="json") and made.settings.seed == 1
    assert [case.part for case in made.cases] == ["layer", "random", "random", *rows.OPERATORS]
    assert all(result.failed is None for case in made.cases for result in case.results.values())
    assert all(case.results["ours"].bit_equal is True and case.check == "checked" for case in made.cases)
    text = (tmp_path / "path.md").read_text()
    assert f"`{made.command}`" in text and "### random layers" in text and "### add_rms_norm_quantize" in text


def test_the_tables_and_the_goals_are_printed(tmp_path, capsys, monkeypatch):
    library = register(lacking="rms_norm_dynamic_per_token_quant")
    monkeypatch.setattr(peers, "every_peer", lambda vllm_lib=None: [peers.Apart(), peers.Torch(), FakeVllm(vllm_lib)])
    try:
        assert bench.run(parse(*TINY, "--random", "0", "--out", str(tmp_path))) == frame.OK
    finally:
        library._destroy()
    shown = capsys.readouterr().out
    assert "linear layers, microseconds per call" in shown and "row-wise operators, microseconds per call" in shown and "over vllm" in shown
    assert "not run: vllm on rms_norm_quantize: torch.ops.fake_vllm has no rms_norm_dynamic_per_token_quant" in " ".join(shown.split())
    made = PathDocument.load(tmp_path)
    assert [one.part for one in made.lacking] == ["rms_norm_quantize", "add_rms_norm_quantize"]
    assert {case.part for case in made.cases if "vllm" in case.results} == {
        "layer",
        "quantize_int8",
        "quantize_int8_static",
        "add_rms_norm",
        "silu_and_mul",
    }
    assert all(result.failed is None for case in made.cases for result in case.results.values())


@pytest.mark.filterwarnings("ignore:No artists with labels")
@pytest.mark.parametrize("part", ["--shapes", "--operators"])
def test_wrong_bits_fail_the_command(part, tmp_path, capsys, monkeypatch):
    class Wrong(peers.Ours):
        def prepare(self, inputs):
            calls = inputs.ours(self.name)

            def run(i):
                results = calls[i]()
                results[0].view(-1)[0] += 1
                return results

            return inputs.keep(self.name, run)

    monkeypatch.setattr(peers, "Ours", Wrong)
    none = ["--operators", "none"] if part == "--shapes" else ["--shapes", "none"]
    words = [*TINY, "--random", "0", "--peers", "none", *none, "--out", str(tmp_path)]
    assert bench.run(parse(*words)) == frame.FAILED
    assert "wrong bits" in capsys.readouterr().out and "WRONG" in (tmp_path / "path.md").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shapes", "nonsense"], "--shapes: unknown shape 'nonsense'"),
        (["--m", "0"], "--m: M must be a positive integer"),
        (["--operators", "gelu"], "--operators: expected all, none, or some of quantize_int8, "),
        (["--sizes", "4096"], "--sizes: expected MxK with positive integers, got '4096'"),
        (["--shapes", "none", "--random", "0", "--operators", "none"], "expected something to time"),
        (["--peers", "vllm"], "unknown peer 'vllm' on cpu"),
        (["--vllm-lib", "/nope"], "--vllm-lib: expected the path of a library, got /nope"),
    ],
)
def test_arguments_that_make_no_sense_end_with_status_two(words, message, capsys):
    assert bench.run(parse(*SMALL, *words)) == frame.USAGE
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == "" and len(printed.err.splitlines()) == 1


@pytest.mark.parametrize(
    "words", [["--kernel", "x"], ["--sgl-lib", "x"], ["--formats", "q4_0"], ["--only", "x"], ["--random", "-1"], ["--random", "x"]]
)
def test_other_options_and_numbers_are_refused(words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["bench", "path", *words])
    assert caught.value.code == frame.USAGE and words[0] in capsys.readouterr().err


def test_an_existing_report_is_rendered_and_compared_again(tmp_path, capsys):
    document().save(tmp_path)
    assert bench.run(parse("path", "--render", str(tmp_path))) == frame.OK
    assert "0.90x at 8B_qkv M=512" in (tmp_path / "path.md").read_text()
    (tmp_path / "path.md").unlink()
    assert main(["report", str(tmp_path)]) == 0 and (tmp_path / "path.md").is_file()
    capsys.readouterr()
    assert main(["report", str(tmp_path), "--compare", str(tmp_path)]) == 0
    assert "1.000x as fast" in (shown := capsys.readouterr().out) and "7 products" in shown
    assert bench.run(parse("path", "--render", str(tmp_path / "missing"))) == frame.USAGE
    assert "missing" in capsys.readouterr().err


def test_every_suite_waits_for_the_kernels_that_it_times(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALED_MM_JIT", "background")
    seen = []
    monkeypatch.setattr(frame, "usage", lambda args, message: seen.append(os.environ["SCALED_MM_JIT"]) or frame.USAGE)
    for suite in bench.SUITES:
        refused = ("--device", "cpu", "--m", "0")
        if suite == "random":  # random products have an M of their own, and are for a GPU
            refused = ("--device", "cpu")
        elif suite == "parallel":
            refused = ("--simulate", "--tokens", "0")
        assert bench.run(parse(suite, *refused)) == frame.USAGE
    assert seen == ["wait"] * len(bench.SUITES)
