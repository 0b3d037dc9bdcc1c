"""Code generation: a row of the table, and nothing else, decides what is compiled; a library says what it holds."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import c_header
import pytest
import yaml

from scaled_mm.core import binding
from scaled_mm.errors import KernelNotBuiltError
from scaled_mm.gguf_formats import WEIGHT_FORMATS
from scaled_mm.jit import cache, codegen, compile, library, toolchain
from scaled_mm.jit.paths import csrc_dir
from scaled_mm.tables import FASTEST, TileTable, available_tables, load_table, time_fields
from scaled_mm.tables.schema import KernelRow, TableError

TABLES = [load_table(arch) for arch, _ in available_tables()]
C3X = dict(name="r", family="c3x", tile=[128, 128, 128], schedule="cooperative")
C2X = dict(name="r", family="c2x", tile=[128, 128, 64], warp=[64, 64, 64], stages=5)
GENERIC = dict(name="r", family="generic", tile=[64, 64, 64])
DECODE = dict(name="r", family="decode", tile=[64, 16, 128], swap_ab=True, split_k=4, stages=8)
GROUPED_C3X = dict(name="r", family="c3x", tile=[128, 128, 128], schedule="cooperative", section="grouped")
GROUPED_C2X = {**C2X, "section": "grouped"}
BLOCK_SCALED = dict(name="r", family="c2x", tile=[128, 128, 128], warp=[64, 32, 128], stages=3, section="block_scaled")
BLOCK_SCALED_GENERIC = dict(name="r", family="generic", tile=[64, 64, 128], section="block_scaled")
GGUF_MMA = dict(name="r", family="gguf_mma", tile=[8, 16, 256], stages=3, section="gguf")
GGUF_WGMMA = dict(name="r", family="gguf_wgmma", tile=[32, 128, 256], stages=5, section="gguf")


def source(fields: dict, out_dtype: str = "bf16", **changed) -> str:
    return codegen.kernel_source(KernelRow.model_validate({**fields, **changed}), out_dtype)


def edited_table(tmp_path: Path, edit) -> TileTable:
    """sm90's table after `edit(document)`, read from a file as `--table` would."""
    path = next(path for arch, path in available_tables() if arch == "sm90")
    document = yaml.safe_load(path.read_text())
    edit(document)
    copy = tmp_path / "edited.yaml"
    copy.write_text(yaml.safe_dump(document))
    return load_table(copy)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.arch)
def test_every_row_and_dtype_has_a_source_and_a_symbol_of_its_own(table):
    names = library.kernel_names(table)
    without_table = len(codegen.rowwise_names()) + 1  # and the zero-point terms
    assert len(names) == sum(len(codegen.out_dtypes(row)) for row in table.all_rows) + without_table
    symbols = [codegen.symbol(*name) for name in names]
    assert len(set(symbols)) == len(symbols) and all(name.isidentifier() for name in symbols)
    sources = [library.kernel_source(table, name) for name in names]
    assert len(set(sources)) == len(sources)
    for text, name in zip(sources, symbols):
        assert f'extern "C" const scaled_mm::Kernel {name};' in text
        header = csrc_dir() / text.split('#include "')[1].split('"')[0]
        assert header.is_file(), f"{name}: {header} is missing; a table may contain a kernel config only when its header exists"


