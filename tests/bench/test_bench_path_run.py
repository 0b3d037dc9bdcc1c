"""Cases, inputs, checks and implementations of the path, on a CPU, vLLM's operators by stand-ins."""

import functools

import pytest
import torch
from bench_data import CPU
from path_bench_data import FakeVllm, register

import scaled_mm as sm
from scaled_mm.bench import overhead
from scaled_mm.bench.path import cases, linear, operators, peers, rows, suite
from scaled_mm.bench.path.cases import LAYER, PathCase
from scaled_mm.bench.path.inputs import OUTLIER_FACTOR, activations
from scaled_mm.measure import shapes
from scaled_mm.measure.run import Options, run_grid

FAST = Options(budget_ms=0.5, sets=3)
LINEAR = PathCase("64x96", 5, 64, 96, LAYER)
ON_CPU = [peers.Ours(), peers.Apart(), peers.Torch()]


def of(part: str, m: int = 5, k: int = 64) -> PathCase:
    return LINEAR if part == LAYER else PathCase(f"{part} K={k}", m, k, k, part)


def run_one(case: PathCase, *those, options: Options = FAST):
    [[record]] = run_grid(suite.PathSuite(), [case], list(those), CPU, options)
    return record


@pytest.fixture
def fake():
    library = register()
    peer = FakeVllm()
    assert peer.available(CPU) is None
    yield peer
    library._destroy()


def generator() -> torch.Generator:
    return torch.Generator(CPU).manual_seed(1)


def test_the_default_grid_of_a_gpu_is_every_layer_and_every_operator():
    given = cases.defaults(torch.device("cuda:0"))
    layers = cases.layers(given.shapes, given.ms)
    assert {case.shape for case in layers} == set(shapes.LLM_SHAPES) and len(layers) == 9 * 11
    found = cases.rows(operators.OPERATORS, given.sizes)
    assert {(case.M, case.K) for case in found} == {(m, k) for m in (1, 16, 64, 256, 1024, 4096) for k in (4096, 8192, 14336)}
    assert len(found) == 6 * 18 and cases.layers("none", given.ms) == []


def test_random_layers_follow_from_the_seed_and_are_off_the_grid():
    given = cases.GPU
    drawn = cases.random_layers(10, 7, given)
    assert drawn == cases.random_layers(10, 7, given) != cases.random_layers(10, 8, given)
    layers = {(case.N, case.K) for case in drawn}
    assert len(layers) == 10 and len(drawn) == 30 and not layers & set(shapes.LLM_SHAPES.values())
    assert all(size % 16 == 0 and 512 <= size <= 16384 for layer in layers for size in layer)
    for index, case in enumerate(drawn):
        least, most = given.bands[index % 3]
        assert least <= case.M <= most and (case.M % 2 == 1 or index // 3 % 2 == 1)


@pytest.mark.parametrize("text", ["x", "4096", "0x4096", "4096x4096x1", "-1x16", ""])
def test_sizes_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="expected"):
        cases.parse_sizes(text)


def test_activations_have_few_large_channels():
    x = activations(64, 1024, CPU, generator())
    large = x.float().std(dim=0) > OUTLIER_FACTOR / 2
    assert x.dtype is torch.bfloat16 and large.sum() == 2
    assert (activations(64, 32, CPU, generator()).float().std(dim=0) > OUTLIER_FACTOR / 2).sum() == 1


@pytest.mark.parametrize("part", [LAYER, *operators.OPERATORS])
def test_ours_has_the_bits_of_the_reference_before_and_after_timing(part):
    record = run_one(of(part), *peers.serving(ON_CPU, part))
    assert record.part == part and record.check == "checked" and record.traffic_bytes > 0
    assert all(result.failed is None and result.error < 0.05 for result in record.results.values())
    assert all(record.results[name].bit_equal is True for name in peers.OURS_ALL if name in record.results)
    assert ("apart" in record.results) is (part == LAYER) and ("torch" in record.results) is (part in (LAYER, "add_rms_norm", "silu_and_mul"))


@pytest.mark.parametrize("part", [LAYER, *operators.OPERATORS])
def test_vllm_computes_nearly_the_same(part, fake):
    result = run_one(of(part), peers.Ours(), fake).results["vllm"]
    assert result.failed is None and result.us > 0 and result.error < 0.02


@pytest.mark.parametrize("name", ["add_rms_norm", "add_rms_norm_quantize"])
def test_an_operator_that_writes_to_its_inputs_writes_to_its_own(name, fake):
    inputs = rows.RowInputs(of(name), CPU, generator(), 2)
    before = [(inputs.x(i).clone(), inputs.residual(i).clone()) for i in range(2)]
    for call in fake.prepare(inputs) * 2:
        call()
    assert all(torch.equal(x, inputs.x(i)) and torch.equal(residual, inputs.residual(i)) for i, (x, residual) in enumerate(before))


