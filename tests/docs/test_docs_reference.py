"""The reference is complete: commands, variables, errors, keys, public names. And the pages that are generated are fresh."""

from __future__ import annotations

import inspect
import re
import runpy

import pytest
from docs_pages import DOCS, README, ROOT, blocks, first_cells

import scaled_mm
import scaled_mm.schema
import scaled_mm.tables
from scaled_mm.cli import COMMANDS, main
from scaled_mm.errors import ScaledMMError, Status
from scaled_mm.kernels.arch import ARCHES
from scaled_mm.kernels.family import FAMILIES
from scaled_mm.kernels.sections import SECTIONS
from scaled_mm.tables import loader
from scaled_mm.tables.schema import Bucket, KernelRow, ModeRule, TileTable

REFERENCE = DOCS / "reference"


def test_the_two_lines_come_first_and_ci_runs_them():
    lines = [line.split("  ")[0] for line in blocks("", README)[0].splitlines()]
    assert lines == ["pip install . && scaled-mm verify --time", 'pip install ".[test]" && pytest']
    assert README.read_text().index("pip install . ") < 200
    script = (ROOT / ".ci" / "run").read_text()
    assert all(f"line '{line}'" in script for line in lines)


def test_the_readme_is_read_without_scrolling_far():
    assert len(README.read_text().splitlines()) <= 120


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_shown_and_explains_itself(command, capsys):
    assert f"## `scaled-mm {command}`\n" in (REFERENCE / "cli.md").read_text()
    with pytest.raises(SystemExit) as done:
        main([command, "--help"])
    assert done.value.code == 0 and len(capsys.readouterr().out.splitlines()) > 3


def test_the_page_of_commands_is_what_the_parsers_say():
    page = runpy.run_path(str(DOCS / "_site" / "cli_page.py"))["page"]()
    assert (REFERENCE / "cli.md").read_text() == page, "python docs/_site/cli_page.py writes it again"


def test_the_page_of_reports_is_what_the_reports_say():
    page = runpy.run_path(str(DOCS / "_site" / "reports_page.py"))["page"]()
    assert (REFERENCE / "reports.md").read_text() == page, "python docs/_site/reports_page.py writes it again"
    assert page.count("](../../reports/") == len([*(ROOT / "reports").rglob("*.md")])


def test_every_environment_variable_is_documented():
    text = (REFERENCE / "environment.md").read_text()
    sources = [*(ROOT / "scaled_mm").rglob("*.py"), ROOT / "setup.py"]
    used = {name for source in sources for name in re.findall(r'environ(?:\.get)?[(\[]"(\w+)"', source.read_text())}
    used |= {name for source in sources for name in re.findall(r'"(SCALED_MM_\w+)"', source.read_text())}
    for name in sorted(used - {"XDG_CACHE_HOME"}):
        assert f"`{name}`" in text, name


def of_this_package(cls: type) -> set[type]:
    below = {cls}.union(*map(of_this_package, cls.__subclasses__()))
    return {one for one in below if one.__module__.partition(".")[0] == "scaled_mm"}


def test_every_error_is_documented_with_its_status():
    text = (REFERENCE / "errors.md").read_text()
    rows = {cells[0].strip("` "): cells[1].strip("` ") for cells in re.findall(r"^\|([^|]+)\|([^|]+)\|", text, re.MULTILINE)}
    for cls in of_this_package(ScaledMMError) - {ScaledMMError}:
        assert rows.get(cls.__name__) == cls.status.name, cls
    assert "ScaledMMError" in rows and all(f"`{status.name}`" in text for status in Status)


def test_the_built_in_errors_that_a_class_is_are_documented():
    text = (REFERENCE / "errors.md").read_text()
    rows = {row[0].strip("` "): row[2] for row in re.findall(r"^\|([^|]+)\|([^|]+)\|([^|]+)\|", text, re.MULTILINE)}
    for cls in of_this_package(ScaledMMError) - {ScaledMMError}:
        also = {base.__name__ for base in cls.__mro__ if base.__module__ == "builtins" and issubclass(base, Exception)} - {
            "Exception",
            "RuntimeError",
        }
        shown = set(re.findall(r"`(\w+)`", rows[cls.__name__]))
        assert shown <= also and (bool(shown) == bool(also - {"ArithmeticError", "LookupError"})), cls


def test_every_key_of_a_tile_table_is_documented():
    shown = first_cells(REFERENCE / "tile-table.md")
    keys = {key for model in (KernelRow, Bucket, ModeRule, TileTable, loader._Header, loader._SectionHeader) for key in model.model_fields}
    keys = (keys | {"cases"}) - {"source"}  # where the table was read from, which no file says
    assert keys <= shown, keys - shown


def test_every_kernel_family_and_section_is_documented():
    text = (REFERENCE / "tile-table.md").read_text()
    family, section = (re.search(rf"^\| `{key}` \|.*", text, re.MULTILINE)[0] for key in ("family", "section"))
    assert all(f"`{name}`" in family for name in FAMILIES) and all(f"`{name}`" in section for name in SECTIONS)


def test_every_table_and_architecture_is_documented():
    built = (DOCS / "design" / "builds-and-cache.md").read_text()
    features = re.search(r"^\| feature \|.*", (DOCS / "support.md").read_text(), re.MULTILINE)[0]
    for arch, _ in scaled_mm.tables.available_tables():
        assert re.search(rf"^\|[^|]+\| `{arch}\.yaml` \|", built, re.MULTILINE), arch
    for arch in ARCHES:
        number = arch.removeprefix("sm")
        assert re.search(rf"\b(SM)?{number}\b", features), f"docs/support.md: {arch}"
        assert re.search(rf"^\|[^|]*\b{number[:-1]}\.{number[-1]}\b[^|]*\| `", built, re.MULTILINE), f"docs/design/builds-and-cache.md: {arch}"


def test_every_public_name_is_in_the_reference():
    text = (REFERENCE / "python.md").read_text()
    for name in scaled_mm.__all__:
        assert re.search(rf"^::: scaled_mm\.{name}$", text, re.MULTILINE) or f"`{name}`" in text, name


def test_every_public_name_has_a_docstring_of_its_own():
    for name in scaled_mm.__all__:
        thing = getattr(scaled_mm, name)
        text = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
        generated = inspect.isclass(thing) and (text or "").startswith(f"{name}(")  # a dataclass or named tuple without one
        assert text and text.strip() and not generated, name


def test_annotations_are_shipped():
    assert (ROOT / "scaled_mm" / "py.typed").is_file()
    assert re.search(r'^scaled_mm = \[.*"py\.typed"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def test_the_table_of_features_has_no_hole_and_its_tests_exist():
    table = re.search(r"^\| feature \|.*?\n\n", (DOCS / "support.md").read_text(), re.DOTALL | re.MULTILINE).group()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()]
    assert len(rows) > 6 and len({len(row) for row in rows}) == 1 and all(all(row) for row in rows)
    there = set(re.findall(r"^def (test_\w+)", "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py")), re.MULTILINE))
    for row in rows[2:]:
        named = set(re.findall(r"`(test_\w+)`", row[-1]))
        assert named and named <= there, (row[0], named - there)
