"""Builds the C core into the package and ships the sources that kernels are compiled from just in time.

SCALED_MM_BUILD_ARCHS="sm90" (comma-separated) also builds those architectures' kernels into the wheel; that needs nvcc. With torch beside
setuptools, the torch operators are built in too. `scaled-mm build --wheel` sets it, and SCALED_MM_BUILD_CACHE, a build cache with the kernels.
"""

import atexit
import importlib.util
import os
import shutil
import sys
import tempfile
import types
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
OPTIONS = {}
BUILD = ROOT / "build"
if not os.access(ROOT, os.W_OK):  # a source tree that is mounted read-only is built elsewhere
    BUILD = Path(tempfile.mkdtemp(prefix="scaled-mm-build-"))
    atexit.register(shutil.rmtree, BUILD, ignore_errors=True)
    OPTIONS = {"build": {"build_base": str(BUILD)}, "egg_info": {"egg_base": str(BUILD)}}
ARCHS = [arch.strip() for arch in os.environ.get("SCALED_MM_BUILD_ARCHS", "").split(",") if arch.strip()]


def build_room():
    """scaled_mm.jit.library, without importing the package itself: that would need torch."""
    package = types.ModuleType("scaled_mm")
    package.__path__ = [str(ROOT / "scaled_mm")]
    sys.modules.setdefault("scaled_mm", package)
    # Build in the build tree, not in the cache of whoever installs.
    os.environ["SCALED_MM_CACHE_DIR"] = os.environ.get("SCALED_MM_BUILD_CACHE") or str(BUILD / "cache")
    if not os.environ.get("SCALED_MM_BUILD_CACHE"):
        os.environ["SCALED_MM_TRUST_CACHE"] = "1"  # who may write to the sources may have them run anyway
    from scaled_mm.jit import library

    return library


class BuildWithCore(build_py):
    def run(self):
        package = ROOT / "scaled_mm" if self.editable_mode else Path(self.build_lib) / "scaled_mm"
        if not self.editable_mode and package.exists():
            # What an earlier build left: a source that was deleted since would be shipped, and change the keys of kernels.
            shutil.rmtree(package)
        super().run()
        library = build_room()
        if not self.editable_mode:  # an editable install reads them where they are
            for name, target in (("csrc", "csrc"), ("cutlass_configs", "configs"), ("schemas", "schemas")):
                shutil.copytree(ROOT / name, package / target)
        library.install_core(package / "lib")
        for arch in ARCHS:
            from scaled_mm.tables import load_table

            library.install_arch(load_table(arch), package / "lib")
        if ARCHS and importlib.util.find_spec("torch"):  # pip's environment for builds has none
            library.install_operators(package / "lib")


class BinaryDistribution(Distribution):
    """The core is machine code, so the wheel is for one platform; it links no Python."""

    def has_ext_modules(self):
        return True


class AnyPythonWheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_py": BuildWithCore, "bdist_wheel": AnyPythonWheel},
    distclass=BinaryDistribution,
    options=OPTIONS,
    # Reaches pip as a build requirement: kernels include CUTLASS, the core does not.
    setup_requires=["nvidia-cutlass==4.2.0.0"] if ARCHS else [],
)
