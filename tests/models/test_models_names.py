"""Names on disk: models whose tensors transformers renames, merges or splits there are saved whole, and are read by both loaders."""

from __future__ import annotations

import json

import pytest
import torch
from operands.tiny_models import EXPERTS, MLA, SIZES, distance, logits, tokens, transformers
from safetensors.torch import load_file, save_file

import scaled_mm as sm
from scaled_mm import nn
from scaled_mm.models.save import check_savable

IDS = tokens()[0]
PLAIN = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
MERGED = ("NomicBert", "Gte", "JinaEmbeddingsV3")


def made(name: str, kind: str, **fields):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **PLAIN, **fields}, dtype=torch.float32)
    return getattr(transformers, name + kind)._from_config(config, dtype=torch.float32).eval()


def encoder(name: str):
    return made(name, "Model", initializer_range=0.3)


def same(loaded: torch.nn.Module, model: torch.nn.Module) -> bool:
    ours, theirs = model.state_dict(), loaded.state_dict()
    return (
        set(ours) == set(theirs) and all(torch.equal(ours[key], theirs[key]) for key in ours) and torch.equal(logits(loaded, IDS), logits(model, IDS))
    )


STATIC_QKV = sm.Int8Config(activation="dynamic", overrides={"re:.*(q|k|v)_proj": {"activation": "static", "smooth": None}})


@pytest.mark.filterwarnings("ignore:static scales")
@pytest.mark.parametrize("config", [sm.Int8Config(activation="dynamic"), STATIC_QKV, sm.Int8Config(overrides={"re:.*(q|k|v)_proj": None})])
@pytest.mark.parametrize("name", MERGED)
def test_layers_that_transformers_merges_on_disk_are_saved_apart(tmp_path, name, config):
    model = encoder(name)
    sm.quantize_(model, config, tokens(), progress=False)
    sm.save_pretrained(model, tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    assert sum(key.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) for key in names) == 6
    assert same(sm.from_pretrained(tmp_path), model)
    pytest.importorskip("compressed_tensors")
    assert distance(logits(type(model).from_pretrained(tmp_path).eval(), IDS), logits(model, IDS)) < 0.1
    assert same(sm.convert_(type(model).from_pretrained(tmp_path)).eval(), model)


