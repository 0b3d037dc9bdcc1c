"""The real flashinfer-bench (0.1.2 from PyPI) loads, builds and keeps every file. CI installs it: .ci/run says how."""

from __future__ import annotations

import collections
import os

import pytest
import torch
from schema_data import ROOT, collection, distinct
from schema_independent import check

from scaled_mm import schema

if not os.environ.get("SCALED_MM_REQUIRE_FLASHINFER_BENCH"):  # .ci/run sets it: that it cannot be imported is a failure there
    pytest.importorskip("flashinfer_bench", reason="flashinfer-bench is not installed (schemas/README.md says how)")

from flashinfer_bench.bench.utils import gen_inputs, load_safetensors  # noqa: E402
from flashinfer_bench.compile import BuilderRegistry  # noqa: E402
from flashinfer_bench.data import Definition, Solution, Trace, TraceSet, load_json_file, load_jsonl_file, save_json_file  # noqa: E402


@pytest.fixture(scope="module")
def trace_set() -> TraceSet:
    return TraceSet.from_path(str(ROOT))


def test_the_real_loader_counts_what_the_files_are(trace_set):
    lines = {folder: sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.jsonl")) for folder in ("workloads", "traces")}
    assert len(trace_set.definitions) == len(list((ROOT / "definitions").rglob("*.json"))) > 100
    assert sum(map(len, trace_set.solutions.values())) == len(list((ROOT / "solutions").rglob("*.json"))) > 200
    assert sum(map(len, trace_set.workloads.values())) == lines["workloads"] > 300
    assert sum(map(len, trace_set.traces.values())) == lines["traces"] > 600


def test_both_readers_read_the_same(trace_set):
    ours = collection()
    assert set(ours.definitions) == set(trace_set.definitions)
    for name, definition in ours.definitions.items():
        assert definition.model_dump(mode="json", exclude_unset=True) == trace_set.definitions[name].model_dump(mode="json", exclude_unset=True)
    for kind in ("solutions", "traces"):
        for name, several in getattr(ours, kind).items():
            theirs = getattr(trace_set, kind)[name]
            assert [one.model_dump(mode="json", exclude_unset=True) for one in several] == [
                one.model_dump(mode="json", exclude_unset=True) for one in theirs
            ]
    for name, several in ours.workloads.items():
        assert [one.model_dump(mode="json") for one in several] == [trace.workload.model_dump(mode="json") for trace in trace_set.workloads[name]]


@pytest.mark.parametrize("folder, kind", [("definitions", Definition), ("solutions", Solution)])
def test_every_file_is_the_same_after_a_round_trip(folder, kind, tmp_path):
    for path in sorted((ROOT / folder).rglob("*.json")):
        save_json_file(load_json_file(kind, path), tmp_path / "copy.json")
        assert (tmp_path / "copy.json").read_text() + "\n" == path.read_text(), path


def test_every_line_is_the_same_after_a_round_trip():
    for path in [*(ROOT / "workloads").rglob("*.jsonl"), *(ROOT / "traces").rglob("*.jsonl")]:
        lines = path.read_text().splitlines()
        traces = load_jsonl_file(Trace, path)
        assert len(traces) == len(lines)
        for trace, line in zip(traces, lines):
            assert schema.Trace.model_validate_json(line).model_dump(mode="json") == trace.model_dump(mode="json"), path


def test_files_lie_where_the_validator_of_newer_releases_wants_them(trace_set):
    for path in (ROOT / "definitions").rglob("*.json"):
        assert trace_set.definitions[path.stem].op_type == path.parent.name
    for definition in trace_set.definitions.values():
        assert set(definition.var_axes) == set(definition.var_axes_bindings)  # every var axis is in an input


@pytest.mark.parametrize("name", distinct())
def test_the_real_build_of_every_reference_equals_an_independent_computation(name, trace_set):
    definition, workload = distinct()[name]
    run = BuilderRegistry.get_instance().build_reference(trace_set.definitions[name])
    try:
        check(definition, run, schema.draw(definition, workload, root=ROOT))
    finally:
        run.cleanup()


@pytest.mark.parametrize("name", distinct())
def test_the_real_build_of_every_solution_gives_what_ours_gives(name, trace_set):
    definition, workload = distinct()[name]
    inputs = schema.draw(definition, workload, root=ROOT)
    for solution in trace_set.solutions[name]:
        run = BuilderRegistry.get_instance().build(trace_set.definitions[name], solution)
        try:
            theirs, ours = (call(*inputs) for call in (run, schema.build_solution(collection().solution(solution.name))))
        finally:
            run.cleanup()
        for a, b in zip(*(one if isinstance(one, (tuple, list)) else [one] for one in (theirs, ours)), strict=True):
            assert torch.equal(a, b)


def test_the_real_package_reads_the_inputs_that_are_kept(trace_set):
    kinds = collections.Counter()
    for name, several in trace_set.workloads.items():
        definition = trace_set.definitions[name]
        for trace in several:
            wanted = [one.path for one in trace.workload.inputs.values() if one.type == "safetensors"]
            if not wanted or not all((ROOT / path).is_file() for path in wanted):
                continue
            kinds[definition.op_type] += 1
            tensors = load_safetensors(definition, trace.workload, ROOT)
            inputs = gen_inputs(definition, trace.workload, "cpu", tensors)
            ours = schema.draw(collection().definitions[name], schema.Workload.model_validate(trace.workload.model_dump()), root=ROOT)
            for (input_name, spec), theirs, drawn in zip(definition.inputs.items(), inputs, ours):
                if input_name in tensors:
                    assert torch.equal(theirs, drawn)
                elif spec.shape is None:
                    assert theirs == drawn
                else:
                    assert theirs.shape == drawn.shape and theirs.dtype == drawn.dtype
    assert {"dequantize", "paged_decode_attention", "gemm_q4_0", "gemm_q8_0_q8_1"} <= set(kinds)


def test_a_trace_of_ours_is_a_trace_of_theirs(tmp_path):
    definition, workload = collection().definitions["quantize_q8_1"], collection().workloads["quantize_q8_1"][0]
    for solution, trace in zip(
        collection().solutions["quantize_q8_1"], schema.evaluate(definition, collection().solutions["quantize_q8_1"], workload, "cpu")
    ):
        theirs = Trace.model_validate_json(trace.model_dump_json(exclude_unset=True))
        assert theirs.is_successful() and theirs.solution == solution.name and theirs.evaluation.performance.latency_ms > 0
