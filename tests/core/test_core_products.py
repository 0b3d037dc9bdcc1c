"""A kind of product is described three times: its spec in Python, its problem in the C core, its entry in csrc/torch. They agree."""

from __future__ import annotations

import importlib
import pkgutil
import re

import c_header
import pytest

from scaled_mm import products
from scaled_mm.core import binding
from scaled_mm.core.operators import Product
from scaled_mm.core.spec import ProductSpec
from scaled_mm.jit.paths import csrc_dir
from scaled_mm.products import codes
from scaled_mm.rowwise import kernels

MODULES = [importlib.import_module(f"scaled_mm.products.{module.name}") for module in pkgutil.iter_modules(products.__path__)]
PRODUCTS = {value.spec.code: value for module in MODULES for value in vars(module).values() if isinstance(value, Product)}
SPECS = sorted(
    [
        *(product.spec for product in PRODUCTS.values()),
        *(value for module in MODULES for value in vars(module).values() if isinstance(value, ProductSpec)),
    ],
    key=lambda spec: spec.code,
)
KINDS = c_header.enum("scaledMMProduct_t")
NUMBERS = {name: code for name, code in KINDS.items() if code not in set(kernels.Kind)}  # of products; row-wise operators have no table


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_the_operands_of_a_spec_are_those_of_the_core_in_its_order(spec):
    assert spec.operand_names == binding.operand_names(spec.code)


def test_every_kind_of_the_core_has_a_spec():
    assert [spec.code for spec in SPECS] == sorted(NUMBERS.values())
    assert list(KINDS.values()) == list(range(len(KINDS)))
    assert all(map(binding.operand_names, KINDS.values())) and binding.operand_names(len(KINDS)) == ()


def test_the_row_wise_operators_are_the_numbers_of_the_header():
    names = {code: name for name, code in KINDS.items() if name not in NUMBERS}
    assert {kind.value: kind.name in names[kind.value] for kind in kernels.Kind} == dict.fromkeys(names, True)
    assert {f"SCALED_MM_{function.name}": function.value for function in kernels.Function} == c_header.enum("scaledMMRowwise_t")
    assert {f"SCALED_MM_ROWWISE_{output.name}": output.value for output in kernels.Output} == c_header.enum("scaledMMRowwiseOutput_t")


def test_the_codes_are_the_numbers_of_the_header():
    assert {f"SCALED_MM_{name}": code for name, code in vars(codes).items() if name.isupper()} == NUMBERS
    assert {name.replace("SCALED_MM_TABLE_", "SCALED_MM_") for name in c_header.enum("scaledMMTableKind_t")} == NUMBERS.keys()


def test_the_abi_version_is_that_of_the_header():
    assert c_header.macro("SCALED_MM_ABI_VERSION") == binding.ABI_VERSION


def test_every_kind_but_gguf_whose_operators_take_more_is_a_product():
    assert set(NUMBERS.values()) - PRODUCTS.keys() == {codes.GGUF_GEMM}


@pytest.mark.parametrize("spec", [product.spec for product in PRODUCTS.values()], ids=lambda spec: spec.name)
def test_the_cuda_operators_take_what_their_schema_says(spec):
    source = (csrc_dir() / "torch" / "operators.cpp").read_text()
    number = next(name for name, code in NUMBERS.items() if code == spec.code)
    entry = re.search(rf"constexpr Kind (\w+) = \{{{number}, (\d+), 0b([01]+), (-?\d+), (true|false), \w+\}};", source)
    assert entry, f"csrc/torch/operators.cpp: no Kind of {number}"
    name, inputs, required, constant, has_int32_out = entry.groups()
    assert int(inputs) == len(spec.inputs)
    assert required[::-1].ljust(len(spec.inputs), "0") == "".join("01"[operand.required] for operand in spec.inputs)
    assert int(constant) == (-1 if spec.constant is None else spec.input_names.index(spec.constant))
    assert (has_int32_out == "true") == any(str(dtype) == "torch.int32" for dtype in spec.out_dtypes)
    assert f'SCALED_MM_IMPL("{spec.name}", {name});' in source
