"""Tables and providers through the C interface. The registry is the process's own, so these tables have names of their own."""

from __future__ import annotations

import ctypes
import dataclasses
import math

import c_header
import pytest
import torch

import scaled_mm as sm
from scaled_mm import tables
from scaled_mm.core import binding, dispatcher
from scaled_mm.errors import (
    ArchitectureNotSupportedError,
    BadParamError,
    InternalError,
    KernelNotBuiltError,
    NullPointerError,
    ScaledMMError,
    Status,
    error_for,
)
from scaled_mm.jit import library, toolchain
from scaled_mm.jit.provide import When
from scaled_mm.kernels.generic import Generic
from scaled_mm.tables import load_table

OPEN = 2**63 - 1
KINDS = c_header.enum("scaledMMTableKind_t")
GGUF = KINDS["SCALED_MM_TABLE_GGUF_GEMM"]
NO_TIME = binding._TimeModelC()
UNKNOWN = len(KINDS)  # the first number that is no kind


def c_table(rows=((b"any", 1, 1, 1, 1),), buckets=((OPEN, OPEN, OPEN, 0),), fallback=0, arch=b"sm_registry", source=b"a test", kind=0, modes=()):
    c_rows = (binding._TableRowC * len(rows))(*(binding._TableRowC(*row) for row in rows))
    c_buckets = (binding._TableBucketC * len(buckets))(*(binding._TableBucketC(*bucket, *[0] * (5 - len(bucket))) for bucket in buckets))
    c_modes = (binding._TableModeC * len(modes))(*(binding._TableModeC(*mode) for mode in modes))
    return binding._TableC(arch, source, c_rows, len(rows), c_buckets, len(buckets), fallback, 0, kind, 0, c_modes, len(modes))


def register(**parts) -> None:
    binding.call("scaledMMRegisterTable", ctypes.byref(c_table(**parts)))


def test_a_table_is_registered_and_replaced():
    register()
    register(rows=((b"fast", 16, 16, 16, 16), (b"any", 1, 1, 1, 1)), buckets=((16, OPEN, OPEN, 0), (OPEN, OPEN, OPEN, 1)), fallback=1)