@pytest.mark.parametrize(
    "fields, changed",
    [
        *(
            (C3X, change)
            for change in (
                dict(tile=[256, 128, 128]),
                dict(tile=[128, 64, 128]),
                dict(tile=[128, 128, 64]),
                dict(cluster=[2, 1]),
                dict(cluster=[1, 2]),
                dict(schedule="pingpong"),
                dict(schedule="warp_specialized"),
                dict(scheduler="stream_k"),
                dict(stages=3),
                dict(swap_ab=True),
                dict(raster="along_m"),
                dict(raster="along_n"),
                dict(swizzle=4),
                dict(prefetch=1024),
                dict(early_weights=True),
                dict(name="other"),
            )
        ),
        *((DECODE, change) for change in (dict(tile=[64, 32, 128]), dict(tile=[128, 16, 128]), dict(split_k=2), dict(stages=6), dict(name="other"))),
        *(
            (C2X, change)
            for change in (
                dict(tile=[64, 128, 64]),
                dict(tile=[128, 64, 64]),
                dict(tile=[128, 128, 128]),
                dict(warp=[32, 64, 64]),
                dict(warp=[64, 32, 64]),
                dict(warp=[64, 64, 32]),
                dict(stages=4),
                dict(swizzle=4),
                dict(split_k=2),
                dict(name="other"),
            )
        ),
        *(
            (GENERIC, change)
            for change in (
                dict(tile=[32, 64, 64]),
                dict(tile=[64, 32, 64]),
                dict(tile=[64, 64, 32]),
                dict(name="other"),
                dict(section="grouped"),
            )
        ),
        *(
            (GROUPED_C3X, change)
            for change in (
                dict(tile=[256, 128, 128]),
                dict(cluster=[2, 1]),
                dict(schedule="pingpong"),
                dict(stages=3),
                dict(swap_ab=True),
                dict(raster="along_n"),
                dict(swizzle=4),
                dict(section="gemm"),
                dict(name="other"),
            )
        ),
        *(
            (GROUPED_C2X, change)
            for change in (
                dict(tile=[64, 128, 64]),
                dict(warp=[32, 64, 64]),
                dict(stages=4),
                dict(swizzle=4),
                dict(section="gemm"),
                dict(name="other"),
            )
        ),
        *(
            (BLOCK_SCALED, change)
            for change in (
                dict(tile=[64, 128, 128]),
                dict(tile=[128, 64, 128]),
                dict(warp=[32, 32, 128]),
                dict(warp=[64, 16, 128]),
                dict(stages=4),
                dict(swizzle=4),
                dict(section="gemm"),
                dict(name="other"),
            )
        ),
        *(
            (BLOCK_SCALED_GENERIC, change)
            for change in (
                dict(tile=[32, 64, 128]),
                dict(tile=[64, 32, 128]),
                dict(section="gemm"),
                dict(name="other"),
            )
        ),
    ],
    ids=str,
)
def test_every_field_of_a_row_reaches_the_source(fields, changed):
    assert source(fields, **changed) != source(fields)


def test_a_field_without_a_kernel_is_refused_and_not_built_as_something_else():
    for change in (dict(schedule="pingpong", scheduler="stream_k"), dict(schedule="cooperative", scheduler="stream_k", split_k=2), dict(split_k=2)):
        with pytest.raises(KernelNotBuiltError, match=r"^r: no c3x kernel has schedule \w+, scheduler \w+ and split_k \d"):
            source(C3X, **change)


FIRST_C3X = next(index for index, row in enumerate(load_table("sm90").rows) if row.family == "c3x")


def test_an_illegal_row_does_not_reach_code_generation(tmp_path):
    for change in (dict(family="c2x"), dict(tile=[64, 512, 128]), dict(schedule=None), dict(cluster=[16, 1])):
        with pytest.raises(TableError, match=rf"edited.yaml:\d+: rows\[{FIRST_C3X}\]"):
            edited_table(tmp_path, lambda document, change=change: document["rows"][FIRST_C3X].update(change))
    with pytest.raises(AssertionError, match="no template for family c4x"):  # one that was not read from a table
        codegen.kernel_source(KernelRow.model_validate(GENERIC).model_copy(update={"family": "c4x"}), "bf16")


