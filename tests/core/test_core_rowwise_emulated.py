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
RAN, NO_SUCH_KERNEL = 0, 1  # of rowwise_emulated.cpp; another status: the kernel is not for these rows


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
        *((name, ctypes.c_void_p) for name in ("out_scale", "out_zero_point", "out_row_sums", "rows_end")),
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
    """emulate(x, function, output, *operands): for every kernel that serves such rows, {name of an output: its tensor}."""
    cxx, include = toolchain.find_cxx(), cuda_include()
    if cxx is None or include is None:
        pytest.skip("needs a C++ compiler and the headers of a CUDA toolkit")
    target = tmp_path_factory.mktemp("emulated") / "rowwise.so"
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-Wall", "-Wno-unknown-pragmas"]
    includes = [f"-I{HERE / 'emulated'}", f"-I{HERE}", f"-I{csrc_dir()}", f"-I{include_dir()}", f"-isystem{include}"]
    subprocess.run([str(cxx), *flags, *includes, str(HERE / "rowwise_emulated.cpp"), "-o", str(target)], check=True, timeout=600)
    library = ctypes.CDLL(str(target))

    def run(
        kernel,
        x,
        function,
        output,
        vector_=None,
        offset=None,
        residual=None,
        in_place=False,
        scale=None,
        zero_point=None,
        epsilon=0.0,
        padding=0,
        rows_end=None,
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
            residual = residual.clone() if in_place else residual
            written["total"] = residual if in_place else torch.full((m, k), 77, dtype=x.dtype)
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
            rows_end=None if rows_end is None else rows_end.data_ptr(),
        )
        status = library.emulate(ctypes.byref(rows), code(x.dtype), *kernel)
        assert (poisoned[:, k:] == 77).all(), "wrote past the end of a row"
        return status, written

    def emulate(*operands, **rest):
        found = []
        for vectors, fewer in itertools.product((False, True), repeat=2):  # whether chunks are whole and aligned; fewer thread blocks than spans
            for at in itertools.count():
                status, written = run((at, vectors, fewer), *operands, **rest)
                if status == NO_SUCH_KERNEL:
                    break
                found += [written] if status == RAN else []
        assert found
        return found

    return emulate


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    expected = expected.reshape(got.shape)
    return torch.equal(got, expected) if not got.is_floating_point() else reference.same_bits(got, expected)


# Tails, one chunk, a row of every length, several steps of every lane.
KS = (1, 7, 8, 24, 130, 1024, 1500, 2056, 2560, 4104, 9000)
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
    for vector_ in (None, smooth):
        q, scale = sm.quantize_int8(x, smooth_scale=vector_)
        for got in emulate(x, QUANTIZE, TOKEN, vector_):
            assert same(got["out"], q) and same(got["scale"], scale)
    expected = sm.quantize_int8(x, symmetric=False)
    for got in emulate(x, QUANTIZE, ASYMMETRIC, padding=3) + emulate(x, QUANTIZE, ASYMMETRIC, padding=8):
        assert same(got["out"], expected.q) and same(got["scale"], expected.scale)
        assert same(got["zero_point"], expected.zero_point) and same(got["row_sums"], expected.row_sums)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("k", [300, 304, 5000])
def test_rows_with_nan_and_infinity(emulate, dtype, k):
    x = rows_of(dtype, k)[:4]
    x[0, 5], x[1, 17], x[2, 299], x[3, 0], x[3, 1] = float("nan"), float("inf"), -float("inf"), float("inf"), float("nan")
    q, scale = sm.quantize_int8(x)
    for got in emulate(x, QUANTIZE, TOKEN):
        assert same(got["out"], q) and same(got["scale"], scale)
    expected = sm.quantize_int8(x, symmetric=False)
    for got in emulate(x, QUANTIZE, ASYMMETRIC):
        assert same(got["out"], expected.q) and same(got["scale"], expected.scale) and same(got["zero_point"], expected.zero_point)
    weight, residual = torch.randn(k), rows_of(dtype, k)[1:]
    expected, total = sm.add_rms_norm(x, residual, weight, quantize="token")
    for got in emulate(x, ADD_RMS_NORM, TOKEN, weight, residual=residual, in_place=True, epsilon=1e-6):
        assert same(got["out"], expected.q) and same(got["scale"], expected.scale) and same(got["total"], total)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("zero_point", [None, 0, 5, -128, 127, 500, -(2**31), 2**31 - 1])
def test_static_quantization(emulate, dtype, zero_point):
    x = rows_of(dtype, 300)
    x[0, 5], x[1, 17], x[1, 18] = float("nan"), float("inf"), -float("inf")
    point = None if zero_point is None else torch.tensor([zero_point], dtype=torch.int32)
    for value in (0.02, 1.0, 1e-45, 3e38, 0.0, -0.5, float("inf"), float("nan")):
        scale = torch.tensor([value])
        expected = sm.quantize_int8(x, scale=scale, zero_point=point)
        for got in emulate(x, QUANTIZE, STATIC, scale=scale, zero_point=point):
            assert same(got["out"], expected[0]), value
            if point is not None:
                assert same(got["row_sums"], expected.row_sums)
    scales, points = torch.rand(5) + 0.01, torch.randint(-128, 128, (5,), dtype=torch.int8)
    expected = sm.quantize_int8(x, scale=scales[:, None], zero_point=points[:, None]).q
    assert all(same(got["out"], expected) for got in emulate(x, QUANTIZE, STATIC, scale=scales, zero_point=points))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_quantize_multiplies_and_rounds(emulate, dtype):
    x = rows_of(dtype, 300)
    x[0, 5], x[1, 17] = float("nan"), float("inf")
    scale, offset = torch.randn(300), torch.randn(300) * 10
    for of in FLOATS:
        for shift in (None, offset.to(of)):
            expected = sm.quantize(x, scale.to(of), shift)
            assert all(same(got["out"], expected) for got in emulate(x, QUANTIZE, ROUND, scale.to(of), shift))


