"""Links lead somewhere, and so do the pages that sources name."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml
from docs_pages import DOCS, PAGES, README, ROOT, anchors, name, without_code

LINK = re.compile(r"\]\(([^)\s#:]*)(?:#([^)\s]+))?\)")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_a_page_links_to_exists(page):
    for target, anchor in LINK.findall(without_code(page.read_text())):
        place = page.parent / target if target else page
        assert place.exists(), target
        if anchor and place.suffix == ".md":
            assert anchor in anchors(place), f"{target}#{anchor}"


def test_tests_that_pages_name_exist():
    """By name, or by path below tests/. Decisions and the changelog may name what is gone."""
    files = [path for path in (ROOT / "tests").rglob("*") if path.is_file()]
    known = {path.stem for path in files} | {
        found for path in files if path.suffix == ".py" for found in re.findall(r"def (test_\w+)", path.read_text())
    }
    missing = set()
    for page in PAGES:
        if page.parent.name == "decisions" or page.name == "CHANGELOG.md":
            continue
        text = page.read_text()
        missing |= {(name(page), test) for test in re.findall(r"\btest_[a-z0-9_]+", text) if test not in known}
        missing |= {(name(page), path) for path in re.findall(r"(?<![\w/.-])tests/[\w./]*\w(?![\w<])", text) if not (ROOT / path).exists()}
    assert not missing


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode or not done.stdout:
        pytest.skip("no checkout of git")
    return done.stdout.splitlines()


def test_pages_that_sources_and_texts_name_exist():
    missing = set()
    for file in tracked():
        path = ROOT / file
        if path.suffix not in (".py", ".h", ".cpp", ".c", ".cuh", ".cu", ".md", ".yaml", ".yml", ".json", ".toml", "") or not path.is_file():
            continue
        if file == "CHANGELOG.md":  # which names pages that are gone
            continue
        text = path.read_text(errors="replace")
        for page in re.findall(r"(?<![\w/.])(?:\.\./)*(docs/[\w./-]+\.md|schemas/README\.md)", text):
            if not (ROOT / page).is_file():
                missing.add((file, page))
        for number in re.findall(r"(?<![\w/])docs/decisions/(\d{4})", text):
            if not list((DOCS / "decisions").glob(f"{number}-*.md")):
                missing.add((file, number))
    assert not missing


def test_every_page_is_in_the_navigation():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def pages(nav):
        for entry in nav:
            for value in entry.values():
                yield from pages(value) if isinstance(value, list) else [value]

    there = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    named = list(pages(config["nav"]))
    assert len(named) == len(set(named)) and set(named) <= there
    assert {page for page in there - set(named) if not re.match(r"decisions/\d{4}-", page)} == set()


def test_every_decision_is_in_the_index_once_and_numbers_follow_each_other():
    text = (DOCS / "decisions" / "index.md").read_text()
    files = sorted(path.name for path in (DOCS / "decisions").glob("0*.md"))
    assert re.findall(r"^\| \[\d{4}\]\(([^)]+)\)", text, re.MULTILINE) == files
    assert [int(file[:4]) for file in files] == list(range(1, len(files) + 1))


def test_the_readme_shows_a_picture():
    assert re.search(r"!\[[^\]]+\]\(reports/[^)]+\.png\)", README.read_text())
