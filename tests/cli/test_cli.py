"""`scaled-mm verify` and `scaled-mm doctor`, run as a user runs them."""

import argparse
import dataclasses
import json
import math
import re
import shlex
import subprocess
import sys
import time
import types

import pytest
import torch

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.cli import common, doctor, main, verify
from scaled_mm.cpu import gemm as cpu_gemm
from scaled_mm.cpu import integer_product
from scaled_mm.jit import library
from scaled_mm.tables import load_table

SHAPES = ["--shape", "1x64x96", "--shape", "33x40x37"]
CASES_PER_SHAPE = 7  # three float dtypes with and without bias, and int32


def run_json(capsys, *arguments: str) -> tuple[int, dict]:
    """Exit status and document, which must be JSON as RFC 8259 has it: without NaN and Infinity."""

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is no JSON")

    status = main([*arguments, "--json"])
    return status, json.loads(capsys.readouterr().out, parse_constant=refuse)


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
    assert (table.select(128, 2048, 4096).row.name, "fp32") in names
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


# ---- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["verify", "--seed", "99999999999999999999999"], "argument --seed: expected an integer from 0 to "),
        (["verify", "--shape", f"1x{2**31}x1"], "argument --shape: "),
        (["build", "--jobs", "-4"], "argument --jobs: expected an integer of 1 or more, got '-4'"),
        (["build", "--jobs", "0"], "argument --jobs: expected an integer of 1 or more, got '0'"),
        (["verify", "--frob"], "usage: scaled-mm verify"),
        (["table", "show", "--frob"], "usage: scaled-mm table show"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_with_the_usage_of_their_command(capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["verify", "--device", "foo"], "--device: expected cuda, cuda:<index> or cpu, got 'foo'"),
        (["verify", "--device", "meta"], "--device: expected cuda"),
        (["verify", "--device", "cuda:-1"], "--device: expected cuda"),
        (["verify", "--device", "cuda:9999"], "--device: "),
        (["build", "--arch", "tuned/h200.yaml"], "--arch: expected an architecture or a file, there is no tuned/h200.yaml; `scaled-mm autotune`"),
        (["build", "--arch", "sm90x"], "--arch: no tile table for 'sm90x'; there are: "),
        (["build", "--out", "/dev/null/below/kernels.so"], "--out: expected a folder that can be written to"),
        (["build", "--out", "/"], "--out: expected the name of a file, got the folder /"),
    ],
)
def test_what_cannot_be_carried_out_is_one_line_and_status_two(capsys, arguments, message):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err and len(printed.err.splitlines()) == 1 and printed.out == ""


def test_a_build_of_a_whole_table_that_nobody_named_says_what_it_does_and_how_to_do_less(capsys, monkeypatch, tmp_path):
    built = []

    def build_arch(table, jobs, on_kernel):
        built.append(table.arch)
        (tmp_path / "kernels.so").write_bytes(b"kernels")
        return tmp_path / "kernels.so"

    monkeypatch.setattr(library, "build_arch", build_arch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("SCALED_MM_ARCH", raising=False)
    number = len(library.kernel_names(load_table("sm90")))
    assert main(["build", "--jobs", "3"]) == 0
    narrower = "; --arch names another table, --row, --out-dtype and --format build a part of it\n"
    assert capsys.readouterr().err == f"{number} kernels of sm90, 3 at a time{narrower}"
    assert main(["build", "--jobs", "3", "--arch", "sm90"]) == 0
    assert capsys.readouterr().err == f"{number} kernels of sm90, 3 at a time\n"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sm, "Handle", lambda device: types.SimpleNamespace(arch={"cuda:0": "sm80"}[device]))
    assert main(["build"]) == 0
    monkeypatch.setenv("SCALED_MM_ARCH", "sm75")
    assert main(["build"]) == 0
    assert capsys.readouterr().err.count(narrower) == 2 and built == ["sm90", "sm90", "sm80", "sm75"]


def test_explain_answers_for_the_architecture_that_calls_are_forced_to(capsys, monkeypatch):
    def explained(*more: str) -> str:
        return run_json(capsys, "table", "explain", "64", "4096", "4096", *more)[1]["arch"]

    monkeypatch.delenv("SCALED_MM_ARCH", raising=False)
    assert explained() == "sm90"
    monkeypatch.setenv("SCALED_MM_ARCH", "sm80")
    assert explained() == "sm80" and explained("--arch", "sm89") == "sm89"
    for command in (["table", "explain", "1", "2", "3"], ["build"]):
        monkeypatch.setenv("SCALED_MM_ARCH", "/x")
        assert main(command) == 2
        assert "SCALED_MM_ARCH: expected the name of an architecture, as sm80, got /x" in capsys.readouterr().err


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0 and capsys.readouterr().out == f"scaled-mm {sm.__version__}\n"


def test_the_package_runs_as_a_module_and_a_reader_that_leaves_early_is_no_error():
    command = f"{shlex.quote(sys.executable)} -m scaled_mm"
    script = "".join(f"{command} {arguments} | true; echo ${{PIPESTATUS[0]}}; " for arguments in ("table show --json", "table show"))
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stderr == "" and done.stdout.split() == ["141", "141"]


def test_a_full_disk_is_no_answer_but_one_line_and_status_two():
    for arguments in (["table", "explain", "1", "2", "3"], ["verify", "--device", "cpu", "--shape", "2x2x2", "--json"]):
        command = [sys.executable, "-m", "scaled_mm", *arguments]
        # The first command in an empty cache compiles the C core, which takes two more lines, and on a busy machine minutes.
        assert subprocess.run(command, capture_output=True, timeout=600).returncode == 0
        with open("/dev/full", "w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=600)
        assert done.returncode == 2 and re.fullmatch(rf"scaled-mm {arguments[0]}: .*No space left on device\n", done.stderr), done.stderr


# ---- doctor ----------------------------------------------------------------------------------------------------------


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
    [("SCALED_MM_NVCC", "nvcc"), ("SCALED_MM_CUTLASS", "CUTLASS headers"), ("CXX", "C++ compiler"), ("SCALED_MM_ARCH", "forced architecture")],
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
    from scaled_mm.jit import library

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


def test_a_log_gets_a_line_at_the_start_and_now_and_then_and_a_terminal_none(capsys):
    for terminal, seconds in ((False, 0.0), (True, 0.0), (False, 3600.0)):
        log = common.LogLines(terminal, seconds)
        log.begin("3 kernels")
        log.say("1 of 3 kernels")
        log.say("2 of 3 kernels")
    assert re.fullmatch(r"3 kernels\n1 of 3 kernels, \d+ s\n2 of 3 kernels, \d+ s\n3 kernels\n", capsys.readouterr().err)
