"""Block products measured on a CPU: cases, inputs, the check against float64, the command, the examples."""

import argparse
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from bench_data import CPU
from gguf_bench_data import PERF_LINES, write_program

import scaled_mm as sm
from scaled_mm.bench.gguf import analysis, llama, peers
from scaled_mm.bench.gguf.cases import CPU_TOKENS, SWEEP, BlockCase, group_by_format, parse_cases, parse_formats
from scaled_mm.bench.gguf.inputs import BlockInputs, BlockWeights, weight_bytes
from scaled_mm.bench.gguf.record import load
from scaled_mm.bench.gguf.run import error_of, expected, run_grid, spread
from scaled_mm.bench.int8.peers import OURS
from scaled_mm.bench.int8.run import Options
from scaled_mm.cli import bench, bench_gguf, main
from scaled_mm.errors import BadParamError
from scaled_mm.gguf_formats import WEIGHT_FORMATS

FAST = Options(budget_ms=1, sets=3)
EXAMPLES = Path(__file__).parents[2] / "examples"


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(list(words))


def make_inputs(fmt: str = "q4_0", tokens: int = 5, sets: int = 3) -> BlockInputs:
    case, generator = BlockCase("70x96", tokens, 70, 96, fmt), torch.Generator().manual_seed(1)
    return BlockInputs(case, BlockWeights(case, CPU, generator, sets), generator)


# ---- cases ------------------------------------------------------------------------------------------------------------


def test_formats_cross_with_weights_and_tokens_weight_by_weight():
    cases = parse_cases(("q8_0", "q4_0"), "64x96, 8B_o, 7x64x96", (1, 2))
    assert [(case.fmt, case.shape, case.M) for case in cases][:5] == [
        ("q8_0", "64x96", 1),
        ("q8_0", "64x96", 2),
        ("q8_0", "64x96", 7),
        ("q8_0", "8B_o", 1),
        ("q8_0", "8B_o", 2),
    ]
    assert cases[5] == BlockCase("64x96", 1, 64, 96, "q4_0") and len(cases) == 10
    assert [len(group) for group in group_by_format(cases)] == [3, 2, 3, 2]
    assert str(cases[0]) == "q8_0 64x96 M=1 N=64 K=96"
    assert {case.shape for case in parse_cases(("q4_0",), "llama-8b", (1,))} == {"8B_qkv", "8B_o", "8B_gate_up", "8B_down"}


@pytest.mark.parametrize("text", ["", "64", "64x0", "axb", "1x2x3x4", "64x100"])
def test_a_shape_that_is_none_is_refused(text):
    with pytest.raises(BadParamError, match="--shapes: expected"):
        parse_cases(("q4_0",), text, (1,))


def test_formats_are_those_of_weights():
    assert parse_formats("all") == tuple(WEIGHT_FORMATS) and parse_formats("q8_0, q4_0,q8_0") == ("q8_0", "q4_0")
    for text in ("q8_1", "q4_0,nope", ""):
        with pytest.raises(BadParamError, match="--formats: expected"):
            parse_formats(text)
    with pytest.raises(BadParamError, match="got 'Q8_0'; formats are spelled in lower case$"):
        parse_formats("q4_0,Q8_0")


# ---- inputs and the check ---------------------------------------------------------------------------------------------


def test_weight_sets_are_different_weights_in_memory_of_their_own():
    weights = make_inputs("q5_1").weights
    assert [packed.shape for packed in weights.packed] == [(70, 96)] * 3
    assert torch.equal(weights.packed[1].unpack(), weights.blocks[1]) and not torch.equal(weights.blocks[0], weights.blocks[1])
    assert weights.blocks[1].data_ptr() != weights.blocks[0].data_ptr()
    assert torch.equal(weights.dequantized[2], sm.dequantize_block(weights.blocks[2], "q5_1"))
    assert weight_bytes(BlockCase("x", 1, 64, 96, "q5_1")) == 64 * 3 * 24


def test_activations_are_the_same_values_in_each_dtype():
    inputs = make_inputs()
    assert torch.equal(inputs.float16, inputs.float32.half()) and torch.equal(inputs.q8_1, sm.quantize_q8_1(inputs.float32))
    assert inputs.out(0).dtype is torch.float32 and inputs.out(0).shape == (5, 70)


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
@pytest.mark.parametrize("tokens", [1, 5])
def test_every_implementation_computes_every_set(fmt, tokens):
    inputs = make_inputs(fmt, tokens)
    for peer in peers.every_peer():
        inputs.poison()
        calls = peer.prepare(inputs)
        exact = inputs.float32 if not isinstance(peer, peers.OursBlock) else peer.activation(inputs)
        values = sm.dequantize_q8_1(exact) if exact.dtype is torch.uint8 else exact.float()
        for i, call in enumerate(calls):
            want = values.double() @ inputs.weights.dequantized[i].double().t()
            assert (call().double() - want).norm() <= 0.02 * want.norm(), (peer.name, i)
        calls[0]()
        assert error_of(inputs.out(0), inputs, expected(peer, inputs)) <= analysis.ERROR_BOUND
        peer.release()


