"""What README.md shows must run as it stands there."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path

import pytest
import torch
from fake_gpu import c_compiler, compile_c

from scaled_mm.build import toolchain
from scaled_mm.build.paths import include_dir
from scaled_mm.cli import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCK_FORMATS = (ROOT / "docs" / "BLOCK_FORMATS.md").read_text()


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_the_two_lines_come_first_and_ci_runs_them():
    lines = [line.split("  ")[0] for line in blocks("")[0].splitlines()]
    assert lines == ["pip install . && scaled-mm verify --time", 'pip install ".[test]" && pytest']
    assert README.index("pip install . ") < 200
    script = (ROOT / ".ci" / "run").read_text()
    assert all(f"line '{line}'" in script for line in lines)


def test_the_python_examples_run_in_order_and_print_what_is_shown(capsys):
    names: dict = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    assert names["out"].shape == (16, 11008) and names["fp16"].dtype.itemsize == 2
    assert names["both"].shape == (16, 11008) and names["each"].shape == names["same"].shape == (8, 16, 128)
    [shown] = re.findall(r"# (BAD_TENSOR_SHAPE .*)", README)
    assert capsys.readouterr().out.splitlines()[-1] == shown


def test_the_python_of_coming_from_runs_in_order():
    names: dict = {}
    for block in blocks("python", (ROOT / "docs" / "COMING_FROM.md").read_text()):
        exec(compile(block, "COMING_FROM.md", "exec"), names)
    assert torch.equal(names["sums"].float() * names["scale_a"], names["scaled"])
    assert names["blocks"].dtype is torch.float16 and (names["y"] - names["x"] @ names["w"].t()).norm() < 0.1 * names["y"].norm()


def test_the_python_of_block_formats_runs_in_order_and_its_products_agree(tmp_path, capsys, monkeypatch):
    pytest.importorskip("gguf")
    example = runpy.run_path(str(ROOT / "examples" / "gguf_to_product.py"))
    example["write_small_file"](tmp_path).rename(tmp_path / "model.gguf")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    operands, plan, file = blocks("python", BLOCK_FORMATS)
    for block in (operands, plan):
        exec(compile(block, "BLOCK_FORMATS.md", "exec"), names)
    assert "cpu_block_float32" in capsys.readouterr().out
    out, layer = names["out"].t(), names["z"]  # the descriptor's product and the layer's
    assert (out - layer).norm() <= 4e-6 * layer.norm()  # each within 2e-6
    exec(compile(file, "BLOCK_FORMATS.md", "exec"), names)
    assert names["y"].shape == (4, 256) and names["t"].fmt == "q4_0"


def test_the_c_example_compiles_without_a_warning(tmp_path):
    [block] = blocks("c")
    source = tmp_path / "example.c"
    source.write_text(block)
    compile_c(str(source), tmp_path / "example.o", "-c", "-Wno-missing-field-initializers")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_shown_and_explains_itself(command, capsys):
    assert f"`scaled-mm {command} " in README or f"`scaled-mm {command}`" in README
    with pytest.raises(SystemExit) as done:
        main([command, "--help"])
    assert done.value.code == 0 and len(capsys.readouterr().out.splitlines()) > 3


def test_what_the_text_links_to_exists():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_table_of_features_has_no_hole_and_its_tests_exist():
    table = re.search(r"^\| feature \|.*?\n\n", README, re.DOTALL | re.MULTILINE).group()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()]
    assert len(rows) > 6 and len({len(row) for row in rows}) == 1 and all(all(row) for row in rows)
    there = set(re.findall(r"^def (test_\w+)", "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py")), re.MULTILINE))
    for row in rows[2:]:
        named = set(re.findall(r"`(test_\w+)`", row[-1]))
        assert named and named <= there, (row[0], named - there)


def test_every_environment_variable_is_documented():
    text = (ROOT / "docs" / "BUILDING.md").read_text()
    sources = [*(ROOT / "scaled_mm").rglob("*.py"), ROOT / "setup.py"]
    used = {name for source in sources for name in re.findall(r'environ(?:\.get)?[(\[]"(\w+)"', source.read_text())}
    used |= {name for source in sources for name in re.findall(r'"(SCALED_MM_\w+)"', source.read_text())}
    for name in sorted(used - {"XDG_CACHE_HOME"}):
        assert f"`{name}`" in text, name


def test_the_header_is_c_and_cxx(tmp_path):
    for suffix, standard in ((".c", "-std=c99"), (".cpp", "-std=c++17")):
        source = tmp_path / f"only{suffix}"
        source.write_text("#include <scaled_mm/scaled_mm.h>\n")
        compiler = toolchain.find_cxx() if suffix == ".cpp" else c_compiler()
        command = [compiler, standard, "-Wall", "-Wextra", "-pedantic", "-Werror", "-fsyntax-only", f"-I{include_dir()}", str(source)]
        subprocess.run(command, check=True, timeout=60)
