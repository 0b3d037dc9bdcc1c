"""`scaled-mm table`: the same answers for people and, with --json, for programs."""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
from pathlib import Path

import pytest
import torch

from scaled_mm.cli import table as command
from scaled_mm.errors import K_BOUNDS, KernelNotBuiltError
from scaled_mm.jit import check, toolchain
from scaled_mm.kernels.gpu import facts
from scaled_mm.tables import load_table
from scaled_mm.tables.select import output_tiles


@pytest.fixture
def call(capsys):
    """call(*arguments) -> (exit status, stdout, stderr)"""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)

    def call(*arguments):
        status = command.run(parser.parse_args([str(argument) for argument in arguments]))
        return status, *capsys.readouterr()

    return call


def test_show_prints_every_row_and_every_bucket(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    status, out, _ = call("show")
    table = load_table("sm90")
    assert status == 0
    for row in table.rows:
        assert row.name in out and str(row.tile) in out
    for bucket in table.buckets:
        assert bucket.kernel in out and all(str(bound) in out for bound in (bucket.m, bucket.n) if bound)
    assert "open" in out and "KB" in out and "registers" in out


@pytest.mark.parametrize("terminal", [True, False], ids=["80 columns", "a pipe"])
def test_show_cuts_no_word_short(call, monkeypatch, terminal):
    monkeypatch.setenv("COLUMNS", "80")
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    status, out, _ = call("show")
    assert status == 0 and "\N{HORIZONTAL ELLIPSIS}" not in out
    table = load_table("sm90")
    assert all(row.name in out and str(row.tile) in out and (row.schedule or "") in out for row in table.rows)
    assert ("not shown in 80 columns: scheduler" in " ".join(out.split())) is terminal


def test_show_json_has_the_whole_table(call):
    status, out, _ = call("show", "--arch", "sm90", "--json")
    shown, table = json.loads(out), load_table("sm90")
    assert status == 0 and shown["arch"] == "sm90" and shown["fallback"] == table.fallback and shown["tuned"] is False
    assert [row["name"] for row in shown["rows"]] == [row.name for row in table.rows]
    assert [(b["m"], b["n"], b["k"], b["kernel"]) for b in shown["buckets"]] == [(b.m, b.n, b.k, b.kernel) for b in table.buckets]
    large = next(row for row in shown["rows"] if row["name"] == "c3x_128x128x128_pp_c12_swap")
    assert large["tile"] == [128, 128, 128] and large["estimate"]["accumulator_registers"] == 128
    assert large["estimate"]["shared_memory_bytes"] <= 227 * 1024 and large["alignment_bytes"] == {
        "a": 16,
        "b": 16,
        "out": 16,
    }


def test_show_of_a_file_shows_that_file(call, table_file):
    status, out, _ = call("show", "--table", table_file.path, "--json")
    assert status == 0 and [row["name"] for row in json.loads(out)["rows"]] == ["small", "large", "any"]


def test_check_of_the_tables_of_the_package_finds_nothing(call):
    status, out, _ = call("check")
    assert status == 0 and "sm90.yaml: ok" in out
    status, out, _ = call("check", "--json")
    answer = json.loads(out)
    assert status == 0 and answer["ok"] is True and all(table["problems"] == [] for table in answer["tables"])


def test_check_prints_each_problem_with_its_line_and_exits_1(call, table_file):
    table_file.replace("swap_ab: true", "swap_ab: 1").replace("{kernel: large}", "{kernel: huge}")
    status, out, err = call("check", "--table", table_file.path)
    assert status == 1 and "2 problems" in err
    first, second = out.splitlines()
    assert first.startswith(f"{table_file.path}:{table_file.line_of('swap_ab')}: rows[0].swap_ab: ")
    assert second.startswith(f"{table_file.path}:{table_file.line_of('huge')}: buckets[2].kernel: no row is named 'huge'")


def test_check_json_lists_file_line_field_and_reason(call, table_file):
    table_file.replace("{kernel: large}", "{kernel: huge}")
    status, out, _ = call("check", "--table", table_file.path, "--json")
    answer = json.loads(out)
    assert status == 1 and answer["ok"] is False
    line = table_file.line_of("huge")
    expected = {
        "file": str(table_file.path),
        "line": line,
        "field": "buckets[2].kernel",
        "reason": "no row is named 'huge'",
    }
    assert answer["tables"] == [{"table": str(table_file.path), "problems": [expected]}]


def compiled(table, names, on_kernel, spilled=0, serialized=False):
    """What `check.compile_kernels` answers: every kernel for one GPU, the last one with a spill, or serialized."""
    kernels = [check.Compiled(*name, "sm_90a", 168, *((spilled, 1.0, serialized) if name == names[-1] else (0, 1.0))) for name in names]
    on_kernel(kernels)
    return [*kernels, kernels[-1]]  # of two device kernels


@pytest.fixture
def nvcc(monkeypatch):
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: toolchain.Nvcc(Path("nvcc"), "13.0.88", "test"))


