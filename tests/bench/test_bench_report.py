"""The report of synthetic documents, its schema, and that rendering depends on bench.json alone."""

import importlib.util
import json
from types import SimpleNamespace

import pytest
from bench_data import case_record, document, measured
from pydantic import ValidationError

from scaled_mm.bench import report as frame
from scaled_mm.bench.int8 import analysis, report
from scaled_mm.bench.int8.record import Int8CaseRecord, Int8Document
from scaled_mm.measure import document as parts
from scaled_mm.measure import stats
from scaled_mm.measure.record import Clocks, Result

RECORDED = analysis.load_recorded()
NEEDS_MATPLOTLIB = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")


def written(document: Int8Document) -> str:
    return parts.markdown(report.contents(document, RECORDED, []))


def two_cases() -> list[Int8CaseRecord]:
    good = {"bit_equal": True, "error": 0.0, "kernel": "t64x16x256"}
    failed = Result(failed="RuntimeError: x|y")
    return [
        case_record("8B_o", m, 4096, 4096, ours=measured(8.0, **good), vllm=vllm, sgl=sgl, bf16=measured(14.0))
        for m, vllm, sgl in ((1, measured(10.0), measured(9.6)), (16, measured(9.0), failed))
    ]


def test_speedup_is_over_the_better_rival_of_the_run():
    speedups = analysis.measured_speedups(document(two_cases()))
    assert [(one.rival, round(one.factor, 3)) for one in speedups] == [("sgl", 1.2), ("vllm", 1.125)]
    assert stats.mean_by_m(speedups) == {1: pytest.approx(1.2), 16: pytest.approx(1.125)}
    assert stats.mean_by_shape(speedups) == {"8B_o": pytest.approx((1.2 * 1.125) ** 0.5)}


def test_recorded_times_are_used_only_on_the_gpu_they_come_from():
    here = analysis.recorded_speedups(document(two_cases()), RECORDED)
    assert here[0].rival_us == min(RECORDED.us["8B_o", 1][name] for name in ("vllm", "sgl"))
    assert analysis.recorded_speedups(document(two_cases(), gpu="NVIDIA L4"), RECORDED) == []
    assert analysis.drift(document(two_cases(), gpu="NVIDIA L4"), RECORDED) == {}


def test_drift_compares_what_ran_in_both():
    drift = analysis.drift(document(two_cases()), RECORDED)
    assert drift["sgl"] == pytest.approx(9.6 / RECORDED.us["8B_o", 1]["sgl"])
    assert "ours" not in drift and "intmm" not in drift


def test_the_report_names_every_number_and_every_failure():
    text = written(document(two_cases()))
    assert "`scaled-mm bench --seed 7`" in text
    assert "NVIDIA H200 (sm90)" in text and "0123abc with changes" in text and "1980 MHz SM" in text
    assert "the better of vllm and sgl, measured in this run: **1.162x** (geometric mean of 2 of 2 cases)" in text
    assert "| 1 | 8.00 | 14.00 | 10.00 | 9.60 | 1.20x | 0.44 | equal | `t64x16x256` |" in text
    assert "| 16 | 8.00 | 14.00 | 9.00 | failed | 1.12x |" in text
    assert "- `vllm`: label of vllm (1)" in text
    assert "`sgl` failed on 8B_o M=16: RuntimeError: x|y" in text
    assert "Bit-equal with the reference: 2 of 2 checked cases." in text
    assert "| `ours: desc.calculate` | 2.50 |" in text
    assert "| `vllm` | failed: RuntimeError: no kernel |" in text
    assert "| over the faster of vLLM and SGLang, M of 1 to 16, mean | 1.30x | 1.16x | **no** | 1.12x at 8B_o M=16 | 2 |" in text


def test_the_report_says_in_which_state_the_gpu_was_unless_it_was_the_standard_one():
    usual = document(two_cases())
    settled = usual.model_copy(update={"settings": usual.settings.model_copy(update={"regime": "settled"})})
    sentence = "Before each case the GPU is under load for 2000 ms. Before each turn of an implementation the GPU does not rest"
    assert sentence in written(settled) and "Before each turn" not in written(usual)


def test_energy_is_by_operation_with_the_clock_where_it_was_metered():
    cases = two_cases()
    assert "## Energy" not in written(document(cases))
    first = cases[0]
    ours = first.results["ours"].model_copy(update={"joules": 2e-12 * first.M * first.N * first.K * 0.5, "sm_mhz": 1755.0})
    metered = [first.model_copy(update={"results": first.results | {"ours": ours}}), *cases[1:]]
    text = written(document(metered))
    table = text[text.index("## Energy") :]
    assert "| shape | M | ours |" in table
    assert f"| {first.shape} | {first.M} | 0.50 at 1755 |" in table and f"| {cases[1].shape} | {cases[1].M} | — |" in table


def test_a_settled_run_without_a_meter_says_so():
    usual = document(two_cases())
    settled = usual.model_copy(update={"settings": usual.settings.model_copy(update={"regime": "settled"})})
    assert "Not metered in this run" in written(settled) and "Not metered" not in written(usual)


def test_recorded_times_are_a_comparison_of_their_own_said_plainly():
    cases = [case.model_copy(update={"results": {"ours": case.results["ours"]}}) for case in two_cases()]
    text = written(document(cases, sgl_unavailable="sgl_kernel is not installed"))
    assert "against the recorded microseconds in `scaled_mm/bench/data/h200_int8_peers.json`" in text
    assert "not in this run" in text
    assert "`vllm` has no time on 2 of 2 cases" in text
    assert "## Speed-up measured in this run" not in text
    assert "- `sgl` (label of sgl): sgl_kernel is not installed" in text
    elsewhere = written(document(cases, gpu="NVIDIA L4"))
    assert "are not compared" in elsewhere and "No speed-up: neither vLLM nor SGLang has a time" in elsewhere


