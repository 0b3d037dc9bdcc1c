"""`from_gguf`: a GGUF file on its own blocks computes what the dequantized model computes, and says which layers are dense."""

from __future__ import annotations

import copy
import json
import os
import types

import pytest
import torch
from operands.tiny_gguf import FORMATS, MODULES, tokens, write, write_experts
from operands.tiny_models import distance, logits
from safetensors.torch import load_file, save_file

import scaled_mm as sm
from scaled_mm import nn
from scaled_mm.cli import main
from scaled_mm.models import gguf as under_test
from scaled_mm.models import gguf_source
from scaled_mm.models.source import load_model, load_tokenizer

# |logits - reference| / |reference| with the dequantized float32 model on a CPU: the same weights, sums in another order. Measured: 3e-7 here, 2.4e-6
# for the 30 layers of SmolLM2.
NEAR = 1e-5
LINEARS = [f"model.layers.{layer}.{name}" for layer in range(2) for name in MODULES.values()]


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "tiny.gguf")


def packed(path, **options) -> tuple[torch.nn.Module, sm.GgufReport]:
    reports = []
    model = sm.from_gguf(path, report=reports.append, progress=False, **options)
    (report,) = reports
    return model, report


@torch.no_grad()
def hidden(model, ids):
    return model.model(ids).last_hidden_state


