"""The examples run as their first lines say."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from gguf_bench_data import PERF_LINES, write_program

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_multiplies_what_it_loads_from_a_file(tmp_path, capsys):
    pytest.importorskip("gguf")
    module = example("gguf_to_product")
    assert module.main(["--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "3 of 4 tensors of supported types are quantized" in shown and "blk.0.ffn_up.weight: q5_1 [384, 512], 4 tokens on cpu" in shown
    path = module.write_small_file(tmp_path)
    assert module.main([str(path), "--tensor", "blk.0.attn_q.weight", "--tokens", "3", "--device", "cpu"]) == 0
    assert "q4_0 [256, 512], 3 tokens" in capsys.readouterr().out
    assert module.main([str(path), "--tensor", "output_norm.weight", "--device", "cpu"]) == 1  # nothing to multiply with


def test_the_example_converts_the_k_quants_of_a_file(tmp_path, capsys):
    gguf = pytest.importorskip("gguf")
    writer, generator = gguf.GGUFWriter(tmp_path / "k.gguf", "llama"), torch.Generator().manual_seed(0)
    for fmt, size, scales in (("q4_k", 144, slice(0, 4)), ("q5_k", 176, slice(0, 4)), ("q6_k", 210, slice(208, 210))):
        blocks = torch.randint(0, 256, (32, 2, size), dtype=torch.uint8, generator=generator)
        blocks[..., scales] = 0x2B  # float16 0.056; random bytes may be an infinity
        writer.add_tensor(fmt, blocks.flatten(1).numpy(), raw_dtype=gguf.GGMLQuantizationType[fmt.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert example("gguf_to_product").main([str(tmp_path / "k.gguf"), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "3 of 3 tensors of supported types are quantized" in shown and "q4_k: a K-quant, converted with a relative error of " in shown
    assert "q5_k: q5_1 [32, 512], 4 tokens on cpu" in shown and "q6_k: q6_k [32, 512], which no product reads, left out" in shown


def test_the_example_compares_with_llama_cpp(tmp_path, capsys):
    program = write_program(tmp_path / "test-backend-ops", PERF_LINES.replace("m=16,n=1,k=256", "m=64,n=3,k=96"))
    words = ["--device", "cpu", "--formats", "q4_1", "--shapes", "64x96", "--m", "1,3", "--budget-ms", "1"]
    assert example("compare_with_llama_cpp").main([*words, "--llama", str(program)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "4 products of GGUF formats" in lines[0] and lines[-2].startswith("q4_1 64x96      3") and " 4.03 " in lines[-2]
    assert lines[-2].endswith("yes") and lines[-1].startswith("Noise: ")


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("gguf_to_product", ["missing.gguf"], "No such file or directory: 'missing.gguf'"),
        ("gguf_to_product", ["--tensor", "nothing"], "got 'nothing'; there are "),
        ("gguf_to_product", ["--device", "cuda:99"], "--device: "),
        ("gguf_to_product", ["--device", "nowhere"], "--device: expected cuda, cuda:<index> or cpu, got 'nowhere'"),
        ("compare_with_llama_cpp", ["--formats", "q6_9"], "--formats: expected all, or some of q4_0"),
        ("compare_with_llama_cpp", ["--shapes", "64x100"], "--shapes: expected K to be a multiple of 32"),
        ("compare_with_llama_cpp", ["--llama", "missing"], "--llama: expected the path of llama.cpp's test-backend-ops, got missing"),
        ("compare_with_llama_cpp", ["--device", "cuda:99"], "--device: "),
    ],
)
def test_an_example_that_cannot_run_says_so_in_a_line(name, words, message, tmp_path, capsys, monkeypatch):
    if name == "gguf_to_product":
        pytest.importorskip("gguf")
    monkeypatch.chdir(tmp_path)
    assert example(name).main(["--device", "cpu", *words]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and shown.startswith(f"{name}.py: ") and message in shown


def test_the_example_without_the_gguf_package_says_how_to_get_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert example("gguf_to_product").main([]) == 2
    assert capsys.readouterr().err == "gguf_to_product.py: expected the package gguf, which is not installed; pip install gguf\n"


@pytest.mark.parametrize(("option", "value"), [("--m", "0"), ("--m", "x"), ("--budget-ms", "0")])
def test_the_comparison_refuses_numbers_that_are_none(option, value, capsys):
    with pytest.raises(SystemExit) as done:
        example("compare_with_llama_cpp").main([option, value])
    assert done.value.code == 2 and f"argument {option}: " in capsys.readouterr().err
