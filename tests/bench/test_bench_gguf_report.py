"""What a GGUF document says: ratios, the check, monotony, hand-overs; and its report."""

import importlib.util
import shutil
from pathlib import Path

import pytest
from gguf_bench_data import case_of, gguf_document
from pydantic import ValidationError

from scaled_mm.bench.gguf import analysis, goals, report
from scaled_mm.bench.gguf.plots import ticks
from scaled_mm.bench.gguf.record import GgufDocument
from scaled_mm.cli import main
from scaled_mm.cli.report import times
from scaled_mm.measure import document as parts
from scaled_mm.measure import plots
from scaled_mm.measure.record import Result

NEEDS_MATPLOTLIB = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")


def written(document: GgufDocument) -> str:
    return parts.markdown(report.contents(document, []))


def two_cases():
    return [case_of(1, 8.0, llama_us=12.0), case_of(16, 10.0, kernel="row_b", llama_us=9.0)]


def test_the_report_has_times_rates_ratios_check_and_kernel_of_each_case():
    text = written(gguf_document(two_cases()))
    assert "`scaled-mm bench gguf --seed 7`" in text and "NVIDIA H200 (sm90)" in text and "where llama.cpp's times come from." in text
    assert "### q4_0 4096x4096: N=4096, K=4096" in text
    # 9437184 bytes in 8 us; 2 * 4096^2 operations in 8 us; 12 us over 8 us and over 8.8 us
    assert "| 1 | 8.00 | 8.80 | 1.1796 | 4.194 | 12.00 | 1.50x | 1.36x | yes | `row_a` |" in text
    assert "| 16 | 10.00 | 11.00 | 0.9437 | 53.687 | 9.00 | 0.90x | 0.82x | yes | `row_b` |" in text
    assert "llama.cpp's time over that of `ours` (recorded): **1.16x** (geometric mean of 2 of 2 cases), from 0.90x" in text
    assert "above 1 on 1." in text and "Within 2e-06 of the formula in float64, on a slice of rows and tokens: 2 of 2" in text
    assert "Monotone within 5%" in text and "## Where" not in text


def test_without_times_of_llama_cpp_the_report_says_so():
    text = written(gguf_document([case_of(1, 8.0)], status="none"))
    assert "No time of llama.cpp to compare with." in text and "| tokens | ours | ours_w4a8 | TB/s | TOPS | within 2e-06 | kernel |" in text
    some = written(gguf_document([case_of(1, 8.0, llama_us=9.0), case_of(2, 8.0)]))
    assert "| — | — | — | yes |" in some and "| 9.00 | 1.12x |" in some


@pytest.mark.parametrize(("error", "said"), [(2.0e-6, "yes"), (2.1e-6, "NO 2.1e-06"), (float("nan"), "NO nan"), (None, "not checked")])
def test_an_error_above_the_bound_is_no_and_nan_is_above_it(error, said):
    case = case_of(1, 8.0, error=error)
    assert analysis.check_of(case) == said
    document = gguf_document([case])
    assert bool(analysis.wrong_cases(document)) == said.startswith("NO")
    assert ("**Not within 2e-06**: q4_0 4096x4096 at 1 token" in written(document)) == said.startswith("NO")


def test_each_implementation_has_a_bound_of_its_own():
    case = case_of(1, 8.0, error=3e-4, ours_q8_1=Result(us=1.0, samples=[1.0], error=3e-7))
    bounds = {"ours": 5e-4, "ours_w4a8": 5e-4}
    assert analysis.check_of(case, bounds) == "yes" and analysis.check_of(case, bounds | {"ours": 1e-4}) == "NO 3.0e-04"
    text = written(gguf_document([case], bounds=bounds))
    assert "Within the bound of the formula" in text and "The bounds: `ours` 0.0005, `ours_w4a8` 0.0005." in text and "| within the bound |" in text


def against_bf16(M, factor, fmt="q4_0", llama_us=None):
    """Ours takes 10 us."""
    return case_of(M, 10.0, fmt=fmt, bf16=Result(us=10.0 * factor, samples=[1.0]), ours_f32=Result(us=20.0, samples=[1.0]), llama_us=llama_us)


