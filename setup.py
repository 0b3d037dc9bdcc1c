"""Builds the C core into the package and ships the sources that kernels are compiled from just in time.

SCALED_MM_BUILD_ARCHS="sm90" (comma-separated) also builds those architectures' kernels into the wheel; that needs nvcc and
the nvidia-cutlass package: `pip install --no-build-isolation .`.
"""

import os
import shutil
import sys
import types
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def build_room():
    """scaled_mm.build.library, without importing the package itself: that would need torch."""
    package = types.ModuleType("scaled_mm")
    package.__path__ = [str(ROOT / "scaled_mm")]
    sys.modules.setdefault("scaled_mm", package)
    # Build in the build tree, not in the cache of whoever installs.
    os.environ["SCALED_MM_CACHE_DIR"] = str(ROOT / "build" / "cache")
    from scaled_mm.build import library

    return library


class BuildWithCore(build_py):
    def run(self):
        super().run()
        library = build_room()
        package = ROOT / "scaled_mm" if self.editable_mode else Path(self.build_lib) / "scaled_mm"
        if not self.editable_mode:  # an editable install reads them where they are
            for name, target in (("csrc", "csrc"), ("cutlass_configs", "configs")):
                shutil.copytree(ROOT / name, package / target, dirs_exist_ok=True)
        library.install_core(package / "lib")
        for arch in filter(None, os.environ.get("SCALED_MM_BUILD_ARCHS", "").split(",")):
            from scaled_mm.tables import load_table

            library.install_arch(load_table(arch.strip()), package / "lib")


class BinaryDistribution(Distribution):
    """The core is machine code, so the wheel is for one platform; it links no Python."""

    def has_ext_modules(self):
        return True


try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel


class AnyPythonWheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildWithCore, "bdist_wheel": AnyPythonWheel}, distclass=BinaryDistribution)
