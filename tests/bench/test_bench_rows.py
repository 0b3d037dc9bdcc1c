"""Every row of a tile table on a product: the loop, `rows.json`, the command."""

import argparse
import json

import pytest
import torch
from bench_data import CPU, SMALL, StandIn, environment

from scaled_mm.bench import ours
from scaled_mm.bench.rows import report as rows
from scaled_mm.bench.rows.suite import RowsSuite, row_names, row_peers
from scaled_mm.cli import main
from scaled_mm.cli.bench import frame
from scaled_mm.errors import KernelNotFoundError
from scaled_mm.measure.run import Options, run_grid

FAST = Options(budget_ms=2, sets=3)


def make_row(kernel, name):
    faults = {"wrong": "bits", "broken": "raise"}
    return StandIn(name if kernel is None else kernel, fault=faults.get(kernel))


def test_every_row_is_timed_and_faulty_rows_are_told_apart():
    [[entry]] = run_grid(RowsSuite("slow", make_row), [SMALL], row_peers(["first", "wrong", "broken", "last"], make_row), CPU, FAST)
    assert set(entry["rows"]) == {"first", "last"}
    assert entry["failed"] == {
        "wrong": "its bits differ from those of first",
        "broken": "RuntimeError: the launch failed",
    }
    assert entry["dispatched"] == "row of dispatched" and entry["fallback"] == "slow"
    assert (entry["M"], entry["N"], entry["K"], entry["shape"]) == (5, 64, 32, "64x32")


def test_peers_that_are_not_rows_stand_apart_and_may_have_other_bits():
    suite = RowsSuite("slow", make_row, others=["wrong"])
    [[entry]] = run_grid(suite, [SMALL], row_peers(["wrong", "first", "last"], make_row), CPU, FAST)
    assert set(entry["rows"]) == {"first", "last"} and set(entry["peers"]) == {"wrong"} and not entry["failed"]


def test_the_dispatched_row_alone_is_timed_under_its_name():
    [[entry]] = run_grid(RowsSuite("slow", make_row), [SMALL], row_peers(["dispatched"], make_row), CPU, FAST)
    assert set(entry["rows"]) == {"row of dispatched"} == {entry["dispatched"]} and not entry["failed"]


def test_the_loss_of_the_dispatched_row_is_against_the_best():
    entry = {"rows": {"x": 2.0, "y": 2.5}, "dispatched": "y", "failed": {}}
    assert rows.best(entry) == ("x", 2.0)
    assert rows.loss(entry) == pytest.approx(0.25)
    assert rows.loss(entry | {"dispatched": "failed one"}) is None
    assert rows.best(entry | {"rows": {}}) is None


def test_the_speed_of_the_fallback_is_by_the_number_of_rows():
    def entry(m, shape, picked, us, fallback_us):
        return {"shape": shape, "M": m, "dispatched": picked, "fallback": "slow", "rows": {picked: us} | {"slow": fallback_us}, "failed": {}}

    entries = [entry(16, "p", "a", 1.0, 2.0), entry(1, "q", "a", 3.0, 4.0), entry(16, "r", "a", 1.0, 8.0), entry(4, "s", "slow", 5.0, 5.0)]
    assert rows.fallback_table(entries) == [["1", "1", "0.75", "0.75", "q"], ["16", "2", "0.25", "0.12", "r"]]
    assert rows.fallback_speed(entries[3]) is None and rows.fallback_speed(entries[0] | {"rows": {"a": 1.0}}) is None


def test_rows_are_saved_as_the_list_that_tables_are_chosen_by(tmp_path):
    entry = {
        "shape": "s",
        "M": 1,
        "N": 2,
        "K": 3,
        "dispatched": "b",
        "fallback": "slow",
        "rows": {"a": 1.0, "b": 1.5, "slow": 6.0},
        "failed": {"c": "E: no"},
    }
    hopeless = entry | {"rows": {}, "dispatched": "c"}
    path = rows.save_rows([entry, hopeless], tmp_path, environment(), "scaled-mm bench rows")
    assert json.loads(path.read_text()) == [entry, hopeless]
    text = (tmp_path / "rows.md").read_text()
    assert "| s | 1 | a | 1.00 | b | 1.50 | 50.0% | 1 |" in text
    assert "## The fallback" in text and "| 1 | 1 | 0.25 | 0.25 | s |" in text
    assert "every row failed" in text and "- `c`: E: no" in text and "`scaled-mm bench rows`" in text


def test_rows_are_named_as_in_the_table_of_the_gpu(monkeypatch):
    monkeypatch.setattr(ours, "our_handle", lambda device: argparse.Namespace(arch="sm90"))
    gpu = torch.device("cuda:0")
    every = row_names("all", gpu)
    assert "generic_64x64x64" in every and row_names(f"{every[1]}, {every[0]},{every[1]}", gpu) == [every[1], every[0]]
    assert row_names("dispatched", gpu) == ["dispatched"]
    with pytest.raises(KernelNotFoundError, match="row 'foo' is not in .*: expected some of "):
        row_names("foo", gpu)


def test_the_command_writes_rows_json_and_fails_where_every_row_failed(tmp_path, capsys, monkeypatch):
    from scaled_mm.bench.rows import suite

    monkeypatch.setattr(suite.RowsSuite.__init__, "__defaults__", (make_row,))
    monkeypatch.setattr(suite.row_peers, "__defaults__", (make_row,))
    monkeypatch.setattr(ours, "refuse_cpu", lambda option, device: None)
    monkeypatch.setattr(ours, "table_of", lambda device: argparse.Namespace(fallback="slow"))
    monkeypatch.setattr(suite, "row_names", lambda text, device: text.split(","))
    words = ["bench", "rows", "--device", "cpu", "--shapes", "5x64x32", "--budget-ms", "1", "--out", str(tmp_path), "--json", "--only"]
    assert main([*words, "first,wrong"]) == frame.OK
    printed = capsys.readouterr()
    [entry] = json.loads(printed.out)
    assert json.loads((tmp_path / "rows.json").read_text()) == [entry] and set(entry["rows"]) == {"first"}
    assert "its bits differ from those of first" in printed.err and "--only first,wrong" in (tmp_path / "rows.md").read_text()
    assert main([*words, "broken"]) == frame.FAILED
    assert "every row failed" in capsys.readouterr().err


def test_rows_are_kernels_for_a_gpu(capsys):
    assert main(["bench", "rows", "--device", "cpu"]) == frame.USAGE
    printed = capsys.readouterr()
    assert "rows of a tile table are kernels for a GPU" in printed.err and printed.out == "" and len(printed.err.splitlines()) == 1
