"""`scaled-mm doctor`, run as a user runs it."""

from __future__ import annotations

import math

import pytest
import torch
from cli_run import run_json

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.cli import doctor, main
from scaled_mm.cpu import gemm as cpu_gemm
from scaled_mm.jit import library, provide
from scaled_mm.tables import load_table


def test_doctor_passes_where_the_cpu_backend_works(capsys):
    status, report = run_json(capsys, "doctor")
    assert status == 0 and report["ok"] is True
    findings = {finding["name"]: finding for finding in report["findings"]}
    assert cpu_gemm.kernel_name() in findings["CPU backend"]["found"]
    assert torch.__version__ in findings["torch"]["found"]
    assert {"Python", "core library", "nvcc", "CUTLASS headers", "ninja", "C++ compiler", "build cache"} <= set(findings)
    for finding in findings.values():
        assert finding["found"] or (finding["needed_for"] and (finding["get"] or finding["reason"])), finding


def test_doctor_prints_no_number_that_json_lacks(capsys, monkeypatch):
    found = [doctor.Finding("a part", "works", details=[math.inf, {"size": math.nan}])]
    monkeypatch.setattr(doctor, "examine", lambda: found)
    assert run_json(capsys, "doctor")[1]["findings"][0]["details"] == ["Infinity", {"size": "NaN"}]


