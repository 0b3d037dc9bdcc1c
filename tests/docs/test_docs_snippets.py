"""What the pages show must run as it stands there, page by page, in order."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from docs_pages import DOCS, PAGES, README, ROOT, blocks, name, needs, run, shell_lines, snippets

from scaled_mm.cli import build_parser

sys.path.append(str(Path(__file__).parents[1] / "core"))
from fake_gpu import compile_c  # noqa: E402

GUIDES = DOCS / "guide"
WITH_PYTHON = [page for page in PAGES if snippets(page) and page != ROOT / "schemas" / "README.md"]  # which tests/schema runs


def checked_readme(names, printed):
    assert names["out"].shape == (16, 11008) and names["y"].shape == (16, 11008)
    difference = (names["y"].float() - names["x"] @ names["w"].t()).norm()
    assert difference < 0.2 * names["y"].float().norm()


def checked_products(names, printed):
    assert names["out"].shape == (16, 11008) and names["fp16"].dtype.itemsize == 2 and names["raw"].dtype is torch.int32
    [shown] = re.findall(r"# (BAD_TENSOR_SHAPE .*)", (GUIDES / "int8-products.md").read_text())
    assert printed.splitlines()[-1] == shown


def checked_prepared(names, printed):
    assert names["both"].shape == names["shifted"].shape == names["out"].shape == (16, 11008)


def checked_batches(names, printed):
    assert names["each"].shape == names["same"].shape == (8, 16, 128)


def checked_coming_from(names, printed):
    assert torch.equal(names["sums"].float() * names["scale_a"], names["scaled"])
    assert names["blocks"].dtype is torch.float16 and (names["y"] - names["x"] @ names["w"].t()).norm() < 0.1 * names["y"].norm()


def checked_gguf(names, printed):
    assert "cpu_gguf_float32" in printed
    out, layer = names["out"].t(), names["z"]  # the descriptor's product and the layer's
    assert (out - layer).norm() <= 0.02 * layer.norm()  # the descriptor has q8_1 activations
    assert names["y"].shape == (4, 256) and names["t"].fmt == "q4_0"


CHECKS = {
    "README.md": checked_readme,
    "docs/guide/int8-products.md": checked_products,
    "docs/guide/prepared-weights.md": checked_prepared,
    "docs/guide/batches.md": checked_batches,
    "docs/guide/coming-from.md": checked_coming_from,
    "docs/guide/gguf.md": checked_gguf,
}


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name)
def test_the_python_of_a_page_runs_in_order(page, tmp_path, capsys, monkeypatch):
    for package in needs(page):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    names = run(page)
    CHECKS.get(name(page), lambda names, printed: None)(names, capsys.readouterr().out)


def test_pages_with_checks_are_there():
    assert set(CHECKS) <= set(map(name, WITH_PYTHON))


@pytest.mark.parametrize("page", [page for page in GUIDES.glob("*.md")], ids=name)
def test_a_guide_shows_something_to_run(page):
    assert snippets(page) or blocks("c", page) or any(line.startswith("scaled-mm ") for line in shell_lines(page))


def test_the_c_example_compiles_without_a_warning(tmp_path):
    [block] = blocks("c", GUIDES / "from-c.md")
    source = tmp_path / "example.c"
    source.write_text(block)
    compile_c(str(source), tmp_path / "example.o", "-c", "-Wno-missing-field-initializers")


COMMAND_LINES = sorted({(name(page), line) for page in PAGES for line in shell_lines(page) if line.startswith("scaled-mm ")})


@pytest.mark.parametrize("page, line", COMMAND_LINES)
def test_every_command_line_is_one_that_the_command_takes(page, line):
    words = shlex.split(line, comments=True)
    command = words[1 : next((i for i, word in enumerate(words) if word in ("&&", "|", ";")), None)]
    build_parser().parse_args(command)


def test_the_readme_has_an_example_of_each_kind():
    assert len(blocks("python", README)) >= 2
