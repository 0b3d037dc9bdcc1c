"""Inputs, checks and records, on a CPU with stand-ins for the implementations."""

import math

import pytest
import torch
from bench_data import CPU, SMALL, StandIn

from scaled_mm.bench.int8 import peers
from scaled_mm.bench.int8.inputs import Inputs, WeightSets, epilogue
from scaled_mm.bench.int8.peers import Bf16, Fp32, IntMM, IntMMEpilogue, Ours, every_peer
from scaled_mm.bench.int8.suite import Int8Suite, relative_error, run_overhead
from scaled_mm.cpu.integer_product import int_mm_is_exact
from scaled_mm.measure.peer import implementations, select
from scaled_mm.measure.rotation import output_slots
from scaled_mm.measure.run import Options, run_grid
from scaled_mm.measure.shapes import Case
from scaled_mm.reference import scaled_mm as reference

FAST = Options(budget_ms=2, sets=3)


def make_inputs(case: Case = SMALL, sets: int = 3) -> Inputs:
    generator = torch.Generator(CPU).manual_seed(1)
    return Inputs(case, WeightSets(case.N, case.K, CPU, generator, sets), generator)


def run_one(*those, options=FAST, case=SMALL):
    [[record]] = run_grid(Int8Suite(), [case], list(those), CPU, options)
    return record


def test_inputs_are_random_and_full_range_in_the_layout_of_a_linear_layer():
    inputs = make_inputs(Case("free", 64, 128, 256))
    b = inputs.b(1)
    assert b.shape == (256, 128) and b.stride() == (1, 256)
    assert inputs.a.min() == -128 and inputs.a.max() == 127
    assert not torch.equal(inputs.b(0), inputs.b(1))
    assert inputs.a_scale.shape == (64, 1) and inputs.b_scale(0).shape == (1, 128)
    product = reference(inputs.a, b, inputs.a_scale, inputs.b_scale(1), out_dtype=torch.float32)
    assert 0.3 < product.std() < 3


def test_weight_set_zero_has_an_output_of_its_own():
    inputs = make_inputs(sets=5)
    for inputs.slots in (2, 3, 5):
        slots = [inputs.slot(i) for i in range(5)]
        assert slots.count(0) == 1 and set(slots) == set(range(inputs.slots))


def test_outputs_rotate_no_further_than_weights_or_cache_ask():
    assert output_slots(12, 8192, 60 << 20) == 12
    assert output_slots(12, 100 << 20, 60 << 20) == 2
    assert output_slots(1, 8192, 60 << 20) == 1


def test_fp8_copies_hold_the_same_matrix():
    inputs = make_inputs()
    a = inputs.a_fp8.float() * inputs.a_fp8_scale
    assert relative_error(a, inputs.a_fp32) < 0.04
    assert inputs.a_fp8.float().abs().max() <= 448


EXACT_INT_MM = pytest.mark.skipif(not int_mm_is_exact(), reason="torch._int_mm is not exact on this CPU")


@pytest.mark.parametrize(("peer", "error"), [(Bf16(), 2e-2), (Fp32(), 2e-3), pytest.param(IntMMEpilogue(), 0.0, marks=EXACT_INT_MM)])
def test_every_cpu_peer_computes_the_same_product_for_every_weight_set(peer, error):
    inputs = make_inputs()
    inputs.poison()
    for i, call in enumerate(peer.prepare(inputs)):
        expected = reference(inputs.a, inputs.b(i), inputs.a_scale, inputs.b_scale(i))
        assert relative_error(peer.finish(call(), inputs), expected) <= error


def test_int_mm_pads_small_m_and_says_so():
    peer = IntMM()
    assert [peer.rows(m) for m in (1, 16, 17, 32, 100)] == [32, 32, 17, 32, 100]
    inputs = make_inputs()
    assert "padded to 32" in peer.details(inputs)["note"]
    padded = inputs.a.repeat(7, 1)[:32].int() @ inputs.b(0).int()
    assert torch.equal(peer.finish(padded, inputs), epilogue(padded[: SMALL.M], inputs, 0))