def test_goals_and_speed_ups_over_bfloat16_stand_in_the_report():
    cases = [against_bf16(1, 4.0, llama_us=36.0), against_bf16(1, 3.0), against_bf16(1, 1.5, "q8_0"), against_bf16(600, 0.8)]
    document = gguf_document(cases, results=("ours", "ours_f32", "ours_w4a8", "bf16"), bounds={"ours": 5e-4})
    found = {one.goal.what: one for one in goals.outcomes(document)}
    four = found["over `bf16`, formats of 4 bits, 1 token, mean"]
    assert four.met and four.reached == pytest.approx(12**0.5) and four.worst == 3.0 and four.count == 2
    assert found["over `bf16`, from 512 tokens, mean"].met is False and found["over `bf16`, 9 to 16 tokens, mean"].met is None
    assert found["over `bf16`, each"].worst == 0.8 and found["`ours_f32` over llama.cpp, 1 and 2 tokens, mean"].reached == pytest.approx(1.8)
    text = written(document)
    assert "## Goals" in text and "| 1 | `ours` | 2.62x | 1.50x at q8_0 4096x4096 at 1 token | 0 of 3 |" in text
    assert "| 512 to 4096 | `ours_f32` | 0.40x | 0.40x at q4_0 4096x4096 at 600 tokens | 1 of 1 |" in text
    assert "## Goals" not in written(gguf_document(two_cases())) and "bfloat16" not in written(gguf_document(two_cases()))


def test_a_step_from_eight_to_nine_tokens_of_a_tenth_misses_its_goal():
    for ninth, met in ((10.9, True), (11.1, False)):
        bf16 = Result(us=30.0, samples=[1.0])
        document = gguf_document([case_of(8, 10.0, bf16=bf16), case_of(9, ninth, bf16=bf16), case_of(9, 50.0, fmt="q8_0", bf16=bf16)])
        [step] = [one for one in goals.outcomes(document) if one.goal.what == "time of 8 tokens over that of 9, each"]
        assert step.met is met and step.count == 1


def test_the_worst_error_of_any_of_our_modes_counts():
    case = case_of(1, 8.0, ours_q8_1=Result(us=1.0, samples=[1.0], error=1e-3))
    assert analysis.check_of(case) == "NO 1.0e-03"


def test_time_that_falls_by_more_than_five_percent_is_not_monotone():
    fine = [case_of(1, 10.0), case_of(2, 9.6), case_of(3, 12.0)]
    assert analysis.drops(fine, "ours") == []
    cliff = [case_of(1, 10.0), case_of(2, 20.0, kernel="row_a"), case_of(3, 12.0, kernel="row_b"), case_of(4, 13.0), case_of(5, 11.0)]
    pairs = analysis.drops(cliff, "ours")
    assert [(pair.first.M, pair.second.M, round(pair.ratio, 3)) for pair in pairs] == [(2, 3, 1.667), (4, 5, 1.182)]
    text = written(gguf_document(cliff))
    assert "**Not monotone** within 5% in 4 places" in text  # both modes, twice
    assert "- q4_0 4096x4096, `ours`: 20.00 µs at 2 (`row_a`), 12.00 µs at 3 (`row_b`): 1.67x." in text


def test_small_steps_down_that_add_up_are_found_and_other_weights_do_not_mix():
    slope = [case_of(m, 10.0 - 0.3 * m) for m in (1, 2, 3)]
    assert [(pair.first.M, pair.second.M) for pair in analysis.drops(slope, "ours")] == [(1, 3)]
    apart = gguf_document([case_of(1, 10.0, fmt="q8_0"), case_of(2, 5.0, fmt="q4_0")])
    assert analysis.all_drops(apart) == []


def test_a_case_that_failed_is_left_out_of_the_monotony_and_named():
    broken = case_of(2, 1.0).model_copy(update={"results": {"ours": Result(failed="RuntimeError: no")}})
    document = gguf_document([case_of(1, 10.0), broken, case_of(3, 11.0)])
    assert analysis.all_drops(document) == [] and analysis.hand_overs(document) == []
    text = written(document)
    assert "| 2 | failed | — |" in text and "`ours` failed on q4_0 4096x4096 at 2 tokens: RuntimeError: no" in text


def test_hand_overs_are_neighbours_with_other_kernels():
    cases = [case_of(8, 10.0, kernel="row_a"), case_of(9, 15.0, kernel="row_b"), case_of(10, 15.0, kernel="row_b"), case_of(16, 16.0, kernel="row_c")]
    pairs = analysis.hand_overs(gguf_document(cases))
    assert [(pair.name, pair.first.M, pair.second.M) for pair in pairs] == [("ours", 8, 9), ("ours_w4a8", 8, 9)]
    assert "| q4_0 4096x4096 | ours | 8, 9 | `row_a`, `row_b` | 10.00 | 15.00 | 1.50x |" in written(gguf_document(cases))


def test_a_sweep_is_eight_tokens_in_a_row_or_more_up_to_64():
    row = [case_of(m, 10.0 + m) for m in (*range(1, 9), 512)]
    assert [case.M for case in analysis.sweeps(gguf_document(row))["q4_0 4096x4096"]] == list(range(1, 9))
    grid = [case_of(m, 10.0 + m) for m in (1, 2, 4, 8, 16, 32, 48, 64, 128)]
    assert analysis.sweeps(gguf_document(grid)) == {}