def test_editing_a_row_changes_its_kernel_and_no_other(tmp_path):
    before = load_table("sm90")

    def edit(document):
        document["rows"][FIRST_C3X]["tile"][2] //= 2

    after = edited_table(tmp_path, edit)
    assert [row.name for row in after.rows] == [row.name for row in before.rows]
    for index, (old, new) in enumerate(zip(before.rows, after.rows)):
        for out_dtype in codegen.out_dtypes(old):
            same = codegen.kernel_source(old, out_dtype) == codegen.kernel_source(new, out_dtype)
            assert same == (index != FIRST_C3X), new.name
    assert f"Gemm<{', '.join(map(str, after.rows[FIRST_C3X].tile))}, " in codegen.kernel_source(after.rows[FIRST_C3X], "bf16")


# ---- the index of a library -------------------------------------------------------------------------------------------


class Kernel(ctypes.Structure):
    _fields_ = [
        ("row", ctypes.c_char_p),
        ("out_dtype", ctypes.c_int32),
        ("shared_memory", ctypes.c_int32),
        ("prepare", ctypes.c_void_p),
        ("launch", ctypes.c_void_p),
    ]


class KernelLibrary(ctypes.Structure):
    _fields_ = [
        ("abi_version", ctypes.c_int32),
        ("arch", ctypes.c_char_p),
        ("kernels", ctypes.POINTER(ctypes.POINTER(Kernel))),
        ("num_kernels", ctypes.c_int64),
        ("tables", ctypes.POINTER(ctypes.POINTER(binding._TableC))),
        ("num_tables", ctypes.c_int64),
    ]


def compile_index(folder: Path, table: TileTable, names: list[library.KernelName], with_table: bool) -> ctypes.CDLL:
    """What nvcc would link to the kernels, linked to entries without code."""
    symbols = [codegen.symbol(*name) for name in names]
    entries = ['#include "core/kernel_abi.h"']
    for (row, out_dtype), name in zip(names, symbols):
        code = codegen.BUILT_FOR[out_dtype].code if out_dtype else -1
        entries.append(f'extern "C" const scaled_mm::Kernel {name}; const scaled_mm::Kernel {name} = {{"{row}", {code}, 0, 0, 0}};')
    (folder / "index.cpp").write_text(codegen.library_source(table.arch, symbols, table if with_table else None))
    (folder / "entries.cpp").write_text("\n".join(entries))
    sources = [folder / "index.cpp", folder / "entries.cpp"]
    compile.run_ninja(folder, "index", toolchain.find_cxx(), sources, [*compile.cxx_flags(), "-Werror"], ["-shared"])
    return ctypes.CDLL(str(folder / cache.LIBRARY))


def content(loaded: ctypes.CDLL) -> KernelLibrary:
    loaded.scaled_mm_kernel_library.restype = ctypes.POINTER(KernelLibrary)
    return loaded.scaled_mm_kernel_library().contents


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.arch)
def test_the_index_of_an_architecture_holds_every_kernel_and_the_table(tmp_path, table):
    names = library.kernel_names(table)
    index = content(compile_index(tmp_path, table, names, with_table=True))
    version = c_header.macro("SCALED_MM_KERNEL_ABI_VERSION")
    assert (index.abi_version, index.arch, index.num_kernels) == (version, table.arch.encode(), len(names))
    held = [(index.kernels[i].contents.row.decode(), index.kernels[i].contents.out_dtype) for i in range(len(names))]
    assert held == [(row, codegen.BUILT_FOR[out].code if out else -1) for row, out in names]

    kinds = c_header.enum("scaledMMTableKind_t")
    assert index.num_tables == len(kinds)
    for i, (name, kind) in enumerate(kinds.items()):
        section = name.removeprefix("SCALED_MM_TABLE_").removesuffix("GEMM").rstrip("_").lower()
        check_table(index.tables[i].contents, getattr(table, section) if section else table, kind)