@pytest.mark.parametrize(
    "parts, message",
    [
        (dict(buckets=((OPEN, OPEN, OPEN, 1),)), "a bucket names row 1 of 1"),
        (dict(buckets=((16, OPEN, OPEN, -2), (OPEN, OPEN, OPEN, 0))), "a bucket names row -2 of 1"),
        (
            dict(kind=GGUF, modes=((OPEN, 2),), buckets=((OPEN, OPEN, OPEN, -1),)),
            "a bucket takes the fastest row, but no row besides the fallback has a time model",
        ),
        (dict(buckets=((16, OPEN, OPEN, 0),)), "the last bucket must be open in M, N and K"),
        (dict(buckets=((OPEN, 16, OPEN, 0),)), "the last bucket must be open in M, N and K"),
        (dict(buckets=((OPEN, OPEN, OPEN - 1, 0),)), "the last bucket must be open in M, N and K"),
        (dict(buckets=((OPEN, OPEN, OPEN, 0, 1),)), "the last bucket must be open in M, N and K, to any b"),
        (dict(buckets=((16, OPEN, OPEN, 0, 2), (OPEN, OPEN, OPEN, 0))), "a bucket: expected flags 0 or SCALED_MM_BUCKET_CONSTANT_B, got 2"),
        (dict(buckets=()), "expected rows, buckets and a fallback"),
        (dict(rows=()), "expected rows, buckets and a fallback"),
        (dict(fallback=1), "expected rows, buckets and a fallback"),
        (dict(fallback=-1), "expected rows, buckets and a fallback"),
        (dict(rows=((b"fast", 16, 16, 16, 16),)), "the fallback row fast must take any alignment"),
        (dict(rows=((b"any", 1, 1, 2, 1),)), "the fallback row any must take any alignment"),
        (dict(rows=((b"any", 1, 1, 1, 16),)), "the fallback row any must take any alignment"),
        (dict(rows=((b"any", 1, 1, 1, 1, NO_TIME, 128),)), "the fallback row any must take any alignment and block size"),
        (dict(rows=((b"any", 1, 1, 1, 1, NO_TIME, -1),)), "row 0: expected a block_size of at least 0, got -1"),
        (dict(rows=((b"any", 1, 1, 1, 0),)), "row 0: expected a name, and alignments and store_bytes of at least 1"),
        (dict(rows=((b"any", 1, 0, 1, 1),)), "row 0: expected a name, and alignments and store_bytes of at least 1"),
        (dict(kind=UNKNOWN), f"expected a kind of scaledMMTableKind_t, got {UNKNOWN}"),
        (dict(modes=((OPEN, 1),)), "expected no modes in a table, got 1"),
        (dict(kind=GGUF), "expected modes, the last of them open"),
        (dict(kind=GGUF, modes=((8, 1),)), "expected modes, the last of them open"),
        (dict(kind=GGUF, modes=((8, 0), (OPEN, 1))), "a mode: expected a scaledMMGgufMode_t but AUTO, got 0"),
        (
            dict(kind=GGUF, modes=((OPEN, 2),), buckets=((16, OPEN, OPEN, 0, 1), (OPEN, OPEN, OPEN, 0))),
            "expected flags of at most one of SCALED_MM_BUCKET_W4A8, _W4A16 and _W16A16, and _MINIMA or not, got 1",
        ),
        (
            dict(kind=GGUF, modes=((OPEN, 2),), buckets=((16, OPEN, OPEN, 0, 6), (OPEN, OPEN, OPEN, 0))),
            "expected flags of at most one of SCALED_MM_BUCKET_W4A8, _W4A16 and _W16A16, and _MINIMA or not, got 6",
        ),
        (
            dict(kind=GGUF, modes=((OPEN, 2),), buckets=((OPEN, OPEN, OPEN, 0, 2),)),
            "the last bucket must be open in M, N and K, to any mode or format",
        ),
        (dict(rows=((None, 1, 1, 1, 1),)), "row 0: expected a name, and alignments and store_bytes of at least 1"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_with_the_reason(parts, message):
    with pytest.raises(BadParamError) as caught:
        register(**parts)
    assert str(caught.value).startswith("table a test: ") and message in str(caught.value)


MODEL = dict(zip((name for name, _ in binding._TimeModelC._fields_), (64, 64, 128, 1, 1, 1, 0, 1, 0, 2.0, 0.1, 1.0, 1.0, 0.0, 6e4, 0.0, 0.0)))


TIMES = ("start_us", "step_us", "tile_us", "wait_us", "memory", "l2", "sharing_us", "two_tiles_us")


def with_model(**changes) -> tuple:
    return ((b"any", 1, 1, 1, 1), (b"timed", 16, 16, 16, 16, binding._TimeModelC(**{**MODEL, **changes})))


def test_a_bucket_may_take_the_fastest_row():
    register(rows=with_model(), buckets=((OPEN, OPEN, OPEN, -1),))
    register(buckets=((OPEN, OPEN, OPEN, -1),))  # the fallback, as none has a time model
    register(kind=GGUF, modes=((OPEN, 3),), rows=with_model(most_parts=16), buckets=((OPEN, OPEN, OPEN, -1, 8), (OPEN, OPEN, OPEN, 0)))


@pytest.mark.parametrize("changes", [{}, {"most_parts": 16, "wait_us": 1.0}])
def test_the_choice_between_gguf_rows_depends_on_no_bandwidth_and_no_constant_weight(changes):
    expected = "row 1: expected a time model with most_parts > 0 and wait_us of 0 for a table of GGUF products, or none: rows whose last bits differ"
    with pytest.raises(BadParamError, match=expected):
        register(kind=GGUF, modes=((OPEN, 3),), rows=with_model(**changes), buckets=((OPEN, OPEN, OPEN, 0),))


@pytest.mark.parametrize(
    "field, value",
    [
        *[(field, value) for field in ("unit_m", "unit_n", "unit_k") for value in (-1, 2**40)],
        *[(field, value) for field in ("blocks", "cluster", "resident") for value in (-1, 1025, 2**31 - 1)],
        *[("least_steps", value) for value in (-1, -(2**31))],
        *[("most_parts", value) for value in (-1, 1025)],
        *[("epilogue_overlaps", value) for value in (-1, 2)],
        *[(field, 0) for field in ("unit_n", "unit_k", "blocks", "cluster", "resident", "memory", "l2")],
        *[(field, value) for field in TIMES for value in (-1.0, math.nan, math.inf)],
    ],
)
def test_a_time_model_outside_its_ranges_is_refused(field, value):
    with pytest.raises(BadParamError, match="table a test: row 1: expected a time model with sizes and rates above 0 and finite times, or none"):
        register(rows=with_model(**{field: value}))


@pytest.mark.parametrize("field", ["arch", "source", "rows", "buckets"])
def test_a_table_with_a_null_pointer_is_refused(field):
    table = c_table()
    setattr(table, field, None)
    with pytest.raises(NullPointerError, match="table: expected arch, source, rows and buckets"):
        binding.call("scaledMMRegisterTable", ctypes.byref(table))


def test_every_table_of_the_package_is_taken_by_the_core():
    for arch, _ in tables.available_tables():
        binding.register_table(load_table(arch).model_copy(update={"arch": f"{arch}_copy"}))


def test_what_is_no_kernel_library_is_refused(tmp_path):
    with pytest.raises(BadParamError, match="path: expected a kernel library, .*nothing.so"):
        binding.call("scaledMMLoadKernels", str(tmp_path / "nothing.so").encode())
    (tmp_path / "text.so").write_text("not a library")
    with pytest.raises(BadParamError, match="path: expected a kernel library, .*text.so"):
        binding.call("scaledMMLoadKernels", str(tmp_path / "text.so").encode())
    version = c_header.macro("SCALED_MM_KERNEL_ABI_VERSION")
    with pytest.raises(BadParamError, match=f"expected a kernel library of ABI version {version}, got 0"):
        binding.call("scaledMMLoadKernels", str(library.core_library()).encode())


# ---- the provider that builds kernels -----------------------------------------------------------------------------------


def provided(arch: str, row: str | None, out_dtype: int = -1) -> ScaledMMError:
    """What the core sees when it asks the package's own provider, as the error it would become."""
    status = binding._provider(arch.encode(), row.encode() if row else None, out_dtype, When.NOW, None)
    assert status != Status.SUCCESS
    return error_for(status, binding.library().scaledMMGetLastErrorMessage().decode())


def test_an_architecture_without_a_table_comes_back_as_a_typed_error():
    error = provided("sm10", None)
    assert type(error) is ArchitectureNotSupportedError and "sm10" in str(error) and "sm90" in str(error)


def test_a_kernel_that_cannot_be_built_comes_back_as_a_typed_error_with_its_message(monkeypatch):
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    error = provided("sm90", load_table("sm90").fallback, 3)
    assert type(error) is KernelNotBuiltError and "nvcc: needed for building, not found" in str(error)


def test_a_bad_value_of_the_variable_that_says_whether_to_compile_comes_back_as_a_typed_error(monkeypatch):
    monkeypatch.setenv("SCALED_MM_JIT", "soon")
    error = provided("sm90", load_table("sm90").fallback, 3)
    assert type(error) is BadParamError and str(error) == "SCALED_MM_JIT: expected background, wait or off, got soon"


def test_any_other_exception_becomes_an_internal_error_that_names_it(monkeypatch):
    def broken(arch):
        raise ZeroDivisionError("in the loader")

    monkeypatch.setattr(tables, "load_table", broken)
    error = provided("sm90", None)
    assert type(error) is InternalError and "ZeroDivisionError: in the loader" in str(error)


def test_the_table_of_sm90_is_provided():
    status = binding._provider(b"sm90", None, -1, When.NOW, None)
    assert status == Status.SUCCESS, binding.library().scaledMMGetLastErrorMessage().decode()


def test_a_table_whose_kernel_has_no_source_comes_back_as_an_internal_error_that_names_the_header(monkeypatch):
    code = Generic.code
    monkeypatch.setattr(Generic, "code", lambda *arguments: dataclasses.replace(code(*arguments), header="int8/nowhere/gemm.cuh"))
    error = provided("sm90", None)
    assert type(error) is InternalError and "int8/nowhere/gemm.cuh: expected this header in " in str(error)


@pytest.mark.gpu
def test_a_gpu_cannot_be_forced_to_the_kernels_of_a_newer_one():
    if torch.cuda.get_device_capability() >= (12, 0):
        pytest.skip("no table is for newer GPUs than this one")
    with pytest.raises(ArchitectureNotSupportedError, match="arch: .*got sm120, which needs 12.0 or newer"):
        sm.Handle("cuda:0", arch="sm120")


def test_an_interrupt_while_a_kernel_is_built_is_raised_where_it_happened_also_through_an_operator(monkeypatch):
    def interrupted(arch):
        raise KeyboardInterrupt

    monkeypatch.setattr(tables, "load_table", interrupted)
    status = binding._provider(b"sm90", None, -1, When.NOW, None)
    crossed = RuntimeError(f"[scaled_mm status {status}] KeyboardInterrupt: ")  # what an operator makes of it
    assert type(dispatcher.typed_error(crossed)) is KeyboardInterrupt
    later = RuntimeError(f"[scaled_mm status {int(Status.BAD_PARAM)}] a: expected something else")
    assert type(dispatcher.typed_error(later)) is BadParamError