def test_check_compile_prints_the_registers_of_every_kernel(call, table_file, monkeypatch, nvcc):
    monkeypatch.setattr(check, "compile_kernels", compiled)
    status, out, _ = call("check", "--table", table_file.path, "--compile")
    assert status == 0
    for row in ("small", "large", "any"):
        assert f"sm90 {row} bf16 sm_90a: 168 registers, 0 bytes spilled\n" in out
    assert out.splitlines()[-1] == f"{table_file.path}: ok"
    status, out, _ = call("check", "--table", table_file.path, "--compile", "--json")
    answer = json.loads(out)
    assert status == 0 and answer["ok"] is True
    assert {kernel["row"] for kernel in answer["tables"][0]["compiled"]} == {"small", "large", "any", "zero_point_terms"}


def test_a_row_that_spills_is_serialized_or_does_not_compile_is_a_problem_of_its_table(call, table_file, monkeypatch, nvcc):
    monkeypatch.setattr(check, "compile_kernels", functools.partial(compiled, spilled=244))
    status, out, err = call("check", "--table", table_file.path, "--compile")
    assert status == 1 and "1 problem" in err
    assert out.splitlines()[-1] == f"{table_file.path}: rows: zero_point_terms spills 244 bytes on sm_90a"

    monkeypatch.setattr(check, "compile_kernels", functools.partial(compiled, serialized=True))
    status, out, err = call("check", "--table", table_file.path, "--compile")
    assert status == 1 and "1 problem" in err and "sm90 zero_point_terms sm_90a: 168 registers, 0 bytes spilled, serialized\n" in out
    assert out.splitlines()[-1] == f"{table_file.path}: rows: zero_point_terms waits after each of its wgmma instructions on sm_90a"

    def refuse(table, names, on_kernel):
        raise KernelNotBuiltError("small: the compiler failed (status 1)")

    monkeypatch.setattr(check, "compile_kernels", refuse)
    status, out, _ = call("check", "--table", table_file.path, "--compile")
    assert status == 1 and "rows: small: the compiler failed (status 1)" in out


def test_check_compile_without_nvcc_says_how_to_get_one(call, table_file, monkeypatch):
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    status, out, err = call("check", "--table", table_file.path, "--compile")
    assert status == 2 and out == "" and "nvcc: needed for building, not found" in err


def test_explain_of_a_c2x_row_names_its_warp_tile(call):
    status, out, _ = call("explain", 17, 28672, 4096, "--arch", "sm86")
    assert status == 0 and "c2x, tile 32x64x128, warp 32x64x64" in out


def test_explain_names_the_row_the_bucket_and_the_tiles(call):
    status, out, _ = call("explain", 64, 4096, 4096)
    selection = load_table("sm90").select(64, 4096, 4096)
    assert status == 0
    assert selection.row.name in out and selection.reason in out
    assert "128: 0.97 waves on 132 multiprocessors" in out  # 4096 / 32 tiles along N, one along M
    assert "note" not in out


def test_explain_of_an_architecture_without_a_typical_gpu_asks_for_its_number_of_sms(call, table_file):
    table_file.replace("arch: sm90", "arch: sm103").replace(
        "family: c3x, tile: [128, 128, 128], schedule: pingpong", "family: generic, tile: [64, 64, 64]"
    )
    text = table_file.path.read_text()
    start, end = text.index("  - name: small"), text.index("  - {name: large")
    table_file.path.write_text(text[:start] + "  - {name: small, family: generic, tile: [32, 64, 64]}\n" + text[end:])
    status, out, err = call("explain", 17, 4096, 4096, "--table", table_file.path)
    assert status == 2 and out == "" and "--sms: expected the number of SMs of the GPU: no typical GPU of sm103 is known" in err
    status, out, _ = call("explain", 17, 4096, 4096, "--table", table_file.path, "--sms", 100)
    assert status == 0 and "waves on 100 multiprocessors" in out