def test_the_check_sees_one_wrong_element_of_the_slice_and_any_that_is_not_finite():
    inputs = make_inputs()
    ours, *_ = peers.every_peer()
    want = expected(ours, inputs)
    inputs.poison()
    assert error_of(inputs.out(0), inputs, want) != error_of(inputs.out(0), inputs, want)  # NaN
    ours.prepare(inputs)[0]()
    assert error_of(inputs.out(0), inputs, want) <= analysis.ERROR_BOUND
    inputs.out(0)[-1, -1] += 1
    assert error_of(inputs.out(0), inputs, want) > 1e-3
    ours.release()


def test_mode_auto_on_a_gpu_is_what_the_tile_table_says(monkeypatch):
    from scaled_mm.jit import dispatch
    from scaled_mm.tables.schema import ModeRule

    gpu = torch.device("cuda:0")
    monkeypatch.setattr(peers, "our_handle", lambda device: argparse.Namespace(arch="sm90"))
    assert peers.auto_mode(gpu, 1) == dispatch.callable_table("sm90").gguf.auto[0].mode  # the table that is there
    rules = [ModeRule(m=8, mode="w4a16"), ModeRule(m=64, mode="w4a8"), ModeRule(mode="w4a16")]
    table = argparse.Namespace(gguf=argparse.Namespace(auto=rules, rows=[argparse.Namespace(name="row_a")]))
    monkeypatch.setattr(dispatch, "callable_table", lambda arch: table)
    assert [peers.auto_mode(gpu, m) for m in (1, 8, 9, 64, 65, 4096)] == ["w4a16", "w4a16", "w4a8", "w4a8", "w4a16", "w4a16"]
    assert [peers.auto_mode(CPU, m) for m in (1, 9)] == ["w4a16"] * 2


def test_a_row_to_force_is_looked_up_in_the_section_of_block_products(monkeypatch):
    from scaled_mm.bench.int8 import peers as int8_peers
    from scaled_mm.jit.dispatch import callable_table

    monkeypatch.setattr(int8_peers, "our_handle", lambda device: argparse.Namespace(arch="sm90"))
    gpu, row = torch.device("cuda:0"), callable_table("sm90").gguf.rows[0].name
    chosen = bench_gguf._peers(parse("--block", "--kernel", row), gpu)
    assert [peer.name for peer in chosen] == list(analysis.OURS_ALL)  # and none of a CPU's
    with pytest.raises(sm.errors.KernelNotFoundError, match=f"--kernel: expected one of {row}, .*, got 'generic_64x64x64'"):
        bench_gguf._peers(parse("--block", "--kernel", "generic_64x64x64"), gpu)


def test_a_slice_is_spread_from_the_first_to_the_last():
    assert spread(5, 128, CPU).tolist() == [0, 1, 2, 3, 4] and spread(1, 4, CPU).tolist() == [0]
    assert spread(28672, 128, CPU)[[0, -1]].tolist() == [0, 28671] and len(spread(28672, 128, CPU)) == 128


def test_a_grid_is_measured_checked_and_stands_next_to_llama_cpp():
    cases = parse_cases(("q4_0", "q8_0"), "64x96", (1, 3))
    times = llama.LlamaTimes({("q8_0", 64, 96, 3): 7.5}, llama.recorded("none").source)
    batches = list(run_grid(cases, peers.every_peer(), CPU, FAST, times))
    assert [[(case.fmt, case.M) for case in batch] for batch in batches] == [[("q4_0", 1), ("q4_0", 3)], [("q8_0", 1), ("q8_0", 3)]]
    for case in (case for batch in batches for case in batch):
        assert set(case.results) == {"ours", "ours_w4a8", "ours_q8_1", "mm", "dequantize_mm"}
        assert all(result.us > 0 and result.error <= analysis.ERROR_BOUND for result in case.results.values())
        assert analysis.check_of(case) == "yes" and case.results[OURS].kernel == "cpu_gguf_float32" and case.rotation == 3
    assert [case.llama_us for batch in batches for case in batch] == [None, None, None, 7.5]


