"""Shapes, the roof, and the parsing of both."""

import pytest

from scaled_mm.bench.int8 import analysis
from scaled_mm.measure.roofline import PEAKS, roof_us, tops, traffic_bytes
from scaled_mm.measure.shapes import LLM_M, LLM_SHAPES, Case, group_by_weight, parse_cases, parse_ms


def test_the_grid_is_exactly_the_recorded_one():
    recorded = analysis.load_recorded()
    assert {(case.shape, case.M) for case in parse_cases("llm", LLM_M)} == set(recorded.us)
    assert all(us > 0 for times in recorded.us.values() for us in times.values())


def test_named_shapes_cross_with_m_and_free_shapes_bring_their_own():
    assert parse_cases("8B_o, 3x48x64", (1, 16)) == [
        Case("8B_o", 1, 4096, 4096),
        Case("8B_o", 16, 4096, 4096),
        Case("48x64", 3, 48, 64),
    ]


def test_a_group_names_the_layers_of_a_model():
    both = parse_cases("llama-8b,llama-70b", (1,))
    assert both == parse_cases("llm", (1,)) and {case.shape for case in parse_cases("llama-70b", (1,))} < {case.shape for case in both}


def test_repeated_cases_are_timed_once_and_cases_of_one_weight_stay_together():
    cases = parse_cases("8B_o,1x48x64,8B_o,2X48X64,1x48x64", (1,))
    assert cases == [Case("8B_o", 1, 4096, 4096), Case("48x64", 1, 48, 64), Case("48x64", 2, 48, 64)]
    assert [len(group) for group in group_by_weight(cases)] == [1, 2]


@pytest.mark.parametrize("text", ["8B_typo", "1x2", "1x2x0", "1x-2x3", "ax2x3", "1x2x3x4"])
def test_a_shape_that_makes_no_sense_is_refused_by_name(text):
    with pytest.raises(ValueError, match=text):
        parse_cases(f"8B_o,{text}", (1,))


@pytest.mark.parametrize("text", ["", " , "])
def test_an_empty_list_is_refused(text):
    with pytest.raises(ValueError, match="at least one"):
        parse_cases(text, (1,))
    with pytest.raises(ValueError, match="at least one"):
        parse_ms(text)


def test_m_keeps_its_order_and_drops_repeats():
    assert parse_ms("16, 1,16,4096") == (16, 1, 4096)


def test_a_range_of_m_has_both_its_ends():
    assert parse_ms("1-4,3,64-65, 7-7") == (1, 2, 3, 4, 64, 65, 7)
    for text in ("4-1", "1-4097", "1-99999999999999"):
        with pytest.raises(ValueError, match=f"expected a range from a number to one not below it, of at most 4096, got '{text}'"):
            parse_ms(text)
    assert len(parse_ms("5-4100")) == 4096


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "1,x", "1-", "1-2-3", "0-4"])
def test_an_m_that_is_no_positive_integer_is_refused(text):
    with pytest.raises(ValueError, match="positive integer"):
        parse_ms(text)


def test_the_roof_is_bandwidth_at_small_m_and_arithmetic_at_large_m():
    n, k = LLM_SHAPES["8B_qkv"]
    assert traffic_bytes(1, n, k) == 1 * k + n * k + 2 * n + 4 * (1 + n)
    assert roof_us(1, n, k, "NVIDIA H200") == pytest.approx(traffic_bytes(1, n, k) / 4.8e6)
    assert roof_us(8192, n, k, "NVIDIA H200") == pytest.approx(2 * 8192 * n * k / 1979e6)
    assert roof_us(8192, n, k, "NVIDIA H200") == pytest.approx(208.346, abs=1e-3)


def test_an_unknown_gpu_has_no_roof():
    assert "Unknown GPU" not in PEAKS
    assert roof_us(1, 64, 64, "Unknown GPU") is None


def test_tops_counts_two_operations_a_multiply_add():
    assert tops(1000, 1000, 1000, 1000.0) == pytest.approx(2.0)