def test_explain_json_has_the_choice_and_its_row(call):
    status, out, _ = call("explain", 256, 6144, 4096, "--json", "--sms", 48)
    answer, selection = json.loads(out), load_table("sm90").select(256, 6144, 4096, gpu=facts("", "sm90", 48))
    assert status == 0
    assert (answer["kernel"], answer["bucket"], answer["reason"]) == (
        selection.row.name,
        selection.bucket_index,
        selection.reason,
    )
    tiles = output_tiles(selection.row, 256, 6144)
    assert tiles > 1 and answer["tiles"] == tiles and answer["waves"] == tiles / 48
    assert answer["row"]["name"] == selection.row.name
    assert answer["contiguous_misfits"] == []


def test_explain_gives_the_three_least_predicted_times_and_their_parts(call):
    table = load_table("sm90")
    status, out, _ = call("explain", 700, 11008, 2048)
    answer = json.loads(call("explain", 700, 11008, 2048, "--json")[1])
    fastest = table.fastest(700, 11008, 2048)
    assert status == 0 and [one["kernel"] for one in answer["predicted"]] == [row.name for _, row in fastest[:3]]
    assert answer["kernel"] == fastest[0][1].name and f"the fastest by prediction, {fastest[0][0]:.4g} us" in answer["reason"]
    for one, (us, row) in zip(answer["predicted"], fastest):
        assert one["us"] == pytest.approx(us)
        assert one["us"] == pytest.approx(one["start"] + math.sqrt(one["compute"] ** 2 + one["memory"] ** 2 + one["l2"] ** 2))
        assert f"{row.name} {us:.4g} us: start {one['start']:.3g}, compute {one['compute']:.3g} in {one['waves']} wave" in out


def test_explain_says_when_unpadded_operands_take_the_fallback(call):
    status, out, _ = call("explain", 64, 4095, 100, "--arch", "sm80")
    assert status == 0
    for operand, stride in (("a", 100), ("b", 100), ("out", 8190)):
        assert f"{operand}: contiguous rows are {stride} bytes apart" in out
    assert "such operands take generic_64x64x64" in out
    assert out.startswith("M=64 N=4095 K=100: generic_64x64x64 if the tensors are contiguous, c2x_")
    assert call("explain", 64, 4095, 100)[1].startswith("M=64 N=4095 K=100: generic_64x64x64 if the tensors are contiguous, decode_")


def test_explain_of_k_zero_takes_the_fallback(call):
    status, out, _ = call("explain", 16, 4096, 0, "--json")
    answer = json.loads(out)
    assert status == 0 and answer["kernel"] == answer["fallback"] and answer["bucket"] == -1


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "--arch", "sm10"),
        ("show", "--arch", "sm90x"),
        ("explain", 1, 1, 1, "--arch", "sm10"),
        ("check", "--arch", "sm10"),
    ],
)
def test_an_architecture_without_a_table_exits_2_with_those_that_exist(call, arguments):
    status, out, err = call(*arguments)
    assert status == 2 and out == "" and "there are: " in err and "sm90" in err
    status, out, err = call(*arguments, "--json")
    error = json.loads(out)["error"]
    assert out.startswith('{\n  "error"')  # indented, as every answer
    assert status == 2 and error["status"] == "ARCHITECTURE_NOT_SUPPORTED" and "sm90" in error["message"]
    assert err == error["message"] + "\n"


