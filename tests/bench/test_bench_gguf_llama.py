"""llama.cpp's times: its printed lines, a program that prints them, and the recorded numbers."""

import pytest
import torch
from bench_data import CPU, GPU
from gguf_bench_data import PERF_LINES, PERF_US, write_program

from scaled_mm.bench.gguf import llama
from scaled_mm.bench.gguf.cases import TOKENS
from scaled_mm.errors import BadParamError


def test_plain_products_of_gguf_formats_are_read_and_nothing_else():
    assert llama.parse(PERF_LINES) == PERF_US


@pytest.mark.parametrize("text", ["", "OK\n", "MUL_MAT(): 1 runs - 1 us/run", "MUL_MAT(type_a=q4_0,m=x,n=1,k=32): 1 runs - 1.0 us/run", "\x00\xff"])
def test_lines_of_another_form_give_nothing(text):
    assert llama.parse(text) == {}


def test_a_program_is_run_with_its_arguments_and_its_times_are_measured_ones(tmp_path):
    times = llama.measure(write_program(tmp_path / "test-backend-ops"), CPU)
    assert times.us == PERF_US and times.source.status == "measured"
    assert "`test-backend-ops perf -o MUL_MAT -b CPU`, which gave 4 products" in times.source.told and str(tmp_path) not in times.source.told
    assert (tmp_path / "test-backend-ops.arguments").read_text() == "perf -o MUL_MAT -b CPU\n"


def test_a_program_that_gives_no_times_is_refused_with_what_it_said(tmp_path):
    program = tmp_path / "test-backend-ops"
    with pytest.raises(BadParamError, match="--llama: expected the path of llama.cpp's test-backend-ops, got "):
        llama.measure(program, CPU)
    with pytest.raises(BadParamError, match="exit status 3: OK"):
        llama.measure(write_program(program, status=3), CPU)
    with pytest.raises(BadParamError, match="exit status 0: no such backend"):
        llama.measure(write_program(program, text="no such backend\n"), CPU)
    program.chmod(0o644)
    with pytest.raises(BadParamError, match="--llama: expected the path"):
        llama.measure(program, CPU)
    program.chmod(0o755)
    program.write_bytes(b"\x7fELF, but not really")
    with pytest.raises(BadParamError, match="--llama: .* gave no times"):
        llama.measure(program, CPU)


def test_recorded_times_are_used_only_on_the_gpu_they_are_of():
    times = llama.recorded(GPU)
    assert times.source.status == "recorded" and llama.RECORDED_FILE in times.source.told and "ggml 0.25.3" in times.source.told
    assert {product[0] for product in times.us} == {"q4_0", "q4_1", "q5_0", "q5_1", "q8_0"} and all(us > 0 for us in times.us.values())
    assert {product[3] for product in times.us} <= set(TOKENS)
    assert times.us["q4_0", 28672, 8192, 1] == 52.41 and times.us["q8_0", 4096, 4096, 4096] == 706.12
    elsewhere = llama.recorded("NVIDIA L4")
    assert elsewhere.us == {} and elsewhere.source.status == "none" and "are of an NVIDIA H200" in elsewhere.source.told


@pytest.mark.gpu
def test_on_a_gpu_the_program_sees_that_gpu_alone(tmp_path):
    program = tmp_path / "test-backend-ops"
    write_program(program)
    program.write_text(program.read_text().replace('"$@"', '"$@" "$CUDA_VISIBLE_DEVICES"'))
    assert llama.measure(program, torch.device("cuda:0")).us == PERF_US
    assert "perf -o MUL_MAT GPU-" in (tmp_path / "test-backend-ops.arguments").read_text()
