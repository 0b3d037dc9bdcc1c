"""The report of a synthetic path document, and what it says of the goals."""

import importlib.util

import pytest
from bench_data import measured
from path_bench_data import cases, document, path_record

from scaled_mm.bench.analysis import wrong_cases
from scaled_mm.bench.path import goals, report
from scaled_mm.bench.path.peers import OURS_ALL
from scaled_mm.bench.path.record import PathDocument
from scaled_mm.measure import document as parts
from scaled_mm.measure.roofline import linear_bytes, linear_us, memory_us

NEEDS_MATPLOTLIB = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")


def written(made: PathDocument) -> str:
    return parts.markdown(report.contents(made, []))


def goal(text: str, made: PathDocument) -> goals.Outcome:
    [found] = [one for one in goals.outcomes(made) if one.goal.what == text]
    return found


def test_a_goal_on_a_mean_is_met_if_every_mean_reaches_it_and_names_the_worst_case():
    made = document()
    small = goal("int8_linear over vLLM's pair, layers, M up to 64, mean", made)
    assert small.met is True and small.count == 2
    assert small.reached == pytest.approx((2.0 * 1.4) ** 0.5) and (small.worst, small.at) == (pytest.approx(1.4), "8B_qkv M=16")
    large = goal("int8_linear over vLLM's pair, layers, M from 512, mean", made)
    assert large.met is False and large.reached == pytest.approx((1.1 * 0.9) ** 0.5)
    each = goal("int8_linear over vLLM's pair, layers, each", made)
    assert each.met is False and (each.reached, each.at) == (pytest.approx(0.9), "8B_qkv M=512")
    bf16 = goal("int8_linear over torch.mm in bfloat16, layers, mean", made)
    assert bf16.met is True and bf16.reached == pytest.approx((2.0 * 1.8) ** 0.5)


def test_a_goal_whose_cases_have_no_time_is_neither_met_nor_missed():
    middle = goal("int8_linear over vLLM's pair, layers, M of 65 to 511, mean", document())
    assert middle.met is None and goals.cells(middle)[2:] == ["—", "not measured", "—", "0"]


def test_random_layers_of_a_band_have_one_mean():
    two = [path_record("random", m, 512, 512, ours=measured(1.0), vllm=measured(us), torch=measured(2.0)) for m, us in ((1, 1.2), (33, 2.0))]
    found = goal("int8_linear over vLLM's pair, random layers, M up to 64, mean", document(two))
    assert found.met is True and found.reached == pytest.approx(2.4**0.5) and found.at == "512x512 M=1"


def test_the_share_of_the_bandwidth_is_asked_of_large_sizes_alone():
    found = goal("silu_and_mul: of the memory's bandwidth from 4096 x 4096, each", document())
    bandwidth = 6 * 4096 * 4096 / 4.8e12 * 1e6 / 25.0
    assert found.count == 1 and found.reached == pytest.approx(bandwidth) and found.met is (bandwidth >= 0.8)
    assert not [one for one in goals.outcomes(document()) if one.goal.part == "add_rms_norm"]  # it was not timed


def test_goals_are_for_gpus():
    assert goals.outcomes(document(arch="cpu")) == [] and "## Goals" not in written(document(arch="cpu"))


def test_the_report_names_every_number_goal_and_failure():
    text = written(document())
    assert "`scaled-mm bench path --seed 7`" in text and "seed 7" in text
    assert "| int8_linear over vLLM's pair, layers, each | 1.00x | 0.90x | **no** | 0.90x at 8B_qkv M=512 | 4 |" in text
    assert "| silu_and_mul over vLLM, each | 1.00x | 1.20x | yes | 1.20x at silu_and_mul 4096x4096 | 1 |" in text
    assert "### 8B_o: N=4096, K=4096" in text and "| 16 | 8.00 | 9.00 | 16.00 | 16.00 | 2.00x | 2.00x |" in text
    assert "### random layers" in text and "| 33 | 1168 | 3376 | 5.00 |" in text and "`decode_1`" in text
    assert "### silu_and_mul: `silu_and_mul(x)`" in text and "| 4096 | 4096 | 25.00 | 70.00 | 30.00 | 1.20x | 2.80x | 0.84 | memory | equal |" in text
    assert "| 1 | 4096 | 2.00 | 5.00 | failed | — | 2.50x |" in text
    assert "`vllm` failed on silu_and_mul 1x4096: RuntimeError: no kernel" in text
    assert "`vllm` on quantize_int8_static: torch.ops._C has no static_scaled_int8_quant" in text
    assert "Bit-equal with the reference: 7 of 7 checked cases." in text
    assert "| `linear: ours` | 2.50 |" in text
    assert "## Linear layers: speed-up over vLLM's quantizer and product" in text and "| mean | **1.673** | **0.995** | **1.290** |" in text


@pytest.mark.parametrize("name", ["ours", "apart"])
def test_wrong_bits_of_ours_stand_in_the_summary_and_in_the_table(name):
    records = cases()
    records[0].results[name].bit_equal = False
    text = written(document(records))
    assert "6 of 7 checked cases" in text and "**Wrong bits**: 8B_o M=16" in text and "| WRONG |" in text
    assert wrong_cases(document(records), OURS_ALL) == [records[0]]


def test_rows_that_were_checked_are_told():
    records = cases()
    records[-1].check = "checked: 1024 of 4096 rows"
    assert "1 case checked: 1024 of 4096 rows." in written(document(records))


def test_the_roof_of_a_layer_is_arithmetic_or_traffic():
    assert linear_bytes(1, 4096, 4096) == 2 * 4096 + 4096 * 4096 + 2 * 4096 + 4 * 4096
    assert linear_us(1, 4096, 4096, "NVIDIA H200") == memory_us(linear_bytes(1, 4096, 4096), "NVIDIA H200")
    assert linear_us(8192, 8192, 8192, "NVIDIA H200") == pytest.approx(2e6 * 8192**3 / 1979e12)
    assert linear_us(1, 1, 1, "a GPU") is memory_us(1, "a GPU") is None


def test_a_document_survives_the_file_and_an_empty_one_renders(tmp_path):
    made = document()
    made.save(tmp_path)
    assert PathDocument.load(tmp_path) == made
    assert "0 of 0 checked cases" in written(document([]))


@NEEDS_MATPLOTLIB
def test_rendering_is_a_pure_function_of_path_json(tmp_path):
    document().save(tmp_path)
    paths = report.render(tmp_path)
    names = ["path.md", "path.html", "path_layers_vllm.png", "path_layers_torch.png", "path_operators_vllm.png"]
    assert [path.name for path in paths] == names
    before = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in report.render(tmp_path)] == before
    assert "![path_layers_vllm](path_layers_vllm.png)" in (tmp_path / "path.md").read_text()
