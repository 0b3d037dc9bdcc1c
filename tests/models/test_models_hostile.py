"""Models that do more than quantized layers compute, changed checkpoints, and arguments of the wrong kind: refused, and nothing is changed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from operands.tiny_models import SIZES, logits, tiny, tokens, transformers

import scaled_mm as sm
from scaled_mm import nn
from scaled_mm.models.blocks import activation_of
from scaled_mm.models.save import check_folder

IDS = tokens()[0]


def quantized(name: str = "llama", **options):
    model = tiny(name)
    sm.quantize_(model, progress=False, **options)
    return model


class Experts(torch.nn.Module):
    """Experts in transformers' form. more: what they do to gate and up besides."""

    def __init__(self, more=lambda gate, up: (gate, up)):
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(0.1 * torch.randn(4, 2 * 24, 40))
        self.down_proj = torch.nn.Parameter(0.1 * torch.randn(4, 40, 24))
        self.act_fn, self.more = torch.nn.SiLU(), more

    def forward(self, x, ids, weights):
        out = torch.zeros_like(x)
        for choice in range(ids.shape[1]):
            for token, expert in enumerate(ids[:, choice]):
                gate, up = self.more(*(x[token] @ self.gate_up_proj[expert].T).chunk(2, -1))
                out[token] += weights[token, choice] * (self.down_proj[expert] @ (self.act_fn(gate) * up))
        return out


def test_experts_are_those_that_compute_what_ours_do():
    assert activation_of(Experts()) == activation_of(Experts().to("meta")) == "silu"
    scaled = Experts(lambda gate, up: (gate, up * 1.1))
    clamped = Experts(lambda gate, up: (gate.clamp(max=10), up.clamp(-10, 10)))
    normalized = Experts()
    normalized.norm = torch.nn.LayerNorm(24)
    for experts in scaled, clamped, normalized:
        with pytest.raises(sm.BadParamError, match="model: expected experts that compute down"):
            activation_of(experts)


@pytest.mark.parametrize("more", [lambda y: 1.3 * y, lambda y: y.clamp(-0.01, 0.01)])
def test_an_mlp_that_does_more_is_not_fused_however_little_it_contributes(more):
    model = quantized()
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: more(forward(x))
    before = logits(model, IDS)
    with pytest.raises(sm.BadParamError, match="do only what those of Llama do, got a LlamaMLP that computes something else"):
        sm.fuse_(model)
    assert torch.equal(logits(model, IDS), before)


def test_fusing_needs_neither_nine_tokens_nor_evaluation_mode():
    config = transformers.LlamaConfig(**{**SIZES, "vocab_size": 5})
    model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.float32)
    sm.quantize_(model, progress=False)
    model.train()
    assert sm.fuse_(model).mlps and model.training and all(module.training for module in model.model.layers[0].self_attn.modules())