def test_a_result_that_is_allocated_is_held_until_its_slot_comes_again():
    inputs = make_inputs()
    calls = inputs.keeping(lambda i: torch.full((4,), float(i)))
    pointers = {call().data_ptr() for call in calls}
    assert len(pointers) == inputs.slots == 3


def test_a_correct_peer_is_recorded_as_bit_equal_with_its_kernel():
    record = run_one(StandIn(), StandIn("other"), Bf16())
    assert record.check == "checked"
    ours = record.results["ours"]
    assert ours.bit_equal is True and ours.error == 0.0 and ours.kernel == "row of ours"
    assert ours.us > 0 and len(ours.samples) >= 2
    assert record.results["other"].bit_equal is True
    assert record.results["bf16"].failed is None and record.results["bf16"].error < 2e-2


def test_one_wrong_element_is_recorded_as_wrong_bits():
    result = run_one(StandIn(fault="bits")).results["ours"]
    assert result.bit_equal is False and result.us > 0


def test_bits_that_go_wrong_only_under_timing_are_found():
    result = run_one(StandIn(fault="bits", fault_after=2)).results["ours"]
    assert result.bit_equal is False
    assert "timed graph" in result.note


def test_an_output_that_is_never_written_is_not_taken_for_right():
    class Idle(StandIn):
        def prepare(self, inputs):
            return inputs.calls(lambda i: lambda: inputs.out(i))

    record = run_one(StandIn("other"), Bf16(), Idle())
    assert record.results["ours"].bit_equal is False
    assert math.isnan(record.results["ours"].error)


@pytest.mark.parametrize("after", [0, 1, 20])
def test_a_peer_that_raises_is_recorded_as_failed_and_the_others_run(after):
    broken, good = StandIn("vllm", fault="raise", fault_after=after), StandIn()
    record = run_one(broken, good)
    assert record.results["vllm"].failed == "RuntimeError: the launch failed"
    assert record.results["ours"].bit_equal is True
    assert broken.released and good.released


def test_an_unchecked_case_says_why():
    off = run_one(StandIn(), options=Options(budget_ms=2, sets=3, check=False))
    assert off.check == "not checked: switched off" and off.results["ours"].bit_equal is None
    large = run_one(StandIn(), options=Options(budget_ms=2, sets=3, check_limit_gmac=1e-9))
    assert "above the limit" in large.check


def test_cases_of_one_layer_share_weights_and_come_together():
    cases = [Case("x", 1, 64, 32), Case("x", 3, 64, 32), Case("y", 1, 32, 32)]
    seen = []

    class Watching(StandIn):
        def prepare(self, inputs):
            seen.append((inputs.case.shape, inputs.weights))
            return super().prepare(inputs)

    batches = list(run_grid(Int8Suite(), cases, [Watching()], CPU, FAST))
    assert [[record.M for record in batch] for batch in batches] == [[1, 3], [1]]
    assert seen[0][1] is seen[1][1] and seen[2][1] is not seen[0][1]


def test_the_same_seed_gives_the_same_inputs():
    results = []

    class Watching(StandIn):
        def prepare(self, inputs):
            results.append((inputs.a.clone(), inputs.b(1).clone()))
            return super().prepare(inputs)

    for seed in (5, 5, 6):
        run_one(Watching(), options=Options(budget_ms=1, sets=2, seed=seed))
    assert all(torch.equal(x, y) for x, y in zip(results[0], results[1], strict=True))
    assert not torch.equal(results[0][0], results[2][0])


