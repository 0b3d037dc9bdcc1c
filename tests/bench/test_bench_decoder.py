"""`scaled-mm bench decoder` end to end on a CPU; the layer of every implementation against the one in float32; goals."""

from __future__ import annotations

import argparse
import shlex

import pytest
import torch

import scaled_mm as sm
from scaled_mm.bench.decoder import goals, peers, plain, report, vllm
from scaled_mm.bench.decoder.cases import MODELS, DecoderCase
from scaled_mm.bench.decoder.inputs import DecoderInputs, DecoderWeights, attention
from scaled_mm.bench.decoder.ours import DecoderLayer
from scaled_mm.bench.decoder.record import DecoderCaseRecord, DecoderDocument
from scaled_mm.bench.decoder.suite import DecoderSuite
from scaled_mm.bench.int8.suite import relative_error
from scaled_mm.cli import bench
from scaled_mm.cli.bench import frame
from scaled_mm.measure.peer import Peer
from scaled_mm.measure.record import Result
from scaled_mm.measure.run import Options, WrongResult
from scaled_mm.rowwise import reference

PARSER = argparse.ArgumentParser()
bench.add_arguments(PARSER)
SMALL = ["decoder", "--device", "cpu", "--budget-ms", "0.5", "--seed", "1"]


def parse(*words: str) -> argparse.Namespace:
    return PARSER.parse_args(list(words))


def inputs(name: str, tokens: int) -> DecoderInputs:
    generator, model = torch.Generator().manual_seed(0), MODELS[name]
    case = DecoderCase(name, tokens, model.hidden, model.hidden)
    return DecoderInputs(case, DecoderWeights(model, torch.device("cpu"), generator, 2), generator)


def test_the_recorded_command_gives_the_same_arguments():
    args = parse(*SMALL, "--models", "tiny", "--tokens", "3", "--peers", "none", "--no-check", "--vllm-lib", "a.so")
    line = frame.command_line(args, args.parser)
    assert line.startswith("scaled-mm bench decoder ") and parse(*shlex.split(line)[2:]) == args


def test_layers_on_a_cpu_write_a_report(tmp_path, capsys):
    assert bench.run(parse(*SMALL, "--tokens", "1,5", "--out", str(tmp_path))) == frame.OK
    assert "microseconds per layer" in capsys.readouterr().out
    made = DecoderDocument.load(tmp_path)
    assert [(case.shape, case.M) for case in made.cases] == [(name, tokens) for name in ("tiny", "tiny-experts") for tokens in (1, 5)]
    for case in made.cases:
        assert case.results["ours"].bit_equal is True and 0 < case.results["ours"].error < 0.1
        assert 0 < case.results["bf16"].error < 0.1
    text = (tmp_path / report.DECODER_MD).read_text()
    assert f"`{made.command}`" in text and "4 of 4 checked" in text and "8 experts, 2 of a token" in text and "### tiny-experts" in text
    assert bench.run(parse("decoder", "--render", str(tmp_path))) == frame.OK and (tmp_path / report.DECODER_MD).read_text() == text


@pytest.mark.parametrize(
    "words, message",
    [
        (["--models", "llama"], "--models: expected all, or some of llama-8b, llama-70b, qwen3-30b-a3b, tiny, tiny-experts, got 'llama'"),
        (["--tokens", "0"], "--tokens: M must be a positive integer"),
        (["--vllm-lib", "none.so"], "--vllm-lib: expected the path of a library, got none.so"),
    ],
)
def test_what_cannot_be_timed_is_a_usage_error(words, message, capsys):
    assert bench.run(parse("decoder", "--device", "cpu", *words)) == frame.USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tiny", "tiny-experts"])
def test_our_layer_computes_the_layer_in_float32(name):
    given = inputs(name, 9)
    for weights in given.weights.layers:
        out, residual = DecoderLayer(given.case.model, weights)(given.x, given.residual, given.cos, given.sin)
        assert out.dtype is residual.dtype is torch.bfloat16
    first = DecoderLayer(given.case.model, given.weights.layers[0])(given.x, given.residual, given.cos, given.sin)
    assert all(relative_error(*pair) < 0.1 for pair in zip(first, plain.reference(given), strict=True))


