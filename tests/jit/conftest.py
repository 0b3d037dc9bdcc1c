"""A cache of its own for each test, and a toolchain that looks again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scaled_mm.jit import compile, toolchain

_LOOKS = (
    toolchain.find_nvcc,
    toolchain.find_cutlass,
    toolchain.cutlass_version,
    toolchain.find_ninja,
    toolchain.find_cxx,
    toolchain.cxx_version,
    compile.sources_digest,
    compile._own_header,
)


@pytest.fixture
def cache_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty build cache; the folder does not exist yet."""
    root = tmp_path / "cache"
    monkeypatch.setenv("SCALED_MM_CACHE_DIR", str(root))
    return root


@pytest.fixture
def look_again() -> Iterator[None]:
    """What was found is remembered per process: forget it, before the test and after it."""
    for look in _LOOKS:
        look.cache_clear()
    yield
    for look in _LOOKS:
        look.cache_clear()
