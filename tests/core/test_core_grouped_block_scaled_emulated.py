"""The device code of every grouped block-scaled row, run by coroutines (emulated/gpu.h), against the reference: no GPU needed."""

from __future__ import annotations

import ctypes
import subprocess

import pytest
import torch
from core.test_core_block_scaled_emulated import HERE, MACROS, SUFFIXES, cuda_include
from operands.grouped_block_scaled_cases import ExpertsCase

from scaled_mm.core import binding
from scaled_mm.jit import codegen, toolchain
from scaled_mm.jit.paths import csrc_dir, include_dir
from scaled_mm.tables import available_tables, load_table

# A row is emulated once, whatever tables it is in.
ROWS = {row.name: row for arch, _ in available_tables() for row in load_table(arch).grouped_block_scaled.rows if MACROS[row.family]}
INPUTS = ("a", "b", "out", "a_scale", "b_scale", "bias", "expert_offsets")
DIMS = {"a": "mk", "b": "ekn", "out": "mn", "a_scale": "mk", "b_scale": "ekn", "bias": "en"}


class Product(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("M", "N", "K", "E")),
        *((name, ctypes.c_void_p) for name in INPUTS),
        *((f"{name}_stride_{dim}", ctypes.c_int64) for name, dims in DIMS.items() for dim in dims),
        *((name, ctypes.c_int32) for name in ("bias_dtype", "blocks", "eager", "block_size", "zero_unassigned")),
    ]


@pytest.fixture(scope="module")
def emulate(tmp_path_factory):
    """emulate(row, inputs, out, blocks, eager): the row's kernel into out, by a grid of so many thread blocks."""
    cxx, include = toolchain.find_cxx(), cuda_include()
    if cxx is None or include is None:
        pytest.skip("needs a C++ compiler and the headers of a CUDA toolkit")
    lines = ['#include "grouped_block_scaled_emulated.cpp"']
    for row in ROWS.values():
        for suffix in SUFFIXES.values():
            config = codegen.kernel_source(row, suffix).split("using Row = ")[1].split(";\n")[0]
            if row.family == "generic":
                config = f"{row.tile.m}, {row.tile.n}, {codegen.OUT_DTYPES[suffix].cxx}"
            lines.append(f"{MACROS[row.family]}({row.name}_{suffix}, {config})")
    folder = tmp_path_factory.mktemp("emulated")
    (folder / "rows.cpp").write_text("\n".join(lines) + "\n")
    includes = [f"-I{HERE / 'emulated'}", f"-I{HERE}", f"-I{csrc_dir()}", f"-I{include_dir()}", f"-isystem{include}"]
    checks = ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-Wall", "-Wno-unknown-pragmas", *checks]
    subprocess.run([str(cxx), *flags, *includes, str(folder / "rows.cpp"), "-o", str(folder / "rows.so")], check=True, timeout=600)
    library = ctypes.CDLL(str(folder / "rows.so"))

    def emulate(row: str, inputs: dict, out: torch.Tensor, blocks: int, eager: bool, block_size: int = 128, zero_unassigned: bool = True) -> None:
        tensors = {**inputs, "out": out}
        experts, k, n = inputs["b"].shape
        product = Product(out.shape[0], n, k, experts, *(None if tensors[name] is None else tensors[name].data_ptr() for name in INPUTS))
        for name, dims in DIMS.items():
            if tensors[name] is not None:
                for dim, stride in zip(dims, tensors[name].stride()):
                    setattr(product, f"{name}_stride_{dim}", stride)
        bias = inputs["bias"]
        product.bias_dtype = binding.DTYPES[str(bias.dtype).removeprefix("torch.")] if bias is not None else 0
        product.blocks, product.eager, product.block_size, product.zero_unassigned = blocks, eager, block_size, zero_unassigned
        assert getattr(library, f"{row}_{SUFFIXES[out.dtype]}")(ctypes.byref(product)) == 0

    return emulate


def check(emulate, row: str, case: ExpertsCase, blocks: int, eager: bool = False) -> None:
    inputs, out = case.make(), case.poisoned()
    around = torch.empty(0, dtype=out.dtype).set_(out.untyped_storage())
    emulate(row, inputs, out, blocks, eager, case.block_size)
    case.check(out, inputs, row)
    out.fill_(float("nan"))
    assert around.isnan().all(), f"{row} {case}: wrote beside its output"


