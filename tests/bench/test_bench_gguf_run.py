"""GGUF products measured on a CPU: cases, inputs, the check against float64."""

import argparse

import pytest
import torch
from bench_data import CPU
from gguf_bench_data import Broken

import scaled_mm as sm
from scaled_mm.bench import ours
from scaled_mm.bench.gguf import analysis, llama, peers
from scaled_mm.bench.gguf.cases import BANDS, GgufCase, group_by_format, parse_cases, parse_formats, random_cases
from scaled_mm.bench.gguf.inputs import GgufInputs, GgufWeights, weight_bytes
from scaled_mm.bench.gguf.suite import GgufSuite, error_of, formula, spread
from scaled_mm.errors import BadParamError
from scaled_mm.gguf_formats import WEIGHT_FORMATS
from scaled_mm.measure.peer import OURS
from scaled_mm.measure.run import Options, run_grid

FAST = Options(budget_ms=1, sets=3)


def make_inputs(fmt: str = "q4_0", tokens: int = 5, sets: int = 3) -> GgufInputs:
    case, generator = GgufCase("70x96", tokens, 70, 96, fmt), torch.Generator().manual_seed(1)
    return GgufInputs(case, GgufWeights(case, CPU, generator, sets), generator)


def bounds_of(chosen) -> dict[str, float]:
    return {peer.name: peer.bound for peer in chosen if isinstance(peer, peers.OursGguf)}


def test_random_weights_follow_from_the_seed_and_have_tokens_of_each_band():
    cases = random_cases(("q4_0", "q8_0"), 3, 5)
    assert cases == random_cases(("q4_0", "q8_0"), 3, 5) != random_cases(("q4_0", "q8_0"), 3, 6)
    weights = list(dict.fromkeys((case.N, case.K) for case in cases))
    assert len(weights) == 3 and all(1024 <= size <= 16384 and k % 32 == 0 and n % 8 == 0 for n, k in weights for size in (n, k))
    assert [case.M for case in cases if case.fmt == "q4_0"] == [case.M for case in cases if case.fmt == "q8_0"]
    for index, weight in enumerate(weights):
        tokens = [case.M for case in cases if (case.N, case.K) == weight and case.fmt == "q4_0"]
        assert index % 2 or all(m % 2 for m in tokens)
        assert len(tokens) == len(BANDS) and all(least <= m <= most for m, (least, most) in zip(tokens, BANDS))
    assert random_cases(("q4_0",), 0, 5) == [] and parse_cases(("q4_0",), "none", (1,)) == []


def test_formats_cross_with_weights_and_tokens_weight_by_weight():
    cases = parse_cases(("q8_0", "q4_0"), "64x96, 8B_o, 7x64x96", (1, 2))
    assert [(case.fmt, case.shape, case.M) for case in cases][:5] == [
        ("q8_0", "64x96", 1),
        ("q8_0", "64x96", 2),
        ("q8_0", "64x96", 7),
        ("q8_0", "8B_o", 1),
        ("q8_0", "8B_o", 2),
    ]
    assert cases[5] == GgufCase("64x96", 1, 64, 96, "q4_0") and len(cases) == 10
    assert [len(group) for group in group_by_format(cases)] == [3, 2, 3, 2]
    assert str(cases[0]) == "q8_0 64x96 M=1 N=64 K=96"
    assert {case.shape for case in parse_cases(("q4_0",), "llama-8b", (1,))} == {"8B_qkv", "8B_o", "8B_gate_up", "8B_down"}


@pytest.mark.parametrize("text", ["", "64", "64x0", "axb", "1x2x3x4", "64x100"])
def test_a_shape_that_is_none_is_refused(text):
    with pytest.raises(BadParamError, match="--shapes: expected"):
        parse_cases(("q4_0",), text, (1,))


def test_formats_are_those_of_weights():
    assert parse_formats("all") == tuple(WEIGHT_FORMATS) and parse_formats("q8_0, q4_0,q8_0") == ("q8_0", "q4_0")
    for text in ("q8_1", "q4_0,nope", ""):
        with pytest.raises(BadParamError, match="--formats: expected"):
            parse_formats(text)
    with pytest.raises(BadParamError, match="got 'Q8_0'; formats are spelled in lower case$"):
        parse_formats("q4_0,Q8_0")


def test_weight_sets_are_different_weights_in_memory_of_their_own():
    weights = make_inputs("q5_1").weights
    assert [packed.shape for packed in weights.packed] == [(70, 96)] * 3
    assert torch.equal(weights.packed[1].unpack(), weights.blocks[1]) and not torch.equal(weights.blocks[0], weights.blocks[1])
    assert weights.blocks[1].data_ptr() != weights.blocks[0].data_ptr()
    assert torch.equal(weights.dequantized[2], sm.dequantize_block(weights.blocks[2], "q5_1"))
    assert weight_bytes(GgufCase("x", 1, 64, 96, "q5_1")) == 64 * 3 * 24


