"""`quantize_`: decisions, their report, smoothing that changes no bit, resuming, and what is refused."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import warnings

import pytest
import torch
from operands.tiny_models import MODELS, bert, distance, logits, tiny, tokens, transformers

import scaled_mm as sm
from scaled_mm import nn
from scaled_mm.models.calibration import FloatBlock, Group, record_calls
from scaled_mm.models.search import Static, _least_squares, choose, quantile, relative_error, sample, scale_of
from scaled_mm.models.smoothing import Fold, exponents, fold_of, importance
from scaled_mm.models.weights import quantize_weight


def quantized(name="llama", config=None, calibration=None, **options):
    model = tiny(name)
    report = sm.quantize_(model, config or sm.Int8Config(), tokens() if calibration is None else calibration, progress=False, **options)
    return model, report


@pytest.mark.parametrize("name", MODELS)
def test_the_outputs_of_each_kind_of_model_stay_near(name):
    ids, float_model = tokens()[0], tiny(name)
    model, report = quantized(name)
    assert distance(logits(model, ids), logits(float_model, ids)) < 0.06
    assert type(model.get_output_embeddings()) is torch.nn.Linear
    schemes = {layer.name: layer.scheme for layer in report.layers}
    assert schemes and set(schemes.values()) <= {"static", "dynamic"}
    for layer, module in model.named_modules():
        if isinstance(module, nn.Int8Linear):
            assert schemes[layer] == module.activation
        if isinstance(module, nn.Int8Experts):
            assert schemes[layer] == "dynamic"
        assert type(module) is not torch.nn.Linear or layer == "lm_head" or layer.endswith("gate")


def test_an_encoder_is_quantized_and_its_pooler_is_not():
    ids, float_model, model = tokens()[0], bert(), bert()
    sm.quantize_(model, sm.Int8Config(), tokens(), progress=False)
    assert distance(logits(model, ids), logits(float_model, ids)) < 0.02 and type(model.pooler.dense) is torch.nn.Linear


def test_layers_that_read_the_same_tensor_get_one_scheme_and_scale():
    model, report = quantized(config=sm.Int8Config(activation="static"))
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        assert attention.q_proj.input_scale == attention.k_proj.input_scale == attention.v_proj.input_scale
        assert mlp.gate_proj.input_scale == mlp.up_proj.input_scale != mlp.down_proj.input_scale


@pytest.mark.parametrize(
    "name, expected",
    [("llama", {"q_proj", "o_proj", "gate_proj", "down_proj"}), ("qwen3_moe", {"q_proj", "o_proj"}), ("gemma2", {"o_proj", "down_proj"})],
)
def test_factors_are_folded_exactly_where_nothing_else_reads_the_tensor(name, expected):
    """Not into a norm that a router also reads, nor into gemma's norms, which multiply by 1 + weight. The folded layer gives the same bits."""
    model = tiny(name)
    blocks = list(model.model.layers)
    calls = record_calls(model, blocks, lambda: [model.model(ids) for ids in tokens()], skips=True)
    hidden = [call.hidden for call in calls[0]]
    work = FloatBlock(blocks[0], torch.device("cpu"))
    groups, outputs = work.observe(calls[0], hidden)
    found = {}
    for group in groups:
        fold = fold_of(work, group, groups, calls[0][0], hidden[0], outputs[0])
        if fold is not None:
            found[group.names[0].split(".")[-1]] = fold, group
    assert set(found) == expected
    for fold, group in found.values():
        weights = [work.block.get_submodule(layer).weight for layer in group.names]
        for e in fold.candidates(group.x, weights, 0.8):
            folded = copy.deepcopy(work)
            fold.apply(folded.block, e)
            assert torch.equal(folded(calls[0][1], hidden[1]), outputs[1])
    assert torch.equal(work(calls[0][1], hidden[1]), outputs[1])  # trying has changed nothing