@pytest.mark.parametrize("head", [None, "q5_0", "f16"])
def test_it_computes_what_the_dequantized_model_computes(tmp_path, head):
    path = write(tmp_path / "tiny.gguf", head=head)
    (model, report), reference = packed(path), load_model(path)
    assert distance(hidden(model, tokens()), hidden(reference, tokens())) < NEAR
    assert distance(logits(model, tokens()), logits(reference, tokens())) < NEAR
    options = dict(max_new_tokens=16, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert torch.equal(model.generate(tokens(), **options), reference.generate(tokens(), **options))
    assert not model.training and {layer.name for layer in report.layers} == {*LINEARS, "lm_head"}


def test_every_linear_layer_has_the_blocks_of_the_file(file):
    model, report = packed(file)
    tensors, reference = sm.load_gguf(file), load_model(file)
    for layer in report.layers:
        module, found = model.get_submodule(layer.name), tensors[layer.tensor]
        assert type(module) is nn.BlockLinear and module.fmt == layer.fmt == found.fmt and not layer.reason
        blocks, weight = module.packed.unpack(), reference.get_submodule(layer.name).weight
        assert torch.equal(sm.dequantize_block(blocks, layer.fmt), weight)  # q and k in the order of transformers
        permuted = layer.name.endswith(("q_proj", "k_proj"))
        assert torch.equal(blocks, found.q) is not permuted and torch.equal(blocks.flatten(1).sort(0)[0], found.q.flatten(1).sort(0)[0])
    assert report.counts() == {"q4_0": 4, "q4_1": 4, "q5_0": 2, "q5_1": 2, "q8_0": 3}
    assert report.packed_bytes == sum(tensors[layer.tensor].q.nbytes for layer in report.layers)
    assert report.dense_bytes == sum(parameter.nbytes for parameter in model.parameters()) == 4 * (96 * 64 + 5 * 64)
    assert json.loads(json.dumps(report.to_dict()))["layers"][0]["tensor"] == "blk.0.attn_q.weight"


def test_a_tied_head_gets_the_blocks_of_the_embedding_and_stays_packed(file):
    model, report = packed(file)
    assert [layer.tied for layer in report.layers] == [False] * 14 + [True] and report.layers[-1].tensor == "token_embd.weight"
    before = logits(model, tokens())
    model.tie_weights()
    assert type(model.lm_head) is nn.BlockLinear and not model.config.tie_word_embeddings and "lm_head.weight" not in dict(model.named_parameters())
    assert torch.equal(logits(model, tokens()), before) and model.get_input_embeddings().weight.dtype is torch.float32


def test_other_types_stay_dense_and_the_report_says_so(tmp_path):
    path = write(tmp_path / "tiny.gguf", {**FORMATS, "attn_v": "f16", "ffn_down": "q6_k"}, embedding="f16")
    (model, report), reference = packed(path), load_model(path)
    dense = {layer.name: layer.reason for layer in report.layers if not layer.fmt}
    assert set(dense) == {f"model.layers.{i}.{name}" for i in range(2) for name in ("self_attn.v_proj", "mlp.down_proj")} | {"lm_head"}
    assert dense["model.layers.0.self_attn.v_proj"] == "blk.0.attn_v.weight is of float16"
    assert dense["model.layers.1.mlp.down_proj"] == "blk.1.ffn_down.weight is of q6_k; requantize=True (--requantize) packs it as q8_0"
    assert "lm_head is dense: token_embd.weight is of float16" in str(report) and report.counts()["dense"] == 5
    assert model.lm_head.weight is model.get_input_embeddings().weight and model.config.tie_word_embeddings
    assert distance(logits(model, tokens()), logits(reference, tokens())) < NEAR


@pytest.mark.parametrize("fmt, converted", [("q4_k", "q4_1"), ("q5_k", "q5_1")])
def test_k_quants_are_converted_and_the_report_says_so(tmp_path, fmt, converted):
    path = write(tmp_path / "tiny.gguf", {**FORMATS, "ffn_down": fmt})
    (model, report), reference = packed(path), load_model(path)
    down = [layer for layer in report.layers if layer.name.endswith("down_proj")]
    assert [(layer.fmt, layer.stored, layer.reason) for layer in down] == [(converted, fmt, "")] * 2 and report.counts()[f"{fmt} as {converted}"] == 2
    module = model.get_submodule(down[0].name)
    assert module.fmt == module.packed.fmt == converted
    assert 0 < distance(module.packed.unpack().float(), torch.zeros(())) and distance(logits(model, tokens()), logits(reference, tokens())) < 2e-3
    weight = sm.dequantize_block(module.state_dict()["weight"], converted)
    assert distance(weight, reference.get_submodule(down[0].name).weight) < 1e-3


def test_q6_k_is_quantized_again_if_asked_for_and_the_report_says_so(tmp_path):
    path = write(tmp_path / "tiny.gguf", {**FORMATS, "ffn_down": "q6_k"})
    (model, report), reference = packed(path, requantize=True), load_model(path)
    again = [layer for layer in report.layers if layer.stored == "q6_k"]
    assert [(layer.fmt, layer.reason, layer.kind) for layer in again] == [("q8_0", "", "q6_k as q8_0")] * 2 and "dense" not in report.counts()
    assert sum(isinstance(module, nn.BlockLinear) for module in model.modules()) == len(report.layers)
    for layer in again:
        weight, wanted = sm.dequantize_block(model.get_submodule(layer.name).packed.unpack(), "q8_0"), reference.get_submodule(layer.name).weight
        assert 1e-3 < distance(weight, wanted) < 7e-3
    assert distance(logits(model, tokens()), logits(reference, tokens())) < 0.02


def test_q6_k_that_is_too_large_for_q8_0_stays_dense(tmp_path, monkeypatch):
    path = write(tmp_path / "tiny.gguf", {**FORMATS, "ffn_down": "q6_k"})
    blocks = sm.load_gguf(path)["blk.0.ffn_down.weight"].q.clone()
    large = torch.tensor([4096.0]).half().view(torch.uint8)
    content = path.read_bytes()
    where = content.index(bytes(blocks[0, 0].tolist()))
    path.write_bytes(content[: where + 208] + bytes(large.tolist()) + content[where + 210 :])
    _, report = packed(path, requantize=True)
    reasons = [layer.reason for layer in report.layers if layer.name == "model.layers.0.mlp.down_proj"]
    assert reasons == ["blk.0.ffn_down.weight is of q6_k, and too large or not finite for q8_0"]


def test_requantize_is_a_truth_value_and_an_option_of_packed(file, capsys):
    with pytest.raises(sm.BadParamError, match="requantize: expected True or False, got 'q6_k'"):
        sm.from_gguf(file, requantize="q6_k")
    assert main(["generate", str(file), "hello", "--requantize"]) == 2
    assert "--requantize: expected --packed beside it" in capsys.readouterr().err


def test_a_layer_whose_weight_is_not_that_of_the_blocks_stays_dense(file, monkeypatch):
    def changed(*arguments, **options):
        model = load_model(*arguments, **options)
        attention, mlp = model.model.layers[0].self_attn, model.model.layers[1].mlp
        attention.q_proj.weight[3, 5] *= 1 + 2**-20
        attention.k_proj.weight[:] = attention.k_proj.weight.flip(0)
        attention.o_proj = torch.nn.Linear(64, 64, bias=False)
        mlp.up_proj.weight = mlp.gate_proj.weight
        mlp.other = torch.nn.Linear(32, 32, bias=False)
        return model

    monkeypatch.setattr(under_test, "load_model", changed)
    model, report = packed(file)
    reasons = {layer.name.removeprefix("model.layers."): layer.reason for layer in report.layers if layer.reason}
    assert reasons == {
        **{
            f"0.self_attn.{name}_proj": f"transformers loaded a weight that the blocks of blk.0.attn_{tensor}.weight do not have"
            for name, tensor in (("q", "q"), ("k", "k"), ("o", "output"))
        },
        "1.mlp.gate_proj": "its weight is also model.layers.1.mlp.up_proj.weight",
        "1.mlp.up_proj": "its weight is also model.layers.1.mlp.gate_proj.weight",
        "1.mlp.other": "transformers names no tensor of the file for it",
    }
    assert all(type(model.get_submodule(f"model.layers.{name}")) is torch.nn.Linear for name in reasons)


@pytest.mark.parametrize("name", ["blk.1.attn_q.weight", "blk.0.ffn_norm.weight", "output_norm.weight"])
def test_a_file_without_a_tensor_of_its_model_is_refused(tmp_path, name):
    """transformers would load random values."""
    path = write(tmp_path / "tiny.gguf", without=name)
    with pytest.raises(sm.errors.BadParamError, match=f"^path: expected the tensors of a LlamaForCausalLM, .* has no {name}$"):
        sm.from_gguf(path, progress=False)


def test_a_model_that_reads_the_weights_of_its_layers_is_refused(file, monkeypatch):
    def changed(*arguments, **options):
        model = load_model(*arguments, **options)
        forward = model.forward
        model.forward = lambda *inputs, **rest: (model.lm_head.weight.dtype, forward(*inputs, **rest))[1]  # as Mamba's
        return model

    monkeypatch.setattr(under_test, "load_model", changed)
    with pytest.raises(sm.errors.BadParamError, match="^path: expected a model whose linear layers can be replaced, got a LlamaForCausalLM"):
        sm.from_gguf(file, progress=False)


def test_a_float_model_without_a_tensor_is_refused(tmp_path):
    path = write(tmp_path / "tiny.gguf", without="blk.1.attn_q.weight")
    with pytest.raises(sm.BadParamError, match="^MODEL: expected the tensors of a LlamaForCausalLM, .* has no blk.1.attn_q.weight$"):
        load_model(path)
    model = load_model(write(tmp_path / "whole.gguf"))
    model.save_pretrained(tmp_path / "folder")
    tensors = load_file(tmp_path / "folder" / "model.safetensors")
    rest = {name: tensor for name, tensor in tensors.items() if "layers.0.mlp" not in name}
    save_file(rest, tmp_path / "folder" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(sm.BadParamError, match="has no model.layers.0.mlp.down_proj.weight and 2 more"):
        load_model(tmp_path / "folder")


def test_tensors_that_the_model_has_no_place_for_are_named(tmp_path):
    """transformers does not read them, so the model is another one."""
    path = write(tmp_path / "tiny.gguf", more={"blk.0.attn_q.bias": (64,), "rope_freqs.weight": (8,)})
    with pytest.warns(UserWarning, match="a LlamaForCausalLM of transformers does not use blk.0.attn_q.bias and 1 more"):
        _, report = packed(path)
    with pytest.warns(UserWarning, match="a LlamaForCausalLM of transformers does not use blk.0.attn_q.bias and 1 more"):
        load_model(path)
    assert report.unused == ["blk.0.attn_q.bias", "rope_freqs.weight"] and str(report).endswith("not used: blk.0.attn_q.bias, rope_freqs.weight")


@pytest.mark.parametrize("values", [{"block_count": "2"}, {"block_count": -2}, {"embedding_length": 64.0}, {"split.count": "2"}])
def test_sizes_in_the_header_that_are_no_whole_numbers_are_refused(file, monkeypatch, values):
    header = gguf_source.read_header(file)
    changed = {**header.values, **{key if "." in key else f"llama.{key}": value for key, value in values.items()}}
    monkeypatch.setattr(gguf_source, "read_header", lambda path: header._replace(values=changed))
    with pytest.raises(sm.BadParamError, match="^MODEL: expected a (whole )?model, got .*(without llama.* as a number|one of 2 files)"):
        load_model(file)


def test_the_commands_name_them_in_a_line(tmp_path, capsys, monkeypatch):
    class Tokenizer:
        chat_template = None

        def __call__(self, prompt, return_tensors):
            return {"input_ids": tokens()[:1, :3]}

        def decode(self, ids, skip_special_tokens):
            return "words"

    monkeypatch.setattr("scaled_mm.models.source.load_tokenizer", lambda path: Tokenizer())
    path = write(tmp_path / "tiny.gguf", more={"rope\n\x1b[31m.weight": (8,)})
    assert main(["generate", str(path), "hello", "--tokens", "2", "--device", "cpu"]) == 0
    assert f"\nwarning: {path}: a LlamaForCausalLM of transformers does not use 'rope\\n\\x1b[31m.weight'\n" in capsys.readouterr().err
    assert main(["generate", str(path), "hello", "--tokens", "2", "--device", "cpu", "--packed"]) == 0
    shown = capsys.readouterr().err
    assert shown.count("x1b[31m") == 1 and "\nnot used: 'rope\\n\\x1b[31m.weight'\n" in shown


def test_a_file_whose_names_transformers_does_not_tell_is_loaded_and_not_packed(file, monkeypatch):
    """Qwen3.5's, for example, which it loads in another way."""
    config = types.SimpleNamespace(model_type="qwen3_5_text", num_hidden_layers=2)
    assert gguf_source._names_of_transformers(types.SimpleNamespace(config=config, state_dict=dict, named_children=list), "qwen35") is None
    monkeypatch.setattr(gguf_source, "_names_of_transformers", lambda *_: None)
    with pytest.warns(UserWarning, match="it is not known which of its tensors a LlamaForCausalLM of transformers uses"):
        assert logits(load_model(file), tokens()).isfinite().all()
    with pytest.raises(sm.BadParamError, match="path: expected an architecture whose tensor names transformers tells, got 'llama' in "):
        sm.from_gguf(file, progress=False)


@pytest.mark.filterwarnings("error:.*of transformers does not use")
def test_a_mixture_keeps_its_experts_dense(tmp_path):
    path = write_experts(tmp_path / "experts.gguf")
    source = gguf_source.GgufSource(path, "MODEL")
    source.tensors.remove("blk.0.ffn_gate_exps.weight")
    with pytest.raises(sm.BadParamError, match="has no blk.0.ffn_gate_exps$"):
        load_model(path, gguf=source)
    (model, report), reference = packed(path), load_model(path)
    assert report.counts()["q4_0"] == 2 and not report.unused and not any("exps" in layer.tensor for layer in report.layers)
    assert distance(logits(model, tokens()), logits(reference, tokens())) < NEAR


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(layers=1000), "path: expected the tensors of 1000 layers, .* has none of blk.999"),
        (dict(parts=3), "path: expected a whole model, got .*, one of 3 files"),
    ],
)
def test_a_file_that_is_not_a_whole_model_is_refused_before_one_is_made(tmp_path, monkeypatch, options, message):
    monkeypatch.setattr(under_test, "load_model", None)
    with pytest.raises(sm.BadParamError, match=message):
        sm.from_gguf(write(tmp_path / "tiny.gguf", **options), progress=False)
    with pytest.raises(sm.BadParamError, match=message.replace("path", "MODEL")):
        load_model(tmp_path / "tiny.gguf")