def test_doctor_prints_what_is_missing_and_how_to_get_it(capsys, monkeypatch):
    from scaled_mm.jit import toolchain

    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    assert main(["doctor"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "not found; needed for building GPU kernels" in printed and ".[cuda]" in printed
    assert "The CPU backend works." in printed


def test_doctor_fails_when_the_cpu_gives_a_wrong_number(capsys, monkeypatch):
    monkeypatch.setattr(reference, "scaled_mm", lambda a, b, *args, **kwargs: torch.zeros(a.shape[0], b.shape[1]))
    status, report = run_json(capsys, "doctor")
    assert status == 1 and report["ok"] is False
    backend = next(finding for finding in report["findings"] if finding["name"] == "CPU backend")
    assert backend["found"] is None and "differs from the reference" in backend["reason"]


def test_doctor_survives_a_part_that_raises(capsys, monkeypatch):
    from scaled_mm.jit import cache

    def broken():
        raise PermissionError("cache [not] readable")

    monkeypatch.setattr(cache, "entries", broken)
    status, report = run_json(capsys, "doctor")
    assert status == 0
    finding = next(finding for finding in report["findings"] if finding["name"] == "build cache")
    assert finding["found"] is None and finding["reason"] == "PermissionError: cache [not] readable"
    assert main(["doctor"]) == 0
    assert "cache [not] readable" in " ".join(capsys.readouterr().out.split())


@pytest.fixture
def look_again():
    """What was found is remembered per process."""
    from scaled_mm.jit import toolchain

    looks = (toolchain.find_nvcc, toolchain.find_cutlass, toolchain.cutlass_version, toolchain.find_cxx, toolchain.cxx_version)
    for look in looks:
        look.cache_clear()
    yield
    for look in looks:
        look.cache_clear()


@pytest.mark.parametrize(
    "variable, name",
    [
        ("SCALED_MM_NVCC", "nvcc"),
        ("SCALED_MM_CUTLASS", "CUTLASS headers"),
        ("CXX", "C++ compiler"),
        ("SCALED_MM_JIT", "kernel builds"),
        ("SCALED_MM_ARCH", "forced architecture"),
    ],
)
def test_doctor_keeps_what_is_wrong_apart_from_what_to_do(capsys, monkeypatch, look_again, variable, name):
    monkeypatch.setenv(variable, "/x")
    _, report = run_json(capsys, "doctor")
    finding = next(finding for finding in report["findings"] if finding["name"] == name)
    assert finding["found"] is None and finding["get"] == f"correct the variable {variable}, or unset it"
    assert finding["reason"].startswith(f"{variable}: expected ") and finding["reason"].endswith("got /x")
    main(["doctor"])
    printed = " ".join(capsys.readouterr().out.split())
    assert f"cannot be used: {variable}: expected" in printed and f"What to do: correct the variable {variable}" in printed


def test_doctor_tries_to_write_to_the_cache(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SCALED_MM_CACHE_DIR", str(tmp_path / "file"))
    _, report = run_json(capsys, "doctor")
    finding = next(finding for finding in report["findings"] if finding["name"] == "build cache")
    assert finding["found"] is None and str(tmp_path / "file") in finding["reason"]
    assert finding["get"] == "correct the variable SCALED_MM_CACHE_DIR, or unset it"


def test_doctor_checks_the_tile_tables(capsys, monkeypatch, tmp_path):
    from scaled_mm.tables import configs_dir, loader

    text = (configs_dir() / "sm90.yaml").read_text()
    (tmp_path / "cutlass_configs").mkdir()
    (tmp_path / "cutlass_configs" / "sm90.yaml").write_text(text.replace("swap_ab: true", "swap_ab: 1", 1))
    monkeypatch.setattr(loader, "_PACKAGE", tmp_path / "scaled_mm")
    _, report = run_json(capsys, "doctor")
    findings = {finding["name"]: finding for finding in report["findings"]}
    assert "tile tables" not in findings and findings["tile table sm90"]["found"] is None
    assert "swap_ab" in findings["tile table sm90"]["reason"]


def test_doctor_says_which_kernels_the_wheel_has(monkeypatch, tmp_path):

    assert doctor._shipped_kernels() == []
    table = sm.tables.load_table("sm90")
    (tmp_path / "built.so").write_bytes(b"kernels")
    monkeypatch.setattr(library, "lib_dir", lambda: tmp_path / "lib")
    library.install_prebuilt(tmp_path / "built.so", "kernels_sm90", library._arch_key(table), tmp_path / "lib")
    [finding] = doctor._shipped_kernels()
    assert finding.name == "kernels in the wheel" and finding.found.startswith(f"sm90, {len(library.kernel_names(table))} (")
    library.install_prebuilt(tmp_path / "built.so", "kernels_sm90", "another key", tmp_path / "lib")
    [finding] = doctor._shipped_kernels()
    assert finding.found is None and "another tile table or other sources" in finding.reason


@pytest.mark.gpu
def test_doctor_names_the_gpu_and_its_tile_table():
    findings = {finding.name: finding for finding in doctor.examine()}
    assert torch.cuda.get_device_name(0) in findings["GPU 0"].found
    assert findings["tile table of GPU 0"].found.startswith(f"{sm.Handle('cuda:0').arch}: ")


@pytest.mark.parametrize("how", ["background", "wait", "off"])
def test_doctor_shows_the_mode_and_how_many_kernels_of_this_machines_architecture_are_built(monkeypatch, how):
    monkeypatch.setenv("SCALED_MM_JIT", how)
    monkeypatch.setenv("SCALED_MM_ARCH", "sm80")
    names = library.kernel_names(load_table("sm80"))
    monkeypatch.setattr(library, "arch_library", lambda table: None)
    monkeypatch.setattr(provide, "built", lambda table, name: "a library" if name in names[:3] else None)
    finding = doctor._just_in_time()
    assert finding.found.startswith(f"{how}: ") and finding.found.endswith(f"; 3 of {len(names)} kernels of sm80 are built")
    assert finding.details == {"mode": how, "arch": "sm80", "built": 3, "kernels": len(names)}
    monkeypatch.setattr(library, "arch_library", lambda table: "kernels_sm80.so")
    assert doctor._just_in_time().details["built"] == len(names)


def test_doctor_shows_the_mode_alone_without_a_gpu(monkeypatch):
    monkeypatch.delenv("SCALED_MM_ARCH", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("SCALED_MM_JIT", "off")
    assert doctor._just_in_time().found == "off: nothing is compiled"
