"""Each reference equals an independent computation, and both solutions pass by it."""

from __future__ import annotations

import numpy as np
import pytest
from schema_data import collection, distinct
from schema_independent import PACKAGE, check, dequantized, dequantized_by_hand, quantized, quantized_by_hand

from scaled_mm import schema


@pytest.mark.parametrize("name", distinct())
def test_every_reference_equals_an_independent_computation(name):
    definition, workload = distinct()[name]
    check(definition, schema.build_reference(definition), schema.draw(definition, workload, root=collection().root))


def test_every_definition_has_a_reference_that_was_compared():
    compared = {definition.reference for definition, _ in distinct().values()}
    assert {definition.reference for definition in collection().definitions.values()} == compared and len(compared) > 40


@pytest.mark.parametrize("fmt", PACKAGE)
def test_what_formats_that_the_gguf_package_lacks_are_compared_with_has_the_bits_of_the_package(fmt):
    x = np.random.default_rng(1).standard_normal((200, 32)).astype(np.float32)
    q = quantized(x, fmt, "ggml")
    assert np.array_equal(quantized_by_hand(x, fmt, "ggml"), q)
    assert np.array_equal(dequantized_by_hand(q, fmt).astype(np.float32), dequantized(q, fmt))


@pytest.mark.parametrize("name", distinct())
def test_solutions_pass_on_a_cpu(name):
    definition, workload = distinct()[name]
    traces = schema.evaluate(definition, collection().solutions[name], workload, "cpu", collection().root)
    assert [trace.evaluation.status for trace in traces] == ["PASSED", "PASSED"], [trace.evaluation.log for trace in traces]
    if definition.op_type.startswith("gemm_q"):  # the bound of docs/design/gguf-formats.md, which is the package's alone
        ours = next(trace for trace in traces if trace.solution.startswith("scaled_mm_"))
        assert ours.evaluation.correctness.extra["out"]["relative_norm"] <= 2e-6
