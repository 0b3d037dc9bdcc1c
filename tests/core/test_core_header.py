"""The public header compiles by itself, as C and as C++."""

from __future__ import annotations

import subprocess

from fake_gpu import c_compiler

from scaled_mm.jit import toolchain
from scaled_mm.jit.paths import include_dir


def test_the_header_is_c_and_cxx(tmp_path):
    for suffix, standard in ((".c", "-std=c99"), (".cpp", "-std=c++17")):
        source = tmp_path / f"only{suffix}"
        source.write_text("#include <scaled_mm/scaled_mm.h>\n")
        compiler = toolchain.find_cxx() if suffix == ".cpp" else c_compiler()
        command = [compiler, standard, "-Wall", "-Wextra", "-pedantic", "-Werror", "-fsyntax-only", f"-I{include_dir()}", str(source)]
        subprocess.run(command, check=True, timeout=60)