def test_explain_of_a_broken_table_exits_2_with_the_line(call, table_file):
    table_file.replace("{kernel: large}", "{kernel: huge}")
    status, out, err = call("explain", 1, 1, 1, "--table", table_file.path)
    assert status == 2 and out == "" and f"{table_file.path}:{table_file.line_of('huge')}: " in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("explain", "-1", "1", "1"), "argument M: expected an integer from 0 to 2147483647, got '-1'"),
        (("explain", "16", "abc", "4"), "argument N: expected an integer from 0 to 2147483647, got 'abc'"),
        (("explain", "1", "1", str(2**31)), "argument K: expected"),
        (("explain", "1", "1"), "K"),
        (("explain", "1", "1", "1", "--sms", "0"), "argument --sms: expected an integer of 1 or more, got '0'"),
        ((), "show | check | explain"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(call, capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        call(*arguments)
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_explain_names_no_kernel_for_a_product_that_is_refused(call):
    status, out, _ = call("explain", 16, 4096, 131072)
    assert status == 1 and "refused" in out and "K <= 131071" in out and "c3x" not in out
    status, out, _ = call("explain", 16, 4096, 200000, "--json")
    answer = json.loads(out)
    assert status == 1 and answer["kernel"] is None and "K <= 131071" in answer["reason"]
    status, out, _ = call("explain", 16, 4096, 131071)
    assert status == 0 and "with a zero point it is refused: K <= 65793" in out
    status, out, _ = call("explain", 16, 4096, 33026)
    assert status == 0 and "with two zero points it is refused: K <= 33025" in out


def test_explain_refuses_an_out_that_the_core_refuses_and_no_smaller_one(call):
    import scaled_mm as sm

    def described(M: int, N: int, K: int) -> dict:
        out = dict(out=sm.TensorDesc((M, N), torch.int32), a=sm.TensorDesc((M, K), torch.int8))
        return out | dict(b=sm.TensorDesc((K, N), torch.int8, strides=(1, K)))

    edge = 2**30 + 1  # times 2^30 is above 2^60
    for sizes, status in (((2**31 - 1, 2**31 - 1, 131071), 1), ((edge, 2**30, 64), 1), ((2**30, 2**30, 64), 0)):
        answer = call("explain", *sizes, "--arch", "sm90", "--json")
        assert answer[0] == status and (json.loads(answer[1])["kernel"] is None) is (status == 1)
        if status:
            assert "M * N <= 2^60" in json.loads(answer[1])["reason"]
            with pytest.raises(sm.BadTensorStridesError, match="reaches past 2\\^60"):
                sm.create_descriptor(sm.Handle("cpu"), **described(*sizes))
        else:
            sm.create_descriptor(sm.Handle("cpu"), **described(*sizes)).destroy()


def test_the_bounds_on_k_are_those_that_the_operator_has():
    import scaled_mm as sm

    zero_point, scale = torch.zeros(1, dtype=torch.int8), torch.ones(1)
    for count, bound in enumerate(K_BOUNDS):
        points = dict(zip(("a_zero_point", "b_zero_point"), [zero_point] * count))
        one = torch.zeros(1, 1, dtype=torch.int8)
        sm.scaled_mm(one.expand(1, bound), one.expand(bound, 1), scale, scale, **points)
        with pytest.raises(sm.AccumulatorOverflowError):
            sm.scaled_mm(one.expand(1, bound + 1), one.expand(bound + 1, 1), scale, scale, **points)


@pytest.mark.parametrize(
    "arch, sizes, fits",
    [
        ("sm80", (1, 4100, 4096), True),
        ("sm80", (2, 4100, 4096), False),
        ("sm90", (1, 20004, 4096), True),  # the fastest of those that write any N
        ("sm90", (1, 20008, 4096), True),
        ("sm90", (1, 4099, 4096), True),
    ],
)
def test_explain_knows_that_one_row_has_no_stride_and_what_a_store_writes(call, arch, sizes, fits):
    status, out, _ = call("explain", *sizes, "--arch", arch, "--json")
    answer = json.loads(out)
    assert status == 0 and (answer["contiguous_misfits"] == []) is fits
    assert sizes[1] * 2 % load_table(arch).row(answer["kernel"]).store_bytes == 0


def test_explain_knows_that_padding_does_not_help_a_row_that_is_no_whole_number_of_stores(call, table_file):
    status, out, _ = call("explain", 1, 20004, 4096, "--table", table_file.path, "--json")
    misfits = json.loads(out)["contiguous_misfits"]
    assert status == 0 and len(misfits) == 1 and "writes whole pieces of 16" in misfits[0]


def test_show_has_lower_bounds_of_buckets(call, table_file):
    table_file.replace("buckets:\n", "buckets:\n  - {m: 64, m_min: 33, n: 1024, n_min: 1024, k_min: 512, kernel: large}\n")
    status, out, _ = call("show", "--table", str(table_file.path))
    assert status == 0 and re.search(r"33-64\s+1024-1024\s+512-open\s+large", out)
