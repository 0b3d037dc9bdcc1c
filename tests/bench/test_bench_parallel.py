"""`scaled-mm bench parallel` end to end: the simulation, and the measurement with two processes on a CPU; what it refuses."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from scaled_mm.bench.parallel import report, suite
from scaled_mm.bench.parallel.cases import DECODERS, LINEAR
from scaled_mm.bench.parallel.record import STATIC, ParallelDocument
from scaled_mm.cli import bench, main
from scaled_mm.cli.bench import frame
from scaled_mm.parallel import cost

PARSER = argparse.ArgumentParser()
bench.add_arguments(PARSER)
SMALL = ["parallel", "--simulate", "--ranks", "2,8", "--tokens", "1,8192"]


def parse(*words: str) -> argparse.Namespace:
    return PARSER.parse_args(list(words))


def test_the_recorded_command_gives_the_same_arguments():
    args = parse(*SMALL, "--gpu", "NVIDIA L40S", "--link", "pcie5", "--gpus-per-node", "4")
    line = frame.command_line(args, args.parser)
    assert line.startswith("scaled-mm bench parallel ") and parse(*shlex.split(line)[2:]) == args


def test_a_simulation_writes_a_report_that_says_so_first(tmp_path, capsys):
    assert bench.run(parse(*SMALL, "--out", str(tmp_path))) == frame.OK
    assert "Nothing was measured" in capsys.readouterr().out
    made = ParallelDocument.load(tmp_path)
    assert made.settings.simulated and not made.cases and not made.implementations
    assert [(one.shape, one.ranks, one.M) for one in made.linear] == [(name, ranks, m) for name in LINEAR for ranks in (2, 8) for m in (1, 8192)]
    assert all(set(one.ways) == {*cost.WAYS, *STATIC} == set(report.WAYS) for one in made.linear)
    lines = (tmp_path / report.PARALLEL_MD).read_text().splitlines()
    assert lines[0].startswith("# Several GPUs, simulated") and lines[2].startswith("**Nothing was measured.**") and f"`{made.command}`" in lines
    assert main(["report", str(tmp_path)]) == 0 and (tmp_path / report.PARALLEL_MD).read_text().splitlines() == lines
    assert bench.run(parse("parallel", "--render", str(tmp_path))) == frame.OK


def test_the_record_holds_what_the_model_says(tmp_path, capsys):
    assert bench.run(parse(*SMALL, "--json", "--out", str(tmp_path))) == frame.OK
    document = json.loads(capsys.readouterr().out)
    assert document["settings"] == {"simulated": True, "gpu": "NVIDIA H200", "link": "nvlink4", "network": "400 Gb/s", "gpus_per_node": 8}
    one = next(one for one in ParallelDocument.load(tmp_path).linear if (one.shape, one.ranks, one.M) == ("70B_down", 8, 8192))
    assert one.single_us == pytest.approx(cost.predict(8192, 8192, 28672, 1).us, abs=0.01)
    for name, way in one.ways.items():
        options = dict(way=STATIC.get(name, name), static=name in STATIC)
        chunks = cost.best_chunks(8192, 8192, 28672, 8, **options)
        assert (way.chunks, way.us) == (chunks, pytest.approx(cost.predict(8192, 8192, 28672, 8, chunks=chunks, **options).us, abs=0.01))
        assert sum(way.parts.values()) - way.hidden == pytest.approx(way.us, abs=0.1) and way.us <= way.plain_us
        assert way.sent == round(cost.sent_bytes(8192, 8192, 8, **options, k=28672))


def test_a_simulation_of_before_the_ways_that_gather_still_renders(tmp_path, capsys):
    assert bench.run(parse(*SMALL, "--out", str(tmp_path))) == frame.OK
    path = tmp_path / "parallel.json"
    document = json.loads(path.read_text())
    for layer in document["linear"]:
        layer["ways"] = {name: way for name, way in layer["ways"].items() if "gather" not in name}
    for layer in document["decoders"]:
        layer["us"] = {name: us for name, us in layer["us"].items() if "gather" not in name}
    path.write_text(json.dumps(document))
    assert bench.run(parse("parallel", "--render", str(tmp_path))) == frame.OK
    text = (tmp_path / report.PARALLEL_MD).read_text()
    assert "`exact_int8`" in text and "gather_int8" not in text


def test_a_decoder_layer_is_the_sum_of_its_linear_layers():
    layers = suite.linear([64], [4], "NVIDIA H200", cost.hosts_of("NVIDIA H200"))
    facts = cost.facts_of("NVIDIA H200")
    for one in suite.decoders(layers, "NVIDIA H200"):
        columns, rows = DECODERS[one.model]
        expected = sum(layer.ways["bf16"].us for layer in layers if layer.shape in rows)
        expected += sum(cost.product_us(64, n // 4, k, facts) for n, k in columns)
        assert one.us["bf16"] == pytest.approx(expected, abs=0.01) and one.single_us > one.us["bf16"] > 0


def test_ranks_that_do_not_divide_the_experts_have_none():
    assert suite.experts([1], [3], cost.hosts_of("NVIDIA H200")) == []


@pytest.mark.parametrize(
    "words, message",
    [
        (["parallel"], "--simulate: expected this option, or to run under torchrun: torchrun --nproc-per-node N -m scaled_mm bench parallel"),
        ([*SMALL, "--experts", "tiny"], "--experts: expected none with --simulate, got tiny"),
        ([*SMALL, "--gpu", "H200"], "--gpu: expected one of NVIDIA H200, "),
        ([*SMALL, "--link", "wire"], "--link: expected one of nvlink4, nvlink3, pcie5, pcie4, got 'wire'"),
        ([*SMALL, "--tokens", "0"], "--tokens: M must be a positive integer"),
        (["parallel", "--simulate", "--ranks", "1"], "--ranks: expected integers from 2 to 4096, got '1'"),
        (["parallel", "--simulate", "--ranks", ","], "--ranks: expected at least one number of GPUs, got an empty list"),
        (["parallel", "--simulate", "--ranks", "12"], "--ranks: ranks: expected at most 8 (gpus_per_node) or a multiple of it, got 12"),
    ],
)
def test_what_cannot_be_simulated_is_a_usage_error(words, message, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert bench.run(parse(*words)) == frame.USAGE
    assert message in capsys.readouterr().err


def test_two_processes_measure_every_way_and_write_a_report(tmp_path):
    """The processes of torchrun, on a CPU. --tokens has no name that torchrun would take for one of its own."""
    options = ["--shapes", "tiny", "--experts", "tiny", "--tokens", "3,256", "--out", str(tmp_path)]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "scaled_mm",
        "bench",
        "parallel",
        *options,
    ]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and done.stdout.count("256 tokens ...") == 2, done.stderr[-2000:]
    made = ParallelDocument.load(tmp_path)
    assert not made.settings.simulated and made.command.startswith("torchrun --nproc-per-node 2 -m scaled_mm bench parallel --shapes tiny")
    assert [(one.shape, one.M) for one in made.measured] == [(name, m) for name in ("tiny", "experts of tiny") for m in (3, 256)]
    for layer in made.measured:
        exact = {way.name: way.bit_equal for way in layer.ways if way.bit_equal is not None}
        linear = {"exact", "exact_int8", "exact_all_reduce", "gather", "gather_int8"}
        assert set(exact) == ({"replicated", "all_to_all"} if "experts" in layer.shape else linear)
        assert all(exact.values()) and all(way.us > 0 and len(way.samples) == 15 for way in layer.ways)
    assert {way.chunks for way in made.measured[0].ways} == {1} and {way.chunks for way in made.measured[1].ways} == {1, 2, 4}
    text = (tmp_path / report.PARALLEL_MD).read_text()
    assert text.startswith("# Several GPUs: 2 ranks") and "Nothing was measured" not in text
    assert main(["report", str(tmp_path)]) == 0 and (tmp_path / report.PARALLEL_MD).read_text() == text


@pytest.mark.parametrize("words, message", [(["--shapes", "9B"], "--shapes: expected none or some of 8B_o"), (["--tokens", "x"], "--tokens: ")])
def test_what_cannot_be_measured_is_a_usage_error_before_the_ranks_meet(words, message, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert bench.run(parse("parallel", *words)) == frame.USAGE
    assert message in capsys.readouterr().err