def test_a_file_without_the_sizes_of_its_model_is_refused_before_one_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(under_test, "load_model", None)
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "none.gguf", "llama")
    writer.add_tensor("output.weight", torch.zeros(4, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(sm.BadParamError, match="path: expected a model, got .* without llama.block_count"):
        sm.from_gguf(tmp_path / "none.gguf", progress=False)


def cpu_out_of_memory(text: str) -> RuntimeError:
    return RuntimeError(f"DefaultCPUAllocator: can't allocate memory: {text}")


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError, cpu_out_of_memory])
def test_a_lack_of_memory_is_not_blamed_on_the_file(file, monkeypatch, error):
    def fails(*_):
        raise error("no room")

    monkeypatch.setattr(under_test, "trial", fails)
    with pytest.raises(type(error("")), match="no room"):
        sm.from_gguf(file, progress=False)


def test_layers_of_another_class_stay_dense_and_are_named(file, monkeypatch):
    class Other(torch.nn.Linear):
        """As Falcon's."""

    def changed(*arguments, **options):
        model = load_model(*arguments, **options)
        model.model.layers[0].mlp.up_proj.__class__ = Other
        return model

    monkeypatch.setattr(under_test, "load_model", changed)
    _, report = packed(file)
    assert [(layer.name, layer.reason) for layer in report.layers if layer.reason] == [("model.layers.0.mlp.up_proj", "its class is Other")]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_dense_has_the_given_dtype_and_the_layers_are_packed(file, dtype):
    model, report = packed(file, dtype=dtype, mode="w4a16")
    assert "dense" not in report.counts() and {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert {module.mode for module in model.modules() if isinstance(module, nn.BlockLinear)} == {"w4a16"}
    assert distance(logits(model, tokens()), logits(load_model(file), tokens())) < 0.03 and logits(model, tokens()).dtype is dtype


def test_copies_and_state_dicts_keep_its_bits(file, tmp_path):
    model, other = sm.from_gguf(file, progress=False), sm.from_gguf(file, progress=False)
    before = logits(model, tokens())
    assert torch.equal(logits(copy.deepcopy(model), tokens()), before)
    for parameter in other.parameters():
        parameter.zero_()
    for module in other.modules():
        if isinstance(module, nn.BlockLinear):
            module.weight_levels.zero_()
    assert not torch.equal(logits(other, tokens()), before)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(logits(other, tokens()), before)


def test_it_compiles_as_one_graph(file):
    model = sm.from_gguf(file, progress=False)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert distance(logits(compiled, tokens()), logits(model, tokens())) < NEAR


def test_it_is_evaluated_beside_the_dequantized_model(file):
    result = sm.evaluate(sm.from_gguf(file, progress=False), [tokens()], load_model(file))
    assert result.kl < 1e-9 and list(result.layers) == ["model.layers.0", "model.layers.1"] and max(result.layers.values()) < NEAR


def test_it_is_not_saved_quantized_or_fused(file, tmp_path):
    model = sm.from_gguf(file, progress=False)
    with pytest.raises(sm.BadParamError, match="model: expected one without packed weights"):
        model.save_pretrained(tmp_path / "saved")
    with pytest.raises(sm.BadParamError, match="model: expected one without packed layers of a GGUF file"):
        sm.save_pretrained(model, tmp_path / "saved")
    for change in (sm.quantize_, sm.fuse_, sm.reproducible_):
        with pytest.raises(sm.BadParamError, match="model: expected"):
            change(model)
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(dtype=torch.float64), sm.BadTensorDtypeError, "dtype: expected float16, bfloat16 or float32, got torch.float64"),
        (dict(mode="w8a8"), sm.BadParamError, "mode: expected one of"),
        (dict(device="gpu"), sm.BadParamError, "device: expected"),
    ],
)
def test_other_arguments_are_refused(file, options, error, message):
    with pytest.raises(error, match=message):
        sm.from_gguf(file, **options)