def check_table(inside: binding._TableC, table: TileTable, kind: int) -> None:
    assert inside.kind == kind
    assert (inside.arch.decode(), inside.num_rows, inside.num_buckets) == (table.arch, len(table.rows), len(table.buckets))
    assert table.arch in inside.source.decode() and bool(inside.tuned) == table.tuned
    rows = inside.rows[: len(table.rows)]
    assert [(row.name.decode(), row.align_a, row.align_b, row.align_out, row.store_bytes, row.block_size) for row in rows] == [
        (row.name, *row.alignment, row.store_bytes, row.block_size) for row in table.rows
    ]
    fields = [name for name, _ in binding._TimeModelC._fields_]
    assert [tuple(getattr(row.time, field) for field in fields) for row in rows] == [time_fields(table, row) for row in table.rows]
    assert rows[inside.fallback_row].name.decode() == table.fallback
    open_bound = 2**63 - 1
    assert [
        (b.m_max, b.n_max, b.k_max, b.flags, rows[b.row].name.decode() if b.row >= 0 else FASTEST, b.m_min, b.n_min, b.k_min)
        for b in inside.buckets[: len(table.buckets)]
    ] == [(*(open_bound if bound is None else bound for bound in (b.m, b.n, b.k)), b.flags, b.kernel, *b.least) for b in table.buckets]
    modes = [(rule.m_max, binding.GGUF_MODES[rule.mode]) for rule in inside.modes[: inside.num_modes]]
    assert modes == [(open_bound if rule.m is None else rule.m, rule.mode) for rule in table.auto]


def test_the_index_of_one_kernel_brings_no_table(tmp_path):
    table = TABLES[0]
    index = content(compile_index(tmp_path, table, [(table.fallback, "fp16")], with_table=False))
    assert index.num_kernels == 1 and index.kernels[0].contents.row.decode() == table.fallback and index.num_tables == 0


def test_a_gguf_row_is_built_for_the_formats_of_weights():
    assert codegen.out_dtypes(KernelRow.model_validate(GGUF_MMA)) == tuple(WEIGHT_FORMATS)
    text = source(GGUF_MMA, "q5_1")
    assert '#include "gguf/mma.cuh"' in text and "using Row = scaled_mm::gguf::Mma<scaled_mm::gguf::Q5_1, 8, 1, 16, 3>;" in text
    for out_dtype in ("bf16", "q8_1"):
        with pytest.raises(KernelNotBuiltError, match=f"^r: expected a format of the weight of {', '.join(WEIGHT_FORMATS)}, got {out_dtype}"):
            source(GGUF_MMA, out_dtype)


@pytest.mark.parametrize("fmt, stages", [("q4_0", 6), ("q5_1", 6), ("q8_0", 5)])
def test_a_gguf_row_has_as_many_stages_as_fit_of_the_format(fmt, stages):
    text = source(GGUF_WGMMA, fmt, stages=6)
    assert f"using Row = scaled_mm::gguf::Wgmma<scaled_mm::gguf::{fmt.upper()}, 32, 128, 1, {stages}>;" in text
    stage = 2 * 512 * {"q4_0": 18, "q5_1": 24, "q8_0": 34}[fmt] + (32 * 8 * 8 if fmt == "q5_1" else 2 * 128)  # sums of values, or powers of rows
    most = stages * stage + 6 * 32 * 144 + 2048  # six stages of activations
    assert f"static_assert(Row::kSharedMemory <= {most}," in text and most <= 227 * 1024
    assert f"32, 128, 2, {stages}>;" in source(GGUF_WGMMA, fmt, stages=6, split_k=2)  # sums of shared tiles lie in the workspace


def test_a_block_scaled_row_has_no_int32_output():
    with pytest.raises(KernelNotBuiltError, match="^r: expected an out dtype of bf16, fp16, fp32, got int32"):
        source(BLOCK_SCALED, "int32")


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.arch)
def test_the_source_of_a_kernel_config_has_each_of_its_kernels_once(table):
    for row in table.all_rows:
        together = codegen.row_source(row)
        for out in codegen.out_dtypes(row):
            alone = codegen.kernel_source(row, out)
            assert together.count(f"const scaled_mm::Kernel {codegen.symbol(row.name, out)} =") == 1
            assert set(alone.splitlines()) <= set(together.splitlines())
        assert together.count("#include") == 1


