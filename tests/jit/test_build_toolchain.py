"""Finding compilers and headers, and the error when one is missing: what, what for, and how to get it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scaled_mm.errors import KernelNotBuiltError, Status
from scaled_mm.jit import cache, compile, library, toolchain
from scaled_mm.tables import load_table

TABLE = load_table("sm90")
pytestmark = pytest.mark.usefixtures("look_again", "cache_root")


@pytest.fixture
def bare(monkeypatch, tmp_path) -> Path:
    """A machine with no toolkit, no wheel, no variable and an empty PATH; returns the folder that PATH names."""
    path = tmp_path / "bin"
    path.mkdir()
    monkeypatch.setenv("PATH", str(path))
    for variable in ("SCALED_MM_NVCC", "SCALED_MM_CUTLASS", "CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(toolchain, "TOOLKIT_NVCC", tmp_path / "no toolkit" / "nvcc")
    monkeypatch.setattr(toolchain, "_wheel_roots", lambda: [])
    return path


def program(path: Path, says: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


def nvcc(path: Path, version: str) -> Path:
    return program(path, f"Cuda compilation tools, release {version.rpartition('.')[0]}, V{version}")


# ---- what is missing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "finder, how",
    [
        ("find_nvcc", r'nvcc: needed for building, not found; .*CUDA toolkit.*pip install "\.\[cuda\]"'),
        ("find_cutlass", r"CUTLASS: needed for building, not found; `pip install nvidia-cutlass==4\.2\.0\.0`"),
    ],
)
def test_a_kernel_that_cannot_be_built_says_what_is_missing_and_how_to_get_it(monkeypatch, finder, how):
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: toolchain.Nvcc(Path("nvcc"), "13.0.88", "test"))
    monkeypatch.setattr(toolchain, "find_cutlass", lambda: Path("include"))
    monkeypatch.setattr(toolchain, finder, lambda: None)
    with pytest.raises(KernelNotBuiltError, match=how) as caught:
        library.build_kernel(TABLE, (TABLE.fallback, "bf16"))
    assert caught.value.status is Status.KERNEL_NOT_BUILT
    assert cache.entries() == []


def test_without_ninja_nothing_builds_and_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(toolchain, "find_ninja", lambda: None)
    with pytest.raises(KernelNotBuiltError, match=r"ninja: needed for building, not found; `pip install ninja`"):
        library.build_core()
    assert cache.entries() == []


def test_without_a_compiler_the_core_says_how_to_get_one(bare):
    with pytest.raises(KernelNotBuiltError, match=r"C\+\+ compiler: needed for building, not found; install g\+\+"):
        library.build_core()


def test_a_bare_machine_has_nothing_and_nothing_raises(bare, monkeypatch):
    assert toolchain.find_nvcc() is None and toolchain.find_cxx() is None
    assert toolchain.cxx_version() == "none"
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    assert toolchain.find_cutlass() is None and toolchain.cutlass_version() is None and toolchain.find_ninja() is None


# ---- where nvcc is found, and in which order ----------------------------------------------------------------------------


def test_nvcc_is_taken_from_the_variable_then_cuda_home_then_path_then_toolkit_then_wheel(bare, monkeypatch, tmp_path):
    wheel = tmp_path / "nvidia" / "cu13"
    places = [
        ("nvidia-cuda-nvcc wheel", wheel / "bin" / "nvcc", lambda: monkeypatch.setattr(toolchain, "_wheel_roots", lambda: [wheel])),
        ("toolkit", tmp_path / "toolkit" / "nvcc", lambda: monkeypatch.setattr(toolchain, "TOOLKIT_NVCC", tmp_path / "toolkit" / "nvcc")),
        ("PATH", bare / "nvcc", lambda: None),
        ("environment variable CUDA_PATH", tmp_path / "path" / "bin" / "nvcc", lambda: monkeypatch.setenv("CUDA_PATH", str(tmp_path / "path"))),
        ("environment variable CUDA_HOME", tmp_path / "home" / "bin" / "nvcc", lambda: monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))),
        ("environment variable SCALED_MM_NVCC", tmp_path / "own", lambda: monkeypatch.setenv("SCALED_MM_NVCC", str(tmp_path / "own"))),
    ]
    for minor, (origin, path, announce) in enumerate(places):  # each goes before those already there
        nvcc(path, f"13.{minor}.7")
        announce()
        toolchain.find_nvcc.cache_clear()
        assert toolchain.find_nvcc() == toolchain.Nvcc(path, f"13.{minor}.7", origin)


def test_an_nvcc_that_is_too_old_or_does_not_run_is_passed_over(bare, monkeypatch, tmp_path):
    nvcc(bare / "nvcc", "11.8.89")
    monkeypatch.setattr(toolchain, "TOOLKIT_NVCC", program(tmp_path / "toolkit" / "nvcc", "no version here"))
    assert toolchain.find_nvcc() is None
    monkeypatch.setattr(toolchain, "_wheel_roots", lambda: [tmp_path / "cu13"])
    (tmp_path / "cu13" / "bin").mkdir(parents=True)
    (tmp_path / "cu13" / "bin" / "nvcc").write_text("not a program")
    toolchain.find_nvcc.cache_clear()
    assert toolchain.find_nvcc() is None
    nvcc(tmp_path / "cu13" / "bin" / "nvcc", "12.0.76")
    toolchain.find_nvcc.cache_clear()
    assert toolchain.find_nvcc().version == "12.0.76"


@pytest.mark.parametrize("says", [None, "Cuda compilation tools, release 11.8, V11.8.89", "a text editor"])
def test_a_variable_that_names_no_usable_nvcc_is_an_error_even_if_there_is_another(bare, monkeypatch, tmp_path, says):
    nvcc(bare / "nvcc", "13.0.88")
    monkeypatch.setenv("SCALED_MM_NVCC", str(program(tmp_path / "own", says) if says else tmp_path / "missing"))
    with pytest.raises(KernelNotBuiltError, match="SCALED_MM_NVCC: expected the path of an nvcc of CUDA 12.0 or newer, got /"):
        toolchain.find_nvcc()


def test_a_cutlass_checkout_goes_before_the_wheel(monkeypatch, tmp_path):
    include = tmp_path / "include"
    (include / "cutlass").mkdir(parents=True)
    monkeypatch.setenv("SCALED_MM_CUTLASS", str(tmp_path))
    with pytest.raises(KernelNotBuiltError, match="SCALED_MM_CUTLASS: expected the folder of a CUTLASS checkout"):
        toolchain.find_cutlass()
    text = "#define CUTLASS_MAJOR 9\n#define CUTLASS_MINOR 8\n#define CUTLASS_PATCH 7\n"
    (include / "cutlass" / "version.h").write_text(text)
    assert toolchain.find_cutlass() == include and toolchain.cutlass_version() == "9.8.7"


def test_the_compiler_of_the_variable_goes_first_and_a_wrong_one_is_an_error(bare, monkeypatch, tmp_path):
    for name in ("clang++", "g++", "c++"):  # each goes before those already there
        toolchain.find_cxx.cache_clear()
        assert toolchain.find_cxx() != str(program(bare / name, f"{name} 1.0"))
        toolchain.find_cxx.cache_clear()
        assert toolchain.find_cxx() == str(bare / name)
    monkeypatch.setenv("CXX", str(program(tmp_path / "own", "own 2.0")))
    toolchain.find_cxx.cache_clear()
    assert toolchain.find_cxx() == str(tmp_path / "own") and toolchain.cxx_version() == "own 2.0"
    monkeypatch.setenv("CXX", "g++ -pthread")
    toolchain.find_cxx.cache_clear()
    with pytest.raises(KernelNotBuiltError, match=r"CXX: expected a C\+\+ compiler.*got g\+\+ -pthread"):
        toolchain.find_cxx()


# ---- when the compiler says no ----------------------------------------------------------------------------------------


def test_a_compile_error_names_the_log_and_shows_its_end(cache_root, tmp_path):
    source = tmp_path / "broken.cpp"
    source.write_text('#error "this does not compile"\n')
    cache_root.mkdir()
    with pytest.raises(KernelNotBuiltError) as caught:
        compile.run_ninja(tmp_path, "my-kernel", toolchain.find_cxx(), [source], compile.cxx_flags(), ["-shared"])
    message, log = str(caught.value), cache_root / "failed-my-kernel.log"
    assert message.startswith("my-kernel: the compiler failed (status 1); the whole log is in ")
    assert str(log) in message and "this does not compile" in message
    assert "broken.cpp" in log.read_text() and "this does not compile" in log.read_text()


def test_a_program_that_is_no_compiler_and_does_not_fail_is_an_error_too(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(program(tmp_path / "own", "own 2.0")))
    with pytest.raises(KernelNotBuiltError, match=f"^core: expected a library from {tmp_path / 'own'}, got none"):
        library.build_core()
    assert cache.entries() == []


@pytest.mark.parametrize("target", ["$$", "$PPID"], ids=["the compiler", "ninja"])
def test_an_interrupt_that_reaches_the_compiler_or_ninja_first_is_no_failed_build(cache_root, tmp_path, target):
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\nkill -INT {target}\nsleep 1\n")
    compiler.chmod(0o755)
    (tmp_path / "source.cpp").write_text("")
    cache_root.mkdir()
    with pytest.raises(KeyboardInterrupt):
        compile.run_ninja(tmp_path, "my-kernel", compiler, [tmp_path / "source.cpp"], [], [])
    assert list(cache_root.iterdir()) == []


def test_a_kernel_that_does_not_compile_leaves_a_log_and_no_entry(cache_root, monkeypatch, tmp_path):
    compiler = tmp_path / "nvcc"
    compiler.write_text("#!/bin/sh\necho 'error: no instruction for this' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: toolchain.Nvcc(compiler, "13.0.88", "test"))
    monkeypatch.setattr(toolchain, "find_cutlass", lambda: tmp_path)
    monkeypatch.setattr(toolchain, "cutlass_version", lambda: "4.2.0")
    with pytest.raises(KernelNotBuiltError, match="no instruction for this"):
        library.build_kernel(TABLE, (TABLE.fallback, "bf16"))
    assert cache.entries() == []
    assert [path.name for path in cache_root.iterdir() if path.suffix == ".log"] == [f"failed-sm90-{TABLE.fallback}-bf16.log"]


def test_one_kernel_that_fails_ends_the_build_and_keeps_what_is_finished(cache_root, monkeypatch):
    def build(table, name, announce):
        if name[0] == "two":
            raise KernelNotBuiltError("two: the compiler failed")
        return cache.get_or_build("kernel", name[0], "key", lambda folder: (folder / cache.LIBRARY).write_bytes(b"built"))

    monkeypatch.setattr(library, "build_kernel", build)
    done = []
    names = [(row, "bf16") for row in ("one", "two", "three")]
    with pytest.raises(KernelNotBuiltError, match="two: the compiler failed"):
        library.build_kernels(TABLE, names, jobs=1, on_kernel=lambda name, count, total: done.append(name[0]))
    assert "two" not in done
    assert "one" in [entry.name for entry in cache.entries()]


@pytest.mark.parametrize("others", [1, 2, 3])
def test_a_kernel_config_that_another_process_finishes_meanwhile_is_not_mixed_with_its_kernels(monkeypatch, others):
    """Its object and that of one of its kernels would define a symbol twice."""
    names = [(TABLE.fallback, out) for out in ("bf16", "fp16", "fp32")]
    looks = []

    def find(kind, label, key):
        looks.append(kind)
        if kind == "row":
            return "whole" if looks.count("row") > others else None
        return label

    monkeypatch.setattr(library, "kernel_key", lambda table, name: str(name))
    monkeypatch.setattr(cache, "find", find)
    assert set(library.build_kernels(TABLE, names).values()) == {"whole"}


def test_folders_with_spaces_and_dollars_in_their_names_are_no_obstacle(cache_root, monkeypatch, tmp_path):
    place = tmp_path / "a $folder of: mine"
    place.mkdir()
    (place / "answer.h").write_text("#define ANSWER 42\n")
    (place / "main.cpp").write_text('#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n')
    compile.run_ninja(place, "spaces", toolchain.find_cxx(), [place / "main.cpp"], [f"-I{place}", "-fPIC"], ["-shared"])
    assert os.path.getsize(place / cache.LIBRARY) > 0
