"""Where the cache may lie: folders with any name, in any locale, none at all; and that nobody else may write to it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scaled_mm.core import binding, fast
from scaled_mm.errors import KernelNotBuiltError
from scaled_mm.jit import cache, compile, library, toolchain

PACKAGE = Path(cache.__file__).parent.parent
BARE_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}  # file names are ASCII, and bytes
NAMES = [
    "sp ace",
    "quo'te",
    'dq"uote',
    "com,ma",
    "dol$lar",
    "per%cent",
    "col:on",
    "back\\slash",
    "(a)&b;c",
    "tick`id`",
    "[a]*?",
    "#~",
    "é中",
    "new\nline",
]
# A library with a header from the folder's neighbour: both names pass through ninja, and a shell. Without torch, whose import takes seconds.
BUILD = f"""
import ctypes, os, sys, types
package = types.ModuleType("scaled_mm")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["scaled_mm"] = package
from scaled_mm.jit import cache, compile, toolchain
for include in sys.argv[1:]:
    os.environ["SCALED_MM_CACHE_DIR"] = os.path.join(include, "cache")
    def build(folder):
        (folder / "main.cpp").write_text('#include "answer.h"\\nextern "C" int answer() {{ return ANSWER; }}')
        compile.run_ninja(folder, "main", toolchain.find_cxx(), [folder / "main.cpp"], ["-fPIC", f"-I{{include}}"], ["-shared"])
    path = cache.get_or_build("kernel", "row", "key", build)
    assert ctypes.CDLL(str(path)).answer() == 42
    assert not any(file.is_symlink() for file in path.parent.iterdir())
"""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for variable in ("SCALED_MM_CACHE_DIR", "SCALED_MM_TRUST_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)


def fake(folder: Path) -> None:
    (folder / cache.LIBRARY).write_bytes(b"a library")


def get(key: str = "key") -> Path:
    return cache.get_or_build("kernel", "row", key, fake)


# ---- its name -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("locale", [{}, BARE_LOCALE], ids=["this locale", "the C locale"])
@pytest.mark.parametrize("names", [NAMES[0::2], NAMES[1::2]], ids=["even", "odd"])
def test_any_name_does_for_the_cache_and_the_sources(tmp_path, names, locale):
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "answer.h").write_text("#define ANSWER 42\n")
    done = subprocess.run(
        [sys.executable, "-c", BUILD, *(str(tmp_path / name) for name in names)], env={**os.environ, **locale}, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")


def test_a_name_that_is_no_text_does_for_the_cache_too(tmp_path):
    name = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(name)
    Path(os.fsdecode(name), "answer.h").write_text("#define ANSWER 42\n")
    for locale in ({}, BARE_LOCALE):
        subprocess.run([sys.executable, "-c", BUILD, name], env={**os.environ, **locale}, check=True, timeout=120)


def test_nvcc_is_told_of_no_folder_that_its_shell_or_its_lists_would_take_apart(tmp_path):
    for name in NAMES:
        (tmp_path / name).mkdir()
    flags = [f"{option}{tmp_path / name}" for option in ("-I", "-L") for name in NAMES]
    with compile.speakable(tmp_path, flags, ["-shared", f"-isystem{tmp_path / NAMES[1]}"]) as (said, others):
        assert not [flag for flag in (*said, *others) if set("'\"`,\n") & set(flag)]
        assert [os.path.realpath(tmp_path / flag[2:]) for flag in said] == [flag[2:] for flag in flags]
        assert others[0] == "-shared" and others[1].startswith("-isystem")
    assert not [path for path in tmp_path.iterdir() if path.is_symlink()]


def test_a_relative_folder_is_meant_from_where_the_process_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCALED_MM_CACHE_DIR", "mine")
    assert cache.cache_dir() == tmp_path / "mine"

    def build(folder: Path) -> None:
        (folder / "main.cpp").write_text("")
        compile.run_ninja(folder, "main", toolchain.find_cxx(), [folder / "main.cpp"], ["-fPIC"], ["-shared"])

    assert cache.get_or_build("kernel", "row", "key", build).is_file()
    monkeypatch.delenv("SCALED_MM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the XDG Base Directory Specification
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.cache_dir() == tmp_path / "home" / ".cache" / "scaled_mm"


def test_a_user_without_a_home_is_told_to_name_a_folder(monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    for use in (get, cache.check_writable, cache.entries):
        with pytest.raises(
            KernelNotBuiltError, match="^SCALED_MM_CACHE_DIR: expected a folder for the cache, got none, and this user has no home folder$"
        ):
            use()


def test_a_library_that_cannot_be_loaded_is_a_typed_error(tmp_path, monkeypatch):
    """So it is in a file system that is mounted noexec."""
    (tmp_path / "library.so").write_bytes(b"no library")
    monkeypatch.setattr(library, "core_library", lambda: tmp_path / "library.so")
    with pytest.raises(KernelNotBuiltError, match="expected a library that can be loaded: .*SCALED_MM_CACHE_DIR names another folder"):
        binding.library.__wrapped__()
    monkeypatch.setattr(library, "python_library", lambda: tmp_path / "library.so")
    with pytest.warns(UserWarning, match="calls go through torch's dispatcher.*library.so"):
        fast.load()
    assert fast.module is None


def test_an_error_of_the_provider_may_name_a_file_whose_name_is_no_text(monkeypatch):
    def fail(*_):
        raise KernelNotBuiltError("/\udcff: not there")

    monkeypatch.setattr(binding, "_provide", fail)
    status = binding._provider(b"sm90", None, 0, 0, None)
    assert status == KernelNotBuiltError.status and str(binding.failure(status)) == "/\\udcff: not there"


# ---- who may write to it ------------------------------------------------------------------------------------------------

REFUSED = "^SCALED_MM_CACHE_DIR: expected a folder that only this user may write to, for its libraries are loaded, got "


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A cache that a variable names, with one entry."""
    monkeypatch.setenv("SCALED_MM_CACHE_DIR", str(tmp_path / "cache"))
    get()
    return tmp_path / "cache"


