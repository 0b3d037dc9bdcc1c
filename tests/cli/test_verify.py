"""`scaled-mm verify`, run as a user runs it."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import time
import types

import pytest
import torch
from cli_run import run_json

import scaled_mm as sm
from scaled_mm.cli import common, main, verify
from scaled_mm.cpu import gemm as cpu_gemm
from scaled_mm.cpu import integer_product
from scaled_mm.measure import timing
from scaled_mm.measure.regime import REGIMES
from scaled_mm.tables import load_table

SHAPES = ["--shape", "1x64x96", "--shape", "33x40x37"]
CASES_PER_SHAPE = 7  # three float dtypes with and without bias, and int32


@pytest.mark.parametrize("mode", [[], ["--asymmetric"]], ids=["symmetric", "asymmetric"])
def test_verify_finds_every_result_equal(capsys, device, mode):
    status, report = run_json(capsys, "verify", "--device", device, *SHAPES, *mode)
    assert status == 0 and report["equal"] is True
    assert len(report["cases"]) == 2 * CASES_PER_SHAPE
    for case in report["cases"]:
        assert case["equal"] and case["error"] is None and case["difference"] is None
        assert case["kernel"] and case["asymmetric"] == bool(mode)
        assert 0 < case["relative_error"] < 0.06
        assert case["median_us"] is None
    assert {(c["out_dtype"], c["bias"]) for c in report["cases"]} == {
        *((name, bias) for name in ("bfloat16", "float16", "float32") for bias in (False, True)),
        ("int32", False),
    }


def test_verify_reports_times_when_asked(capsys, device):
    status, report = run_json(capsys, "verify", "--device", device, "--shape", "2x16x32", "--time")
    assert status == 0
    assert all(case["median_us"] > 0 for case in report["cases"])


def test_verify_does_not_rest_between_products(capsys, monkeypatch):
    """Rests of 0.6 s for each of 35 products were a fifth of what a new user waited for."""
    regimes = []
    monkeypatch.setattr(timing, "measure", lambda *_, regime, **__: regimes.append(REGIMES[regime]) or timing.Timing(1.0, [1.0], 1, ""))
    status, report = run_json(capsys, "verify", "--device", "cpu", "--shape", "2x16x32", "--time")
    assert status == 0 and [case["median_us"] for case in report["cases"]] == [1.0] * CASES_PER_SHAPE
    assert len(regimes) == CASES_PER_SHAPE and all(one.rest_ms == 0 and one.settle_ms <= 5 and one.load_ms == 0 for one in regimes)


def test_verify_stops_timing_when_the_time_for_it_is_spent(capsys, monkeypatch):
    monkeypatch.setattr(verify, "_TIMING_LIMIT_S", {"cpu": 1e-9})
    arguments = ["verify", "--device", "cpu", "--shape", "2x16x32", "--time"]
    status, report = run_json(capsys, *arguments)
    assert status == 0 and [case["median_us"] is not None for case in report["cases"]] == [True] + [False] * (CASES_PER_SHAPE - 1)
    assert main(arguments) == 0
    assert f"{CASES_PER_SHAPE - 1} of {CASES_PER_SHAPE} products were not timed" in capsys.readouterr().out


def test_verify_says_what_a_slow_cpu_left_out_and_all_checks_it(capsys, monkeypatch):
    few = ((2, 16, 32), (3, 8, 40))
    monkeypatch.setattr(verify, "DEFAULT_SHAPES", few)
    monkeypatch.setattr(verify, "_LEAST_S", 0.0)
    monkeypatch.setattr(common, "process_age", lambda: 1e9)
    total = len(few) * CASES_PER_SHAPE
    status, report = run_json(capsys, "verify", "--device", "cpu")
    assert status == 0 and report["equal"] and report["left_out"] == CASES_PER_SHAPE
    assert {(case["m"], case["n"], case["k"]) for case in report["cases"]} == {few[0]} and len(report["cases"]) == CASES_PER_SHAPE
    assert main(["verify", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert f"\nthe {CASES_PER_SHAPE} results equal the reference bit for bit\n" in printed
    assert f"\n{CASES_PER_SHAPE} of {total} products were left out: 40 s were over; --all checks them\n" in printed
    for arguments in (["--all"], [part for m, n, k in few for part in ("--shape", f"{m}x{n}x{k}")]):  # shapes that were asked for are all checked
        status, report = run_json(capsys, "verify", "--device", "cpu", *arguments)
        assert status == 0 and len(report["cases"]) == total and report["left_out"] == 0
    assert main(["verify", "--device", "cpu", "--all"]) == 0
    printed = capsys.readouterr().out
    assert f"all {total} results equal" in printed and "left out" not in printed


def test_verify_begins_no_product_and_no_shape_after_its_time(capsys, monkeypatch):
    """Of a shape the operands and the reference take longer than the products."""
    real, begun, now = verify.verify_shape, [], [0.0]

    def one_second_each(handle, device, m, n, k, *more):
        begun.append((m, n, k))
        for result in real(handle, device, m, n, k, *more):
            now[0] += 1.0
            yield result

    monkeypatch.setattr(verify, "verify_shape", one_second_each)
    monkeypatch.setattr(verify, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(common, "process_age", lambda: 5.0)
    monkeypatch.setattr(verify, "DEFAULT_SHAPES", shapes := ((2, 16, 32), (3, 8, 40), (4, 8, 16)))
    for limit, checked, of in ((5.0 + CASES_PER_SHAPE + 1.5, CASES_PER_SHAPE + 2, 2), (1.0, CASES_PER_SHAPE, 1), (1e3, 3 * CASES_PER_SHAPE, 3)):
        monkeypatch.setattr(verify, "_LIMIT_S", limit)
        monkeypatch.setattr(verify, "_LEAST_S", 0.5)
        begun.clear()
        _, report = run_json(capsys, "verify", "--device", "cpu")
        assert begun == list(shapes[:of]) and len(report["cases"]) == checked and report["left_out"] == 3 * CASES_PER_SHAPE - checked


def test_the_age_of_a_process_counts_from_its_start():
    script = "import time; time.sleep(0.3); from scaled_mm.cli import common; print(common.process_age())"
    start = time.monotonic()
    age = float(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120).stdout)
    assert 0.3 <= age <= time.monotonic() - start + 0.02  # a tick of Linux is 10 ms


def test_verify_cannot_be_carried_out_with_a_cpu_kernel_that_there_is_not(capsys, monkeypatch):
    monkeypatch.setenv(integer_product.VARIABLE, "float33")
    integer_product._choose.cache_clear()
    try:
        assert main(["verify", "--device", "cpu", "--shape", "1x2x3"]) == 2
    finally:
        integer_product._choose.cache_clear()
    printed = capsys.readouterr()
    assert printed.out == "" and "BAD_PARAM: SCALED_MM_CPU_KERNEL: expected one of onednn_int8, float32, got 'float33'" in printed.err


def test_verify_names_the_kernels_that_its_products_need():
    table = load_table("sm90")
    names = verify.needed_kernels(table, verify.DEFAULT_SHAPES, asymmetric=False)
    assert (table.fallback, "bf16") in names and ("zero_point_terms", None) not in names  # 33x1000x1031 is not aligned
    assert (table.select(128, 1024, 4096).row.name, "fp32") in names and ("rowwise_quantize", "fp32") in names
    configs = {table.row(row) for row, out in names if out is not None and row != "rowwise_quantize"}
    assert sorted(config.family for config in configs) == ["c3x", "decode", "decode", "generic"]
    more = verify.needed_kernels(table, verify.DEFAULT_SHAPES, asymmetric=True)
    assert ("zero_point_terms", None) in more and set(names) <= set(more)
    assert (table.select(1, 4096, 4096, constant_b=True).row.name, "int32") in more


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [[], ["--asymmetric"]], ids=["symmetric", "asymmetric"])
def test_verify_compiles_nothing_but_what_it_named_beforehand(capsys, monkeypatch, tmp_path, mode):
    """Kernels are compiled at once, one a core; a product that compiled one more would do it alone."""
    monkeypatch.setenv("SCALED_MM_CACHE_DIR", str(tmp_path))
    script = "import sys; from scaled_mm.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", script, "verify", "--shape", "1x512x512", "--shape", "33x40x37", *mode], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "building kernel" not in done.stderr


def test_verify_prints_a_table_for_people(capsys, device):
    assert main(["verify", "--device", device, *SHAPES]) == 0
    printed = capsys.readouterr().out
    assert "33x40x37" in printed and "bfloat16" in printed
    assert f"all {2 * CASES_PER_SHAPE} results equal the reference bit for bit" in printed


def test_verify_fails_when_one_number_differs(capsys, monkeypatch):
    gemm = cpu_gemm.gemm

    def off_by_one(out, *inputs):
        gemm(out, *inputs)
        if out.dtype is torch.float16:
            out[0, 3] += out[0, 3].abs() + 1

    monkeypatch.setattr(cpu_gemm, "gemm", off_by_one)
    status, report = run_json(capsys, "verify", "--device", "cpu", *SHAPES)
    assert status == 1 and report["equal"] is False
    wrong = [case for case in report["cases"] if not case["equal"]]
    assert {case["out_dtype"] for case in wrong} == {"float16"} and len(wrong) == 4
    assert "1 of 64 elements differ; the first at [0, 3]" in wrong[0]["difference"]
    assert main(["verify", "--device", "cpu", *SHAPES]) == 1
    assert "4 of 14 results differ" in capsys.readouterr().out


def test_verify_notices_an_element_that_nobody_wrote(capsys, monkeypatch):
    monkeypatch.setattr(cpu_gemm, "gemm", lambda out, *inputs: None)
    status, report = run_json(capsys, "verify", "--device", "cpu", "--shape", "2x3x4")
    assert status == 1
    assert not any(case["equal"] for case in report["cases"])
    assert "6 of 6 elements differ" in report["cases"][0]["difference"]
    assert report["cases"][0]["relative_error"] == "NaN"  # of the poison


def test_verify_reports_a_product_that_is_refused_and_fails(capsys, device):
    status, report = run_json(capsys, "verify", "--device", device, "--shape", "1x2x131072", "--shape", "1x2x3")
    assert status == 1
    refused, fine = report["cases"][:CASES_PER_SHAPE], report["cases"][CASES_PER_SHAPE:]
    assert all(case["error"].startswith("OVERFLOW: ") for case in refused) and report["refused"] == CASES_PER_SHAPE
    assert all(case["equal"] for case in fine)


def test_verify_says_once_what_is_refused_and_does_not_call_it_different(capsys):
    assert main(["verify", "--device", "cpu", "--shape", "1x2x131072", "--shape", "1x2x3"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("1x2x131072: OVERFLOW: a: expected K <= 131071") == 1 and "differ" not in printed
    assert f"{CASES_PER_SHAPE} of {2 * CASES_PER_SHAPE} products were refused" in printed
    assert f"the other {CASES_PER_SHAPE} results equal the reference bit for bit" in printed


def test_verify_takes_sizes_of_zero(capsys, device):
    for shape in ("0x4x5", "4x0x5", "4x5x0"):
        for mode in ([], ["--asymmetric"]):
            status, report = run_json(capsys, "verify", "--device", device, "--shape", shape, *mode)
            assert status == 0 and all(case["equal"] for case in report["cases"])


@pytest.mark.parametrize("text", ["1x2", "1x2x3x4", "axbxc", "-1x2x3", "", "1,2,3"])
def test_a_shape_that_is_none_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected MxNxK"):
        verify._shape(text)


def test_asymmetric_verify_multiplies_by_a_prepared_weight_too(capsys, monkeypatch):
    real = sm.prepare_weight

    def wrong_sums(b, b_zero_point):
        prepared = real(b, b_zero_point)
        return dataclasses.replace(prepared, column_sums=prepared.column_sums + 1)

    monkeypatch.setattr(sm, "prepare_weight", wrong_sums)
    status, report = run_json(capsys, "verify", "--device", "cpu", "--shape", "3x16x32", "--asymmetric")
    assert status == 1 and all(case["difference"].startswith("prepared weight: ") for case in report["cases"])
    status, report = run_json(capsys, "verify", "--device", "cpu", "--shape", "3x16x32")
    assert status == 0


def test_verify_splits_no_kernel_name_in_80_columns(capsys, monkeypatch):
    name = "c3x_128x256x128_co_c21_swap_s8"
    result = verify.Result(8192, 28672, 8192, "bfloat16", True, False, kernel=name, equal=True, relative_error=0.01, median_us=12345.6)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    verify._print({"name": "a GPU", "device": "cuda:0", "torch": "2"}, [result], left_out=0, timed=True)
    assert name in capsys.readouterr().out


def test_verify_names_the_shape_that_does_not_fit_into_memory(capsys, monkeypatch):
    real = torch.randn

    def randn(*sizes, **options):
        # In place of an allocation that a large machine would carry out.
        if sizes == (7, 9):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 40000000000 bytes")
        return real(*sizes, **options)

    monkeypatch.setattr(torch, "randn", randn)
    assert main(["verify", "--device", "cpu", "--shape", "7x1x9"]) == 2
    assert "--shape: expected matrices that fit into memory, got 7x1x9" in capsys.readouterr().err
