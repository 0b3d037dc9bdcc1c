"""Installation: what an sdist holds, and a wheel from a source tree that cannot be written to, in a folder whose name has spaces and quotes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools.command.bdist_wheel")
pytest.importorskip("pip")
ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "setup.py").is_file():
    pytest.skip("no checkout", allow_module_level=True)
COPIED = ("csrc", "cutlass_configs", "schemas", "scaled_mm", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo stand-in 1.0; exit; fi
while [ "$1" != -o ]; do shift; done
echo compiled > "$2"
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of the sources, as git has them."""
    root = tmp_path_factory.mktemp("install") / 'we\'ird "path"'
    root.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "lib", "build.ninja", "blob")  # of schemas/blob it would be 62 files more
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, root / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, root / name)
    return root


READ_ONLY = "access = os.access; os.access = lambda path, mode, **_: str(path) != os.getcwd() and access(path, mode); "


def setup(tree: Path, *arguments: str, before: str = "", **variables: str) -> subprocess.CompletedProcess:
    program = f"import os, runpy, sys; {before}sys.argv[0] = 'setup.py'; runpy.run_path('setup.py', run_name='__main__')"
    command = [sys.executable, "-c", program, "-q", *arguments]
    return subprocess.run(command, cwd=tree, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120)


def files(tree: Path, *folders: str) -> set[str]:
    return {path.relative_to(tree).as_posix() for folder in folders for path in (tree / folder).rglob("*") if path.is_file()}


def test_an_sdist_holds_all_that_an_installation_needs(tree, tmp_path):
    wanted = files(tree, "csrc", "cutlass_configs", "schemas", "scaled_mm") | {"setup.py", "pyproject.toml", "README.md", "LICENSE"}
    (tree / "scaled_mm" / "lib").mkdir()
    (tree / "scaled_mm" / "lib" / "libscaled_mm.json").write_text("{}")  # as an editable installation leaves it
    try:
        done = setup(tree, "egg_info", "--egg-base", str(tmp_path), "sdist", "--formats", "tar", "--dist-dir", str(tmp_path / "dist"))
    finally:
        shutil.rmtree(tree / "scaled_mm" / "lib")
    assert done.returncode == 0, done.stderr
    (archive,) = (tmp_path / "dist").iterdir()
    with tarfile.open(archive) as tar:
        held = {name.partition("/")[2] for name in tar.getnames()}
    assert wanted <= held
    assert not [name for name in held if name.startswith("scaled_mm/lib/") or name.endswith((".so", ".pyc"))]


def test_a_tree_that_cannot_be_written_to_is_installed_and_left_as_it_is(tree, tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    before = files(tree, ".")
    done = setup(
        tree, "bdist_wheel", "--dist-dir", str(tmp_path / "dist"), "--bdist-dir", str(tmp_path / "bdist"), before=READ_ONLY, CXX=str(compiler)
    )
    assert done.returncode == 0, done.stderr
    assert {name for name in files(tree, ".") - before if "__pycache__" not in name} == set()
    (wheel,) = (tmp_path / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        assert archive.read("scaled_mm/lib/libscaled_mm.so") == b"compiled\n"
    moved = {f"scaled_mm/{name.replace('cutlass_configs', 'configs')}" for name in files(tree, "csrc", "cutlass_configs", "schemas")}
    assert moved | {"scaled_mm/bench/data/h200_int8_peers.json"} <= held


def test_without_a_compiler_the_last_line_says_how_to_get_one(tree, tmp_path):
    """Of setup.py's output, which pip prints."""
    done = setup(
        tree,
        "bdist_wheel",
        "--dist-dir",
        str(tmp_path / "dist"),
        "--bdist-dir",
        str(tmp_path / "bdist"),
        before=READ_ONLY,
        PATH=str(tmp_path),
        CXX="",
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        "C++ compiler: needed for building, not found; install g++ (Debian: `apt-get install g++`), or set CXX"
    )


def test_an_sdist_installs_without_a_network_and_what_is_installed_multiplies(tree, tmp_path):
    """By the hooks that pip and build call. The installed C core is the one in use: nothing is compiled at run time."""
    build = f"import setuptools.build_meta as backend; print(backend.build_sdist({str(tmp_path / 'dist')!r}))"
    done = subprocess.run([sys.executable, "-c", build], cwd=tree, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    archive, target = tmp_path / "dist" / done.stdout.splitlines()[-1], tmp_path / "target"
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--disable-pip-version-check", "--quiet", "--target", str(target)]
    done = subprocess.run([sys.executable, "-m", "pip", "install", *options, str(archive)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    environment = {**os.environ, "PYTHONPATH": str(target), "SCALED_MM_CACHE_DIR": str(tmp_path / "cache")}
    verify = "sys.exit(scaled_mm.cli.main(['verify', '--device', 'cpu', '--shape', '3x5x7']))"
    program = f"import sys, scaled_mm.cli; print(scaled_mm.__file__, flush=True); {verify}"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "building" not in done.stderr, done.stderr
    assert done.stdout.startswith(f"{target}{os.sep}") and "all 7 results equal the reference bit for bit" in done.stdout
    assert (target / "scaled_mm" / "configs" / "sm90.yaml").is_file() and (target / "scaled_mm" / "schemas" / "definitions").is_dir()
