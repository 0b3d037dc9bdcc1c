"""A kind of product is described three times: its spec in Python, its problem in the C core, its entry in csrc/torch. They agree."""

from __future__ import annotations

import re

import pytest

from scaled_mm.core import binding
from scaled_mm.jit.paths import csrc_dir
from scaled_mm.products import block_scaled, codes, gemm, gguf, grouped

SPECS = [gemm.GEMM.spec, grouped.GROUPED.spec, block_scaled.BLOCK_SCALED.spec, gguf.SPEC]
OPERATORS = {codes.GEMM: "SCALED_MM_GEMM", codes.GROUPED_GEMM: "SCALED_MM_GROUPED_GEMM", codes.BLOCK_SCALED_GEMM: "SCALED_MM_BLOCK_SCALED_GEMM"}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_the_operands_of_a_spec_are_those_of_the_core_in_its_order(spec):
    assert spec.operand_names == binding.operand_names(spec.code)


def test_every_kind_of_the_core_has_a_spec():
    assert [spec.code for spec in SPECS] == list(range(len(SPECS)))
    assert binding.operand_names(len(SPECS)) == ()


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.code in OPERATORS], ids=lambda spec: spec.name)
def test_the_cuda_operators_take_what_their_schema_says(spec):
    source = (csrc_dir() / "torch" / "operators.cpp").read_text()
    entry = re.search(rf"constexpr Kind (\w+) = \{{{OPERATORS[spec.code]}, (\d+), 0b([01]+), (-?\d+), (true|false), \w+\}};", source)
    name, inputs, required, constant, has_int32_out = entry.groups()
    assert int(inputs) == len(spec.inputs)
    assert required[::-1].ljust(len(spec.inputs), "0") == "".join("01"[operand.required] for operand in spec.inputs)
    assert int(constant) == (-1 if spec.constant is None else spec.input_names.index(spec.constant))
    assert (has_int32_out == "true") == any(str(dtype) == "torch.int32" for dtype in spec.out_dtypes)
    assert f'SCALED_MM_IMPL("{spec.name}", {name});' in source
