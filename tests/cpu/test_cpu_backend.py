"""Paths of the CPU backend: each form of the oneDNN call, chunks of the output, float32 products in slices of K."""

import os
import platform
import subprocess
import sys
import time

import pytest
import torch
from operands.cases import INPUT_LAYOUTS, LAYOUTS, OUT_DTYPES, Case, every_shape, matrix, poisoned, random_case
from operands.pairs import pairs

import scaled_mm as sm
from scaled_mm.cpu import gemm as cpu_gemm
from scaled_mm.cpu import integer_product

ON_X86 = platform.machine() in ("x86_64", "AMD64")


def run(case: Case) -> None:
    operands = case.make()
    out = operands.poisoned_out()
    cpu_gemm.gemm(out, **operands.inputs)
    operands.check(out)


@pytest.fixture
def tiny_blocks(monkeypatch):
    """Every threshold so low that small operands take the paths of large ones."""
    monkeypatch.setattr(integer_product, "_LARGE_WEIGHT", 0)
    monkeypatch.setattr(integer_product, "_ALIASING_STRIDE", 1)
    monkeypatch.setattr(cpu_gemm, "_EPILOGUE_ELEMENTS_PER_THREAD", 256)
    monkeypatch.setattr(cpu_gemm, "_CHUNK_MIN_ROWS", 7)
    monkeypatch.setattr(cpu_gemm, "_CHUNK_ELEMENTS", 64)


def test_every_shape_and_dtype_equals_the_reference():
    for case in every_shape():
        run(case)


def test_every_shape_equals_the_reference_in_tiny_blocks(tiny_blocks):
    for case in every_shape(a_zero_point="vector_int32", b_zero_point="vector_int8"):
        run(case)


def test_random_mixes_equal_the_reference_in_tiny_blocks(tiny_blocks):
    generator = torch.Generator().manual_seed(11)
    for _ in range(300):
        run(random_case(generator))


@pytest.mark.parametrize("shape", [(1, 40, 33), (2, 40, 33), (20, 30, 64), (20, 1, 33), (1, 1, 33), (9, 40, 1), (1, 40, 1)], ids=str)
def test_every_memory_layout_is_honoured(shape):
    for layouts in pairs(a_layout=INPUT_LAYOUTS, b_layout=INPUT_LAYOUTS, out_layout=LAYOUTS):
        run(Case(*shape, **layouts, bias="out"))


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 8, 9, 16, 17, 64, 65])
def test_weights_whose_rows_alias_in_the_cache_take_every_form_of_call(m):
    for out_dtype in (torch.bfloat16, torch.int32):
        run(Case(m, 1030, 4096, out_dtype=out_dtype, values="extremes", a_zero_point="vector_int8"))


def test_outputs_of_more_than_one_chunk_equal_the_reference():
    run(Case(cpu_gemm._CHUNK_MIN_ROWS * 2 + 3, 8200, 16, out_dtype=torch.float16, b_zero_point="vector_int8", bias="out"))


def test_nothing_outside_a_padded_output_is_written():
    operands = Case(20, 30, 40, bias="out").make()
    whole = poisoned(24, 40, torch.bfloat16)
    cpu_gemm.gemm(whole[2:22, 5:35], **operands.inputs)
    operands.check(whole[2:22, 5:35])
    frame = torch.ones(24, 40, dtype=torch.bool)
    frame[2:22, 5:35] = False
    assert whole[frame].isnan().all()


def test_inputs_are_left_alone():
    operands = Case(70, 30, 40, bias="float32", a_zero_point="vector_int32", b_zero_point="vector_int32").make()
    kept = {name: t.clone() for name, t in operands.inputs.items()}
    cpu_gemm.gemm(operands.poisoned_out(), **operands.inputs)
    for name, t in operands.inputs.items():
        assert torch.equal(t, kept[name]), name


def test_scales_that_want_gradients_do_not_pull_the_output_into_autograd():
    operands = Case(4, 5, 6).make()
    operands.a_scale.requires_grad_()
    out = operands.poisoned_out()
    cpu_gemm.gemm(out, **operands.inputs)
    assert not out.requires_grad
    operands.check(out)


def test_operands_that_blas_cannot_express_are_copied_and_the_others_are_not():
    generator = torch.Generator().manual_seed(0)
    copied = {"every_second", "broadcast_row", "broadcast_column"}
    for layout in INPUT_LAYOUTS:
        t = matrix(12, 20, layout, "full", generator)
        operand = integer_product.blas_operand(t)
        assert torch.equal(operand, t)
        assert (operand.data_ptr() != t.data_ptr()) == (layout in copied), layout
    for shape, strides in [
        ((1, 9), (1, 1)),
        ((1, 9), (0, 1)),
        ((1, 9), (5, 3)),
        ((9, 1), (1, 1)),
        ((9, 1), (4, 0)),
        ((9, 1), (0, 1)),
        ((1, 1), (2**31, 2**40)),
        ((1, 9), (2**31, 1)),
        ((1, 9), (2**33, 2)),
        ((9, 1), (3, 2**32)),
        ((9, 9), (1, 1)),
    ]:
        t = torch.arange(50, dtype=torch.int8).as_strided(shape, strides)
        operand = integer_product.blas_operand(t)
        assert torch.equal(operand, t)
        # What oneDNN's BLAS asks of leading dimensions.
        rows, columns = operand.shape
        row_stride, column_stride = operand.stride()
        least, leading = (columns, row_stride) if column_stride == 1 else (rows, column_stride)
        assert 1 in (row_stride, column_stride) and least <= leading < 2**31