def test_attention_is_causal_and_groups_heads():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(5, heads, 8, generator=generator) for heads in (4, 2, 2))
    out = attention(query, key, value).view(5, 4, 8)
    for t in range(5):
        for h in range(4):
            probabilities = (key[: t + 1, h // 2] @ query[t, h] / 8**0.5).softmax(0)
            assert torch.allclose(out[t, h], probabilities @ value[: t + 1, h // 2], atol=1e-5)


def stand_ins() -> dict:
    """vLLM's operators by their definitions, computed by this package's references."""

    def norm_quantize(q, x, weight, scale, epsilon, upper, residual):
        assert upper is None
        y, total = reference.add_rms_norm(x, residual, weight, epsilon)
        residual.copy_(total)
        for into, one in zip((q, scale), reference.token(y), strict=True):
            into.copy_(one)

    def quantize(q, x, scale, zero_point):
        assert zero_point is None and x.is_contiguous()
        for into, one in zip((q, scale), reference.token(x), strict=True):
            into.copy_(one)

    def product(out, a, b, a_scale, b_scale, bias):
        assert bias is None
        out.copy_(sm.scaled_mm(a, b, a_scale, b_scale, out_dtype=out.dtype))

    def rotate(positions, query, key, head, cos_sin, neox):
        assert neox
        cos, sin = cos_sin[positions].chunk(2, -1)
        found = sm.rope(query.view(len(query), -1, head), key.view(len(key), -1, head), cos, sin)
        for into, one in zip((query, key), found, strict=True):
            into.copy_(one.flatten(1))

    def norm_rotate(qkv, heads, kv_heads, _, head, epsilon, query_weight, key_weight, cos_sin, neox, positions):
        query, key = qkv[:, : heads * head], qkv[:, heads * head : (heads + kv_heads) * head]
        for part, weight in ((query, query_weight), (key, key_weight)):
            part.copy_(sm.rms_norm(part.reshape(len(part), -1, head), weight, epsilon).flatten(1))
        rotate(positions, query, key, head, cos_sin, neox)

    def add_norm(x, residual, weight, epsilon):
        y, total = sm.add_rms_norm(x, residual, weight, epsilon)
        x.copy_(y)
        residual.copy_(total)

    def choose(factors, ids, sources, logits, renormalize, bias):
        assert renormalize and bias is None
        for into, one in zip((factors, ids), plain.best(logits, factors.shape[1]), strict=True):
            into.copy_(one)

    def align(ids, experts, bm, rows, experts_of_tiles, padded, expert_map):
        assert expert_map is None
        rows.fill_(ids.numel())
        tile = 0
        for expert in range(experts):
            copies = (ids.flatten() == expert).nonzero().flatten()
            for part in copies.split(bm):
                rows[tile * bm : tile * bm + len(part)] = part.to(torch.int32)
                experts_of_tiles[tile], tile = expert, tile + 1
        padded.fill_(tile * bm)

    return {
        "topk_softmax": choose,
        "moe_align_block_size": align,
        "moe_sum": lambda x, out: out.copy_(x.sum(1)),
        "rms_norm_dynamic_per_token_quant": norm_quantize,
        "dynamic_scaled_int8_quant": quantize,
        "cutlass_scaled_mm": product,
        "rotary_embedding": rotate,
        "silu_and_mul": lambda out, x: out.copy_(sm.silu_and_mul(x)),
        "fused_qk_norm_rope": norm_rotate,
        "fused_add_rms_norm": add_norm,
    }


def test_vllms_operators_are_called_so_that_they_compute_the_layer():
    given = inputs("tiny", 9)
    found = vllm.VllmLayer(given, 0, stand_ins()).call()
    assert all(relative_error(*pair) < 0.1 for pair in zip(found, plain.reference(given), strict=True))


def test_vllms_operators_and_the_triton_kernel_compute_the_layer_of_a_mixture(monkeypatch):
    """The kernel is replaced by its definition: row r of a tile is row r // gather of a, and is written to row r."""
    from scaled_mm.bench.triton.tiles import Config

    calls = []

    class grouped:
        @staticmethod
        def product(config, a, a_scale, weight, scale, aligned, out, gather, sms):
            calls.append(gather)
            for tile in range(int(aligned.tiles)):
                rows = aligned.rows[tile * config.bm : (tile + 1) * config.bm].long()
                rows, expert = rows[rows < len(out)], int(aligned.experts[tile])
                out[rows] = sm.scaled_mm(a[rows // gather], weight[expert].t(), a_scale[rows // gather], scale[expert], out_dtype=out.dtype)

    import scaled_mm.bench.triton as package

    monkeypatch.setattr(package, "grouped", grouped, raising=False)
    monkeypatch.setitem(__import__("sys").modules, "scaled_mm.bench.triton.grouped", grouped)
    monkeypatch.setattr(vllm, "multiprocessors", lambda device: 1)
    given = inputs("tiny-experts", 9)
    for bms in ((4, 8), (16, 16)):
        found = vllm.VllmLayer(given, 0, stand_ins(), tuple(Config(bm, 16, 64, 1, 1, 1, 1) for bm in bms)).call()
        assert all(relative_error(*pair) < 0.1 for pair in zip(found, plain.reference(given), strict=True))
    assert calls == [2, 1] * 2


def test_vllms_operators_are_of_two_libraries():
    peer = peers.Vllm()
    with pytest.raises(RuntimeError, match="torch.ops._C and torch.ops._moe_C have no topk_softmax"):
        peer._operator("topk_softmax")


def a_peer(name: str) -> Peer:
    peer = Peer()
    peer.name = name
    return peer


def test_a_layer_that_computes_something_else_is_not_timed():
    given = inputs("tiny", 300)
    check = DecoderSuite().check(given, Options())
    out, residual = plain.reference(given)
    assert check.once(a_peer("vllm"), lambda: (out, residual)) == {"error": 0.0}
    without_attention = given.x.float() + given.residual.float()
    for wrong in ((out.neg(), residual), (out, without_attention)):
        with pytest.raises(WrongResult, match="expected an error of 0.25 at most, got"):
            check.once(a_peer("vllm"), lambda wrong=wrong: wrong)


def test_a_graph_that_computes_other_bits_than_a_plain_call_is_wrong():
    given = inputs("tiny", 3)
    check = DecoderSuite().check(given, Options())
    expected = plain.reference(given)
    call = given.keep("ours", lambda i: tuple(one.clone() for one in expected))[0]
    result = Result(us=1.0, samples=[1.0], **check.once(a_peer("ours"), call))
    call()
    assert check.after_timing(a_peer("ours"), result).bit_equal is True
    given.kept("ours")[0][0, 0] += 1
    after = check.after_timing(a_peer("ours"), result)
    assert after.bit_equal is False and after.note == "a plain call and the timed graph give different bits"
    changing = iter([expected, (expected[0] + 0.001, expected[1])])
    assert check.once(a_peer("ours"), lambda: next(changing))["note"] == "two plain calls give different bits"


def test_goals_are_for_few_and_for_many_tokens():
    def case(tokens: int, **us: float) -> DecoderCaseRecord:
        results = {name: Result(us=value, samples=[value]) for name, value in us.items()}
        return DecoderCaseRecord(shape="llama-8b", M=tokens, N=4096, K=4096, rotation=1, outputs=1, cold=True, results=results)

    few, many, bf16 = goals.goals()
    slow, fast = case(64, ours=10.0, vllm=12.0, bf16=16.0), case(65, ours=10.0, vllm=10.5, bf16=15.0)
    assert [few.covers(one) for one in (slow, fast)] == [True, False] and [many.covers(one) for one in (slow, fast)] == [False, True]
    assert few.value(slow) < few.floor and many.value(fast) == many.floor
    assert bf16.value(slow) == bf16.floor and bf16.value(fast) < bf16.floor
