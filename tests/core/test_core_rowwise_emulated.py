"""The device code of the row-wise kernels, run by coroutines (emulated/gpu.h), against the operators of `scaled_mm.rowwise`: no GPU needed."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from pathlib import Path

import pytest
import torch
from core.test_core_block_scaled_emulated import cuda_include

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.jit import toolchain
from scaled_mm.jit.paths import csrc_dir, include_dir
from scaled_mm.kernels.dtypes import C_DTYPES

HERE = Path(__file__).resolve().parent
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
CAST, TOKEN, ASYMMETRIC, STATIC, ROUND = range(5)  # scaledMMRowwiseOutput_t
QUANTIZE, RMS_NORM, ADD_RMS_NORM, SILU, GELU, GELU_TANH = range(6)  # scaledMMRowwise_t
# (threads of a row, chunks in registers, whether every chunk is whole and aligned; 0 chunks: computed again), and the longest row
LENGTHS = {(32, 4, True): 1024, (128, 4, True): 4096, (256, 4, True): 8192, (256, 8, True): 16384, (256, 0, True): 1 << 30}
LENGTHS |= {(32, 4, False): 1024, (256, 4, False): 8192, (256, 0, False): 1 << 30}


class Matrix(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("stride_row", ctypes.c_int64),
        ("stride_k", ctypes.c_int64),
        ("vectors", ctypes.c_bool),
        ("end", ctypes.c_void_p),
    ]


class Vector(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("stride", ctypes.c_int64), ("dtype", ctypes.c_int32), ("vectors", ctypes.c_bool)]


class Rows(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_int64),
        ("K", ctypes.c_int32),
        ("spans", ctypes.c_int32),
        *((name, Matrix) for name in ("x", "residual", "total", "out")),
        *((name, Vector) for name in ("vector", "offset")),
        ("epsilon", ctypes.c_double),
        ("function", ctypes.c_int32),
        ("output", ctypes.c_int32),
        ("scale", ctypes.c_void_p),
        ("scale_stride", ctypes.c_int64),
        ("zero_point", ctypes.c_void_p),
        ("zero_point_stride", ctypes.c_int64),
        ("zero_point_dtype", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("out_scale", "out_zero_point", "out_row_sums")),
    ]


def code(dtype: torch.dtype) -> int:
    return C_DTYPES[str(dtype).removeprefix("torch.")]


def matrix(t: torch.Tensor | None, columns: slice | None = None) -> Matrix:
    if t is None:
        return Matrix()
    part = t if columns is None else t[:, columns]
    chunk = min(16, 8 * t.element_size())
    vectors = part.data_ptr() % chunk == 0 and part.stride(1) == 1 and part.stride(0) * t.element_size() % chunk == 0
    last = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride())) * t.element_size()
    return Matrix(part.data_ptr(), *part.stride(), vectors, part.data_ptr() + last + t.element_size() if part.numel() else None)


def vector(t: torch.Tensor | None) -> Vector:
    return Vector() if t is None else Vector(t.data_ptr(), t.stride(0), code(t.dtype), t.data_ptr() % 16 == 0 and t.stride(0) == 1)


@pytest.fixture(scope="module")
def emulate(tmp_path_factory):
    """emulate(x, function, output, length, **operands): {name of an output: its tensor}."""
    cxx, include = toolchain.find_cxx(), cuda_include()
    if cxx is None or include is None:
        pytest.skip("needs a C++ compiler and the headers of a CUDA toolkit")
    target = tmp_path_factory.mktemp("emulated") / "rowwise.so"
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-Wall", "-Wno-unknown-pragmas"]
    includes = [f"-I{HERE / 'emulated'}", f"-I{HERE}", f"-I{csrc_dir()}", f"-I{include_dir()}", f"-isystem{include}"]
    subprocess.run([str(cxx), *flags, *includes, str(HERE / "rowwise_emulated.cpp"), "-o", str(target)], check=True, timeout=600)
    library = ctypes.CDLL(str(target))

    def emulate(
        x, function, output, length, vector_=None, offset=None, residual=None, total=None, scale=None, zero_point=None, epsilon=0.0, padding=0
    ):
        gated = function >= SILU
        m, k = x.shape[0], x.shape[1] // (2 if gated else 1)
        poisoned = torch.full((m, k + padding), 77, dtype=x.dtype if output == CAST else torch.int8)
        written = {"out": poisoned[:, :k]}
        if output in (TOKEN, ASYMMETRIC):
            written["scale"] = torch.full((m,), -7.0)
        if output == ASYMMETRIC or (output == STATIC and zero_point is not None):
            written["row_sums"] = torch.full((m,), -7, dtype=torch.int32)
        if output == ASYMMETRIC:
            written["zero_point"] = torch.full((m,), -777, dtype=torch.int32)
        if function == ADD_RMS_NORM:
            written["total"] = torch.full((m, k), 77, dtype=x.dtype) if total is None else total
        pointer = {name: t.data_ptr() for name, t in written.items()}
        rows = Rows(
            rows=m,
            K=k,
            x=matrix(x, slice(0, k)),
            residual=matrix(x, slice(k, None)) if gated and k else matrix(residual),
            total=matrix(written.get("total")),
            out=matrix(written["out"]),
            vector=vector(vector_),
            offset=vector(offset),
            epsilon=epsilon,
            function=function,
            output=output,
            scale=None if scale is None else scale.data_ptr(),
            scale_stride=0 if scale is None or scale.numel() == 1 else 1,
            zero_point=None if zero_point is None else zero_point.data_ptr(),
            zero_point_stride=0 if zero_point is None or zero_point.numel() == 1 else 1,
            zero_point_dtype=0 if zero_point is None else code(zero_point.dtype),
            out_scale=pointer.get("scale"),
            out_zero_point=pointer.get("zero_point"),
            out_row_sums=pointer.get("row_sums"),
        )
        assert library.emulate(ctypes.byref(rows), code(x.dtype), *length) == 0
        assert (poisoned[:, k:] == 77).all(), "wrote past the end of a row"
        return written

    return emulate


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    expected = expected.reshape(got.shape)
    return torch.equal(got, expected) if not got.is_floating_point() else reference.same_bits(got, expected)


def lengths(k: int) -> list[tuple[int, int, bool]]:
    return [length for length, longest in LENGTHS.items() if k <= longest and not (length[2] and k % 8)]


# Tails, one chunk, a row of every length, several steps of every lane.
KS = (1, 7, 8, 24, 130, 1024, 1500, 2056, 4104, 9000)
CASES = list(itertools.product(FLOATS, KS))


def rows_of(dtype: torch.dtype, k: int) -> torch.Tensor:
    """Rows of several magnitudes; one of zeros, one with exact ties after division, and one with an outlier."""
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(5, k, generator=generator) * torch.tensor([[1.0], [1e-3], [40.0], [0.0], [1.0]])
    x[2] = (x[2] / 0.5).round() * 0.5
    x[2, 0] = 127.0
    x[4, k // 2] = 3000.0
    return x.to(dtype)


@pytest.mark.parametrize("dtype, k", CASES, ids=str)
def test_dynamic_quantization(emulate, dtype, k):
    x = rows_of(dtype, k)
    smooth = (torch.rand(k, generator=torch.Generator().manual_seed(1)) + 0.5).to(dtype)
    for length in lengths(k):
        for vector_ in (None, smooth):
            got = emulate(x, QUANTIZE, TOKEN, length, vector_)
            q, scale = sm.quantize_int8(x, smooth_scale=vector_)
            assert same(got["out"], q) and same(got["scale"], scale)
        got = emulate(x, QUANTIZE, ASYMMETRIC, length, padding=8 if length[2] else 3)
        expected = sm.quantize_int8(x, symmetric=False)
        assert same(got["out"], expected.q) and same(got["scale"], expected.scale)
        assert same(got["zero_point"], expected.zero_point) and same(got["row_sums"], expected.row_sums)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_with_nan_and_infinity(emulate, dtype):
    x = rows_of(dtype, 300)[:4]
    x[0, 5], x[1, 17], x[2, 299], x[3, 0], x[3, 1] = float("nan"), float("inf"), -float("inf"), float("inf"), float("nan")
    for length in lengths(300):
        got = emulate(x, QUANTIZE, TOKEN, length)
        q, scale = sm.quantize_int8(x)
        assert same(got["out"], q) and same(got["scale"], scale)
        got = emulate(x, QUANTIZE, ASYMMETRIC, length)
        expected = sm.quantize_int8(x, symmetric=False)
        assert same(got["out"], expected.q) and same(got["scale"], expected.scale) and same(got["zero_point"], expected.zero_point)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("zero_point", [None, 0, 5, -128, 127, 500, -(2**31), 2**31 - 1])
def test_static_quantization(emulate, dtype, zero_point):
    x = rows_of(dtype, 300)
    x[0, 5], x[1, 17], x[1, 18] = float("nan"), float("inf"), -float("inf")
    point = None if zero_point is None else torch.tensor([zero_point], dtype=torch.int32)
    for value, length in itertools.product((0.02, 1.0, 1e-45, 3e38, 0.0, -0.5, float("inf"), float("nan")), lengths(300)):
        scale = torch.tensor([value])
        got = emulate(x, QUANTIZE, STATIC, length, scale=scale, zero_point=point)
        expected = sm.quantize_int8(x, scale=scale, zero_point=point)
        assert same(got["out"], expected[0]), value
        if point is not None:
            assert same(got["row_sums"], expected.row_sums)
    scales, points = torch.rand(5) + 0.01, torch.randint(-128, 128, (5,), dtype=torch.int8)
    got = emulate(x, QUANTIZE, STATIC, (256, 4, False), scale=scales, zero_point=points)
    assert same(got["out"], sm.quantize_int8(x, scale=scales[:, None], zero_point=points[:, None]).q)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_quantize_multiplies_and_rounds(emulate, dtype):
    x = rows_of(dtype, 300)
    x[0, 5], x[1, 17] = float("nan"), float("inf")
    scale, offset = torch.randn(300), torch.randn(300) * 10
    for of in FLOATS:
        for shift in (None, offset.to(of)):
            got = emulate(x, QUANTIZE, ROUND, (256, 4, False), scale.to(of), shift)
            assert same(got["out"], sm.quantize(x, scale.to(of), shift))


@pytest.mark.parametrize("dtype, k", CASES, ids=str)
def test_norms(emulate, dtype, k):
    x, residual, weight = rows_of(dtype, k), rows_of(dtype, k).flip(0), torch.randn(k, generator=torch.Generator().manual_seed(2))
    static = torch.tensor([0.03])
    for of, length in zip(itertools.cycle(FLOATS), lengths(k)):
        w = weight.to(of)
        assert same(emulate(x, RMS_NORM, CAST, length, w, epsilon=1e-6)["out"], sm.rms_norm(x, w))
        got, expected = emulate(x, RMS_NORM, TOKEN, length, w, epsilon=1e-6), sm.rms_norm(x, w, quantize="token")
        assert same(got["out"], expected.q) and same(got["scale"], expected.scale)
        assert same(emulate(x, RMS_NORM, STATIC, length, w, scale=static, epsilon=1e-6)["out"], sm.rms_norm(x, w, quantize=static).q)
        y, total = sm.add_rms_norm(x, residual, w, 1e-5)
        got = emulate(x, ADD_RMS_NORM, CAST, length, w, residual=residual, epsilon=1e-5)
        assert same(got["out"], y) and same(got["total"], total)
        into = residual.clone()  # total in place of residual
        got = emulate(x, ADD_RMS_NORM, TOKEN, length, w, residual=into, total=into, epsilon=1e-5)
        expected, total = sm.add_rms_norm(x, residual, w, 1e-5, quantize="token")
        assert same(got["out"], expected.q) and same(got["scale"], expected.scale) and same(into, total)


@pytest.mark.parametrize("dtype, k", [(dtype, k) for dtype in FLOATS for k in KS if k < 4096], ids=str)
def test_activations(emulate, dtype, k):
    x = torch.cat((rows_of(dtype, k), rows_of(dtype, k).flip(1)), 1)
    operators = {
        SILU: sm.silu_and_mul,
        GELU: sm.gelu_and_mul,
        GELU_TANH: lambda x, **rest: sm.gelu_and_mul(x, approximate="tanh", **rest),
    }
    for (function, operator), length in itertools.product(operators.items(), lengths(k)):
        assert same(emulate(x, function, CAST, length)["out"], operator(x))
        got, expected = emulate(x, function, TOKEN, length), operator(x, quantize="token")
        assert same(got["out"], expected.q) and same(got["scale"], expected.scale)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_any_strides(emulate, dtype):
    x = rows_of(dtype, 600)[:, ::2]
    got = emulate(x, QUANTIZE, TOKEN, (256, 4, False), rows_of(torch.float32, 900)[0, ::3], padding=5)
    q, scale = sm.quantize_int8(x, smooth_scale=rows_of(torch.float32, 900)[0, ::3])
    assert same(got["out"], q) and same(got["scale"], scale)
    columns = rows_of(dtype, 5).t()  # strides [1, 5]
    got = emulate(columns, QUANTIZE, TOKEN, (32, 4, False))
    assert same(got["out"], sm.quantize_int8(columns)[0])


def test_short_and_long_division_agree_next_to_every_tie(emulate):
    """x / scale within a few units of k + 1/2 for every k: what the multiplication by the inverse alone would round wrongly."""
    for scale in (0.0123, 1.0 / 3.0, 7.77, 1.9999999):
        ties = (torch.arange(-127, 127, dtype=torch.float64) + 0.5) * float(torch.tensor(scale))
        near = ties.to(torch.float32)
        x = torch.cat([near]).repeat(9, 1)
        for step in range(9):
            for _ in range(abs(step - 4)):
                x[step] = torch.nextafter(x[step], torch.full_like(x[step], float("inf") if step > 4 else -float("inf")))
        got = emulate(x, QUANTIZE, STATIC, (32, 4, False), scale=torch.tensor([scale]))
        assert same(got["out"], sm.quantize_int8(x, scale=torch.tensor([scale]))[0])


def test_corrected_quotients_are_those_of_the_division_next_to_every_tie(emulate):
    """x / scale within a few units of k + 1/2 for every k and many scales, of rows whose largest magnitude gives the scale."""
    generator = torch.Generator().manual_seed(5)
    exponents = torch.randint(-88, 100, (40, 1), generator=generator)  # below 2^-90 the kernels divide
    largest = ((torch.rand(40, 1, dtype=torch.float64, generator=generator) + 1) * 2.0**exponents).float()
    scale = largest / 127
    steps = torch.randint(-3, 4, (40, 254), generator=generator)
    near = ((torch.arange(-127, 127, dtype=torch.float64) + 0.5) * scale.double()).float()
    near = (near.view(torch.int32) + steps.to(torch.int32)).view(torch.float32)  # units of the last place away
    x = torch.cat((largest, near), 1)
    for rows in (x, x * 2.0**-30):
        got, expected = emulate(rows, QUANTIZE, TOKEN, (32, 4, False)), sm.quantize_int8(rows)
        assert same(got["out"], expected[0]) and same(got["scale"], expected[1])