# ---- float32 products in parts of K: CPUs without 8-bit dot products -------------------------------------------------


@pytest.fixture
def new_choice(monkeypatch):
    """Whoever asks for the implementation decides again, in the test and after it."""
    monkeypatch.delenv(integer_product.VARIABLE, raising=False)
    integer_product._choose.cache_clear()
    yield monkeypatch
    integer_product._choose.cache_clear()


@pytest.fixture
def float32(new_choice):
    new_choice.setenv(integer_product.VARIABLE, "float32")
    new_choice.setattr(torch, "_int_mm", None)  # whoever calls it fails
    assert cpu_gemm.kernel_name() == "cpu_float32"


def test_float32_products_equal_the_reference(float32, monkeypatch):
    for case in every_shape(values="extremes", a_zero_point="vector_int32", b_zero_point="one_0d_int32"):
        run(case)
    for name, size in (("_TILE_ELEMENTS", 3000), ("_TILE_MIN_COLUMNS", 3), ("_ROWS_ELEMENTS", 999), ("PART", 32)):
        monkeypatch.setattr(integer_product, name, size)
    generator = torch.Generator().manual_seed(12)
    for _ in range(200):
        run(random_case(generator))


@pytest.mark.parametrize("k", [1023, 1024, 1025, 2048, 2049, 5000, 131071])
@pytest.mark.parametrize("b_layout", ["column_major", "row_major"])
def test_float32_products_of_the_largest_values_are_exact_for_every_k(float32, k, b_layout):
    """-128 * -128 is the largest product: parts of more than 1024 would pass 2^24, where float32 skips odd integers."""
    a = torch.full((3, k), -128, dtype=torch.int8)
    weight = torch.full((5, k), -128, dtype=torch.int8)
    a[1], a[2, ::2], weight[1], weight[2, 1::3] = 127, 127, 127, -127
    a[:, -1] = 1  # odd sums
    b = weight.t() if b_layout == "column_major" else weight.t().contiguous()
    assert torch.equal(integer_product.accumulate(a, b), (a.double() @ weight.double().t()).to(torch.int32))