def test_an_implementation_that_could_not_run_is_named_with_its_reason():
    text = written(gguf_document([case_of(1, 8.0)], unavailable="no library"))
    assert "no library" in text and "| tokens | ours | TB/s |" in text


def test_a_document_without_cases_still_renders():
    assert "0 of 0 checked cases" in written(gguf_document([]))


@NEEDS_MATPLOTLIB
def test_the_report_is_rendered_again_from_its_json_beside_that_of_int8(tmp_path, capsys):
    from bench_data import case_record, document, measured

    gguf_document([case_of(m, 10.0 + m, llama_us=12.0) for m in range(1, 10)]).save(tmp_path)
    document([case_record("8B_o", 1, 4096, 4096, ours=measured(8.0, bit_equal=True))]).save(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    drawn = ("gguf_time.png", "gguf_bandwidth.png", "gguf_sweep.png")
    made = {name: (tmp_path / name).read_bytes() for name in ("bench_gguf.md", "bench_gguf.html", *drawn)}
    shown = capsys.readouterr().out
    assert (tmp_path / "bench.md").is_file() and all(name in shown for name in made)
    assert all(made[name].startswith(b"\x89PNG") and f"({name})" in made["bench_gguf.md"].decode() for name in drawn)
    assert made["bench_gguf.html"].count(b"data:image/png;base64,") == 3
    for name in made:
        (tmp_path / name).unlink()
    assert main(["report", str(tmp_path)]) == 0
    assert {name: (tmp_path / name).read_bytes() for name in made} == made


def test_two_gguf_runs_are_compared_format_by_format(tmp_path, capsys):
    one, two = tmp_path / "one", tmp_path / "two"
    gguf_document([case_of(1, 8.0), case_of(1, 6.0, fmt="q8_0")]).save(one)
    gguf_document([case_of(1, 16.0), case_of(1, 12.0, fmt="q8_0")]).save(two)
    assert times(one) == {("q4_0", 1, 4096, 4096): 8.0, ("q8_0", 1, 4096, 4096): 6.0}
    assert main(["report", str(one), "--compare", str(two)]) == 0
    assert "is 2.000x as fast as" in (shown := capsys.readouterr().out) and "q8_0" in shown


def test_a_record_that_does_not_fit_is_refused_by_name(tmp_path, capsys):
    for name in ("bench_block.json", "bench_gguf.json"):
        (tmp_path / name).write_text('{"schema_version": 1}')
        assert main(["report", str(tmp_path)]) == 2
        assert name in capsys.readouterr().err
    data = gguf_document(two_cases()).model_dump(mode="json")
    with pytest.raises(ValidationError, match="schema_version 99"):
        GgufDocument.model_validate(data | {"schema_version": 99})
    with pytest.raises(ValidationError, match="surprise"):
        GgufDocument.model_validate(data | {"surprise": 1})


def test_a_document_survives_the_file(tmp_path):
    document = gguf_document([case_of(1, 8.0, error=float("nan")), *two_cases()])
    document.save(tmp_path)
    again = GgufDocument.load(tmp_path)
    assert analysis.check_of(again.cases[0]) == "NO nan" and again.cases[1:] == document.cases[1:]


RECORDED = Path(__file__).parents[2] / "reports" / "sm90" / "h200"


@pytest.mark.parametrize("folder", [".", "block_sweep", "block_w4a8"])
def test_a_recorded_run_under_its_former_name_gives_the_report_that_is_committed(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "unavailable", lambda: "matplotlib is not installed")
    for path in (RECORDED / folder).glob("b*"):
        if path.is_file() and path.name.startswith(("bench_block.", "block_")):
            shutil.copy(path, tmp_path)
    before = (tmp_path / "bench_block.md").read_text()
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "bench_block.md").read_text() == before and not (tmp_path / "bench_gguf.md").exists()


def test_a_run_under_the_name_of_today_comes_before_one_under_the_former_name(tmp_path):
    gguf_document([case_of(1, 8.0)]).save(tmp_path)
    (tmp_path / "bench_gguf.json").rename(tmp_path / "bench_block.json")
    assert times(tmp_path) == {("q4_0", 1, 4096, 4096): 8.0}
    gguf_document([case_of(1, 4.0)]).save(tmp_path)
    assert times(tmp_path) == {("q4_0", 1, 4096, 4096): 4.0}
    assert GgufDocument.path(tmp_path).name == "bench_gguf.json"


def test_ticks_are_powers_of_two_and_what_is_far_enough_from_them():
    assert ticks([1, 2, 8, 9, 16, 64, 2048]) == [1, 2, 8, 16, 64, 2048]
    assert ticks([1, 7, 13, 21, 41, 91, 134, 390, 2365]) == [1, 7, 13, 21, 41, 91, 134, 390, 2365]
    assert ticks([3, 4, 5, 6]) == [4, 6] and ticks([33]) == [33]
