"""Checkpoints that the real llm-compressor wrote (`llmcompressor_files.py`, a recorded run) are loaded, and compute what its model computed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from operands.tiny_models import distance
from safetensors.torch import load_file

import scaled_mm as sm
from scaled_mm import nn

DATA = Path(__file__).parent / "data" / "llmcompressor"
NAMES = sorted(folder.name for folder in DATA.iterdir())
SAME_SCALES = ["dynamic_asymmetric", "static", "static_asymmetric"]


def recorded(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [2, 24], llm-compressor's logits float32 [2, 24, vocabulary])."""
    tensors = load_file(DATA / name / "logits.safetensors")
    return tensors["ids"], tensors["logits"]


def test_every_kind_was_recorded():
    assert NAMES == sorted([*SAME_SCALES, "dynamic", "experts", "gptq"])
    for name in NAMES:
        config = json.loads((DATA / name / "config.json").read_text())["quantization_config"]
        assert config["quant_method"] == "compressed-tensors" and config["quantization_status"] == "compressed"


@pytest.mark.parametrize("name", SAME_SCALES)
def test_the_logits_are_those_of_llm_compressor(name):
    ids, theirs = recorded(name)
    assert distance(sm.from_pretrained(DATA / name)(ids).logits, theirs) < 1e-5


class Halves(torch.nn.Module):
    """A linear layer whose dynamic scales are max |x| / 127.5, as those of compressed-tensors are. vLLM, SGLang and this package divide by 127."""

    def __init__(self, layer: nn.Int8Linear):
        super().__init__()
        self.weight = layer.weight.float() * layer.weight_scale

    def forward(self, x):
        scale = x.abs().amax(-1, keepdim=True) / 127.5
        return torch.nn.functional.linear((x / scale).round().clamp(-128, 127) * scale, self.weight)


@pytest.mark.parametrize("name", ["dynamic", "gptq"])
def test_only_the_divisor_of_dynamic_symmetric_scales_differs(name):
    ids, theirs = recorded(name)
    model = sm.from_pretrained(DATA / name)
    assert distance(model(ids).logits, theirs) < 0.05  # two roundings of the inputs
    for parent in list(model.modules()):
        for child, layer in list(parent.named_children()):
            if isinstance(layer, nn.Int8Linear):
                assert layer.activation == "dynamic" and layer.symmetric
                setattr(parent, child, Halves(layer))
    assert distance(model(ids).logits, theirs) < 1e-5


def test_experts_hold_the_tensors_of_the_file():
    ids, theirs = recorded("experts")
    model, tensors = sm.from_pretrained(DATA / "experts"), load_file(DATA / "experts" / "model.safetensors")
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts, nn.Int8Experts)
    for e in range(4):
        of = {part: tensors[f"model.layers.0.mlp.experts.{e}.{part}_proj.weight"] for part in ("gate", "up", "down")}
        assert torch.equal(experts.gate_up_proj[e], torch.cat([of["gate"], of["up"]])) and torch.equal(experts.down_proj[e], of["down"])
        scales = {part: tensors[f"model.layers.0.mlp.experts.{e}.{part}_proj.weight_scale"] for part in ("gate", "up", "down")}
        assert torch.equal(experts.gate_up_proj_scale[e], torch.cat([scales["gate"], scales["up"]]))
        assert torch.equal(experts.down_proj_scale[e], scales["down"])
    assert distance(model(ids).logits, theirs) < 0.05


@pytest.mark.parametrize("name", [name for name in NAMES if name != "experts"])  # transformers 5.17 and 5.24 do not load those
def test_what_transformers_loads_is_converted_to_the_same_bits(name):
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(DATA / name)
    sm.convert_(model)
    ids, _ = recorded(name)
    assert torch.equal(model(ids).logits, sm.from_pretrained(DATA / name)(ids).logits)