@pytest.mark.parametrize("eager", [False, True], ids=["copies land late", "copies land at once"])
@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_the_bits_of_the_reference(emulate, row, eager):
    m, n, _ = ROWS[row].tile
    cases = [
        ExpertsCase(1, 1, 128, n, pad=16),
        ExpertsCase(2 * m + 3, 5, 300, n + 9, pad=16, bias="out", offsets="short"),
        ExpertsCase(m + 1, 3, 129, 2 * n, pad=16, bias="float32", offsets="wild", scales="columns", scale_values="signed"),
        ExpertsCase(40, 70, 17, 8, pad=16, bias="out", b_layout="apart"),
        ExpertsCase(9, 4, 640, 130, pad=16, offsets="one", scales="spread", scale_values="special"),
        ExpertsCase(5, 140, 128, 16, pad=16),  # more experts than a warp looks at together
    ]
    for seed, case in enumerate(cases):
        fields = {field: getattr(case, field) for field in case.__dataclass_fields__} | {"seed": seed, "out_dtype": list(SUFFIXES)[seed % 3]}
        check(emulate, row, ExpertsCase(**fields), (1, 3, 2, 7, 1, 4)[seed], eager)


@pytest.mark.parametrize("row", [name for name, row in ROWS.items() if row.block_size <= 64])
def test_blocks_of_64_have_the_bits_of_the_reference(emulate, row):
    for seed, (tokens, experts, k, n) in enumerate([(1, 1, 64, 64), (75, 5, 300, 73), (40, 3, 129, 193), (9, 70, 17, 8)]):
        out_dtype = list(SUFFIXES)[seed % 3]
        case = ExpertsCase(tokens, experts, k, n, out_dtype, pad=16, bias="out", offsets=("random", "short")[seed % 2], block_size=64, seed=seed)
        check(emulate, row, case, seed + 1, seed % 2 == 0)


@pytest.mark.parametrize("row", ROWS)
def test_every_row_sums_the_largest_values_of_a_block_exactly(emulate, row):
    for values in ("minimum", "extremes"):
        check(emulate, row, ExpertsCase(19, 2, 384, 33, torch.float32, pad=16, values=values), 2)


def test_the_generic_row_zeroes_unassigned_rows_of_an_unaligned_output(emulate):
    """Its rows are whole multiples of 16 bytes apart, but begin in between."""
    row = next(name for name, row in ROWS.items() if row.family == "generic")
    for out_dtype in SUFFIXES:
        case = ExpertsCase(20, 2, 128, 64, out_dtype, pad=16, offsets="short")
        inputs, memory = case.make(), torch.full((20, 80), float("nan"), dtype=out_dtype)
        out = memory[:, 1:65]
        emulate(row, inputs, out, 3, False)
        case.check(out, inputs, row)
        assert memory[:, 0].isnan().all() and memory[:, 65:].isnan().all()


@pytest.mark.parametrize("row", ROWS)
def test_unassigned_rows_are_not_written_on_request(emulate, row):
    case = ExpertsCase(75, 3, 256, 72, pad=16, offsets="short")
    inputs, out, zeroed = case.make(), case.poisoned(), case.poisoned()
    emulate(row, inputs, zeroed, 3, False)
    emulate(row, inputs, out, 3, False, zero_unassigned=False)
    end = min(int(inputs["expert_offsets"].max()), 75)
    assert 0 < end < 75 and torch.equal(out[:end], zeroed[:end]) and out[end:].isnan().all() and not zeroed[end:].any()


def test_the_generic_row_takes_any_layout(emulate):
    row = next(name for name, row in ROWS.items() if row.family == "generic")
    for seed, (tokens, experts, k, n) in enumerate([(1, 1, 1, 1), (65, 3, 130, 7), (40, 9, 300, 65), (33, 2, 256, 64), (5, 2, 0, 9)]):
        for b_layout in ("rows", "columns", "apart"):
            options = dict(b_layout=b_layout, bias="float32", scales="spread", offsets=("random", "wild", "short")[seed % 3], seed=seed)
            check(emulate, row, ExpertsCase(tokens, experts, k, n, list(SUFFIXES)[seed % 3], **options), 3)


def test_the_generic_row_takes_experts_that_start_anywhere(emulate):
    """Rows are aligned, and expert 0: the others are not."""
    row = next(name for name, row in ROWS.items() if row.family == "generic")
    case = ExpertsCase(40, 3, 256, 64, bias="float32")
    inputs, out = case.make(), case.poisoned()
    memory = torch.zeros(3 * (64 * 256 + 8) + 16, dtype=torch.int8)
    first = -memory.data_ptr() % 16
    apart = memory[first:].as_strided((3, 256, 64), (64 * 256 + 8, 1, 256))
    inputs["b"] = apart.copy_(inputs["b"])
    emulate(row, inputs, out, 3, False)
    case.check(out, inputs, row)
