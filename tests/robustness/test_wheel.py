"""`scaled-mm build --wheel`: kernels of architectures in a wheel, which multiplies where there is no compiler.

The tables of the copied sources are cut down to the fallback, and their row-wise kernels to one, so that nvcc takes seconds instead of an hour.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from scaled_mm import cli
from scaled_mm.jit import codegen, toolchain, wheel
from scaled_mm.tables import available_tables, load_table

pytest.importorskip("setuptools.command.bdist_wheel")
pytest.importorskip("pip")
ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "setup.py").is_file():
    pytest.skip("no checkout", allow_module_level=True)
COPIED = ("csrc", "cutlass_configs", "schemas", "scaled_mm", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
needs_nvcc = pytest.mark.skipif(
    toolchain.find_nvcc() is None or toolchain.find_cutlass() is None,
    reason="no nvcc or no CUTLASS here: `scaled-mm doctor` says how to get them",
)


def small(table_file: Path) -> None:
    """Leaves of a table the fallback of its products: four kernels, and that of the zero points."""
    table = load_table(table_file)
    tile = list(table.row(table.fallback).tile)
    table_file.write_text(
        f"arch: {table.arch}\nserves: [{', '.join(table.serves)}]\nfallback: {table.fallback}\nbuckets: [{{kernel: {table.fallback}}}]\n"
        f"rows: [{{name: {table.fallback}, family: generic, tile: {tile}}}]\n"
    )


KERNELS = 5 + 3  # of each architecture: those of `small`, and one row-wise kernel for three dtypes


def one_row_wise_kernel(codegen_file: Path) -> None:
    others = [f'    "{name}": ' for name in codegen.ROWWISE if name != "rowwise_quantize"]
    lines = codegen_file.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith(tuple(others))]
    assert len(lines) - len(kept) == len(others)
    codegen_file.write_text("".join(kept))


@pytest.fixture(autouse=True)
def from_the_checkout(monkeypatch):
    """Also where the package is installed: wheels are built from sources."""
    monkeypatch.setattr(wheel, "__file__", str(ROOT / "scaled_mm" / "jit" / "wheel.py"))


@pytest.fixture(scope="module")
def archs() -> list[str]:
    """sm75, whose kernels compile fastest, and that of the GPU if there is one."""
    from scaled_mm import Handle
    from scaled_mm.tables.loader import table_of

    return list(dict.fromkeys(["sm75", *([table_of(Handle("cuda:0").arch)] if torch.cuda.is_available() else [])]))


@pytest.fixture(scope="module")
def built(tmp_path_factory, archs) -> tuple[dict, str]:
    """(The command's answer, its stderr)."""
    root = tmp_path_factory.mktemp("wheel") / "tree"
    root.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "lib", "build.ninja", "blob")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, root / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, root / name)
    for arch in archs:
        small(root / "cutlass_configs" / f"{arch}.yaml")
    one_row_wise_kernel(root / "scaled_mm" / "jit" / "codegen.py")
    options = [option for arch in archs for option in ("--arch", arch)]
    command = [sys.executable, "-m", "scaled_mm", "build", "--wheel", str(root.parent / "dist"), *options, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(root), "SCALED_MM_CACHE_DIR": str(root.parent / "cache")}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def python(built, tmp_path_factory) -> Path:
    """The Python of a new environment with the wheel in it. Everything else comes from this environment, after it."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    options = ["--no-index", "--no-deps", "--no-cache-dir", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", *options, built[0]["wheel"]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (packages,) = folder.glob("lib/python*/site-packages")
    outer = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(Path(torch.__file__).parents[1])}
    (packages / "outer.pth").write_text("\n".join(sorted(outer)) + "\n")
    return python


# Without a compiler, and whatever asks for one fails.
HIDDEN = """
import json, os, sys
from pathlib import Path
from scaled_mm.jit import compile, library, toolchain
from scaled_mm.tables import load_table

for name in ("find_nvcc", "find_cutlass", "find_ninja", "find_cxx"):
    setattr(toolchain, name, lambda: None)

def refuse(*arguments):
    raise AssertionError(f"compiles: {arguments}")

compile.run_program = refuse
"""

MULTIPLY = """
import torch
import scaled_mm as sm
from scaled_mm import reference

device, archs = sys.argv[1], sys.argv[2].split(",")
g = torch.Generator().manual_seed(1)
a, b = (torch.randint(-128, 128, size, generator=g, dtype=torch.int8) for size in ((33, 70), (70, 41)))
points = {"a_zero_point": torch.randint(-128, 128, (33, 1), generator=g, dtype=torch.int8)}
scales = (torch.rand(33, 1, generator=g), torch.rand(1, 41, generator=g), torch.randn(41, generator=g))
for out_dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int32):
    inputs = (a, b, None, None) if out_dtype is torch.int32 else (a, b, *scales)
    on_device = [t if t is None else t.to(device) for t in inputs]
    out = sm.scaled_mm(*on_device, out_dtype=out_dtype, **{name: t.to(device) for name, t in points.items()})
    assert torch.equal(out.cpu(), reference.scaled_mm(*inputs, out_dtype=out_dtype, **points)), out_dtype
