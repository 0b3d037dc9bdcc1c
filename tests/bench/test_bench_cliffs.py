"""Time by M: which products are cliffs, the report, the command."""

import json

import pytest
from bench_data import CPU, StandIn, environment

from scaled_mm.bench import ours
from scaled_mm.bench.cliffs import report
from scaled_mm.bench.cliffs.suite import CliffsSuite
from scaled_mm.cli import main
from scaled_mm.measure import shapes
from scaled_mm.measure.run import Options, run_grid


def entry(m: int, us: float, shape: str = "s") -> dict:
    return {"shape": shape, "M": m, "N": 64, "K": 32, "us": us, "kernel": f"row of {m}"}


def test_a_product_is_compared_with_the_fastest_of_those_with_more_rows():
    entries = [entry(1, 2.0), entry(8, 3.0), entry(15, 1.0), entry(22, 2.5), entry(29, 2.49), entry(1, 9.0, "t"), entry(8, 1.0, "t")]
    found = report.cliffs(entries)
    assert [(one.product["shape"], one.product["M"], one.larger["M"], one.ratio) for one in found] == [
        ("t", 1, 8, 9.0),
        ("s", 8, 15, 3.0),
        ("s", 1, 15, 2.0),
    ]
    lines = {line[0]: line[1:] for line in report.summary(entries)}
    assert lines["s"] == ["5", "5", "2", "3.00", "M=8, 3.00 µs", "`row of 8`", "M=15, 1.00 µs", "`row of 15`"]
    assert lines["t"][2] == "1"
    rising = [entry(m, float(m)) for m in (1, 8, 15)]
    assert not report.cliffs(rising) and report.summary(rising)[0][3] == "0"


def test_the_report_has_the_cliffs_and_the_failures(tmp_path):
    entries = [entry(1, 2.0), entry(8, 1.0), {"shape": "s", "M": 15, "N": 64, "K": 32, "failed": "no room"}]
    assert json.loads(report.save(entries, tmp_path / "new", environment(), "scaled-mm bench cliffs --seed 3").read_text()) == entries
    text = (tmp_path / "new" / "cliffs.md").read_text()
    assert "`scaled-mm bench cliffs --seed 3`" in text and "s M=15: no room" in text
    assert "| s | 1 | 2.00 | M=1, 2.00 µs | `row of 1` | M=8, 1.00 µs | `row of 8` |" in text
    assert (tmp_path / "new" / "cliffs.png").read_bytes().startswith(b"\x89PNG")


def test_only_the_dispatched_row_is_timed():
    cases = shapes.parse_cases("3x64x32,5x64x32", ())
    [[first, second]] = run_grid(CliffsSuite(), cases, [StandIn("ours")], CPU, Options(budget_ms=1, sets=2))
    assert (first["M"], second["M"], first["shape"]) == (3, 5, "64x32") and first["us"] > 0 and first["kernel"] == "row of ours"
    [[failed]] = run_grid(CliffsSuite(), cases[:1], [StandIn("ours", fault="raise")], CPU, Options(budget_ms=1, sets=2))
    assert "launch failed" in failed["failed"] and "us" not in failed


def test_the_command_times_the_products_and_says_what_failed(tmp_path, capsys, monkeypatch):
    from scaled_mm.bench.int8 import peers

    monkeypatch.setattr(ours, "refuse_cpu", lambda option, device: None)
    monkeypatch.setattr(peers, "Ours", lambda: StandIn("ours"))
    words = ["bench", "cliffs", "--device", "cpu", "--shapes", "3x64x32,5x64x32", "--out", str(tmp_path), "--json"]
    assert main(words) == 0
    assert [one["M"] for one in json.loads(capsys.readouterr().out)] == [3, 5]
    assert "--seed" in (tmp_path / "cliffs.md").read_text()  # the one that was drawn
    monkeypatch.setattr(peers, "Ours", lambda: StandIn("ours", fault="raise"))
    assert main(words) == 1


def test_the_command_refuses_a_cpu(capsys):
    assert main(["bench", "cliffs", "--device", "cpu"]) == 2
    assert "--device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "ms"), [("1-20:7", (1, 8, 15)), ("5:1-9", None), ("4:2", None), ("1-9:0", None), ("1-8192:61", tuple(range(1, 8193, 61)))]
)
def test_ranges_of_m_may_have_a_step(text, ms):
    if ms is None:
        with pytest.raises(ValueError, match="M must be a positive integer or a range"):
            shapes.parse_ms(text)
    else:
        assert shapes.parse_ms(text) == ms