def test_float16_weights_that_a_factor_would_denormalize_are_not_smoothed():
    def block(scale: float) -> torch.nn.Module:
        made = torch.nn.ModuleDict(dict(norm=torch.nn.RMSNorm(8), q=torch.nn.Linear(8, 4)))
        torch.nn.init.constant_(made.q.weight, 1.1 * scale)
        return made.half()

    fold = Fold(Group(("q",), torch.zeros(1, 8), "norm"), "norm")
    assert fold.is_exact(block(1.0), torch.full((8,), -4)) and fold.is_exact(block(2.0**-13), torch.full((8,), 4))
    assert not fold.is_exact(block(2.0**-13), torch.full((8,), -4)) and not fold.is_exact(block(1.0), torch.full((8,), 16))


def test_a_tensor_with_massive_activations_is_dynamic_and_channel_outliers_are_smoothed():
    generator = torch.Generator().manual_seed(0)
    weights = {"w": torch.randn(48, 64, generator=generator)}
    normal = torch.randn(600, 64, generator=generator)
    massive = normal.clone()
    massive[:6] *= 1000.0
    assert choose(sm.Int8Config(), massive, weights, torch.float32, None).static is None
    assert choose(sm.Int8Config(), normal, weights, torch.float32, None).static is not None

    class Anywhere:
        def candidates(self, x, weights, alpha):
            return [exponents(importance(x, "max"), weights, alpha)]

    factors = torch.where(torch.arange(64) == 5, 60.0, 1.0)
    outlier = {"w": weights["w"] / factors}
    smoothed = choose(sm.Int8Config(activation="dynamic"), normal * factors, outlier, torch.float32, Anywhere())
    assert smoothed.exponents[5] >= 3 and smoothed.errors["smooth dynamic"] < 0.6 * smoothed.errors["dynamic"]


