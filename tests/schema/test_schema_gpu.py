"""Schemas on a GPU: our runner and flashinfer-bench's own Benchmark, with inputs of every kind."""

from __future__ import annotations

import pytest
from schema_data import collection, distinct, small_folder

from scaled_mm import cli, schema

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", distinct())
def test_solutions_pass_on_a_gpu(name):
    definition, workload = distinct()[name]
    solutions = collection().solutions[name]
    for trace in schema.evaluate(definition, solutions, workload, "cuda:0", collection().root):
        assert trace.evaluation.status == "PASSED", trace.evaluation.log
        assert trace.evaluation.performance.latency_ms > 0 and trace.evaluation.environment.hardware.startswith("NVIDIA")


def test_the_stock_benchmark_passes_every_solution(tmp_path):
    bench = pytest.importorskip("flashinfer_bench")
    names = [
        "gemm_fp32_baseline",
        "gemm_int8_scaled_bias_zp",
        "gemm_q4_0_w4a16",
        "gemm_q5_1_q8_1_w5a8",
        "gemm_q8_0_q8_1_bs32",
        "quantize_q4_0",
        "quantize_int8_dynamic",
    ]
    root = small_folder(tmp_path / "schemas", names)
    assert cli.main(["schema", "draw", "--root", str(root), "--out", str(root)]) == 0  # it reads files that are there, and draws none
    config = bench.BenchmarkConfig(warmup_runs=1, iterations=3, num_trials=1, log_dir=str(tmp_path / "logs"))
    traces = bench.Benchmark(bench.TraceSet.from_path(str(root)), config).run_all().traces
    wanted = {(one.name, workload.uuid) for name in names for one in collection().solutions[name] for workload in collection().workloads[name]}
    got = {(trace.solution, trace.workload.uuid): trace.evaluation for several in traces.values() for trace in several}
    assert set(got) == wanted
    assert {one.status.value for one in got.values()} == {"PASSED"}, [one.log for one in got.values() if one.status.value != "PASSED"]
    assert sum(map(len, schema.load(root).traces.values())) == len(wanted)  # and what it wrote is read here