# ---- the key of a kernel ----------------------------------------------------------------------------------------------

NVCC = toolchain.Nvcc(Path("/somewhere/bin/nvcc"), "13.0.88", "test")


@pytest.fixture
def key_of(monkeypatch, look_again):
    """key_of(table, kernel name): the cache key of what `build_kernel` would build, on a machine with an nvcc."""
    asked = []
    monkeypatch.setattr(cache, "get_or_build", lambda kind, name, key, build: asked.append((kind, name, key)))
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: NVCC)
    monkeypatch.setattr(toolchain, "find_cutlass", lambda: Path("/somewhere/include"))
    monkeypatch.setattr(toolchain, "cutlass_version", lambda: "4.2.0")

    def key_of(table=TABLES[0], name=(TABLES[0].fallback, "bf16")):
        library.build_kernel(table, name, announce=False)
        return asked[-1][2]

    return key_of


def test_every_kernel_of_a_table_has_a_key_of_its_own(key_of):
    for table in TABLES:
        names = library.kernel_names(table)
        assert len({key_of(table, name) for name in names}) == len(names)


def test_whatever_changes_a_kernel_changes_its_key(key_of, monkeypatch, tmp_path):
    keys = [key_of()]
    assert key_of() == keys[0]
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: toolchain.Nvcc(NVCC.path, "13.4.92", "test"))
    keys.append(key_of())
    monkeypatch.setattr(toolchain, "cutlass_version", lambda: "4.3.0")
    keys.append(key_of())
    flags = compile.nvcc_flags
    monkeypatch.setattr(compile, "nvcc_flags", lambda *arguments: [*flags(*arguments), "-O1"])
    keys.append(key_of())
    monkeypatch.setattr(compile, "nvcc_flags", lambda arch, *others: flags("sm80", *others))
    keys.append(key_of())
    assert len(set(keys)) == len(keys)


def test_what_a_kernel_includes_is_part_of_its_key_and_other_sources_are_not(key_of, monkeypatch, tmp_path):
    root = tmp_path / "csrc"
    shutil.copytree(csrc_dir(), root)
    monkeypatch.setattr(compile, "csrc_dir", lambda: root)

    def key_after(path: str) -> str:
        (root / path).write_text((root / path).read_text() + "\n// edited\n")
        compile._own_header.cache_clear()
        return key_of()

    keys = [key_of()]
    for path in ("int8/generic/gemm.cuh", "int8/epilogue/formula.cuh", "int8/launch.cuh", "core/kernel_abi.h", "include/scaled_mm/scaled_mm.h"):
        keys.append(key_after(path))
    assert len(set(keys)) == len(keys)
    for path in ("torch/operators.cpp", "core/registry.cpp", "int8/c3x/gemm.cuh", "int8/c2x/gemm.cuh"):
        assert key_after(path) == keys[-1]


def test_where_nvcc_and_the_sources_lie_is_no_part_of_a_key(key_of, monkeypatch):
    key = key_of()
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: toolchain.Nvcc(Path("/elsewhere/nvcc"), NVCC.version, "other"))
    monkeypatch.setattr(toolchain, "find_cutlass", lambda: Path("/elsewhere/include"))
    assert key_of() == key


def test_a_prebuilt_core_serves_only_the_sources_it_was_made_from(monkeypatch, tmp_path, look_again):
    monkeypatch.setattr(library, "lib_dir", lambda: tmp_path)
    built = tmp_path / "built.so"
    built.write_bytes(b"core")
    made = library.install_prebuilt(built, "libscaled_mm", library.core_key(), tmp_path)
    monkeypatch.setattr(library, "build_core", lambda: Path("built now"))
    assert library.core_library() == made
    monkeypatch.setattr(compile, "sources_digest", lambda *places: "edited")
    assert library.core_library() == Path("built now")