class StatusOfAnother:
    """What stat says, with another owner."""

    def __init__(self, status: os.stat_result):
        self._status, self.st_uid = status, 4242

    def __getattr__(self, name: str):
        return getattr(self._status, name)


def test_a_cache_is_made_for_its_user_alone(tmp_path, monkeypatch):
    former = os.umask(0)
    try:
        monkeypatch.setenv("SCALED_MM_CACHE_DIR", str(tmp_path / "new" / "cache"))
        entry = get().parent
    finally:
        os.umask(former)
    assert (tmp_path / "new" / "cache").stat().st_mode & 0o777 == 0o700
    assert entry.stat().st_mode & 0o777 == 0o700
    assert not [path for path in entry.iterdir() if path.stat().st_mode & 0o022]


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775, 0o702])
def test_a_cache_that_others_may_write_to_is_refused_before_anything_is_loaded_or_built(root, mode):
    root.chmod(mode)
    for use in (get, lambda: get("another"), lambda: cache.find("kernel", "row", "key"), cache.check_writable):
        with pytest.raises(
            KernelNotBuiltError,
            match=REFUSED + rf"{root}, which others may write to \(mode {mode:04o}\); `chmod go-w {root}`, .*SCALED_MM_TRUST_CACHE=1",
        ):
            use()
    assert not (root / "kernel-row-another").exists()
    root.chmod(mode & ~0o022)
    assert get().read_bytes() == b"a library"


def test_a_cache_of_another_user_is_refused_and_may_be_trusted(root, monkeypatch):
    """Such as a mounted one in a container that runs as root."""
    stat = Path.stat
    monkeypatch.setattr(Path, "stat", lambda path, **options: StatusOfAnother(stat(path, **options)))
    with pytest.raises(
        KernelNotBuiltError, match=REFUSED + rf"{root}, which belongs to user 4242, while this is user {os.geteuid()}; name another"
    ) as caught:
        get()
    assert "chmod" not in str(caught.value)
    monkeypatch.setenv("SCALED_MM_TRUST_CACHE", "1")
    assert get().read_bytes() == b"a library" and get("another").read_bytes() == b"a library"
    assert [entry.name for entry in cache.entries()] == ["row", "row"]


def test_trust_is_one_or_zero(root, monkeypatch):
    for value in ("", "0", "1"):
        monkeypatch.setenv("SCALED_MM_TRUST_CACHE", value)
        get()
    monkeypatch.setenv("SCALED_MM_TRUST_CACHE", "yes")
    with pytest.raises(KernelNotBuiltError, match="^SCALED_MM_TRUST_CACHE: expected 0 or 1, got yes$"):
        get()


def test_the_default_folder_is_taken_from_the_group_that_an_umask_gave_it_to(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "scaled_mm").mkdir()
    (tmp_path / "scaled_mm").chmod(0o775)
    get()
    assert (tmp_path / "scaled_mm").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("file, mode", [(".", 0o777), (".", 0o775), (cache.LIBRARY, 0o666), ("kernel.o", 0o664), ("entry.json", 0o666)])
def test_an_entry_that_somebody_else_may_have_written_is_not_loaded_but_built_again(root, file, mode):
    """It is from a time when others could write to the cache."""
    entry = get().parent
    (entry / cache.LIBRARY).write_bytes(b"planted")
    record = {"kind": "kernel", "name": "row", "key": "key", "sha256": cache._file_digest(entry / cache.LIBRARY)}
    (entry / "entry.json").write_text(json.dumps(record))
    (entry / "kernel.o").write_bytes(b"planted")
    entry.chmod(0o755)
    assert get().read_bytes() == b"planted"  # by this user, as far as one can see
    (entry / file).chmod(mode)
    assert cache.find("kernel", "row", "key") is None and cache.entries() == []
    assert get().read_bytes() == b"a library"


def test_a_cache_of_root_serves_other_users_once_they_may_read_it(root, monkeypatch):
    """An image whose kernels were built by root: `chmod -R a+rX`."""
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    monkeypatch.setattr(cache, "_user", lambda: 4242)
    if os.geteuid() == 0:
        assert get().read_bytes() == b"a library"
    else:
        with pytest.raises(KernelNotBuiltError, match=REFUSED):
            get()


def test_the_room_of_setup_py_is_as_trusted_as_the_sources(tmp_path):
    """A checkout of another user, or one that the group may write to, installs."""
    source = Path(__file__).resolve().parents[2] / "setup.py"
    if not source.is_file():
        pytest.skip("no checkout")
    text = source.read_text().partition("class BuildWithCore")[0]
    shutil.copytree(PACKAGE, tmp_path / "scaled_mm", ignore=shutil.ignore_patterns("__pycache__", "lib", "csrc"))
    (tmp_path / "build" / "cache").mkdir(parents=True)
    (tmp_path / "build" / "cache").chmod(0o777)
    (tmp_path / "setup.py").write_text(
        text + 'build_room()\nfrom scaled_mm.jit import cache\ncache.get_or_build("kernel", "row", "key", '
        'lambda folder: (folder / "library.so").write_bytes(b"x"))\n'
    )
    subprocess.run([sys.executable, str(tmp_path / "setup.py")], check=True, timeout=120)