class Broken(peers.OursBlock):
    """Ours, with a fault once it was called so often: "value", "nan" or "raise"."""

    def __init__(self, fault: str, after: int):
        super().__init__(OURS, "broken", "float16", "auto")
        self._fault, self._left = fault, after

    def prepare(self, inputs):
        def make(call):
            def faulty():
                out = call()
                self._left -= 1
                if self._left < 0:
                    if self._fault == "raise":
                        raise RuntimeError("the launch failed")
                    out[-1, -1] = float("nan") if self._fault == "nan" else out[-1, -1] + 1
                return out

            return faulty

        return [make(call) for call in super().prepare(inputs)]


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("fault", ["value", "nan"])
def test_a_wrong_product_is_found_before_and_after_timing(fault, after):
    [[case]] = run_grid(parse_cases(("q4_0",), "1x64x96", ()), [Broken(fault, after)], CPU, FAST)
    assert analysis.check_of(case).startswith("NO") and case.results[OURS].us > 0


def test_a_product_that_raises_is_recorded_and_the_others_are_measured():
    [[case]] = run_grid(parse_cases(("q4_0",), "1x64x96", ()), [Broken("raise", 0), peers.Dequantized()], CPU, FAST)
    assert case.results[OURS].failed == "RuntimeError: the launch failed" and case.results["mm"].us > 0


def test_an_unchecked_case_says_so():
    [[case]] = run_grid(parse_cases(("q4_0",), "1x64x96", ()), peers.every_peer()[:1], CPU, Options(budget_ms=1, sets=2, check=False))
    assert analysis.check_of(case) == "not checked" and case.results[OURS].error is None


# ---- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_report_and_prints_its_json(tmp_path, capsys):
    program = write_program(tmp_path / "test-backend-ops", PERF_LINES.replace("m=16,n=1,k=256", "m=64,n=3,k=96"))
    out = tmp_path / "out"
    words = ["--block", "--device", "cpu", "--shapes", "64x96", "--formats", "q4_1,q4_0", "--m", "1-3", "--budget-ms", "1", "--seed", "1"]
    assert bench.run(parse(*words, "--llama", str(program), "--out", str(out), "--json")) == bench.OK
    printed = capsys.readouterr()
    document = load(out)
    assert json.loads(printed.out) == document.model_dump(mode="json")
    assert [(case.fmt, case.M, case.llama_us) for case in document.cases] == [
        ("q4_1", 1, None),
        ("q4_1", 2, None),
        ("q4_1", 3, 4.03),
        ("q4_0", 1, None),
        ("q4_0", 2, None),
        ("q4_0", 3, None),
    ]
    assert document.llama.status == "measured" and "--block" in document.command and "--formats q4_1,q4_0" in document.command
    assert "onotone within 5%" in printed.err and "6 of 6 checked cases" in printed.err
    text = (out / "bench_block.md").read_text()
    assert "### q4_1 64x96: N=64, K=96" in text and "4.03" in text and (out / "bench_block.html").is_file()


def test_the_sweep_is_tokens_from_1_to_64_and_what_m_names_besides():
    tokens = [case.M for case in bench_gguf._cases(parse("--block", "--sweep", "--formats", "q4_0"), CPU)]
    assert tokens == list(SWEEP) == list(range(1, 65))
    assert tokens == [case.M for case in bench_gguf._cases(parse("--block", "--m", "1-64", "--formats", "q4_0"), CPU)]
    more = [case.M for case in bench_gguf._cases(parse("--block", "--sweep", "--m", "512,16", "--formats", "q4_0"), CPU)]
    assert more == [*range(1, 65), 512]
    default = bench_gguf._cases(parse("--block"), CPU)
    assert {case.fmt for case in default} == set(WEIGHT_FORMATS) and {case.M for case in default} == set(CPU_TOKENS)
    on_gpu = bench_gguf._cases(parse("--block"), torch.device("cuda"))
    assert {case.shape for case in on_gpu} == {"28672x8192", "4096x14336", "4096x4096"} and max(case.M for case in on_gpu) == 4096


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--block", "--formats", "q8_1"], "--formats: expected all, or some of q4_0"),
        (["--block", "--shapes", "64x100"], "--shapes: expected K to be a multiple of 32, got 100"),
        (["--block", "--m", "0"], "--m: M must be a positive integer"),
        (["--block", "--peers", "vllm"], "unknown peer 'vllm' on cpu: expected all, none, or some of ours_w4a8"),
        (["--block", "--kernel", "foo"], "--kernel: rows of a tile table are kernels for a GPU"),
        (["--block", "--llama", "/nope"], "--llama: expected the path of llama.cpp's test-backend-ops, got /nope"),
        (["--block", "--rows"], "--rows: does not go with --block"),
        (["--block", "--overhead"], "--overhead: does not go with --block"),
        (["--block", "--vllm-lib", "x"], "--vllm-lib: does not go with --block"),
        (["--block", "--check-limit", "1"], "--check-limit: does not go with --block"),
        (["--formats", "q4_0"], "--formats: goes with --block alone"),
        (["--sweep"], "--sweep: goes with --block alone"),
        (["--llama", "x"], "--llama: goes with --block alone"),
    ],
)
def test_arguments_that_make_no_sense_end_with_status_two(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "--device", "cpu", *words]) == bench.USAGE
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == "" and len(printed.err.splitlines()) == 1


