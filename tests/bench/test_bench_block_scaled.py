"""`scaled-mm bench block-scaled` end to end on a CPU; goals."""

from __future__ import annotations

import argparse
import shlex

import pytest
import torch

from scaled_mm.bench.block_scaled import goals, report
from scaled_mm.bench.block_scaled.record import BlockScaledDocument
from scaled_mm.bench.rows_check import RowsCheck
from scaled_mm.cli import bench, main
from scaled_mm.cli.bench import frame

PARSER = argparse.ArgumentParser()
bench.add_arguments(PARSER)
SMALL = ["block-scaled", "--device", "cpu", "--budget-ms", "0.5", "--seed", "1"]


def parse(*words: str) -> argparse.Namespace:
    return PARSER.parse_args(list(words))


def test_the_recorded_command_gives_the_same_arguments():
    args = parse(*SMALL, "--shapes", "dsv3_o", "--m", "3", "--peers", "none", "--no-check")
    line = frame.command_line(args, args.parser)
    assert line.startswith("scaled-mm bench block-scaled ") and parse(*shlex.split(line)[2:]) == args


def test_products_on_a_cpu_write_a_report_with_equal_bits(tmp_path, capsys):
    assert bench.run(parse(*SMALL, "--shapes", "1x200x300,70x200x300,5x128x64", "--out", str(tmp_path))) == frame.OK
    assert "microseconds per call" in capsys.readouterr().out
    made = BlockScaledDocument.load(tmp_path)
    assert [(case.M, case.N, case.K) for case in made.cases] == [(1, 200, 300), (70, 200, 300), (5, 128, 64)]
    for case in made.cases:
        assert case.results["ours"].bit_equal is True and case.check == f"checked: {min(case.M, 48)} rows"
        assert case.results["bf16"].error < 0.02
    assert made.cases[0].traffic_bytes == 300 + 200 * 300 + 2 * 200 + 4 * 3 * (1 + 2)
    text = (tmp_path / "block_scaled.md").read_text()
    assert f"`{made.command}`" in text and "3 of 3 checked" in text and "### 200x300: N=200, K=300" in text
    assert bench.run(parse("block-scaled", "--render", str(tmp_path))) == frame.OK and (tmp_path / "block_scaled.md").read_text() == text


def test_report_renders_and_compares_runs(tmp_path, capsys):
    assert bench.run(parse(*SMALL, "--shapes", "3x128x128", "--peers", "none", "--out", str(tmp_path))) == frame.OK
    (tmp_path / "block_scaled.md").unlink()
    assert main(["report", str(tmp_path)]) == 0 and (tmp_path / "block_scaled.md").is_file()
    assert main(["report", str(tmp_path), "--compare", str(tmp_path)]) == 0
    assert "block-scaled" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        (["--shapes", "dsv2"], "--shapes: unknown shape 'dsv2'"),
        (["--m", "0"], "--m: M must be a positive integer"),
        (["--peers", "triton"], "unknown peer 'triton' on cpu: expected all, none, or some of bf16"),
        (["--kernel", "x"], "--kernel: rows of a tile table are kernels for a GPU, the device is a CPU"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_by_name(words, message, capsys):
    assert bench.run(parse(*SMALL, *words)) == frame.USAGE
    assert message in capsys.readouterr().err


def test_wrong_bits_fail_and_stand_in_the_report(tmp_path, monkeypatch, capsys):
    once = RowsCheck.once
    monkeypatch.setattr(RowsCheck, "once", lambda *arguments: once(*arguments) | {"bit_equal": False})
    assert bench.run(parse(*SMALL, "--shapes", "3x128x128", "--out", str(tmp_path))) == frame.FAILED
    text = (tmp_path / "block_scaled.md").read_text()
    assert "0 of 1 checked" in text and "**Wrong bits**: 128x128 M=3" in text and "wrong bits" in capsys.readouterr().out


def test_goals_compare_with_triton_the_roof_and_the_memory(tmp_path):
    bench.run(parse(*SMALL, "--shapes", "16x128x128,63x128x128,64x128x128,1024x128x128", "--out", str(tmp_path)))
    made = BlockScaledDocument.load(tmp_path)
    assert goals.outcomes(made) == []  # on a CPU
    made.environment.arch, made.environment.gpu = "sm90", "NVIDIA H200"
    for case, factor, roof in zip(made.cases, (1.2, 1.5, 0.9, 4.5), (0.5, 0.5, 0.5, 0.7)):
        ours = case.results["ours"]
        case.results["triton"] = ours.model_copy(update={"us": ours.us * factor})
        case.roof_us = ours.us * roof
    made.cases[0].traffic_bytes = int(made.cases[0].results["ours"].us * 4e6)
    found = {one.goal.what: one for one in goals.outcomes(made)}
    large, few = found["over Triton, M from 64, mean"], found["over Triton, M below 64, mean"]
    assert large.met is True and large.reached == pytest.approx((0.9 * 4.5) ** 0.5) and large.count == 2
    assert few.met is True and few.reached == pytest.approx((1.2 * 1.5) ** 0.5)
    each = found["over Triton, each"]
    assert each.met is False and each.worst == pytest.approx(0.9) and each.at == "128x128 M=64"
    assert found["of the roof, M from 1024, each"].reached == pytest.approx(0.7)
    assert found["TB/s, M up to 16, each"].reached == pytest.approx(4.0, rel=1e-3) and found["TB/s, M up to 16, each"].count == 1
    assert any("over triton" in str(part) for part in report.contents(made))


def test_the_dequantized_matrices_are_those_of_the_scales():
    from scaled_mm.bench.block_scaled.inputs import BlockScaledInputs, BlockScaledWeights
    from scaled_mm.measure.shapes import Case

    generator = torch.Generator().manual_seed(0)
    case = Case("x", 3, 130, 200)
    weights = BlockScaledWeights(case, torch.device("cpu"), generator, sets=1)
    made = BlockScaledInputs(case, weights, generator)
    for n, k in ((0, 0), (127, 127), (128, 128), (129, 199)):
        expected = weights.int8[0][n, k] * weights.scale[0][n // 128, k // 128]
        assert float(weights.bf16[0][n, k]) == pytest.approx(float(expected), rel=0.01, abs=1e-9)
    assert float(made.a_bf16[2, 199]) == pytest.approx(float(made.a[2, 199] * made.a_scale[2, 1]), rel=0.01, abs=1e-9)