libraries = [library.core_library(), library.torch_library(), library.python_library(), *(library.arch_library(load_table(arch)) for arch in archs)]
print(json.dumps({"package": sm.__file__, "libraries": list(map(str, libraries)), "serves": [library.serves(load_table(arch)) for arch in archs]}))
"""


def run(python: Path, program: str, cache: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "SCALED_MM_ARCH")}
    environment["SCALED_MM_CACHE_DIR"] = str(cache)
    command = [str(python), "-c", HIDDEN + program, *arguments]
    return subprocess.run(command, cwd=cache.parent, env=environment, capture_output=True, text=True, timeout=240)


@needs_nvcc
def test_the_wheel_has_a_library_and_its_key_for_each_architecture_and_fits_every_python(built, archs):
    answer, said = built
    path = Path(answer["wheel"])
    assert path.name.startswith("scaled_mm-") and path.name.endswith(f"-py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}.whl")
    with zipfile.ZipFile(path) as archive:
        held = {entry.filename: entry for entry in archive.infolist()}
    libraries = ("libscaled_mm", "torch_operators", "fast_path", *(f"kernels_{arch}" for arch in archs))
    assert {f"scaled_mm/lib/{name}.{ending}" for name in libraries for ending in ("so", "json")} == {
        name for name in held if name.startswith("scaled_mm/lib/")
    }
    assert answer["bytes"] == path.stat().st_size
    assert answer["libraries"] == [{"arch": arch, "bytes": held[f"scaled_mm/lib/kernels_{arch}.so"].compress_size} for arch in archs]
    assert f"{KERNELS * len(archs)} kernels of {', '.join(archs)}" in said and "built the wheel" in said


@needs_nvcc
def test_what_is_installed_from_it_multiplies_by_its_own_libraries_without_a_compiler(python, archs, device, tmp_path):
    done = run(python, MULTIPLY, tmp_path / "cache", device, ",".join(archs))
    assert done.returncode == 0 and "building" not in done.stderr, done.stderr
    answer = json.loads(done.stdout)
    installed = python.parents[1] / "lib"
    assert all(Path(path).is_relative_to(installed) for path in (answer["package"], *answer["libraries"])), answer
    assert answer["serves"] == [True] * len(archs)
    assert not (tmp_path / "cache").exists() or list((tmp_path / "cache").iterdir()) == []


@needs_nvcc
def test_doctor_names_the_kernels_of_the_wheel(python, archs, tmp_path):
    done = run(python, "from scaled_mm.cli import main\nsys.exit(main(['doctor', '--json']))", tmp_path / "cache")
    found = {line["name"]: line for line in json.loads(done.stdout)["findings"]}
    assert all(f"{arch}, {KERNELS}" in found["kernels in the wheel"]["found"] for arch in archs), found
    assert found["nvcc"]["found"] is None  # it is hidden indeed


# ---- refused before anything that takes long ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "missing, message",
    [
        ("find_nvcc", "nvcc: needed for building, not found; install the CUDA toolkit"),
        ("find_cutlass", "CUTLASS: needed for building, not found; `pip install nvidia-cutlass"),
        ("find_cxx", "C++ compiler: needed for building, not found; install g++"),
        ("find_ninja", "ninja: needed for building, not found; `pip install ninja`"),
    ],
)
def test_what_is_missing_is_named_before_a_kernel_is_compiled(missing, message, tmp_path, monkeypatch, capsys):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    found = {
        "find_nvcc": toolchain.Nvcc(nvcc, "13.0.88", "test"),
        "find_cutlass": tmp_path,
        "find_cxx": "c++",
        "find_ninja": Path("ninja"),
    }
    for name, tool in (found | {missing: None}).items():
        monkeypatch.setattr(toolchain, name, lambda tool=tool: tool)
    monkeypatch.setattr(wheel, "build", lambda *_: pytest.fail("builds"))
    assert cli.main(["build", "--wheel", str(tmp_path / "dist")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("version, got", [("65.5.0", "got 65.5.0"), (None, "not found")])
def test_a_setuptools_that_is_too_old_is_named(version, got, tmp_path, monkeypatch, capsys):
    def found(name):
        if version is None:
            raise wheel.importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(wheel.importlib.metadata, "version", found)
    monkeypatch.setattr(wheel, "build", lambda *_: pytest.fail("builds"))
    monkeypatch.setattr(wheel.library, "nvcc_and_flags", lambda arch: (toolchain.Nvcc(tmp_path / "none", "13.0.88", "test"), []))
    assert cli.main(["build", "--wheel", str(tmp_path / "dist"), "--arch", "sm75"]) == 2
    assert f"setuptools: needed for building a wheel, 77 or newer, {got}; `pip install 'setuptools>=77'`" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--row", "generic_64x64x64"], "--row: expected none with --wheel"),
        (["--out-dtype", "bf16"], "--out-dtype: expected none with --wheel"),
        (["--format", "q4_0"], "--format: expected none with --wheel"),
        (["--out", "library.so"], "--out: expected none with --wheel"),
        (["--arch", "sm80", "--arch", "sm10"], f"--arch: expected architectures that have a table with --wheel, as {available_tables()[0][0]}"),
        (["--arch", str(available_tables()[0][1])], "--arch: expected architectures that have a table with --wheel"),
    ],
)
def test_options_that_do_not_go_with_a_wheel_are_refused_by_name(arguments, message, tmp_path, capsys):
    assert cli.main(["build", "--wheel", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_several_architectures_are_for_wheels_alone(capsys):
    assert cli.main(["build", "--arch", "sm80", "--arch", "sm90"]) == 2
    assert "--arch: expected one without --wheel, got sm80, sm90" in capsys.readouterr().err


def test_an_installed_package_has_no_sources_to_build_a_wheel_from(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(wheel, "__file__", str(tmp_path / "site-packages" / "scaled_mm" / "jit" / "wheel.py"))
    assert cli.main(["build", "--wheel", str(tmp_path / "dist")]) == 2
    assert "--wheel: expected a checkout or an unpacked source distribution" in capsys.readouterr().err
    assert not (tmp_path / "dist").exists()