@pytest.mark.parametrize("dtype, k", CASES, ids=str)
def test_norms(emulate, dtype, k):
    x, residual, weight = rows_of(dtype, k), rows_of(dtype, k).flip(0), torch.randn(k, generator=torch.Generator().manual_seed(2))
    static = torch.tensor([0.03])
    for w in (weight.to(of) for of in (dtype, torch.float32)):
        y, token, given = sm.rms_norm(x, w), sm.rms_norm(x, w, quantize="token"), sm.rms_norm(x, w, quantize=static)
        assert all(same(got["out"], y) for got in emulate(x, RMS_NORM, CAST, w, epsilon=1e-6))
        for got in emulate(x, RMS_NORM, TOKEN, w, epsilon=1e-6):
            assert same(got["out"], token.q) and same(got["scale"], token.scale)
        assert all(same(got["out"], given.q) for got in emulate(x, RMS_NORM, STATIC, w, scale=static, epsilon=1e-6))
        y, total = sm.add_rms_norm(x, residual, w, 1e-5)
        for got in emulate(x, ADD_RMS_NORM, CAST, w, residual=residual, epsilon=1e-5):
            assert same(got["out"], y) and same(got["total"], total)
        token, total = sm.add_rms_norm(x, residual, w, 1e-5, quantize="token")
        for got in emulate(x, ADD_RMS_NORM, TOKEN, w, residual=residual, in_place=True, epsilon=1e-5):
            assert same(got["out"], token.q) and same(got["scale"], token.scale) and same(got["total"], total)


@pytest.mark.parametrize("dtype, k", [(dtype, k) for dtype in FLOATS for k in KS if k < 9000], ids=str)
def test_activations(emulate, dtype, k):
    x = torch.cat((rows_of(dtype, k), rows_of(dtype, k).flip(1)), 1)
    operators = {
        SILU: sm.silu_and_mul,
        GELU: sm.gelu_and_mul,
        GELU_TANH: lambda x, **rest: sm.gelu_and_mul(x, approximate="tanh", **rest),
    }
    for function, operator in operators.items():
        y, expected = operator(x), operator(x, quantize="token")
        assert all(same(got["out"], y) for got in emulate(x, function, CAST))
        for got in emulate(x, function, TOKEN):
            assert same(got["out"], expected.q) and same(got["scale"], expected.scale)


@pytest.mark.parametrize("dtype, k", [(dtype, k) for dtype in FLOATS for k in (8, 130, 2056, 4104)], ids=str)
def test_rows_from_the_end_of_the_experts_on_are_not_computed(emulate, dtype, k):
    x = torch.cat((rows_of(dtype, k), rows_of(dtype, k).flip(1)), 1)
    y, expected = sm.silu_and_mul(x), sm.silu_and_mul(x, quantize="token")
    for end in (0, 3, 9):
        rows_end = torch.tensor(end, dtype=torch.int32)
        for got in emulate(x, SILU, CAST, rows_end=rows_end):
            assert same(got["out"][:end], y[:end]) and (got["out"][end:] == 77).all()
        for got in emulate(x, SILU, TOKEN, rows_end=rows_end):
            assert same(got["out"][:end], expected.q[:end]) and same(got["scale"][:end], expected.scale[:end])
            assert (got["out"][end:] == 77).all() and (got["scale"][end:] == -7).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_any_strides(emulate, dtype):
    x, smooth = rows_of(dtype, 600)[:, ::2], rows_of(torch.float32, 900)[0, ::3]
    q, scale = sm.quantize_int8(x, smooth_scale=smooth)
    for got in emulate(x, QUANTIZE, TOKEN, smooth, padding=5):
        assert same(got["out"], q) and same(got["scale"], scale)
    columns = rows_of(dtype, 5).t()  # strides [1, 5]
    assert all(same(got["out"], sm.quantize_int8(columns)[0]) for got in emulate(columns, QUANTIZE, TOKEN))


def test_short_and_long_division_agree_next_to_every_tie(emulate):
    """x / scale within a few units of k + 1/2 for every k: what the multiplication by the inverse alone would round wrongly."""
    for scale in (0.0123, 1.0 / 3.0, 7.77, 1.9999999):
        ties = (torch.arange(-127, 127, dtype=torch.float64) + 0.5) * float(torch.tensor(scale))
        near = ties.to(torch.float32)
        x = torch.cat([near]).repeat(9, 1)
        for step in range(9):
            for _ in range(abs(step - 4)):
                x[step] = torch.nextafter(x[step], torch.full_like(x[step], float("inf") if step > 4 else -float("inf")))
        expected = sm.quantize_int8(x, scale=torch.tensor([scale]))[0]
        assert all(same(got["out"], expected) for got in emulate(x, QUANTIZE, STATIC, scale=torch.tensor([scale])))


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
        expected = sm.quantize_int8(rows)
        for got in emulate(rows, QUANTIZE, TOKEN):
            assert same(got["out"], expected[0]) and same(got["scale"], expected[1])