@pytest.mark.filterwarnings("ignore:No artists with labels")
def test_a_wrong_or_failed_product_of_ours_ends_with_status_one(tmp_path, capsys, monkeypatch):
    words = ["bench", "--block", "--device", "cpu", "--shapes", "1x64x96", "--formats", "q4_0", "--budget-ms", "1", "--out", str(tmp_path)]
    for fault, said in (("value", "not within the bound"), ("raise", "at 1 token: ours: RuntimeError: the launch failed")):
        monkeypatch.setattr(peers, "every_peer", lambda kernel=None, fault=fault: [Broken(fault, 0)])
        assert main(words) == bench.FAILED
        assert said in capsys.readouterr().out


def test_the_help_names_every_peer(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    [shown] = [text for text in capsys.readouterr().out.split("\n  --") if text.startswith("peers")]
    assert set(re.findall(r"\w+", shown.split("With --block:")[1])) >= {peer.name for peer in peers.every_peer()[1:]}


# ---- examples ---------------------------------------------------------------------------------------------------------


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


def test_the_example_compares_with_llama_cpp(tmp_path, capsys):
    program = write_program(tmp_path / "test-backend-ops", PERF_LINES.replace("m=16,n=1,k=256", "m=64,n=3,k=96"))
    words = ["--device", "cpu", "--formats", "q4_1", "--shapes", "64x96", "--m", "1,3", "--budget-ms", "1"]
    assert example("compare_with_llama_cpp").main([*words, "--llama", str(program)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "4 products of block formats" in lines[0] and lines[-2].startswith("q4_1 64x96      3") and " 4.03 " in lines[-2]
    assert lines[-2].endswith("yes") and lines[-1].startswith("Noise: ")


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("gguf_to_product", ["missing.gguf"], "No such file or directory: 'missing.gguf'"),
        ("gguf_to_product", ["--tensor", "nothing"], "got 'nothing'; there are "),
        ("gguf_to_product", ["--device", "cuda:99"], "--device: "),
        ("gguf_to_product", ["--device", "nowhere"], "--device: expected cuda, cuda:<index> or cpu, got 'nowhere'"),
        ("compare_with_llama_cpp", ["--formats", "q4_2"], "--formats: expected all, or some of q4_0"),
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


# ---- a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
def test_every_mode_is_measured_and_within_the_bound_on_a_gpu(fmt):
    chosen = [peer for peer in peers.every_peer() if "cuda" in peer.devices]
    batches = list(run_grid(parse_cases((fmt,), "512x1024", (1, 16, 64)), chosen, torch.device("cuda:0"), Options(budget_ms=5)))
    for case in batches[0]:
        assert {name: result.failed for name, result in case.results.items() if result.failed} == {}
        assert set(case.results) == set(analysis.OURS_ALL) and analysis.check_of(case) == "yes"


@pytest.mark.gpu
def test_the_command_runs_on_a_gpu_and_forces_a_row(tmp_path):
    from scaled_mm.bench.int8.peers import our_handle
    from scaled_mm.jit.dispatch import callable_table

    row = callable_table(our_handle(torch.device("cuda", 0)).arch).gguf.fallback
    words = ["--shapes", "256x512", "--formats", "q4_0", "--m", "1,2", "--budget-ms", "5", "--kernel", row, "--out", str(tmp_path)]
    assert main(["bench", "--block", "--device", "cuda:0", *words]) == bench.OK
    assert {result.kernel for case in load(tmp_path).cases for result in case.results.values()} == {row}
    with pytest.raises(sm.errors.KernelNotFoundError, match="--kernel: expected one of "):
        bench_gguf._peers(parse("--block", "--kernel", "foo"), torch.device("cuda:0"))