def test_the_inputs_of_a_weight_do_not_depend_on_the_other_weights_of_the_run():
    seen = []

    class Watching(StandIn):
        def prepare(self, inputs):
            seen.append((inputs.case, inputs.a.clone(), inputs.b(0).clone()))
            return super().prepare(inputs)

    first, second = Case("x", 1, 64, 32), Case("y", 2, 32, 32)
    for cases in ([second], [first, second]):
        list(run_grid(Int8Suite(), cases, [Watching()], CPU, FAST))
    assert [case for case, *_ in seen] == [second, first, second]
    assert torch.equal(seen[0][1], seen[2][1]) and torch.equal(seen[0][2], seen[2][2])


def test_overhead_is_recorded_for_every_peer_that_runs():
    records = {one.name: one for one in run_overhead([StandIn(), StandIn("vllm", fault="raise")], CPU)}
    assert records["ours"].us > 0 and records["ours"].calls > 0
    assert records["vllm"].us is None and "launch failed" in records["vllm"].failed


@pytest.mark.parametrize(("data", "least", "most"), [("uniform", 70, 78), ("gauss", 28, 32)])
def test_the_numbers_have_the_distribution_that_was_asked_for(data, least, most):
    weights = WeightSets(128, 256, CPU, torch.Generator().manual_seed(1), sets=1, data=data)
    inputs = Inputs(Case("s", 64, 128, 256), weights, torch.Generator().manual_seed(2))
    for numbers in (weights.int8[0], inputs.a):
        assert numbers.dtype == torch.int8 and least < numbers.float().std() < most
    product = epilogue(inputs.a.int() @ inputs.b(0).int(), inputs, 0).float()
    assert 0.5 < product.std() < 2  # the scales bring entries near one


def test_peers_are_chosen_by_name_and_device():
    every = every_peer()
    assert [peer.name for peer in select("all", CPU, every)] == ["bf16", "fp32", "intmm_epilogue"]
    cuda = [peer.name for peer in select("all", torch.device("cuda"), every)]
    assert cuda == ["ours_tensor", "bf16", "intmm", "cublaslt", "fp8row", "fp8", "vllm", "sgl"]
    assert select("none", CPU, every) == []
    assert [peer.name for peer in select("sgl, vllm", torch.device("cuda"), every)] == ["vllm", "sgl"]
    with pytest.raises(ValueError, match="vllm.*cpu"):
        select("vllm", CPU, every)


@pytest.mark.parametrize("peer", [peers.Vllm, peers.Sgl])
def test_a_library_that_cannot_be_loaded_gives_its_reason(peer, tmp_path):
    missing, broken = tmp_path / "missing.so", tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    assert "missing.so" in peer(str(missing)).available(CPU)
    assert "broken.so" in peer(str(broken)).available(CPU)
    assert peer(str(broken)).library().startswith("broken.so, 13 bytes, sha256 ")
    [described] = implementations([peer(str(broken))], CPU)
    assert described.rival and described.unavailable


def test_a_library_path_comes_from_the_option_before_the_environment(monkeypatch):
    monkeypatch.setenv(peers.VLLM_LIB_VARIABLE, "from_environment.so")
    by_name = {peer.name: peer for peer in every_peer(vllm_lib="from_option.so")}
    assert "from_option.so" in by_name["vllm"].available(CPU)
    assert "from_environment.so" in {peer.name: peer for peer in every_peer()}["vllm"].available(CPU)


@pytest.mark.gpu
def test_every_cuda_peer_of_torch_computes_the_product_on_a_gpu():
    device = torch.device("cuda:0")
    chosen = [peer for peer in select("bf16,intmm,cublaslt,fp8row,fp8", device, every_peer()) if peer.available(device) is None]
    cases = [Case("256x512", m, 256, 512) for m in (1, 48)]
    [batch] = run_grid(Int8Suite(), cases, [Ours(), *chosen], device, Options(budget_ms=5))
    for record in batch:
        assert {name: result.failed for name, result in record.results.items() if result.failed} == {}
        assert record.results["ours"].bit_equal is True
        assert record.results["intmm"].bit_equal is True and record.results["cublaslt"].bit_equal is True
        assert record.results["bf16"].error < 2e-2
        assert all(result.error < 8e-2 for result in record.results.values())