def test_activations_are_the_same_values_in_each_dtype():
    inputs = make_inputs()
    assert torch.equal(inputs.float16, inputs.float32.half()) and torch.equal(inputs.q8_1, sm.quantize_q8_1(inputs.float32))
    assert torch.equal(inputs.bfloat16, inputs.float32.bfloat16())
    assert inputs.out(0).dtype is torch.float32 and inputs.out(0).shape == inputs.out(0, torch.float16).shape == (5, 70)
    inputs.out(1, torch.float16).zero_()
    inputs.poison()
    assert inputs.out(1, torch.float16).isnan().all() and inputs.out(1).isnan().all()


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
@pytest.mark.parametrize("tokens", [1, 5])
def test_every_implementation_computes_every_set(fmt, tokens):
    inputs = make_inputs(fmt, tokens)
    for peer in peers.every_peer():
        bound = {"bf16": 2.0**-7, "mm": 2e-6, "dequantize_mm": 2e-6}.get(peer.name) or peer.bound
        inputs.poison()
        calls = peer.prepare(inputs)
        exact = inputs.float32 if not isinstance(peer, peers.OursGguf) else peer.activation(inputs)
        values = sm.dequantize_q8_1(exact) if exact.dtype is torch.uint8 else exact.float()
        for i, call in enumerate(calls):
            want = values.double() @ inputs.weights.dequantized[i].double().t()
            assert (call().double() - want).norm() <= 0.02 * want.norm(), (peer.name, i)
        assert error_of(calls[0](), inputs, formula(peer, inputs)) <= bound
        peer.release()


def test_the_check_sees_one_wrong_element_of_the_slice_and_any_that_is_not_finite():
    inputs = make_inputs()
    first, *_ = peers.every_peer()
    want, out = formula(first, inputs), first.out(inputs, 0)
    inputs.poison()
    assert error_of(out, inputs, want) != error_of(out, inputs, want)  # NaN
    first.prepare(inputs)[0]()
    assert error_of(out, inputs, want) <= first.bound
    out[-1, -1] += 1
    assert error_of(out, inputs, want) > first.bound
    first.release()


def test_mode_auto_on_a_gpu_is_what_the_tile_table_says(monkeypatch):
    from scaled_mm.jit import dispatch
    from scaled_mm.tables.schema import ModeRule

    gpu = torch.device("cuda:0")
    monkeypatch.setattr(ours, "our_handle", lambda device: argparse.Namespace(arch="sm90"))
    assert peers.auto_mode(gpu, 1) == dispatch.callable_table("sm90").gguf.auto[0].mode  # the table that is there
    rules = [ModeRule(m=8, mode="w4a16"), ModeRule(m=64, mode="w4a8"), ModeRule(mode="w4a16")]
    table = argparse.Namespace(gguf=argparse.Namespace(auto=rules, rows=[argparse.Namespace(name="row_a")]))
    monkeypatch.setattr(dispatch, "callable_table", lambda arch: table)
    assert [peers.auto_mode(gpu, m) for m in (1, 8, 9, 64, 65, 4096)] == ["w4a16", "w4a16", "w4a8", "w4a8", "w4a16", "w4a16"]
    assert [peers.auto_mode(CPU, m) for m in (1, 9)] == ["w4a16"] * 2


def test_a_slice_is_spread_from_the_first_to_the_last():
    assert spread(5, 128, CPU).tolist() == [0, 1, 2, 3, 4] and spread(1, 4, CPU).tolist() == [0]
    assert spread(28672, 128, CPU)[[0, -1]].tolist() == [0, 28671] and len(spread(28672, 128, CPU)) == 128


def test_a_grid_is_measured_checked_and_stands_next_to_llama_cpp():
    cases = parse_cases(("q4_0", "q8_0"), "64x96", (1, 3))
    times = llama.LlamaTimes({("q8_0", 64, 96, 3): 7.5}, llama.recorded("none").source)
    chosen = [peer for peer in peers.every_peer() if "cpu" in peer.devices]
    batches = list(run_grid(GgufSuite(times), cases, chosen, CPU, FAST))
    assert [[(case.fmt, case.M) for case in batch] for batch in batches] == [[("q4_0", 1), ("q4_0", 3)], [("q8_0", 1), ("q8_0", 3)]]
    for case in (case for batch in batches for case in batch):
        assert set(case.results) == {*analysis.OURS_ALL, "mm", "dequantize_mm"}
        assert all(result.us > 0 and result.error is not None for result in case.results.values())
        assert analysis.check_of(case, bounds_of(chosen)) == "yes" and case.results[OURS].kernel == "cpu_gguf_float32" and case.rotation == 3
    assert [case.llama_us for batch in batches for case in batch] == [None, None, None, 7.5]


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("fault", ["value", "nan"])
def test_a_wrong_product_is_found_before_and_after_timing(fault, after):
    [[case]] = run_grid(GgufSuite(), parse_cases(("q4_0",), "1x64x96", ()), [Broken(fault, after)], CPU, FAST)
    assert analysis.check_of(case, bounds_of(peers.every_peer())).startswith("NO") and case.results[OURS].us > 0


def test_a_product_that_raises_is_recorded_and_the_others_are_measured():
    [[case]] = run_grid(GgufSuite(), parse_cases(("q4_0",), "1x64x96", ()), [Broken("raise", 0), peers.Dequantized()], CPU, FAST)
    assert case.results[OURS].failed == "RuntimeError: the launch failed" and case.results["mm"].us > 0


def test_an_unchecked_case_says_so():
    [[case]] = run_grid(GgufSuite(), parse_cases(("q4_0",), "1x64x96", ()), peers.every_peer()[:1], CPU, Options(budget_ms=1, sets=2, check=False))
    assert analysis.check_of(case) == "not checked" and case.results[OURS].error is None


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
def test_every_mode_is_measured_and_within_the_bound_on_a_gpu(fmt):
    chosen = [peer for peer in peers.every_peer() if "cuda" in peer.devices]
    batches = list(run_grid(GgufSuite(), parse_cases((fmt,), "512x1024", (1, 16, 64)), chosen, torch.device("cuda:0"), Options(budget_ms=5)))
    for case in batches[0]:
        assert {name: result.failed for name, result in case.results.items() if result.failed} == {}
        assert set(case.results) == {*analysis.OURS_ALL, peers.BF16} and analysis.check_of(case, bounds_of(chosen)) == "yes"
