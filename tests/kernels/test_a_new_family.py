"""A kernel family is one module of `scaled_mm.kernels` and a line in its registry: nothing else knows families by name."""

from __future__ import annotations

import pytest

from scaled_mm.autotune.candidates import candidates
from scaled_mm.cli import main
from scaled_mm.jit import codegen
from scaled_mm.kernels.arch import Arch
from scaled_mm.kernels.config import KernelConfig
from scaled_mm.kernels.family import FAMILIES, Code, Family, KernelCost
from scaled_mm.kernels.naming import candidate
from scaled_mm.kernels.registry import register
from scaled_mm.tables import TableError, load_table

TABLE = """
arch: sm80
fallback: any
rows:
  - {name: pretend_8x64x64, family: pretend, tile: [8, 64, 64], stages: 2}
  - {name: any, family: generic, tile: [64, 64, 64]}
buckets:
  - {m: 8, kernel: pretend_8x64x64}
  - {kernel: any}
"""


class Pretend(Family):
    """8 rows of a, on every architecture."""

    name = "pretend"
    section = "gemm"
    fields = ("tile", "stages")

    def rules(self, config: KernelConfig, arch: Arch):
        if config.tile.m != 8:
            yield "tile", f"tile m = {config.tile.m}, expected 8"

    def cost(self, config: KernelConfig, limit: int, out_bytes: int = 4) -> KernelCost:
        return KernelCost(8 * 64 + 64 * 64, 0, 2, 9216, 16)

    def code(self, config: KernelConfig, built_for: str, limit: int) -> Code:
        return Code("int8/pretend/gemm.cuh", f"scaled_mm::Pretend<{codegen.BUILT_FOR[built_for].cxx}, {config.tile.n}>", 1024)

    def config_name(self, config: KernelConfig) -> str:
        return f"pretend_{config.tile}"

    def candidates(self, arch: Arch):
        for n in (32, 64):
            yield candidate(self, tile=[8, n, 64], stages=2)


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.setitem(FAMILIES, "pretend", {})
    register(Pretend())
    path = tmp_path / "pretend.yaml"
    path.write_text(TABLE)
    return path


def test_its_rows_are_read_checked_selected_and_shown(table, capsys):
    loaded = load_table(table)
    assert loaded.select(4, 4096, 4096).row.name == "pretend_8x64x64"
    assert main(["table", "check", "--table", str(table)]) == 0
    assert main(["table", "show", "--table", str(table)]) == 0 and "pretend_8x64x64" in capsys.readouterr().out


def test_its_rules_are_the_tables(table):
    table.write_text(TABLE.replace("[8, 64, 64]", "[16, 64, 64]"))
    with pytest.raises(TableError, match="tile m = 16, expected 8"):
        load_table(table)
    table.write_text(TABLE.replace("stages: 2", "stages: 2, swizzle: 4"))
    with pytest.raises(TableError, match="swizzle"):
        load_table(table)


def test_its_cpp_is_generated(table):
    text = codegen.kernel_source(load_table(table).row("pretend_8x64x64"), "fp16")
    assert '#include "int8/pretend/gemm.cuh"' in text and "scaled_mm::Pretend<__half, 64>" in text


def test_the_tuner_tries_it(table):
    names = [row.name for row in candidates(load_table(table))]
    assert names[0] == "pretend_8x64x64" and "pretend_8x32x64" in names