def test_the_error_is_relative_to_each_token():
    wanted = torch.tensor([[3.0, 4.0], [3000.0, 4000.0]])
    assert relative_error([wanted * torch.tensor([[1.1], [1.0]])], [wanted]) == pytest.approx((0.1**2 / 2) ** 0.5, rel=1e-5)
    assert sample(1000).tolist() == [index * 1000 // 512 for index in range(512)] and sample(5).tolist() == [0, 1, 2, 3, 4]


def test_static_scales_follow_the_formulas_of_the_quantizers():
    x = torch.randn(400, 32, generator=torch.Generator().manual_seed(0))
    assert scale_of(float(x.min()), float(x.max()), True) == (float(sm.quantize_int8(x, "tensor")[1]), None)
    asymmetric = sm.quantize_int8(x + 1, "tensor", symmetric=False)
    scale, zero = scale_of(float((x + 1).min()), float((x + 1).max()), False)
    assert scale == pytest.approx(float(asymmetric.scale), rel=1e-6) and zero == int(asymmetric.zero_point)
    magnitudes = x.abs().reshape(-1)
    for percentile in (50.5, 90, 99.9, 99.999, 100):
        value = quantile(magnitudes, percentile)
        assert (magnitudes <= value).double().mean() * 100 >= percentile - 1e-9 and (magnitudes < value).double().mean() * 100 <= percentile
    x[0, 0] = 50.0
    low, high = _least_squares(x, float(x.min()), float(x.max()), True)
    assert 1.0 < high < 50.0 and low < 0


def test_weights_are_quantized_with_the_scale_that_the_checkpoint_holds():
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        q, scale = quantize_weight(weight.to(dtype), dtype)
        assert torch.equal(scale, scale.to(dtype).float()) and scale.shape == (48, 1)
        assert float((q * scale - weight.to(dtype).float()).abs().max() / scale.max()) < 1.0
    q, scale = quantize_weight((weight * 2.0**-16).half(), torch.float16)  # scales below the normal numbers of float16
    assert float((q * scale - weight * 2.0**-16).norm() / weight.norm()) < 0.1 * 2.0**-16


def test_the_clamp_everywhere_is_available_and_warns_with_the_damage():
    def spiked(seed):
        model = tiny("llama", seed=seed)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[3].mul_(400.0)
        return model

    literal = sm.Int8Config(activation="static", clip="percentile", percentile=99.0, smooth=None)
    with pytest.warns(
        UserWarning, match=r"static scales: \d+ of 14 layers have more than 1.5 times the error of dynamic ones; the worst, .*down_proj \(99 %\): "
    ):
        report = sm.quantize_(spiked(0), literal, tokens(), progress=False)
    assert report.counts() == {"static": 14}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        report = sm.quantize_(spiked(0), sm.Int8Config(), tokens(), progress=False)
    assert {layer.name: layer.scheme for layer in report.layers}["model.layers.1.mlp.down_proj"] == "dynamic"


def test_without_calibration_inputs_are_dynamic():
    model = tiny("qwen3_moe")
    report = sm.quantize_(model, progress=False)
    assert set(report.counts()) == {"dynamic"} and not any(layer.errors for layer in report.layers)
    falcon = transformers.FalconConfig(vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
    with pytest.raises(sm.ScaledMMError, match="model: expected torch.nn.Linear layers or experts in transformer.h, got a FalconForCausalLM without"):
        sm.quantize_(transformers.FalconForCausalLM(falcon))
    with pytest.raises(sm.ScaledMMError, match="calibration: expected data for activation='static', got None"):
        sm.quantize_(tiny("llama"), sm.Int8Config(activation="static"))


def test_ignored_and_overridden_layers():
    config = sm.Int8Config(ignore=("lm_head", "re:.*o_proj"), overrides={"re:.*down_proj": {"activation": "static"}, "re:.*k_proj": None})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model, report = quantized(config=config)
    schemes = {layer.name.split(".")[-1]: layer.scheme for layer in report.layers}
    assert schemes["o_proj"] == schemes["k_proj"] == "float" and schemes["down_proj"] == "static"
    assert type(model.model.layers[0].self_attn.k_proj) is torch.nn.Linear


def test_texts_tokens_and_a_function_calibrate_alike():
    class Tokenizer:
        def __call__(self, text, **_):
            return type("Encoding", (), {"input_ids": torch.tensor([[ord(letter) % 64 for letter in text]])})

    texts = ["quantize the weights", "of every layer here"]
    ids = [Tokenizer()(text).input_ids for text in texts]

    def runs(model):
        for batch in ids:
            model(batch)

    reports = [
        quantized(calibration=texts, tokenizer=Tokenizer())[1],
        quantized(calibration=ids)[1],
        quantized(calibration=[batch[0] for batch in ids])[1],
        quantized(calibration=runs)[1],
    ]
    assert all(report.layers == reports[0].layers and report.exponents == reports[0].exponents for report in reports)


def test_an_interrupted_run_resumes_with_the_same_result(tmp_path, monkeypatch):
    whole, report = quantized(resume=tmp_path / "whole.json")
    path = tmp_path / "part.json"
    document = json.loads((tmp_path / "whole.json").read_text())
    document["layers"] = document["layers"][:7]
    document["exponents"] = {name: e for name, e in document["exponents"].items() if ".0." in name}
    path.write_text(json.dumps(document))
    searched = []
    from scaled_mm.models import quantize as module

    monkeypatch.setattr(module, "choose", lambda *arguments: searched.append(arguments) or choose(*arguments))
    resumed, again = quantized(resume=path)
    assert len(searched) == 4 and again.layers == report.layers and again.exponents == report.exponents
    for (name, ours), theirs in zip(whole.state_dict().items(), resumed.state_dict().values()):
        assert torch.equal(ours, theirs), name
    assert len(json.loads(path.read_text())["layers"]) == 14
    with pytest.raises(sm.ScaledMMError, match="resume: expected a file of the same model, config and calibration data"):
        quantized(config=sm.Int8Config(smooth=None), resume=path)
    path.write_text("{}")
    with pytest.raises(sm.ScaledMMError, match="expected a report of quantize_"):
        quantized(resume=path)


def test_the_report_shows_its_numbers(tmp_path):
    _, report = quantized()
    report.save(tmp_path / "report.json")
    assert sm.QuantizationReport.load(tmp_path / "report.json").to_dict() == report.to_dict()
    assert report.table().row_count == 14
    report.plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 10_000
    layer = report.layers[0]
    assert layer.absmax >= layer.threshold > 0 and {"dynamic", "absmax", "99.9 %", "99.99 %", "mse", "smooth dynamic"} <= set(layer.errors)
    assert layer.error in layer.errors.values()


def test_a_layer_whose_weight_is_read_without_a_call_stays():
    model = tiny("llama")
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: torch.nn.functional.linear(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x), mlp.down_proj.weight)
    report = sm.quantize_(model, sm.Int8Config(), tokens(), progress=False)
    assert type(mlp.down_proj) is torch.nn.Linear and {layer.name: layer.scheme for layer in report.layers}["model.layers.1.mlp.down_proj"] == "float"
    assert logits(model, tokens()[0]).isfinite().all()


def test_weights_that_are_not_finite_are_refused_and_the_model_stays():
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = float("nan")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(sm.ScaledMMError, match="model: expected finite weights and inputs of model.layers.1.mlp.gate_proj, model.layers.1.mlp"):
        sm.quantize_(model, sm.Int8Config(), tokens(), progress=False)
    after = model.state_dict()  # the first decoder layer too
    assert set(after) == set(before)
    assert all(torch.allclose(after[name], tensor, rtol=0, atol=0, equal_nan=True) for name, tensor in before.items())


def test_transformers_own_saving_is_refused_after_quantization(tmp_path):
    model, _ = quantized()
    for one in (model, copy.deepcopy(model)):
        with pytest.raises(sm.ScaledMMError, match=r"model: expected scaled_mm.save_pretrained\(model, path\) for a quantized model"):
            one.save_pretrained(tmp_path)


def test_parameters_that_layers_share_are_not_folded_into():
    model, reference = tiny("llama"), tiny("llama")
    for one in (model, reference):
        one.model.layers[1].input_layernorm.weight = one.model.layers[0].input_layernorm.weight
        one.model.layers[1].mlp.up_proj.weight = one.model.layers[0].mlp.up_proj.weight
    report = sm.quantize_(model, sm.Int8Config(activation="dynamic"), tokens(), progress=False)
    smooth = {layer.name.split(".", 2)[-1]: layer.smooth for layer in report.layers}
    assert not any(smooth[f"{index}.{name}"] for index in (0, 1) for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj"))
    assert distance(logits(model, tokens()[0]), logits(reference, tokens()[0])) < 0.02


def test_patterns_that_match_no_layer_are_warned_of_except_defaults(recwarn):
    sm.quantize_(tiny("llama"), sm.Int8Config(overrides={"re:.*o_proj": None}), progress=False)
    assert not recwarn.list
    config = sm.Int8Config(ignore=("lm_head", "model.norm"), overrides={"re:.*qproj": None})
    with pytest.warns(UserWarning, match="config: 'model.norm' of ignore or overrides matches no") as caught:
        sm.quantize_(tiny("llama"), config, progress=False)
    assert ["model.norm" in str(caught[0].message), "re:.*qproj" in str(caught[1].message), len(caught)] == [True, True, 2]


def test_routers_stay():
    model = tiny("qwen2_moe")
    report = sm.quantize_(model, sm.Int8Config(ignore=("lm_head",)), tokens(), progress=False)
    mlp = model.model.layers[0].mlp
    assert type(mlp.shared_expert_gate) is torch.nn.Linear and isinstance(mlp.shared_expert.down_proj, nn.Int8Linear)
    assert not any("gate" == layer.name.split(".")[-1] for layer in report.layers)


def test_a_refused_call_leaves_the_model_unchanged():
    model = tiny("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(sm.ScaledMMError):
        sm.quantize_(model, calibration=tokens(), resume="/no/such/folder/x.json")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()) and set(before) == set(model.state_dict())


def test_the_model_is_in_evaluation_as_before_and_runs_no_hooks():
    model, _ = quantized()
    assert all("forward" not in vars(module) and not module._forward_hooks and not module._forward_pre_hooks for module in model.model.layers)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: sm.quantize_(tiny("llama"), {"activation": "static"}), "config: expected an Int8Config, got a dict"),
        (lambda: sm.quantize_(torch.nn.Linear(4, 4)), "model: expected one torch.nn.ModuleList of layers with torch.nn.Linear modules, got none"),
        (
            lambda: sm.quantize_(tiny("qwen3_moe"), sm.Int8Config(ignore=("re:.*experts",), overrides={"re:.*proj": None}), tokens()),
            "config: expected layers to quantize, got ignore and overrides that exclude all 1",
        ),
        (lambda: sm.quantize_(tiny("llama"), calibration=[]), "calibration: expected texts, tensors of token ids or a function, not empty"),
        (lambda: sm.quantize_(tiny("llama"), calibration="a text"), "calibration: expected texts, tensors"),
        (lambda: sm.quantize_(tiny("llama"), calibration=["a text"]), "tokenizer: expected one for calibration with texts, got None"),
        (
            lambda: sm.quantize_(tiny("llama"), calibration=[torch.zeros(1, 4)]),
            r"calibration\[0\]: expected token ids as integers, got torch.float32",
        ),
        (lambda: sm.quantize_(tiny("llama"), calibration=[torch.zeros(1, 0, dtype=torch.long)]), r"calibration\[0\]: expected token ids"),
        (
            lambda: sm.quantize_(tiny("llama"), calibration=tokens(), resume="/no/such/folder/x.json"),
            "resume: expected a file that can be written to",
        ),
        (
            lambda: sm.quantize_(tiny("llama"), calibration=lambda model: model.generate(tokens()[0], max_new_tokens=3, pad_token_id=0)),
            "calibration: expected runs without earlier tokens in a KV cache",
        ),
        (lambda: sm.quantize_(tiny("llama"), calibration=lambda model: None), "calibration: expected every layer to run equally often"),
    ],
)
def test_wrong_arguments_are_refused_by_name(call, message):
    with pytest.raises(sm.ScaledMMError, match=message):
        call()