def test_float32_products_of_many_rows_and_small_k_hold_little_beside_their_output(float32):
    """Once twice the output. In a process of its own: peaks do not fall again."""
    script = """
import resource, torch
from scaled_mm.cpu import integer_product
a, b = torch.ones(6000, 16, dtype=torch.int8), torch.ones(16, 6000, dtype=torch.int8)
integer_product.accumulate(a[:64], b[:, :64])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out = integer_product.accumulate(a, b)
assert bool((out == 16).all())
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / (out.numel() * 4))
"""
    environment = {**os.environ, integer_product.VARIABLE: "float32", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and float(done.stdout) < 2, done.stderr + done.stdout


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_reduced_precision_of_float32_products_changes_nothing(float32, precision):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        for m in (1, 5, 40):
            run(Case(m, 70, 3000, values="extremes", out_dtype=torch.int32))
    finally:
        torch.set_float32_matmul_precision(before)


def test_onednn_that_is_switched_off_is_not_used(new_choice):
    before = cpu_gemm.kernel_name()
    with torch.backends.mkldnn.flags(enabled=False):
        assert cpu_gemm.kernel_name() == "cpu_float32"
        run(Case(20, 30, 40, values="extremes"))
    assert cpu_gemm.kernel_name() == before


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_a_cpu_whose_int8_product_is_exact_but_a_scalar_loop_takes_float32(new_choice):
    """As torch has it on CPUs with AVX2 and no VNNI. Deciding takes milliseconds there too, not seconds."""
    int_mm = torch._int_mm

    def scalar_loop(*args, **options):
        with torch.backends.mkldnn.flags(enabled=False):
            return int_mm(*args, **options)

    new_choice.setattr(torch, "_int_mm", scalar_loop)
    new_choice.setattr(integer_product, "cpu_features", frozenset)  # unknown: measured
    with torch.backends.mkldnn.flags(enabled=True):
        start = time.process_time()
        assert cpu_gemm.kernel_name() == "cpu_float32"
        assert time.process_time() - start < 2 * torch.get_num_threads()
        assert integer_product.int_mm_is_exact() and integer_product.choice().reason.endswith("ms by onednn_int8")
        with sm.create_descriptor(sm.Handle("cpu"), **Case(2, 3, 4).make().inputs, out=torch.empty(2, 3)) as desc:
            assert desc.kernel.row == "cpu_float32" and "64 x 512 x 1024 product takes" in desc.kernel.reason
        run(Case(20, 30, 40, values="extremes"))


def test_a_cpu_without_dot_products_is_known_by_its_features(new_choice, tmp_path):
    """An AMD EPYC with AVX2: nothing is timed."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu sse4_1 avx avx2 fma\n\nprocessor\t: 1\nflags\t\t: avx_vnni\n")
    assert integer_product.cpu_features(str(cpuinfo)) == {"fpu", "sse4_1", "avx", "avx2", "fma"}
    assert integer_product.cpu_features(str(tmp_path / "none")) == frozenset()
    new_choice.setattr(integer_product, "cpu_features", lambda: frozenset({"avx2", "fma"}))
    new_choice.setattr(integer_product, "int_mm_is_exact", lambda: True)
    new_choice.setattr(integer_product, "_measure", None)
    new_choice.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    with torch.backends.mkldnn.flags(enabled=True):
        assert integer_product.choice() == integer_product.Choice("float32", "this CPU has no 8-bit dot products")


@pytest.mark.parametrize("forced", ["float32", "onednn_int8", "float64", ""])
def test_an_environment_variable_forces_the_implementation(new_choice, forced):
    new_choice.setenv(integer_product.VARIABLE, forced)
    if forced == "float64":
        with pytest.raises(sm.BadParamError, match="^SCALED_MM_CPU_KERNEL: expected one of onednn_int8, float32, got 'float64'$"):
            cpu_gemm.kernel_name()
    elif forced == "onednn_int8" and not integer_product.int_mm_is_exact():
        with pytest.raises(sm.BadParamError, match="expected an implementation that is exact on this CPU"):
            cpu_gemm.kernel_name()
    else:
        assert cpu_gemm.kernel_name() in ([f"cpu_{forced}"] if forced else ["cpu_float32", "cpu_onednn_int8"])
        run(Case(20, 30, 40, values="extremes"))


def test_an_implementation_that_is_not_exact_cannot_be_forced(new_choice):
    new_choice.setenv(integer_product.VARIABLE, "onednn_int8")
    new_choice.setattr(integer_product, "int_mm_is_exact", lambda: False)
    with pytest.raises(sm.BadParamError, match="^SCALED_MM_CPU_KERNEL: expected an implementation that is exact on this CPU, got 'onednn_int8'"):
        cpu_gemm.kernel_name()


PROBE = """
import torch
from scaled_mm.cpu import gemm as cpu_gemm
from scaled_mm.reference import scaled_mm
a, w = torch.full((8, 500), 127, dtype=torch.int8), torch.full((16, 500), 127, dtype=torch.int8)
out = torch.empty(8, 16, dtype=torch.int32)
cpu_gemm.gemm(out, a, w.t(), None, None, None, None, None)
assert torch.equal(out, scaled_mm(a, w.t(), None, None, out_dtype=torch.int32)), out[0, 0]
print(cpu_gemm.kernel_name())
"""


@pytest.mark.skipif(not (ON_X86 and torch.backends.mkldnn.is_available()), reason="ONEDNN_MAX_CPU_ISA is for x86")
@pytest.mark.parametrize("isa", ["SSE41", "AVX2", "AVX512_CORE"])
def test_a_cpu_without_vnni_is_found_out_and_still_gives_exact_results(isa):
    """On a CPU with VNNI oneDNN saturates under these instruction sets; on one without it torch takes a scalar loop."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    environment.pop(integer_product.VARIABLE, None)
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["cpu_float32"]


def test_onednn_is_named_only_where_it_is_exact(new_choice):
    if cpu_gemm.kernel_name() == "cpu_onednn_int8":
        a = torch.full((3, 1000), -128, dtype=torch.int8)
        assert torch._int_mm(a, a.t()).unique().tolist() == [1000 << 14]
    else:
        assert cpu_gemm.kernel_name() == "cpu_float32"


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
def test_one_thread_and_many_give_the_same_bits(out_dtype):
    case = Case(130, 300, 200, out_dtype=out_dtype, bias="out", a_zero_point="vector_int8")
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            run(case)
    finally:
        torch.set_num_threads(threads)


def test_plans_that_calls_keep_are_few_and_go_with_their_shapes():
    from scaled_mm.core import operators

    w = torch.randint(-128, 128, (600, 32), dtype=torch.int8)
    scale = torch.ones(1)
    most = operators._cpu_plan.cache_info().maxsize
    for n in range(1, most + 40):
        a = torch.full((2, 32), n % 100, dtype=torch.int8)
        expected = (a.int() @ w[:n].int().t()).float()
        assert torch.equal(sm.scaled_mm(a, w[:n].t(), scale, scale, out_dtype=torch.float32), expected)
    assert 0 < operators._cpu_plan.cache_info().currsize <= most