def test_the_trial_of_fusing_is_not_on_the_first_tokens():
    seen = []
    model = quantized()
    model.model.embed_tokens.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].flatten().tolist()))
    sm.fuse_(model)
    assert len(seen) == 2 and all(min(ids) > 0 and max(ids) > SIZES["vocab_size"] // 2 and len(set(ids)) == 8 for ids in seen)


def untied():
    model = tiny("llama")
    assert model.config.tie_word_embeddings
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    sm.quantize_(model, progress=False)
    return model


@pytest.mark.parametrize("told", [False, True])
def test_an_output_head_that_is_no_longer_tied_is_saved(tmp_path, told):
    model = untied()
    if told:
        model.config.tie_word_embeddings = False
    sm.save_pretrained(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(logits(sm.from_pretrained(tmp_path), IDS), logits(model, IDS))


def test_a_checkpoint_with_a_head_of_its_own_is_loaded_with_it(tmp_path):
    model = untied()
    sm.save_pretrained(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    loaded = sm.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, IDS), logits(model, IDS)) and not loaded.config.tie_word_embeddings


def test_modules_that_share_a_parameter_are_saved(tmp_path):
    model = quantized()
    model.model.layers[1].input_layernorm = model.model.layers[0].input_layernorm
    sm.save_pretrained(model, tmp_path)
    assert torch.equal(logits(sm.from_pretrained(tmp_path), IDS), logits(model, IDS))


@pytest.mark.parametrize("calibrated", [False, True])
def test_experts_that_are_not_finite_are_refused(calibrated):
    model = tiny("qwen3_moe")
    model.model.layers[1].mlp.experts.down_proj.data[0, 0, 0] = float("nan")
    with pytest.raises(sm.BadParamError, match="got NaN or infinity in model.layers.1.mlp.experts.down_proj"):
        sm.quantize_(model, None, tokens() if calibrated else None, progress=False)
    assert not any(isinstance(module, (nn.Int8Linear, nn.Int8Experts)) for module in model.modules())


def test_linear_layers_that_are_not_finite_are_refused_without_data():
    model = tiny("llama")
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("inf")
    with pytest.raises(sm.BadParamError, match="got NaN or infinity in model.layers.1.mlp.up_proj.weight"):
        sm.quantize_(model, progress=False)


BAD_ARGUMENTS = [
    (dict(model=None), "model: expected a torch.nn.Module, got a NoneType"),
    (dict(device="nonsense"), "device: expected a device such as"),
    (dict(offload=3), "offload: expected a path, got a int"),
    (dict(resume=3), "resume: expected a path, got a int"),
    (dict(calibration=["text"], tokenizer=3), "tokenizer: expected a function"),
    (dict(calibration=[torch.tensor([[1, 2, 640]])]), "calibration.0.: expected token ids from 0 to 63, got 1 to 640"),
]


@pytest.mark.parametrize("options, message", BAD_ARGUMENTS)
def test_arguments_of_quantize_are_named(options, message):
    model = options.pop("model", tiny("llama")) if "model" in options else tiny("llama")
    with pytest.raises(sm.ScaledMMError, match=message):
        sm.quantize_(model, progress=False, **options)


def test_weights_on_the_meta_device_and_a_layer_that_occurs_twice_are_refused():
    with pytest.raises(sm.BadParamError, match="expected weights, got model.layers.0.* on the meta device"):
        sm.quantize_(tiny("llama").to("meta"), progress=False)
    model = tiny("llama")
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(sm.BadParamError, match="expected layers of model.layers that are modules of their own"):
        sm.quantize_(model, None, tokens(), progress=False)


def test_a_folder_of_offload_in_which_a_file_cannot_be_is_refused_before_the_model_changes(tmp_path):
    (tmp_path / "model.layers.1.safetensors").mkdir()
    model = tiny("llama")
    with pytest.raises(sm.BadParamError, match="offload: expected a file or none, got the folder"):
        sm.quantize_(model, progress=False, offload=tmp_path)
    assert not any(isinstance(module, nn.Int8Linear) for module in model.modules())


def test_a_write_that_fails_says_that_the_model_is_partly_quantized(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("scaled_mm.models.offload.map_int8", full)
    model = tiny("llama")
    with pytest.raises(sm.BadParamError, match="offload: .*No space left on device.*partly quantized, load it again"):
        sm.quantize_(model, progress=False, offload=tmp_path)
    with pytest.raises(sm.BadParamError, match="expected scaled_mm.save_pretrained"):
        model.save_pretrained(tmp_path / "float")


@pytest.fixture(scope="module")
def decisions(tmp_path_factory):
    """(name of a model, config, the file of its decisions): static; with folded factors; and with norms that nothing can be folded into."""
    found = {}
    for of, name, fields in ("static", "llama", dict(activation="static", smooth=None)), ("llama", "llama", {}), ("gemma2", "gemma2", {}):
        config, file = sm.Int8Config(**{"activation": "dynamic", **fields}), tmp_path_factory.mktemp("decisions") / "decisions.json"
        sm.quantize_(tiny(name), config, tokens(), progress=False, resume=file)
        found[of] = name, config, json.loads(file.read_text())
    return found


FIRST, O_PROJ = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj"


def smoothed(exponents, **changes):
    return dict(smooth=True, errors={"dynamic": 0.1, "smooth dynamic": 0.1}, exponents=exponents, **changes)


CHANGED_DECISIONS = [
    ("static", dict(input_scale=0.0), "input_scale 0.0"),
    ("static", dict(input_scale=None), "input_scale None"),
    ("static", dict(input_scale=1e300), r"input_scale 1e\+300"),
    ("static", dict(input_scale=1e-300), "input_scale 1e-300"),
    ("static", dict(input_scale=10**400), "input_scale: expected a finite floating-point number or null, got 1000"),
    ("static", dict(input_zero_point=5), "input_zero_point 5"),
    ("static", dict(scheme="zzz"), "scheme: expected static, dynamic or float, got 'zzz'"),
    ("static", dict(scheme="dynamic"), "scheme 'dynamic'"),
    ("static", dict(rule="absmax"), "rule 'absmax'"),
    ("static", dict(smooth=True), "smooth True"),
    ("static", dict(errors=[1]), "errors: expected an object with finite floating-point numbers"),
    ("static", dict(errors={"mse": 0.1}), "errors {'mse': 0.1}"),
    ("static", dict(errors={"mse": 10**400, "dynamic": 0.1}), "errors: expected an object with finite floating-point numbers"),
    ("static", dict(errors={"mse": float("nan"), "dynamic": 0.1}), "errors: expected an object with finite floating-point numbers"),
    ("llama", smoothed([31] * SIZES["hidden_size"]), r"exponents \[31, 31"),
    ("llama", smoothed([5000] * SIZES["hidden_size"]), r"exponents \[5000, 5000"),
    ("llama", smoothed([10**30] * SIZES["hidden_size"]), r"exponents \[1000"),
    ("llama", smoothed([1.5] * SIZES["hidden_size"]), f"exponents.{FIRST}: expected a list of integers"),
    ("llama", smoothed([1]), r"exponents \[1\]"),
    ("llama", smoothed(None), "exponents.*: expected a list of integers, got None"),
    ("llama", smoothed([1] * 16 + [0] * 48, name=O_PROJ), r"exponents \[1, 1"),  # two heads read one value head
    ("gemma2", smoothed([1] * SIZES["hidden_size"]), "smooth True"),
]


@pytest.mark.parametrize("of, changes, message", CHANGED_DECISIONS)
def test_decisions_that_were_changed_are_not_resumed_and_the_model_stays(decisions, tmp_path, of, changes, message):
    name, config, document = decisions[of]
    layers = {layer["name"]: dict(layer) for layer in document["layers"]}
    changes = dict(changes)
    layer = layers[changes.get("name", FIRST)]
    exponents = dict(document["exponents"])
    if "exponents" in changes:
        exponents[layer["name"]] = changes.pop("exponents")
    layer.update(changes)
    file = tmp_path / "decisions.json"
    file.write_text(json.dumps({**document, "layers": list(layers.values()), "exponents": exponents}))
    model = tiny(name)
    with pytest.raises(sm.BadParamError, match=f"decisions.json.*{message}"):
        sm.quantize_(model, config, tokens(), progress=False, resume=file)
    assert not any(isinstance(module, nn.Int8Linear) for module in model.modules())
    assert all(torch.equal(*pair) for pair in zip(model.state_dict().values(), tiny(name).state_dict().values()))


@pytest.mark.parametrize("exponents", [[], None, 3])
def test_a_report_whose_exponents_are_no_object_is_refused(decisions, tmp_path, exponents):
    name, config, document = decisions["llama"]
    (tmp_path / "decisions.json").write_text(json.dumps({**document, "exponents": exponents}))
    with pytest.raises(sm.BadParamError, match="decisions.json: expected a report of quantize_ .*: exponents: expected an object, got"):
        sm.quantize_(tiny(name), config, tokens(), progress=False, resume=tmp_path / "decisions.json")


def test_a_resume_file_that_is_nested_too_deeply_is_named(tmp_path):
    (tmp_path / "decisions.json").write_text("[" * 100_000)
    with pytest.raises(sm.BadParamError, match="decisions.json: expected a report of quantize_"):
        sm.quantize_(tiny("llama"), None, tokens(), progress=False, resume=tmp_path / "decisions.json")


BAD_CONFIGS = [
    ("config.json", dict(hidden_act="foo")),
    ("config.json", dict(hidden_size="a")),
    ("config.json", dict(num_attention_heads=0)),
    ("config.json", dict(pad_token_id=999)),
    ("config.json", dict(intermediate_size=-5)),
    ("config.json", dict(architectures=["MistralForCausalLM"])),
    ("config.json", dict(architectures=["BertModel"])),
    ("generation_config.json", []),
    ("generation_config.json", dict(max_new_tokens=-3)),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    sm.save_pretrained(quantized(), folder)
    return folder


@pytest.mark.parametrize("name, changes", BAD_CONFIGS)
def test_a_config_that_transformers_refuses_is_named(checkpoint, tmp_path, name, changes):
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    document = json.loads((tmp_path / name).read_text()) if (tmp_path / name).exists() else {}
    (tmp_path / name).write_text(json.dumps({**document, **changes} if isinstance(changes, dict) else changes))
    with pytest.raises(sm.BadParamError, match=f"{name}: expected"):
        sm.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "path, options, message",
    [
        (None, {}, "path: "),
        (3, {}, "path: "),
        ("a b/c$", {}, "path: "),
        (None, dict(device="nonsense"), "device: "),
        ("", dict(device="mps"), "device: "),
    ],
)
def test_arguments_of_from_pretrained_are_named(checkpoint, path, options, message):
    with pytest.raises(sm.ScaledMMError, match=message):
        sm.from_pretrained(checkpoint if path == "" else path, **options)


def compressed(**changes):
    """One layer as transformers loads it from a compressed-tensors checkpoint. changes: of its scheme and its scales."""
    layer = quantized().model.layers[0].mlp.up_proj
    linear = torch.nn.Linear(layer.in_features, layer.out_features, False, device="meta")
    linear.weight, linear.weight_scale = (torch.nn.Parameter(t.clone(), requires_grad=False) for t in (layer.weight, layer.weight_scale))
    weights = dict(num_bits=8, type="int", strategy="channel", symmetric=True, dynamic=False) | changes.get("weights", {})
    inputs = dict(num_bits=8, type="int", strategy="token", symmetric=True, dynamic=True) | changes.get("inputs", {})
    linear.quantization_scheme = SimpleNamespace(weights=SimpleNamespace(**weights), input_activations=SimpleNamespace(**inputs))
    if "outputs" in changes:
        linear.quantization_scheme.output_activations = SimpleNamespace(**inputs)
    if "scale" in changes:
        linear.weight_scale.data[0] = changes["scale"]
    for name, value in changes.get("zero_points", {}).items():
        setattr(linear, name, torch.nn.Parameter(torch.tensor([value], dtype=torch.int8), requires_grad=False))
    return torch.nn.ModuleDict({"up": linear})


def test_what_compressed_tensors_may_hold_besides_is_refused_by_convert():
    assert isinstance(sm.convert_(compressed(zero_points=dict(weight_zero_point=0, input_zero_point=0)))["up"], nn.Int8Linear)
    for changes, message in (
        (dict(zero_points=dict(weight_zero_point=2)), "expected only 0 in up.weight_zero_point of a symmetric scheme, got 2 to 2"),
        (dict(zero_points=dict(input_zero_point=-1)), "expected only 0 in up.input_zero_point of a symmetric scheme, got -1 to -1"),
        (dict(weights=dict(symmetric=False)), "weights.symmetric"),
        (dict(weights=dict(strategy="group", group_size=32)), "weights.strategy"),
        (dict(inputs=dict(num_bits=4)), "input_activations.num_bits"),
        (dict(inputs=dict(type="float")), "input_activations.type"),
        (dict(inputs=dict(strategy="tensor")), "input_activations: expected strategy token"),
        (dict(inputs=dict(strategy="group", group_size=32)), "input_activations.strategy"),
        (dict(outputs=True), "output_activations"),
        (dict(scale=float("nan")), "expected finite positive scales up.weight_scale"),
    ):
        model = compressed(**changes)
        with pytest.raises(sm.BadParamError, match=message):
            sm.convert_(model)
        assert isinstance(model["up"], torch.nn.Linear)


def test_a_static_norm_has_a_float32_scale_whatever_the_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        norm = nn.RMSNorm(64, quantize="static")
        assert norm.input_scale.dtype is torch.float32 and norm(torch.randn(2, 64)).q.dtype is torch.int8
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def small():
    return quantized()


@pytest.mark.parametrize("bad", ["file", "file/below", None, 3, "a\0b", "x" * 300, "/proc/folder"])
def test_a_path_that_is_no_folder_is_named_and_nothing_is_written(small, tmp_path, bad):
    (tmp_path / "file").write_text("text")
    path = tmp_path / bad if isinstance(bad, str) else bad
    with pytest.raises(sm.BadParamError, match="path: expected a folder"):
        sm.save_pretrained(small, path)
    assert [file.name for file in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "text"


def test_a_tokenizer_of_the_wrong_kind_is_named_before_anything_is_written(small, tmp_path):
    with pytest.raises(sm.BadParamError, match="tokenizer: expected a tokenizer of transformers, got a str"):
        sm.save_pretrained(small, tmp_path / "int8", tokenizer="text")
    assert not (tmp_path / "int8").exists()


def content(folder):
    return {file.name: file.read_bytes() if file.is_file() else None for file in folder.iterdir()}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_folder_in_the_place_of_a_file_is_refused_and_old_files_stay(small, checkpoint, tmp_path, name):
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir()
    before = content(tmp_path)
    with pytest.raises(sm.BadParamError, match=f"path: expected a file or none, got the folder .*{name}"):
        sm.save_pretrained(small, tmp_path)
    assert content(tmp_path) == before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.safetensors", "adapter_config.json"])
def test_weights_of_another_model_in_the_folder_are_refused(small, tmp_path, name):
    (tmp_path / name).write_text("old")
    with pytest.raises(sm.BadParamError, match=f"path: expected a folder without the weights of another model, got .* with {name}"):
        sm.save_pretrained(small, tmp_path)
    with pytest.raises(sm.BadParamError, match="path: expected a folder without the weights of another model"):
        check_folder(tmp_path)
    assert content(tmp_path) == {name: b"old"}


def test_an_old_checkpoint_in_the_folder_is_replaced(tmp_path):
    small = quantized()
    small.generation_config = None
    for name in ("generation_config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"):
        (tmp_path / name).write_text("old")
    sm.save_pretrained(small, tmp_path)
    assert set(content(tmp_path)) == {"config.json", "model.safetensors"}
    assert torch.equal(logits(sm.from_pretrained(tmp_path), IDS), logits(small, IDS))


@pytest.mark.parametrize("calibrated", [False, True])
def test_a_linear_layer_with_two_names_is_refused(calibrated):
    model = tiny("llama")
    mlp = model.model.layers[1].mlp
    mlp.up_proj = mlp.gate_proj
    with pytest.raises(sm.BadParamError, match="modules of their own, got one under the names mlp.gate_proj and mlp.up_proj"):
        sm.quantize_(model, None, tokens() if calibrated else None, progress=False)
    assert not any(isinstance(module, nn.Int8Linear) for module in model.modules())


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "generation_config.json"])
def test_a_file_with_too_many_levels_is_named(checkpoint, tmp_path, name):
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).write_text("[" * 100_000)
    with pytest.raises(sm.BadParamError, match=f"{name}: expected "):
        sm.from_pretrained(tmp_path)