def test_what_is_no_gguf_model_is_refused(tmp_path):
    (tmp_path / "text.gguf").write_text("GGUF, but no header")
    with pytest.raises(sm.BadParamError, match="path: expected a file NAME.gguf, got "):
        sm.from_gguf(tmp_path)
    with pytest.raises(FileNotFoundError):
        sm.from_gguf(tmp_path / "none.gguf")
    with pytest.raises(sm.BadParamError, match="path: expected a GGUF file"):
        sm.from_gguf(tmp_path / "text.gguf")
    with pytest.raises(sm.BadParamError, match="path: transformers cannot load .*rwkv"):
        sm.from_gguf(write(tmp_path / "rwkv.gguf", architecture="rwkv6"))
    with pytest.raises(sm.BadParamError, match="path: expected a file NAME.gguf, got 3"):
        sm.from_gguf(3)


def test_a_missing_package_is_named(file, monkeypatch):
    find = under_test.importlib.util.find_spec
    monkeypatch.setattr(under_test.importlib.util, "find_spec", lambda name: None if name == "accelerate" else find(name))
    with pytest.raises(ImportError, match=r'from_gguf: expected the package accelerate, which is not installed; pip install ".\[models\]"'):
        sm.from_gguf(file)


def test_the_command_refuses_what_is_no_file(tmp_path, capsys):
    assert main(["generate", str(tmp_path), "Hello", "--packed"]) == 2
    assert "--packed: expected a GGUF file as MODEL, got" in " ".join(capsys.readouterr().err.split())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_computes_nearly_what_the_cpu_computes(file, dtype):
    on_gpu, on_cpu = sm.from_gguf(file, dtype=dtype, device="cuda", progress=False), sm.from_gguf(file, dtype=dtype, progress=False)
    assert {parameter.device.type for parameter in on_gpu.parameters()} == {"cuda"} == {buffer.device.type for buffer in on_gpu.buffers()}
    expected = logits(on_gpu, tokens().cuda())
    assert torch.equal(logits(on_cpu.cuda(), tokens().cuda()), expected)  # moved, or made there
    assert distance(expected.cpu(), logits(load_model(file), tokens())) < (2e-3 if dtype is torch.float32 else 0.03)  # float16 inputs of the products


@pytest.mark.skipif("SCALED_MM_SMOLLM2" not in os.environ, reason="SCALED_MM_SMOLLM2 does not name the GGUF file of SmolLM2")
def test_smollm2_writes_the_text_of_the_dequantized_model(capsys):
    path = os.environ["SCALED_MM_SMOLLM2"]
    (model, report), reference, tokenizer = packed(path), load_model(path), load_tokenizer(path)
    assert report.counts() == {"q4_1": 210, "q8_0": 1} and report.packed_bytes < 0.2 * sum(one.nbytes for one in reference.parameters())
    for prompt in ("What is the capital of France?", "Write a short poem about the sea.", "Explain what a prime number is."):
        message = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
        text = reference.generate(ids, max_new_tokens=24, do_sample=False)
        assert torch.equal(model.generate(ids, max_new_tokens=24, do_sample=False), text), prompt
        assert distance(logits(model, text), logits(reference, text)) < NEAR
    del model, reference
    assert main(["generate", path, "What is the capital of France?", "--packed", "--tokens", "8", "--device", "cpu", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["packed"] == 211 and "Paris" in said["text"]
