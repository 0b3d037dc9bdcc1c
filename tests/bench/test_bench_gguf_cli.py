"""`scaled-mm bench gguf` end to end on a CPU."""

import argparse
import json
import re

import pytest
import torch
from bench_data import CPU
from gguf_bench_data import PERF_LINES, Broken, write_program

import scaled_mm as sm
from scaled_mm.bench import ours
from scaled_mm.bench.gguf import analysis, cases, peers
from scaled_mm.bench.gguf.cases import CPU_TOKENS, SWEEP
from scaled_mm.bench.gguf.record import GgufDocument
from scaled_mm.cli import bench, main
from scaled_mm.cli.bench import frame
from scaled_mm.cli.bench import gguf as bench_gguf
from scaled_mm.gguf_formats import WEIGHT_FORMATS


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(list(words))


def test_the_command_writes_a_report_and_prints_its_json(tmp_path, capsys):
    program = write_program(tmp_path / "test-backend-ops", PERF_LINES.replace("m=16,n=1,k=256", "m=64,n=3,k=96"))
    out = tmp_path / "out"
    words = ["gguf", "--device", "cpu", "--shapes", "64x96", "--formats", "q4_1,q4_0", "--m", "1-3", "--budget-ms", "1", "--seed", "1"]
    assert bench.run(parse(*words, "--llama", str(program), "--out", str(out), "--json")) == frame.OK
    printed = capsys.readouterr()
    document = GgufDocument.load(out)
    assert json.loads(printed.out) == document.model_dump(mode="json")
    assert [(case.fmt, case.M, case.llama_us) for case in document.cases] == [
        ("q4_1", 1, None),
        ("q4_1", 2, None),
        ("q4_1", 3, 4.03),
        ("q4_0", 1, None),
        ("q4_0", 2, None),
        ("q4_0", 3, None),
    ]
    assert document.llama.status == "measured" and document.command.startswith("scaled-mm bench gguf ") and "--formats q4_1,q4_0" in document.command
    assert "onotone within 5%" in printed.err and "6 of 6 checked cases" in printed.err
    text = (out / "bench_gguf.md").read_text()
    assert "### q4_1 64x96: N=64, K=96" in text and "4.03" in text and (out / "bench_gguf.html").is_file()


def test_the_sweep_is_tokens_from_1_to_64_and_what_m_names_besides():
    tokens = [case.M for case in bench_gguf.wanted_cases(parse("gguf", "--sweep", "--formats", "q4_0"), CPU, 0)]
    assert tokens == list(SWEEP) == list(range(1, 65))
    assert tokens == [case.M for case in bench_gguf.wanted_cases(parse("gguf", "--m", "1-64", "--formats", "q4_0"), CPU, 0)]
    more = [case.M for case in bench_gguf.wanted_cases(parse("gguf", "--sweep", "--m", "512,16", "--formats", "q4_0"), CPU, 0)]
    assert more == [*range(1, 65), 512]
    default = bench_gguf.wanted_cases(parse("gguf"), CPU, 0)
    assert {case.fmt for case in default} == set(WEIGHT_FORMATS) and {case.M for case in default} == set(CPU_TOKENS)
    on_gpu = bench_gguf.wanted_cases(parse("gguf"), torch.device("cuda"), 0)
    drawn = bench_gguf.wanted_cases(parse("gguf", "--shapes", "none", "--random", "2", "--formats", "q4_0,q5_1"), CPU, 7)
    assert drawn == cases.random_cases(("q4_0", "q5_1"), 2, 7)
    assert {case.shape for case in on_gpu} == {"28672x8192", "4096x14336", "4096x4096"} and max(case.M for case in on_gpu) == 4096


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gguf", "--formats", "q8_1"], "--formats: expected all, or some of q4_0"),
        (["gguf", "--shapes", "64x100"], "--shapes: expected K to be a multiple of 32, got 100"),
        (["gguf", "--shapes", "none"], "--shapes, --random: expected something to time, got none and 0"),
        (["gguf", "--m", "0"], "--m: M must be a positive integer"),
        (["gguf", "--peers", "vllm"], "unknown peer 'vllm' on cpu: expected all, none, or some of ours_bf16"),
        (["gguf", "--kernel", "foo"], "--kernel: rows of a tile table are kernels for a GPU"),
        (["gguf", "--llama", "/nope"], "--llama: expected the path of llama.cpp's test-backend-ops, got /nope"),
    ],
)
def test_arguments_that_make_no_sense_end_with_status_two(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", words[0], "--device", "cpu", *words[1:]]) == frame.USAGE
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == "" and len(printed.err.splitlines()) == 1


@pytest.mark.filterwarnings("ignore:No artists with labels")
def test_a_wrong_or_failed_product_of_ours_ends_with_status_one(tmp_path, capsys, monkeypatch):
    words = ["bench", "gguf", "--device", "cpu", "--shapes", "1x64x96", "--formats", "q4_0", "--budget-ms", "1", "--out", str(tmp_path)]
    for fault, said in (("value", "not within the bound"), ("raise", "at 1 token: ours: RuntimeError: the launch failed")):
        monkeypatch.setattr(peers, "every_peer", lambda kernel=None, fault=fault: [Broken(fault, 0)])
        assert main(words) == frame.FAILED
        assert said in capsys.readouterr().out


def test_the_help_names_every_peer(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "gguf", "--help"])
    [shown] = [text for text in capsys.readouterr().out.split("\n  --") if text.startswith("peers")]
    assert set(re.findall(r"\w+", shown)) >= {peer.name for peer in peers.every_peer()[1:]}


def test_a_row_to_force_is_looked_up_in_the_section_of_gguf_products(monkeypatch):
    from scaled_mm.jit.dispatch import callable_table

    monkeypatch.setattr(ours, "our_handle", lambda device: argparse.Namespace(arch="sm90"))
    gpu, row = torch.device("cuda:0"), callable_table("sm90").gguf.rows[0].name
    chosen = bench_gguf.wanted_peers(parse("gguf", "--kernel", row), gpu)
    assert [peer.name for peer in chosen] == [*analysis.OURS_ALL, peers.BF16]  # and none of a CPU's
    with pytest.raises(sm.errors.KernelNotFoundError, match=f"--kernel: expected one of {row}, .*, got 'generic_64x64x64'"):
        bench_gguf.wanted_peers(parse("gguf", "--kernel", "generic_64x64x64"), gpu)


@pytest.mark.gpu
def test_the_command_runs_on_a_gpu_and_forces_a_row(tmp_path):
    from scaled_mm.bench.ours import our_handle
    from scaled_mm.jit.dispatch import callable_table

    row = callable_table(our_handle(torch.device("cuda", 0)).arch).gguf.fallback
    words = [
        "--shapes",
        "256x512",
        "--formats",
        "q4_0",
        "--m",
        "1,2",
        "--budget-ms",
        "5",
        "--kernel",
        row,
        "--peers",
        "ours_f32,ours_q8_1",
        "--out",
        str(tmp_path),
    ]
    assert main(["bench", "gguf", "--device", "cuda:0", *words]) == frame.OK
    assert {result.kernel for case in GgufDocument.load(tmp_path).cases for result in case.results.values()} == {row}
    with pytest.raises(sm.errors.KernelNotFoundError, match="--kernel: expected one of "):
        bench_gguf.wanted_peers(parse("gguf", "--kernel", "foo"), torch.device("cuda:0"))