def test_a_static_choice_is_what_the_layer_computes_with():
    assert Static("mse", 0.5).zero_point is None
    model, report = quantized(config=sm.Int8Config(activation="static", symmetric=False))
    first = report.layers[0]
    layer = model.get_submodule(first.name)
    assert float(layer.input_scale) == first.input_scale and int(layer.input_zero_point) == first.input_zero_point


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_offloaded_weights_are_mapped_from_files_and_have_the_same_bits(kind, tmp_path):
    models = [tiny(kind), tiny(kind)]
    for model, offload in zip(models, (None, tmp_path / "int8")):
        sm.quantize_(model, None, tokens(), progress=False, offload=offload)
    assert sorted(path.name for path in (tmp_path / "int8").iterdir()) == ["model.layers.0.safetensors", "model.layers.1.safetensors"]
    assert torch.equal(logits(models[0], tokens()[0]), logits(models[1], tokens()[0]))
    for name, model in zip("ab", models):
        sm.save_pretrained(model, tmp_path / name)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    (tmp_path / "file").write_text("")
    with pytest.raises(sm.BadParamError, match="offload: expected a folder that can be written to, got .*file"):
        sm.quantize_(tiny(kind), offload=tmp_path / "file", progress=False)


OFFLOADED = """
import re, sys
from pathlib import Path
import torch, transformers
import scaled_mm as sm
anonymous = lambda: int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1)) / 1024
model = transformers.LlamaForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
before = anonymous()
sm.quantize_(model, None, progress=False, offload=sys.argv[2] if len(sys.argv) > 2 else None)
print(anonymous() - before)
"""


def test_an_offloaded_model_does_not_take_memory_for_its_weights(tmp_path):
    """A model of 100 MB in bfloat16, 50 MB in int8, which transformers maps from its file."""
    sizes = dict(vocab_size=64, hidden_size=512, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8)
    transformers.LlamaForCausalLM._from_config(transformers.LlamaConfig(**sizes), dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000", "OMP_NUM_THREADS": "1"}  # freed memory goes back to the system
    grown = []
    for words in ([], [str(tmp_path / "int8")]):
        command = [sys.executable, "-c", OFFLOADED, str(tmp_path / "model"), *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-2000:]
        grown.append(float(done.stdout))
    assert grown[0] > 45 and grown[1] < grown[0] - 25, grown  # MB: weights of 50, and up to 20 of everything else
