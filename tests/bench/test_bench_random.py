"""The table's choice of kernel on random products: which products, the report, the command."""

import argparse
import json
import math

import pytest
from bench_data import environment
from test_bench_rows import make_row

from scaled_mm.bench import ours
from scaled_mm.bench.rows import choice
from scaled_mm.cli import main
from scaled_mm.cli.bench import frame
from scaled_mm.measure import shapes


def entry(m: int, n: int, k: int, best: float, dispatched: float) -> dict:
    return {"shape": f"{n}x{k}", "M": m, "N": n, "K": k, "dispatched": "b", "rows": {"a": best, "b": dispatched}, "failed": {}}


def test_random_products_follow_from_the_seed_and_cover_what_they_promise():
    cases = shapes.random_cases(500, 7)
    assert cases == shapes.random_cases(500, 7) and cases[:100] == shapes.random_cases(100, 7) and cases != shapes.random_cases(500, 8)
    assert len(set(cases)) == 500
    for i, case in enumerate(cases):
        assert 1 <= case.M <= 8192 and case.N * case.K < 10**9 and min(case.N, case.K) >= 512 - 24 and max(case.N, case.K) <= 65536 + 24
        odd = [size for size in (case.N, case.K) if size % 64]
        assert len(odd) == (i % 5 == 4) and all(size % 16 == 8 for size in odd)
    logs = [math.log(case.M) for case in cases]
    assert abs(sum(logs) / len(logs) - math.log(8192) / 2) < 0.4  # log-uniform: the mean of the logarithm is in the middle


def test_the_summary_is_by_band_and_names_the_worst_product():
    entries = [entry(1, 512, 512, 2.0, 2.02), entry(16, 1024, 512, 1.0, 1.2), entry(600, 512, 512, 4.0, 4.0), entry(5, 520, 512, 1.0, 3.0)]
    lines = {line[0]: line[1:] for line in choice.summary(entries)}
    assert lines["all"] == ["4", f"{(1.01 * 1.2 * 3) ** 0.25:.3f}", "3.00", "520x512 M=5", "50%", "50%"]
    assert lines["M of 1 to 16, aligned"] == ["2", f"{(1.01 * 1.2) ** 0.5:.3f}", "1.20", "1024x512 M=16", "50%", "50%"]
    assert lines["M of 513 to 8192, aligned"][2] == "1.00" and lines["N or K not a multiple of 16"][2] == "3.00"
    assert lines["M of 17 to 128, aligned"] == ["0", "", "", "", "", ""]
    assert choice.ratio(entries[0] | {"dispatched": "failed one"}) is None


def test_speeds_over_peers_are_by_band_and_count_the_slower_products():
    entries = [entry(1, 512, 512, 2.0, 2.0), entry(16, 1024, 512, 1.0, 4.0), entry(600, 512, 512, 4.0, 4.0), entry(700, 512, 512, 4.0, 4.0)]
    for one, vllm in zip(entries, (3.0, 2.0, 4.4), strict=False):  # the last was not timed
        one["peers"] = {"vllm": vllm}
    entries[0]["peers"]["fp8row"] = 1.0
    lines = {tuple(line[:2]): line[2:] for line in choice.speeds(entries)}
    assert lines["all", "vllm"] == ["3", f"{(1.5 * 0.5 * 1.1) ** (1 / 3):.3f}", "0.50", "1024x512 M=16", "1"]
    assert lines["M of 1 to 16", "vllm"][:1] == ["2"] and lines["M of 513 to 4096", "vllm"] == ["1", "1.100", "1.10", "512x512 M=600", "0"]
    assert lines["all", "fp8row"] == ["1", "0.500", "0.50", "512x512 M=1", "1"] and ("M of 17 to 128", "vllm") not in lines
    assert not choice.speeds([entry(1, 512, 512, 2.0, 2.0)])


def test_the_report_has_the_largest_loss_first(tmp_path):
    entries = [entry(1, 512, 512, 2.0, 2.0), entry(16, 1024, 512, 1.0, 1.2)]
    path = choice.save(entries, tmp_path, environment(), "scaled-mm bench random --seed 3")
    assert json.loads(path.read_text()) == entries
    text = (tmp_path / "random.md").read_text()
    assert text.index("| 1024x512 | 16 | a | 1.00 | b | 1.20 | 20.0% | 0 |") < text.index("| 512x512 | 1 |")
    assert "`scaled-mm bench random --seed 3`" in text


def test_the_report_of_dispatched_rows_alone_has_no_choice(tmp_path):
    entries = [{**entry(1, 512, 512, 2.0, 2.0), "rows": {"b": 2.0}, "dispatched": "b", "peers": {"vllm": 3.0}}]
    assert choice.ratio(entries[0]) is None and not choice.has_choice(entries)
    choice.save(entries, tmp_path, environment(), "scaled-mm bench random --only dispatched")
    text = (tmp_path / "random.md").read_text()
    assert text.startswith("# Random products") and "within 3 %" not in text and "| all | vllm | 1 | 1.500 |" in text


def test_the_command_writes_the_seed_that_it_drew(tmp_path, capsys, monkeypatch):
    from scaled_mm.bench.rows import suite

    monkeypatch.setattr(suite.RowsSuite.__init__, "__defaults__", (make_row,))
    monkeypatch.setattr(suite.row_peers, "__defaults__", (make_row,))
    monkeypatch.setattr(ours, "refuse_cpu", lambda option, device: None)
    monkeypatch.setattr(ours, "table_of", lambda device: argparse.Namespace(fallback="slow"))
    monkeypatch.setattr(suite, "row_names", lambda text, device: text.split(","))
    monkeypatch.setattr(shapes, "RANDOM_M", (1, 4))
    monkeypatch.setattr(shapes, "RANDOM_NK", (64, 256))
    words = ["bench", "random", "--device", "cpu", "--count", "3", "--budget-ms", "1", "--out", str(tmp_path), "--json", "--only", "first"]
    assert main(words) == frame.OK
    entries = json.loads(capsys.readouterr().out)
    assert len(entries) == 3 and json.loads((tmp_path / "random.json").read_text()) == entries
    command = (tmp_path / "random.md").read_text().split("`")[1]
    seed = int(command.split("--seed ")[1].split()[0])
    drawn = [(c.M, c.N, c.K) for c in shapes.random_cases(3, seed)]
    assert sorted((e["M"], e["N"], e["K"]) for e in entries) == sorted(drawn)  # products of one weight are timed together


def test_random_products_are_for_a_gpu(capsys):
    assert main(["bench", "random", "--device", "cpu"]) == frame.USAGE
    assert "rows of a tile table are kernels for a GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "random", "--count", "0"])
