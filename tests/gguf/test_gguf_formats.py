"""The list of GGUF formats is the same in Python and in C, and every format has its public functions."""

from __future__ import annotations

import ctypes
import inspect
import subprocess

import pytest
import torch
from gguf_data import seeded

import scaled_mm as sm
from scaled_mm.core import binding
from scaled_mm.gguf import by_format
from scaled_mm.gguf.gemm import gemm_with_floats, gemm_with_q8_1
from scaled_mm.gguf_formats import BLOCK, FORMATS, WEIGHT_FORMATS
from scaled_mm.jit import toolchain
from scaled_mm.jit.codegen import WEIGHT_FORMATS as CXX_FORMATS
from scaled_mm.jit.paths import csrc_dir, include_dir

PROGRAM = """
#include <stdio.h>
#include <scaled_mm/scaled_mm.h>
#define LINE(NAME, name, code, bytes, bits, zero, minimum) printf("%s %d %d %d %d %d\\n", #name, SCALED_MM_DTYPE_##NAME, bytes, bits, zero, minimum);
int main(void) {
  SCALED_MM_GGUF_WEIGHT_FORMATS(LINE)
  puts("activations");
  SCALED_MM_GGUF_ACTIVATION_FORMATS(LINE)
  return 0;
}
"""


def test_the_c_header_has_the_same_formats(tmp_path):
    compiler = toolchain.find_cxx()
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    (tmp_path / "formats.cpp").write_text(PROGRAM)
    subprocess.run([str(compiler), f"-I{include_dir()}", "formats.cpp", "-o", "formats"], cwd=tmp_path, check=True, timeout=120)
    printed = subprocess.run([tmp_path / "formats"], check=True, capture_output=True, text=True, timeout=60).stdout
    weights, activations = ([line.split() for line in part.strip().splitlines()] for part in printed.split("activations"))

    def expected(formats):
        return [[one.name, *map(str, (one.code, one.block_bytes, one.bits, one.zero, int(one.second == "m")))] for one in formats]

    assert weights == expected(WEIGHT_FORMATS.values())
    assert activations == expected(one for one in FORMATS.values() if not one.is_weight)


def test_the_core_knows_the_codes_and_block_bytes_and_no_others():
    lib = binding.library()
    lib.scaledMMGetBlockBytes.argtypes, lib.scaledMMGetBlockBytes.restype = (ctypes.c_int32,), ctypes.c_int64
    by_code = {one.code: one.block_bytes for one in FORMATS.values()}
    assert len(by_code) == len(FORMATS)
    for code in range(-1, max(by_code) + 8):
        assert lib.scaledMMGetBlockBytes(code) == by_code.get(code, 0)
    assert all(binding.DTYPES[name] == one.code and name == one.name for name, one in FORMATS.items())
    assert len(set(binding.DTYPES.values())) == len(binding.DTYPES)
    assert {name: one.code for name, one in CXX_FORMATS.items()} == {name: one.code for name, one in WEIGHT_FORMATS.items()}


@pytest.mark.parametrize("codes, compiles", [((5, 6), True), ((6, 5), True), ((5, 5), False), ((5, 7), False), ((4, 5), False)])
def test_a_code_that_is_taken_or_skips_one_does_not_compile(tmp_path, codes, compiles):
    compiler = toolchain.find_cxx()
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    (tmp_path / "codes.cpp").write_text(
        "#define SCALED_MM_GGUF_FORMATS_H_\n"
        f"#define SCALED_MM_GGUF_FORMATS(X) X(ONE, one, {codes[0]}, 18, 4, 8, 0) X(TWO, two, {codes[1]}, 20, 4, 0, 1)\n"
        '#include "core/registry.h"\n'
    )
    command = [str(compiler), "-std=c++17", "-fsyntax-only", f"-I{csrc_dir()}", f"-I{include_dir()}", "codes.cpp"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode == 0) is compiles, done.stderr
    assert compiles or "expected the next free code for each format" in done.stderr