def test_a_complete_run_needs_no_recorded_times():
    text = written(document(two_cases()[:1]))
    assert "recorded" not in text


def test_wrong_bits_stand_in_the_summary_and_in_the_table():
    case = two_cases()[0]
    case.results["ours"].bit_equal = False
    text = written(document([case]))
    assert "0 of 1 checked cases" in text and "**Wrong bits**: 8B_o M=1" in text and "| WRONG |" in text


def test_notes_and_unchecked_cases_are_explained():
    case = two_cases()[0].model_copy(update={"check": "not checked: switched off"})
    case.results["bf16"] = measured(14.0, note="M padded to 32")
    text = written(document([case]))
    assert "14.00 (1)" in text and "- (1) `bf16`: M padded to 32" in text
    assert "1 cases not checked: switched off" in text


@pytest.mark.parametrize("arch, spread, advised", [("cpu", 0.6, True), ("cpu", 0.4, False), ("sm90", 0.6, False)])
def test_times_far_apart_on_a_cpu_come_with_advice(arch, spread, advised):
    cases = two_cases()
    cases[0].results["ours"].spread = spread
    (line,) = frame.noise(cases, arch)
    assert line.startswith("Noise: ") and f"{spread:.1%} (95th percentile)" in line
    assert ("is the CPU busy? OMP_WAIT_POLICY=PASSIVE" in line) is advised


def test_a_document_without_cases_still_renders():
    text = written(document([]))
    assert "0 of 0 checked cases" in text


@NEEDS_MATPLOTLIB
def test_rendering_is_a_pure_function_of_bench_json(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        document(two_cases()).save(folder)
    paths = report.render(first)
    assert [path.name for path in paths] == ["bench.md", "bench.html", "speedup.png", "time.png", "tops.png"]
    before = {path.name: path.read_bytes() for path in paths}
    report.render(first)
    report.render(second)
    assert all(path.read_bytes() == before[path.name] for path in paths)
    assert all((second / name).read_bytes() == content for name, content in before.items())
    assert all(content.startswith(b"\x89PNG") for name, content in before.items() if name.endswith("png"))
    assert "![speedup](speedup.png)" in (first / "bench.md").read_text()
    page = (first / "bench.html").read_text()
    assert page.count("data:image/png;base64,") == 3 and 'src="speedup' not in page  # it needs no file beside it
    assert "<code>t64x16x256</code>" in page and "<strong>1.162x</strong>" in page


@pytest.mark.parametrize(
    "error, said",
    [(ModuleNotFoundError("gone", name="matplotlib"), "matplotlib is not installed"), (SystemError("NULL"), "SystemError: NULL")],
    ids=["gone", "broken"],
)
def test_a_report_without_matplotlib_says_why_it_has_no_plots(tmp_path, monkeypatch, error, said):
    from scaled_mm.measure import plots

    def fail(name):
        raise error

    monkeypatch.setattr(plots, "importlib", SimpleNamespace(import_module=fail))
    plots.unavailable.cache_clear()
    document(two_cases()).save(tmp_path)
    try:
        assert [path.name for path in report.render(tmp_path)] == ["bench.md", "bench.html"]
    finally:
        plots.unavailable.cache_clear()
    assert said in (tmp_path / "bench.md").read_text()


@NEEDS_MATPLOTLIB
def test_rendering_again_without_matplotlib_keeps_the_plots_that_are_there(tmp_path, monkeypatch, capsys):
    from scaled_mm.cli import main
    from scaled_mm.measure import plots

    document(two_cases()).save(tmp_path)
    report.render(tmp_path)
    before = (tmp_path / "bench.md").read_text()
    monkeypatch.setattr(plots, "unavailable", lambda: "matplotlib is not installed")
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "bench.md").read_text() == before and "![speedup](speedup.png)" in before
    assert "no plots were drawn, those that were there are kept: matplotlib is not installed" in capsys.readouterr().out
    report.render(tmp_path)  # as after a new run, whose plots these would not be
    assert "Not drawn: matplotlib is not installed." in (tmp_path / "bench.md").read_text()


def test_a_document_survives_the_file(tmp_path):
    cases = two_cases()
    cases[0].results["vllm"].error = float("nan")
    document(cases).save(tmp_path)
    again = Int8Document.load(tmp_path)
    assert again.cases[0].results["vllm"].error != again.cases[0].results["vllm"].error
    assert again.cases[1] == cases[1]
    json.loads((tmp_path / "bench.json").read_text())


def test_the_schema_covers_the_document_and_refuses_what_it_does_not_know():
    schema = Int8Document.model_json_schema()
    assert {"schema_version", "command", "environment", "cases"} <= set(schema["properties"])
    data = document(two_cases()).model_dump(mode="json")
    Int8Document.model_validate(data)
    with pytest.raises(ValidationError, match="surprise"):
        Int8Document.model_validate(data | {"surprise": 1})
    with pytest.raises(ValidationError, match="schema_version 99"):
        Int8Document.model_validate(data | {"schema_version": 99})


def test_the_clocks_of_one_time_are_a_range():
    readings = [Clocks(when="after x", sm_mhz=1980, mem_mhz=3201, power_w=power, temperature_c=40) for power in (300.5, 100, 520)]
    one = document(two_cases()).model_copy(update={"clocks": [*readings, Clocks(when="after y", sm_mhz=None, mem_mhz=None)]})
    rows = dict(frame.environment_table(one).rows)
    assert rows["clocks after x"] == "1980 MHz SM, 3201 MHz memory, 100 to 520 W, 40 °C"
    assert rows["clocks after y"] == "not reported"
