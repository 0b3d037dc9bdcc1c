"""Checkpoints: what is saved is loaded with the same bits, and damaged or foreign ones are refused with file, tensor and reason."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from operands.tiny_models import MODELS, SIZES, bert, logits, tiny, tokens, transformers
from safetensors.torch import load_file, save_file

import scaled_mm as sm
from scaled_mm import nn
from scaled_mm.models.scheme import Scheme, read, write

STATIC_ASYMMETRIC = sm.Int8Config(activation="static", symmetric=False, overrides={"re:.*o_proj": {"activation": "dynamic"}})


def saved(folder, name="llama", config=None, dtype=torch.float32, format="compressed-tensors"):
    model = tiny(name, dtype) if name != "bert" else bert()
    sm.quantize_(model, config or sm.Int8Config(), tokens(), progress=False)
    sm.save_pretrained(model, folder, format)
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A dense checkpoint; `damaged` copies it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    saved(folder, config=sm.Int8Config(activation="dynamic"))
    return folder


@pytest.mark.parametrize("name", [*MODELS, "bert"])
def test_a_saved_model_is_loaded_with_the_same_bits(tmp_path, name):
    model = saved(tmp_path, name, dtype=torch.float32 if name == "bert" else torch.bfloat16)
    loaded = sm.from_pretrained(tmp_path)
    for ids in tokens(2):
        assert torch.equal(logits(loaded, ids), logits(model, ids))
    tensors, ours = loaded.state_dict(), model.state_dict()
    assert set(tensors) == set(ours) and all(torch.equal(tensors[key], ours[key]) and tensors[key].dtype is ours[key].dtype for key in ours)


def t5_encoder():
    """Its first layer hands a position bias to the others, beside the hidden states."""
    config = transformers.T5Config(vocab_size=64, d_model=64, d_ff=96, num_layers=2, num_heads=4, d_kv=16, dtype=torch.float32)
    return transformers.T5EncoderModel._from_config(config).eval()


def qwen3_next():
    """Norms of each head, linear attention, experts with a shared one."""
    sizes = {**SIZES, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48}
    linear = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)
    config = transformers.Qwen3NextConfig(**sizes, **linear, layer_types=["linear_attention", "full_attention"], dtype=torch.float32)
    return transformers.Qwen3NextForCausalLM._from_config(config).eval()


@pytest.mark.parametrize("make", [t5_encoder, qwen3_next])
def test_unusual_models_are_calibrated_saved_and_loaded(tmp_path, make):
    torch.manual_seed(0)
    model, ids = make(), tokens()[0]
    report = sm.quantize_(model, sm.Int8Config(), tokens(), progress=False)
    assert all(0 < layer.error < 0.1 for layer in report.layers if layer.error is not None)
    sm.save_pretrained(model, tmp_path)
    with torch.no_grad():
        assert torch.equal(model(ids)[0], sm.from_pretrained(tmp_path)(ids)[0])


@pytest.mark.filterwarnings("ignore:static scales")
@pytest.mark.parametrize("config", [STATIC_ASYMMETRIC, sm.Int8Config(activation="dynamic", symmetric=False), sm.Int8Config(activation="static")])
def test_every_scheme_survives(tmp_path, config):
    model = saved(tmp_path, "llama with biases", config)
    loaded = sm.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, tokens()[0]), logits(model, tokens()[0]))


@pytest.mark.parametrize("name, disk", [("mixtral", "block_sparse_moe.experts.3.w2"), ("qwen3_moe", "mlp.experts.3.down_proj")])
def test_experts_are_stored_one_by_one_with_the_names_of_other_engines(tmp_path, name, disk):
    model = saved(tmp_path, name)
    tensors = load_file(tmp_path / "model.safetensors")
    experts = model.model.layers[1].mlp.experts
    assert torch.equal(tensors[f"model.layers.1.{disk}.weight"], experts.down_proj[3])
    assert torch.equal(tensors[f"model.layers.1.{disk}.weight_scale"], experts.down_proj_scale[3])
    groups = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["config_groups"].values()
    targets = next(group["targets"] for group in groups if group["input_activations"]["dynamic"])
    assert targets == ["Linear"] or r"re:.*\.experts\..*" in targets
    router = next(key for key in tensors if key.endswith(".gate.weight"))
    assert tensors[router].dtype is torch.float32
    ignored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"]
    assert router.removesuffix(".weight") in ignored and "lm_head" in ignored


def test_only_keys_that_every_reader_knows_are_written(tmp_path):
    saved(tmp_path, dtype=torch.bfloat16)
    config = json.loads((tmp_path / "config.json").read_text())
    quantization = config["quantization_config"]
    assert config["dtype"] == "bfloat16" and config["architectures"] == ["LlamaForCausalLM"]
    assert (quantization["quant_method"], quantization["format"], quantization["quantization_status"]) == (
        "compressed-tensors",
        "int-quantized",
        "compressed",
    )
    for group in quantization["config_groups"].values():
        assert set(group) == {"targets", "weights", "input_activations", "output_activations"}
        assert set(group["weights"]) | set(group["input_activations"]) <= {"num_bits", "type", "symmetric", "strategy", "dynamic", "group_size"}
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["model.layers.0.mlp.up_proj.weight_scale"].dtype is torch.bfloat16
    assert tensors["model.layers.0.mlp.up_proj.weight_scale"].shape == (96, 1)
    assert "lm_head.weight" not in tensors  # tied to the embedding


def test_w8a8_int8_holds_dynamic_symmetric_layers_only(tmp_path):
    model = saved(tmp_path, config=sm.Int8Config(activation="dynamic"), format="w8a8_int8")
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] == "w8a8_int8"
    assert torch.equal(logits(sm.from_pretrained(tmp_path), tokens()[0]), logits(model, tokens()[0]))
    with pytest.raises(sm.ScaledMMError, match="format: w8a8_int8 holds dynamic symmetric layers only, got model.layers.0.*, which is static"):
        saved(tmp_path / "other", format="w8a8_int8")


def test_layers_that_engines_compute_as_one_must_agree(tmp_path):
    model = tiny("llama")
    sm.quantize_(model, sm.Int8Config(activation="dynamic"), tokens(), progress=False)
    attention = model.model.layers[1].self_attn
    k = attention.k_proj
    attention.k_proj = nn.Int8Linear.from_tensors(k.weight, k.weight_scale, None, torch.tensor([0.5]))
    message = r"model: expected one scheme and one input scale for q_proj, k_proj, v_proj of model.layers.1.self_attn, got q_proj dynamic, k_proj st"
    with pytest.raises(sm.ScaledMMError, match=message):
        sm.save_pretrained(model, tmp_path)
    for layer, scale in (("q_proj", 0.5), ("v_proj", 0.25)):
        old = getattr(attention, layer)
        setattr(attention, layer, nn.Int8Linear.from_tensors(old.weight, old.weight_scale, None, torch.tensor([scale])))
    with pytest.raises(sm.ScaledMMError, match=r"q_proj static 0.5, k_proj static 0.5, v_proj static 0.25"):
        sm.save_pretrained(model, tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_one_scale_of_the_whole_weight_is_read(tmp_path, checkpoint):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_scale"
    tensors[name] = tensors[name].mean().reshape(1)
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(sm.from_pretrained(tmp_path).model.layers[0].mlp.up_proj.weight_scale, tensors[name].expand(96, 1))


UP = "model.layers.1.mlp.up_proj"
DAMAGE = {
    "a missing scale": (
        lambda tensors: tensors.pop(f"{UP}.weight_scale"),
        rf"expected the tensor {UP}.weight_scale, there is none in model.safetensors",
    ),
    "a missing norm": (lambda tensors: tensors.pop("model.norm.weight"), "expected the tensor model.norm.weight"),
    "a wrong shape": (
        lambda tensors: tensors.update({f"{UP}.weight": torch.zeros(96, 32, dtype=torch.int8)}),
        rf"model.safetensors: {UP}.weight: expected \[96, 64\], got \[96, 32\]",
    ),
    "a scale of a wrong shape": (
        lambda tensors: tensors.update({f"{UP}.weight_scale": torch.ones(96, 2)}),
        rf"{UP}.weight_scale: expected \[96, 1\] or \[96\] or \[1\] or \[\], got \[96, 2\]",
    ),
    "a scale that is no number": (
        lambda tensors: tensors[f"{UP}.weight_scale"].fill_(float("nan")),
        rf"model.safetensors: {UP}.weight_scale: expected finite positive scales, got nan",
    ),
    "a negative scale": (lambda tensors: tensors[f"{UP}.weight_scale"].neg_(), f"{UP}.weight_scale: expected finite positive scales"),
    "a float weight": (lambda tensors: tensors.update({f"{UP}.weight": torch.zeros(96, 64)}), rf"{UP}.weight: expected int8, got float32"),
    "a zero point of a symmetric weight": (
        lambda tensors: tensors.update({f"{UP}.weight_zero_point": torch.tensor([[0]] * 95 + [[3]], dtype=torch.int8)}),
        rf"model.safetensors: {UP}.weight_zero_point: expected only 0, since int8 weights are symmetric, got 0 to 3",
    ),
    "a tensor of another model": (lambda tensors: tensors.update({"model.layers.9.x": torch.zeros(1)}), "expected no tensor model.layers.9.x"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_with_tensor_and_reason(tmp_path, checkpoint, damage):
    change, message = DAMAGE[damage]
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(sm.ScaledMMError, match=message):
        sm.from_pretrained(tmp_path)


def test_a_truncated_missing_or_unreadable_file_is_refused(tmp_path, checkpoint):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(sm.ScaledMMError, match="model.safetensors: expected a complete safetensors file"):
        sm.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(sm.ScaledMMError, match="expected the file model.safetensors, there is none"):
        sm.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(sm.ScaledMMError, match="config.json: expected JSON"):
        sm.from_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(sm.ScaledMMError, match="path: expected a folder with config.json"):
        sm.from_pretrained(tmp_path)
    with pytest.raises(sm.ScaledMMError, match="path: expected a folder with a checkpoint, or a name on the hub"):
        sm.from_pretrained(tmp_path / "nothing" / "here")


GOOD = write("compressed-tensors", {"a": Scheme(), "b": Scheme(static=True)}, ["lm_head"])


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c: None, "expected a quantization_config, got None"),
        (lambda c: {**c, "quant_method": "gptq"}, "expected quant_method compressed-tensors or w8a8_int8, got 'gptq'"),
        (lambda c: {**c, "format": "pack-quantized"}, "expected the format int-quantized or naive-quantized, got 'pack-quantized'"),
        (lambda c: {**c, "kv_cache_scheme": {"num_bits": 8}}, "expected no kv_cache_scheme"),
        (lambda c: {**c, "config_groups": {}}, "expected config_groups, got {}"),
        (lambda c: changed(c, "weights", num_bits=4), r"config_groups.group_0.weights.num_bits: expected 8, got 4"),
        (lambda c: changed(c, "weights", type="float"), r"config_groups.group_0.weights.type: expected 'int', got 'float'"),
        (lambda c: changed(c, "weights", strategy="group", group_size=128), r"group_0.weights.strategy: expected 'channel' or 'tensor', got 'group'"),
        (
            lambda c: changed(c, "input_activations", dynamic=False),
            r"input_activations: expected strategy token with dynamic true, or tensor with false",
        ),
        (
            lambda c: {**c, "config_groups": {"g": {**c["config_groups"]["group_0"], "input_activations": None}}},
            "g.input_activations: expected an int8 scheme, got None",
        ),
    ],
)
def test_an_unknown_scheme_is_refused_with_the_key(change, message):
    with pytest.raises(sm.ScaledMMError, match=f"config.json: {message}|config.json: .*{message}"):
        read(change(GOOD), "config.json")


def changed(config, which, **fields):
    group = config["config_groups"]["group_0"]
    return {**config, "config_groups": {"group_0": {**group, which: {**group[which], **fields}}}}


def test_a_name_counts_before_a_pattern_and_that_before_a_class():
    config = {**GOOD, "ignore": ["re:.*gate$"]}
    one, two = (GOOD["config_groups"][f"group_{index}"]["input_activations"] for index in (0, 1))
    weights = GOOD["config_groups"]["group_0"]["weights"]
    groups = {
        "class": dict(targets=["Linear"], weights=weights, input_activations=one),
        "pattern": dict(targets=["re:.*up"], weights=weights, input_activations=two),
        "name": dict(targets=["layers.0.up"], weights=weights, input_activations={**one, "symmetric": False}),
    }
    schemes = read({**config, "config_groups": groups}, "config.json")
    assert schemes.of("layers.0.up") == Scheme(False, False) and schemes.of("layers.1.up") == Scheme(True)
    assert schemes.of("layers.1.down") == Scheme() and schemes.of("mlp.gate") is None


def test_models_that_no_checkpoint_can_hold_are_refused(tmp_path):
    for model, message in (
        (tiny("llama"), "model: expected one with int8 layers, got none"),
        (torch.nn.Linear(2, 2), "model: expected a model of transformers, got a Linear"),
    ):
        with pytest.raises(sm.ScaledMMError, match=message):
            sm.save_pretrained(model, tmp_path)
    model = tiny("llama")
    sm.quantize_(model, progress=False)
    with pytest.raises(sm.ScaledMMError, match="format: expected 'compressed-tensors' or 'w8a8_int8', got 'gguf'"):
        sm.save_pretrained(model, tmp_path, "gguf")
    sm.fuse_(model)
    with pytest.raises(sm.ScaledMMError, match="model: expected one without fused modules"):
        sm.save_pretrained(model, tmp_path)


def test_experts_that_stay_float_and_a_compiled_model_survive(tmp_path):
    model = saved(tmp_path, "qwen3_moe", sm.Int8Config(ignore=("lm_head", "re:.*experts$")))
    loaded = sm.from_pretrained(tmp_path)
    assert not any(isinstance(module, nn.Int8Experts) for module in loaded.modules())
    assert torch.equal(logits(loaded, tokens()[0]), logits(model, tokens()[0]))
    sm.save_pretrained(torch.compile(model, backend="eager"), tmp_path / "compiled")
    assert torch.equal(logits(sm.from_pretrained(tmp_path / "compiled"), tokens()[0]), logits(model, tokens()[0]))


def test_files_may_be_read_by_all_whom_the_umask_lets(tmp_path):
    model, mask = tiny("llama"), os.umask(0o027)
    try:
        sm.quantize_(model, progress=False)
        sm.save_pretrained(model, tmp_path)
    finally:
        os.umask(mask)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {path.name: 0o640 for path in tmp_path.iterdir()}


def test_a_full_disk_leaves_the_old_files(tmp_path, checkpoint, monkeypatch):
    import safetensors.torch

    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(tensors, path, **_):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        sm.save_pretrained(sm.from_pretrained(checkpoint), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_layer_that_is_not_quantized_beside_one_that_is_is_refused(tmp_path):
    with pytest.raises(sm.ScaledMMError, match="got q_proj dynamic, k_proj not quantized, v_proj dynamic"):
        saved(tmp_path, config=sm.Int8Config(activation="dynamic", overrides={"re:.*k_proj": None}))


@pytest.mark.parametrize(
    "index", ['{"weight_map": {"a": "../model.safetensors"}}', "{}", '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "/etc/passwd"}}']
)
def test_an_index_that_names_other_files_is_refused(tmp_path, checkpoint, index):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(sm.ScaledMMError, match="index.json: expected a weight_map of tensors to safetensors files of the same folder"):
        sm.from_pretrained(tmp_path)


def test_a_checkpoint_in_several_files_is_loaded(tmp_path, checkpoint):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    parts = [dict(list(tensors.items())[start::2]) for start in (0, 1)]
    for index, part in enumerate(parts):
        save_file(part, tmp_path / f"part{index}.safetensors")
    where = {name: f"part{index}.safetensors" for index, part in enumerate(parts) for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert torch.equal(logits(sm.from_pretrained(tmp_path), tokens()[0]), logits(sm.from_pretrained(checkpoint), tokens()[0]))


@pytest.mark.parametrize("change", [dict(architectures=["pipeline"]), dict(architectures=[3]), dict(model_type="no such model")])
def test_a_config_that_transformers_does_not_know_is_refused(tmp_path, checkpoint, change):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(sm.ScaledMMError, match="config.json: expected"):
        sm.from_pretrained(tmp_path)


def test_keys_that_have_defaults_may_be_absent():
    weights = {"num_bits": 8, "strategy": "channel"}
    groups = {"a": dict(targets=["Linear"], weights=weights, input_activations={"num_bits": 8})}
    assert read({**GOOD, "config_groups": groups}, "config.json").of("x") == Scheme(static=True)
    with pytest.raises(sm.ScaledMMError, match=r"quantization_config.ignore: expected a regular expression after re:"):
        read({**GOOD, "ignore": ["re:("]}, "config.json")


def test_of_several_patterns_the_first_in_the_alphabet_decides_as_in_compressed_tensors():
    def group(targets, dynamic):
        numbers = dict(num_bits=8, type="int")
        inputs = dict(**numbers, strategy="token" if dynamic else "tensor", dynamic=dynamic)
        return {"targets": targets, "weights": dict(**numbers, strategy="channel"), "input_activations": inputs}

    groups = {"a": group(["re:.*proj", "Linear"], True), "b": group(["re:.*down_proj", "model.up_proj"], False)}
    schemes = read({"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}, "config.json")
    found = {name: schemes.of(name).static for name in ("model.down_proj", "model.up_proj", "model.gate_proj", "model.head")}
    assert found == {"model.down_proj": True, "model.up_proj": True, "model.gate_proj": False, "model.head": False}
    targets = [target for one in groups.values() for target in one["targets"]]
    match = pytest.importorskip("compressed_tensors.utils.match")
    for name, static in found.items():
        first = match.match_targets(name, torch.nn.Linear(1, 1), targets)[0]
        assert (first in groups["b"]["targets"]) is static, name


def test_latent_attention_has_one_scheme_for_what_vllm_fuses(tmp_path):
    model = torch.nn.Module()
    model.attn = torch.nn.Module()
    model.attn.q_a_proj = nn.Int8Linear(4, 4, bias=False)
    model.attn.kv_a_proj_with_mqa = nn.Int8Linear(4, 4, bias=False, static=True)
    model.attn.kv_a_proj_with_mqa.input_scale.fill_(0.5)
    model.config, model.save_pretrained = None, None
    with pytest.raises(sm.BadParamError, match="one scheme and one input scale for q_a_proj, kv_a_proj_with_mqa of attn, got q_a_proj dynamic"):
        sm.save_pretrained(model, tmp_path)


def test_a_model_of_a_gguf_file_keeps_its_rotary_frequencies_in_float32():
    from scaled_mm.models.source import _without_gguf_attributes

    model = tiny("llama with biases", torch.bfloat16)
    fresh = _without_gguf_attributes(model)
    frequencies = fresh.model.rotary_emb.inv_freq
    assert frequencies.dtype is torch.float32 and torch.equal(frequencies, model.model.rotary_emb.inv_freq)
    assert fresh.dtype is torch.bfloat16 and torch.equal(logits(fresh, tokens()[0]), logits(model, tokens()[0]))


def afmoe():
    """Its norms, and the bias of its router, stay float32."""
    fields = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, num_shared_experts=1, num_dense_layers=1, head_dim=16)
    return transformers.AfmoeForCausalLM._from_config(transformers.AfmoeConfig(**SIZES, **fields), dtype=torch.float32).eval()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make, kept", [(afmoe, "norm.weight"), (afmoe, "expert_bias"), (t5_encoder, "DenseReluDense.wo.weight")])
def test_what_transformers_keeps_in_float32_stays_float32(tmp_path, make, kept, dtype):
    torch.manual_seed(0)
    make().save_pretrained(tmp_path / "float")
    model = transformers.AutoModel.from_pretrained(tmp_path / "float", dtype=dtype) if make is afmoe else None
    model = (model or transformers.T5EncoderModel.from_pretrained(tmp_path / "float", dtype=dtype)).eval()
    sm.quantize_(model, sm.Int8Config(ignore=["re:.*wo"]), progress=False)
    sm.save_pretrained(model, tmp_path)
    loaded = sm.from_pretrained(tmp_path)
    tensors, ours = loaded.state_dict(), model.state_dict()
    assert any(key.endswith(kept) and tensors[key].dtype is torch.float32 for key in tensors) is (dtype is torch.float16 or kept == "expert_bias")
    assert all(torch.equal(tensors[key], ours[key]) and tensors[key].dtype is ours[key].dtype for key in ours)
    assert torch.equal(logits(loaded, tokens()[0]), logits(model, tokens()[0]))


def test_a_model_that_is_float16_as_a_whole_stays_so(tmp_path):
    model = saved(tmp_path, "deepseek", sm.Int8Config(activation="dynamic"), dtype=torch.float16)
    assert all(tensor.dtype is model.state_dict()[key].dtype for key, tensor in sm.from_pretrained(tmp_path).state_dict().items())


def test_rotary_angles_are_computed_in_float32(tmp_path):
    config = transformers.GPTJConfig(vocab_size=64, n_embd=64, n_head=4, n_layer=2, rotary_dim=8)
    transformers.GPTJForCausalLM(config).save_pretrained(tmp_path)
    model = transformers.GPTJForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    sm.quantize_(model, progress=False)
    sm.save_pretrained(model, tmp_path)
    assert torch.equal(logits(sm.from_pretrained(tmp_path), tokens()[0]), logits(model, tokens()[0]))
