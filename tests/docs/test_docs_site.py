"""`mkdocs build --strict` passes: every page renders, every link and every name of the Python reference resolves."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from docs_pages import ROOT

if not os.environ.get("SCALED_MM_REQUIRE_DOCS"):  # .ci/run sets it: that the site cannot be built is a failure there
    pytest.importorskip("material", reason='mkdocs-material is not installed: pip install ".[docs]"')
    pytest.importorskip("mkdocstrings_handlers.python", reason='mkdocstrings is not installed: pip install ".[docs]"')


def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "reference" / "python" / "index.html").is_file()
