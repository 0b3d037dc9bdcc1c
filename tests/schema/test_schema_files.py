"""The files of schemas/: those that the catalog writes and no others, complete, and traces that say how they were made."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from schema_data import ROOT, collection

from scaled_mm import schema
from scaled_mm.gguf_formats import FORMATS, WEIGHT_FORMATS
from scaled_mm.schema.catalog import __main__ as writer
from scaled_mm.schema.catalog import entries
from scaled_mm.schema.vocabulary import GROUPS, OP_TYPES


def files(*folders: str) -> set[str]:
    return {path.relative_to(ROOT).as_posix() for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()}


def test_the_files_are_those_that_the_catalog_writes():
    texts = dict(writer.texts())
    assert set(texts) == files("definitions", "solutions", "workloads")
    for name, text in texts.items():
        assert (ROOT / name).read_text(encoding="utf-8") == text, f"{name}: run python -m scaled_mm.schema.catalog"


def test_the_files_of_inputs_are_those_that_are_drawn():
    blobs = dict(writer.blobs())
    assert set(blobs) == files("blob")
    for name, tensors in blobs.items():
        kept = load_file(ROOT / name)
        assert set(kept) == set(tensors) and all(torch.equal(kept[key], tensors[key]) for key in tensors), name


def test_every_definition_has_our_solution_a_plain_one_and_workloads():
    for name in collection().definitions:
        assert sorted(one.author for one in collection().solutions[name]) == ["pytorch", "scaled_mm"]
        assert collection().workloads[name]
    assert len(collection().definitions) == len(list(entries())) == len(list((ROOT / "definitions").rglob("*.json")))


def test_every_op_type_and_group_has_a_definition():
    used = {definition.op_type for definition in collection().definitions.values()}
    assert used == set(OP_TYPES) and {OP_TYPES[name].group for name in used} == set(GROUPS)


@pytest.mark.parametrize(
    "name",
    [
        "gemm_fp32_baseline",
        "gemm_int8_scaled_n4096_k4096",
        "gemm_q4_0_w4a16",
        "gemm_q4_0_q8_1_w4a8",
        "gemm_q4_0_q8_1_bs32",
        *(f"{verb}_{fmt}" for verb in ("quantize", "dequantize") for fmt in FORMATS),
        *(f"gemm_{fmt}_w{one.bits}a16_n28672_k8192" for fmt, one in WEIGHT_FORMATS.items()),
        *(f"gemm_{fmt}_q8_1_w{one.bits}a8_n4096_k14336" for fmt, one in WEIGHT_FORMATS.items()),
        "quantize_int8_static",
        "quantize_int8_dynamic_smooth",
        "silu_h4096",
        "gelu_h4096",
        "silu_and_mul_h14336",
        "rmsnorm_h4096",
        "add_rms_norm_h8192",
        "softmax_d128",
        "rope_d128_h32_kv8",
        "paged_decode_attention_h32_kv8_d128_bs16",
        "linear_n4096_k4096",
    ],
)
def test_a_name_that_readers_expect_is_there(name):
    assert collection().definition(name).name == name


def test_references_use_nothing_of_the_package():
    for definition in collection().definitions.values():
        assert "scaled_mm" not in definition.reference, definition.name


def test_every_product_and_quantizer_was_measured_on_an_h200_and_passed():
    for name, definition in collection().definitions.items():
        if not definition.op_type.startswith(("gemm", "quantize", "dequantize")):
            continue
        measured = {
            (trace.solution, trace.workload.uuid)
            for trace in collection().traces.get(name, ())
            if trace.evaluation.environment.hardware == "NVIDIA_H200" and trace.evaluation.status == "PASSED"
        }
        assert measured == {(one.name, workload.uuid) for one in collection().solutions[name] for workload in collection().workloads[name]}, name


def test_every_trace_names_the_command_that_made_it_and_its_versions():
    count = 0
    for several in collection().traces.values():
        for trace in several:
            count += 1
            wanted = f"scaled-mm schema run --solution {trace.solution} --workload {trace.workload.uuid} --device cuda:0\n"
            assert trace.evaluation.log == wanted and {"scaled_mm", "torch", "cuda", "driver"} <= set(trace.evaluation.environment.libs)
    assert count == sum(len((ROOT / name).read_text().splitlines()) for name in files("traces"))


def test_our_block_products_stayed_within_their_bound_when_they_were_measured():
    for name, several in collection().traces.items():
        for trace in several if name.startswith("gemm_q") else ():
            if trace.solution.startswith("scaled_mm_"):
                assert trace.evaluation.correctness.extra["out"]["relative_norm"] <= 2e-6, trace.workload.uuid


def test_no_definition_wants_random_bytes_for_blocks():
    for path in (ROOT / "workloads").rglob("*.jsonl"):
        for line in path.read_text().splitlines():
            document = json.loads(line)
            definition = collection().definitions[document["definition"]]
            assert all(document["workload"]["inputs"][name]["type"] == "safetensors" for name in definition.logical if name in definition.inputs)


def test_the_collection_is_found_without_being_named():
    assert schema.schemas_dir().is_dir() and schema.load().root == schema.schemas_dir()
