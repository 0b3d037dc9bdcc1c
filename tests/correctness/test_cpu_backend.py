"""The CPU backend's own paths: the forms of oneDNN call, its chunks, and the float64 alternative."""

import os
import platform
import subprocess
import sys

import pytest
import torch

import scaled_mm as sm
from scaled_mm import cpu

from .cases import INPUT_LAYOUTS, LAYOUTS, OUT_DTYPES, Case, every_shape, matrix, poisoned, random_case

ON_X86 = platform.machine() in ("x86_64", "AMD64")


def run(case: Case) -> None:
    operands = case.make()
    out = operands.poisoned_out()
    cpu.gemm(out, **operands.inputs)
    operands.check(out)


@pytest.fixture
def tiny_blocks(monkeypatch):
    """Every threshold so low that small operands take the paths of large ones."""
    monkeypatch.setattr(cpu, "_LARGE_WEIGHT", 0)
    monkeypatch.setattr(cpu, "_ALIASING_STRIDE", 1)
    monkeypatch.setattr(cpu, "_EPILOGUE_ELEMENTS_PER_THREAD", 256)
    monkeypatch.setattr(cpu, "_CHUNK_MIN_ROWS", 7)
    monkeypatch.setattr(cpu, "_CHUNK_ELEMENTS", 64)


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


@pytest.mark.parametrize("a_layout", INPUT_LAYOUTS)
@pytest.mark.parametrize("b_layout", INPUT_LAYOUTS)
def test_every_memory_layout_is_honoured(a_layout, b_layout):
    for m, n, k in [(1, 40, 33), (2, 40, 33), (20, 30, 64), (20, 1, 33), (1, 1, 33), (9, 40, 1), (1, 40, 1)]:
        for out_layout in LAYOUTS:
            run(Case(m, n, k, a_layout=a_layout, b_layout=b_layout, out_layout=out_layout, bias="out"))


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 8, 9, 16, 17, 64, 65])
def test_weights_whose_rows_alias_in_the_cache_take_every_form_of_call(m):
    for out_dtype in (torch.bfloat16, torch.int32):
        run(Case(m, 1030, 4096, out_dtype=out_dtype, values="extremes", a_zero_point="vector_int8"))


def test_outputs_of_more_than_one_chunk_equal_the_reference():
    run(Case(cpu._CHUNK_MIN_ROWS * 2 + 3, 8200, 16, out_dtype=torch.float16, b_zero_point="vector_int8", bias="out"))


def test_nothing_outside_a_padded_output_is_written():
    operands = Case(20, 30, 40, bias="out").make()
    whole = poisoned(24, 40, torch.bfloat16)
    cpu.gemm(whole[2:22, 5:35], **operands.inputs)
    operands.check(whole[2:22, 5:35])
    frame = torch.ones(24, 40, dtype=torch.bool)
    frame[2:22, 5:35] = False
    assert whole[frame].isnan().all()


def test_inputs_are_left_alone():
    operands = Case(70, 30, 40, bias="float32", a_zero_point="vector_int32", b_zero_point="vector_int32").make()
    kept = {name: t.clone() for name, t in operands.inputs.items()}
    cpu.gemm(operands.poisoned_out(), **operands.inputs)
    for name, t in operands.inputs.items():
        assert torch.equal(t, kept[name]), name


def test_scales_that_want_gradients_do_not_pull_the_output_into_autograd():
    operands = Case(4, 5, 6).make()
    operands.a_scale.requires_grad_()
    out = operands.poisoned_out()
    cpu.gemm(out, **operands.inputs)
    assert not out.requires_grad
    operands.check(out)


def test_operands_that_blas_cannot_express_are_copied_and_the_others_are_not():
    generator = torch.Generator().manual_seed(0)
    copied = {"every_second", "broadcast_row", "broadcast_column"}
    for layout in INPUT_LAYOUTS:
        t = matrix(12, 20, layout, "full", generator)
        operand = cpu._blas_operand(t)
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
        operand = cpu._blas_operand(t)
        assert torch.equal(operand, t)
        # What oneDNN's BLAS asks of leading dimensions.
        rows, columns = operand.shape
        row_stride, column_stride = operand.stride()
        least, leading = (columns, row_stride) if column_stride == 1 else (rows, column_stride)
        assert 1 in (row_stride, column_stride) and least <= leading < 2**31


# ---- where oneDNN's INT8 product is not exact ------------------------------------------------------------------------


@pytest.fixture
def float64(monkeypatch):
    monkeypatch.setattr(cpu, "_probe", lambda onednn_enabled: False)
    monkeypatch.setattr(torch, "_int_mm", None)  # whoever calls it fails
    assert not cpu.int_mm_is_exact()
    assert cpu.kernel_name() == "cpu_float64"


def test_the_float64_alternative_equals_the_reference(float64, monkeypatch):
    for case in every_shape(values="extremes", a_zero_point="vector_int32", b_zero_point="one_0d_int32"):
        run(case)
    monkeypatch.setattr(cpu, "_FLOAT64_ELEMENTS", 999)
    generator = torch.Generator().manual_seed(12)
    for _ in range(200):
        run(random_case(generator))


def test_onednn_that_is_switched_off_is_not_used():
    before = cpu.kernel_name()
    with torch.backends.mkldnn.flags(enabled=False):
        assert cpu.kernel_name() == "cpu_float64"
        run(Case(20, 30, 40, values="extremes"))
    assert cpu.kernel_name() == before


PROBE = """
import torch
from scaled_mm import cpu
from scaled_mm.reference import scaled_mm
a, w = torch.full((8, 500), 127, dtype=torch.int8), torch.full((16, 500), 127, dtype=torch.int8)
out = torch.empty(8, 16, dtype=torch.int32)
cpu.gemm(out, a, w.t(), None, None, None, None, None)
assert torch.equal(out, scaled_mm(a, w.t(), None, None, out_dtype=torch.int32)), out[0, 0]
saturates = not torch.equal(torch._int_mm(a, w.t()), out)
print(cpu.kernel_name(), saturates)
"""


@pytest.mark.skipif(not (ON_X86 and torch.backends.mkldnn.is_available()), reason="ONEDNN_MAX_CPU_ISA is for x86")
@pytest.mark.parametrize("isa", ["SSE41", "AVX2", "AVX512_CORE"])
def test_a_cpu_without_vnni_is_found_out_and_still_gives_exact_results(isa):
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    kernel, saturates = done.stdout.split()
    assert kernel == ("cpu_float64" if saturates == "True" else "cpu_onednn_int8")
    assert saturates == "True"  # these instruction sets have no exact 8-bit product


def test_the_name_says_onednn_where_the_probe_passes():
    if cpu.int_mm_is_exact():
        assert cpu.kernel_name() == "cpu_onednn_int8"
        a = torch.full((3, 1000), -128, dtype=torch.int8)
        assert torch._int_mm(a, a.t()).unique().tolist() == [1000 << 14]
    else:
        assert cpu.kernel_name() == "cpu_float64"


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
    from scaled_mm import ops

    w = torch.randint(-128, 128, (600, 32), dtype=torch.int8)
    scale = torch.ones(1)
    most = ops._cpu_plan.cache_info().maxsize
    for n in range(1, most + 40):
        a = torch.full((2, 32), n % 100, dtype=torch.int8)
        expected = (a.int() @ w[:n].int().t()).float()
        assert torch.equal(sm.scaled_mm(a, w[:n].t(), scale, scale, out_dtype=torch.float32), expected)
    assert 0 < ops._cpu_plan.cache_info().currsize <= most