def test_the_core_calls_a_dtype_by_the_name_of_its_format():
    handle = sm.Handle("cpu")
    *others, last = WEIGHT_FORMATS
    expected = f"{', '.join(others)} or {last}"
    out, x = sm.TensorDesc((4, 2), torch.float32), sm.TensorDesc((2, 32), torch.float16)
    for fmt in (name for name in FORMATS if name not in WEIGHT_FORMATS):
        with pytest.raises(sm.BadTensorDtypeError, match=f"weight: expected {expected}, got {fmt}$"):
            sm.create_block_descriptor(out=out, weight=sm.TensorDesc((4, 32), fmt), activation=x, handle=handle)
    for fmt in WEIGHT_FORMATS:
        with pytest.raises(sm.BadTensorDtypeError, match=f"activation: expected .*, got {fmt}$"):
            sm.create_block_descriptor(out=out, weight=sm.TensorDesc((4, 32), fmt), activation=sm.TensorDesc((2, 32), fmt), handle=handle)


def names(fmt: str) -> list[str]:
    products = [f"gemm_{fmt}", f"gemm_{fmt}_q8_1"] if fmt in WEIGHT_FORMATS else []
    return [f"quantize_{fmt}", f"dequantize_{fmt}", *products]


def test_every_format_has_its_functions_and_nothing_else_is_public():
    assert by_format.__all__ == [name for fmt in FORMATS for name in names(fmt)]
    assert all(getattr(sm, name) is getattr(by_format, name) and name in sm.__all__ for name in by_format.__all__)


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_section_of_a_format_differs_from_that_of_q4_0_in_names_bytes_and_formula_alone(fmt):
    def text(name: str, own: str) -> str:
        lines = inspect.getsource(getattr(by_format, name)).splitlines()
        formula = [line for line in lines if "C[m,n] = " in line]
        assert len(formula) == name.startswith("gemm") * name.endswith("_q8_1")
        body = "\n".join(line for line in lines if line not in formula)
        return body.replace(own, "FORMAT").replace(f"K/32, {FORMATS[own].block_bytes}]", "K/32, BYTES]")

    for name in names(fmt):
        assert text(name, fmt) == text(name.replace(fmt, "q4_0", 1), "q4_0")


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
def test_the_formula_in_the_docstring_is_that_of_the_format(fmt):
    one = FORMATS[fmt]
    with_zero = f"d_w * (d_a * sum(q_w * q_a) - {one.zero} * s_a)"
    formula = with_zero if one.zero else "d_w * d_a * sum(q_w * q_a)" + (" + m_w * s_a" if one.second == "m" else "")
    assert f"C[m,n] = sum over blocks of {formula}\n" in getattr(sm, f"gemm_{fmt}_q8_1").__doc__


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_functions_of_a_format_are_the_general_ones(fmt):
    x = torch.randn(6, 3 * BLOCK, generator=seeded(5))
    q = sm.quantize_block(x, fmt, "ggml")
    assert torch.equal(getattr(sm, f"quantize_{fmt}")(x, "ggml"), q)
    assert torch.equal(getattr(sm, f"quantize_{fmt}")(x, rule="absmax"), sm.quantize_block(x, fmt))
    assert torch.equal(getattr(sm, f"dequantize_{fmt}")(q, torch.float16), sm.dequantize_block(q, fmt, torch.float16))
    if fmt in WEIGHT_FORMATS:
        sizes, a, a_q = (6, 2, 3 * BLOCK), x[:2].half(), sm.quantize_q8_1(x[:2])
        assert torch.equal(getattr(sm, f"gemm_{fmt}_q8_1")(q, a_q, *sizes), gemm_with_q8_1(fmt, q, a_q))
        assert torch.equal(getattr(sm, f"gemm_{fmt}")(q, a, **dict(zip("MNK", sizes))), gemm_with_floats(fmt, q, a))
        for wrong in ((7, 2, 96), (6, 3, 96), (6, 2, 64)):
            for name, activation in ((f"gemm_{fmt}_q8_1", a_q), (f"gemm_{fmt}", a)):
                with pytest.raises(sm.BadTensorShapeError):
                    getattr(sm, name)(q, activation, *wrong)