def test_transformers_leaves_a_head_float_that_has_another_name_on_disk(tmp_path):
    pytest.importorskip("compressed_tensors")
    model = made("GPTNeoX", "ForCausalLM")
    sm.quantize_(model, sm.Int8Config(activation="dynamic"), progress=False)
    sm.save_pretrained(model, tmp_path)
    assert {"lm_head", "embed_out"} <= set(json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"])
    theirs = type(model).from_pretrained(tmp_path).eval()
    assert type(theirs.lm_head) is torch.nn.Linear and distance(logits(theirs, IDS), logits(model, IDS)) < 0.1
    assert same(sm.convert_(type(model).from_pretrained(tmp_path)).eval(), model) and same(sm.from_pretrained(tmp_path), model)


def test_a_parameter_that_is_several_tensors_on_disk_is_loaded(tmp_path):
    model = made("OlmoHybrid", "ForCausalLM", layer_types=["linear_attention", "full_attention"])
    sm.quantize_(model, progress=False)
    sm.save_pretrained(model, tmp_path)
    assert "model.layers.0.linear_attn.q_conv1d.weight" in load_file(tmp_path / "model.safetensors")
    assert same(sm.from_pretrained(tmp_path), model)


def test_a_tensor_that_transformers_stores_in_another_order_is_refused(tmp_path, monkeypatch):
    model = encoder("NomicBert")
    sm.quantize_(model, progress=False)

    def reversed_norms(_, tensors):
        return {name: tensor.flip(0) if "LayerNorm" in name else tensor for name, tensor in tensors.items()}

    def one_norm(_, tensors):
        return {name.replace("layers.1", "layers.0") if "layernorm" in name else name: tensor for name, tensor in tensors.items()}

    for conversion, name in (reversed_norms, "embeddings.LayerNorm.weight"), (one_norm, "layers.0.post_attention_layernorm.weight"):
        monkeypatch.setattr("scaled_mm.models.disk.on_disk", conversion)
        with pytest.raises(sm.BadParamError, match=f"stores as they are or divided by rows, got {name}"):
            sm.save_pretrained(model, tmp_path)
    assert not any(tmp_path.iterdir()) and isinstance(model.layers[0].self_attn.q_proj, nn.Int8Linear)


def test_names_on_disk_do_not_depend_on_the_file_that_a_model_came_from(tmp_path):
    model = encoder("Gte")
    model.save_pretrained(tmp_path)
    tensors = {f"new.{name}": tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = transformers.GteModel.from_pretrained(tmp_path).eval()
    conversions = model._weight_conversions
    sm.quantize_(model, progress=False)
    sm.save_pretrained(model, tmp_path / "int8")
    assert model._weight_conversions is conversions and same(sm.from_pretrained(tmp_path / "int8"), model)


class OwnLlama(transformers.LlamaForCausalLM):
    pass


def llama(change=lambda model: None, kind=transformers.LlamaForCausalLM):
    model = kind._from_config(transformers.LlamaConfig(**SIZES), dtype=torch.float32).eval()
    change(model)
    sm.quantize_(model, progress=False)
    return model


UNREADABLE = {
    "a class of one's own": (lambda: llama(kind=OwnLlama), "config.json: expected the name of a model class of transformers in architectures"),
    "a buffer of one's own": (
        lambda: llama(lambda model: model.model.layers[0].register_buffer("extra", torch.ones(3))),
        r"model.safetensors: expected no tensor model.layers.0.extra \(1 such\), for which the model has no place",
    ),
    "a changed size": (
        lambda: llama(lambda model: setattr(model.model.norm, "weight", torch.nn.Parameter(torch.ones(32)))),
        r"model.safetensors: model.norm.weight: expected \[64\], got \[32\]",
    ),
}


@pytest.mark.parametrize("which", UNREADABLE)
def test_a_model_that_could_not_be_loaded_is_not_saved(tmp_path, which):
    make, message = UNREADABLE[which]
    with pytest.raises(sm.BadParamError, match=f"model: expected one whose checkpoint from_pretrained reads, got: {message}"):
        sm.save_pretrained(make(), tmp_path / "int8")
    assert not (tmp_path / "int8").exists()


MISTRAL4 = dict(n_routed_experts=4, n_group=1, topk_group=1, **MLA, **EXPERTS)
HYBRID = dict(num_local_experts=4, shared_intermediate_size=32, layer_types=["attention", "attention"])
WHOLE = {"GraniteMoe": dict(num_local_experts=4), "GraniteMoeHybrid": HYBRID, "Mistral4": MISTRAL4}


@pytest.mark.parametrize("name", WHOLE)
def test_experts_that_transformers_stores_in_one_tensor_are_saved_one_by_one_if_int8(tmp_path, name):
    model = made(name, "ForCausalLM", **WHOLE[name])
    sm.quantize_(model, progress=False)
    check_savable(model)
    sm.save_pretrained(model, tmp_path)
    assert sum(key.endswith("experts.3.gate_proj.weight_scale") for key in load_file(tmp_path / "model.safetensors")) == 2
    assert same(sm.from_pretrained(tmp_path), model)


@pytest.mark.parametrize("name", WHOLE)
def test_experts_that_transformers_stores_in_one_tensor_stay_so_if_float(tmp_path, name):
    pytest.importorskip("compressed_tensors")
    model = made(name, "ForCausalLM", **WHOLE[name])
    sm.quantize_(model, sm.Int8Config(ignore=("lm_head", "re:.*experts$")), progress=False)
    sm.save_pretrained(model, tmp_path)
    loaded = sm.from_pretrained(tmp_path)
    assert any(isinstance(module, nn.Int8Linear) for module in loaded.modules()) and same(loaded, model)
    assert distance(logits(type(model).from_pretrained(tmp_path).eval(), IDS), logits(model, IDS)) < 0.1