def test_an_operator_that_the_library_lacks_is_recorded_with_the_reason_and_not_run():
    library = register(lacking="static_scaled_int8_quant")
    try:
        fake = FakeVllm()
        assert fake.available(CPU) is None
        [lacking] = peers.lacking([*ON_CPU, fake], [LAYER, *operators.OPERATORS])
        assert (lacking.implementation, lacking.part) == ("vllm", "quantize_int8_static")
        assert lacking.why == "torch.ops.fake_vllm has no static_scaled_int8_quant"
        assert fake not in peers.serving([fake], "quantize_int8_static") and fake in peers.serving([fake], "quantize_int8")
    finally:
        library._destroy()


def test_another_signature_is_a_failure_of_the_case_and_the_others_run(fake, monkeypatch):
    monkeypatch.setattr(fake, "packet", lambda name: torch.ops.fake_vllm.silu_and_mul.default)
    results = run_one(of("rms_norm_quantize"), peers.Ours(), fake).results
    assert "silu_and_mul() " in results["vllm"].failed and results["ours"].bit_equal is True


@pytest.mark.parametrize("part", [LAYER, *operators.OPERATORS])
@pytest.mark.parametrize("after", [0, 1])
def test_one_wrong_bit_is_found_in_a_plain_call_and_under_timing(part, after):
    class Wrong(peers.Ours):
        def prepare(self, inputs):
            made = self._function(inputs)
            left = [after]

            def run(i):
                results = made(i)
                left[0] -= 1
                if left[0] < 0:
                    results[-1].view(-1)[-1] += 1
                return results

            return inputs.keep(self.name, run)

        def _function(self, inputs):
            calls = inputs.ours(self.name)
            return lambda i: calls[i]()

    record = run_one(of(part), Wrong())
    assert record.results["ours"].bit_equal is False
    assert (record.results["ours"].note is not None) is (after == 1)


def test_results_that_a_graph_does_not_write_again_are_not_taken_for_right():
    class Once(peers.Ours):
        def prepare(self, inputs):
            calls = inputs.ours(self.name)
            first = [call() for call in calls]
            return [lambda i=i: first[i] for i in range(len(calls))]

    record = run_one(of("silu_and_mul"), Once())
    assert record.results["ours"].bit_equal is False


def test_of_a_large_case_rows_that_are_spread_are_checked(monkeypatch):
    monkeypatch.setattr(rows, "CHECKED_ELEMENTS", 3 * 64)
    record = run_one(of("quantize_int8", m=9), peers.Ours())
    assert record.check == "checked: 3 of 9 rows" and record.results["ours"].bit_equal is True
    inputs = rows.RowInputs(of("quantize_int8", m=9), CPU, generator(), 2)
    (q, scale), index, _ = inputs.expected(FAST)
    assert index.tolist() == [0, 4, 8] and q.shape == (3, 64) and scale.shape == (3, 1)


def test_an_unchecked_case_says_why():
    off = Options(budget_ms=0.5, sets=2, check=False)
    for part in (LAYER, "silu_and_mul"):
        record = run_one(of(part), peers.Ours(), options=off)
        assert record.check == "not checked: switched off" and record.results["ours"].bit_equal is None
    assert "above the limit" in run_one(LINEAR, peers.Ours(), options=Options(budget_ms=0.5, sets=2, check_limit_gmac=1e-9)).check


def test_traffic_counts_every_input_and_every_output_once():
    for name, operator in operators.OPERATORS.items():
        inputs = rows.RowInputs(of(name), CPU, generator(), 1)
        read = [inputs.x(0), inputs.residual(0), inputs.weight if operator.normalizes else None]
        moved = [one for one in (*read, *operator.run(inputs, 0)) if one is not None]
        assert operator.traffic_bytes(5, 64) == sum(one.numel() * one.itemsize for one in moved), name


def test_the_weight_of_a_layer_is_prepared_once_and_rotates():
    weights = linear.LinearWeights(64, 96, CPU, generator(), 3)
    inputs = linear.LinearInputs(LINEAR, weights, generator())
    assert len(weights.prepared) == 3 and all(isinstance(one, sm.PreparedWeight) for one in weights.prepared)
    first, second = (call()[0].clone() for call in inputs.ours("ours")[:2])
    assert not torch.equal(first, second)
    assert torch.equal(second, sm.int8_linear(inputs.x, weights.int8[1], weights.scale[1]))


def test_overhead_is_recorded_for_every_implementation_of_every_part(fake, monkeypatch):
    monkeypatch.setattr(overhead, "host_overhead", functools.partial(overhead.host_overhead, count=2, batches=4))
    found = {one.name: one for one in suite.run_overhead([peers.Ours(), fake], [LAYER, "random", "silu_and_mul"], CPU)}
    assert set(found) == {"linear: ours", "linear: descriptor", "linear: vllm", "silu_and_mul: ours", "silu_and_mul: vllm"}
    assert all(one.us > 0 for one in found.values())


@pytest.mark.gpu
def test_every_part_runs_on_a_gpu_with_equal_bits():
    device = torch.device("cuda:0")
    for part in (LAYER, *operators.OPERATORS):
        case = PathCase("layer", 33, 512, 1024, LAYER) if part == LAYER else of(part, 33, 1024)
        [[record]] = run_grid(suite.PathSuite(), [case], peers.serving(ON_CPU, part), device, Options(budget_ms=5))
        assert {name: result.failed for name, result in record.results.items() if result.failed} == {}
        assert record.results["ours"].bit_equal is True
