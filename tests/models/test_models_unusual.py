"""Models whose modules are changed by hooks, patches or their authors: quantized and fused with what they were given, or refused unchanged."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.utils.prune
from operands.tiny_models import EXPERTS, MLA, MODELS, SIZES, bert, distance, logits, tiny, tokens, transformers

import scaled_mm as sm
from scaled_mm import nn

IDS = tokens()[0]
INT8 = (nn.Int8Linear, nn.Int8Experts)


def made(kind: str, dtype: torch.dtype = torch.float32, **fields) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **fields}, dtype=dtype)
    return getattr(transformers, f"{kind}ForCausalLM")._from_config(config, dtype=dtype).eval()


def quantized(model: torch.nn.Module) -> torch.nn.Module:
    sm.quantize_(model, progress=False)
    return model


def classes(model: torch.nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


@pytest.mark.parametrize("fails", [False, True])
def test_a_forward_of_a_layer_s_own_is_there_after_calibration(fails):
    """As accelerate gives to layers."""
    model = tiny("llama")
    calls = []
    for layer in model.model.layers:
        layer.forward = lambda *arguments, of=layer.forward, **options: (calls.append(1), of(*arguments, **options))[1]

    def run(model):
        model(IDS)
        if fails:
            raise KeyError("the caller's own")

    if fails:
        with pytest.raises(KeyError):
            sm.quantize_(model, None, run, progress=False)
    else:
        sm.quantize_(model, None, run, progress=False)
    calls.clear()
    model(IDS)
    assert len(calls) == 2


def test_hooks_and_the_training_flag_move_to_the_int8_layer():
    model, seen = tiny("llama"), []
    handle = model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda module, arguments, output: seen.append(type(module)))
    quantized(model)
    seen.clear()
    model(IDS)
    assert seen == [nn.Int8Linear] and not any(module.training for module in model.modules())
    handle.remove()
    model(IDS)
    assert len(seen) == 1


def test_what_has_hooks_is_not_fused_nor_is_the_norm_before_it():
    model, seen = quantized(tiny("llama")), []
    first, second = model.model.layers
    first.input_layernorm.register_forward_hook(lambda *_: seen.append("norm"))
    second.mlp.up_proj.register_forward_hook(lambda *_: seen.append("up"))
    done = sm.fuse_(model)
    assert done.norms == ["model.layers.0.post_attention_layernorm", "model.layers.1.input_layernorm"] and done.mlps == ["model.layers.0.mlp"]
    seen.clear()
    model(IDS)
    assert seen == ["norm", "up"]


def test_a_linear_layer_with_another_forward_is_refused():
    model = tiny("llama")
    up = model.model.layers[1].mlp.up_proj
    up.forward = lambda x, of=up.forward: 2 * of(x)
    with pytest.raises(sm.BadParamError, match="torch.nn.Linear's forward, got model.layers.1.mlp.up_proj with another"):
        quantized(model)
    assert not any(isinstance(module, INT8) for module in model.modules())


@pytest.mark.parametrize("factor", [1.04, 0.96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_small_factor_of_an_mlp_is_not_lost(factor, dtype):
    model = quantized(tiny("llama", dtype))
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x, of=mlp.forward: factor * of(x)
    with pytest.raises(sm.BadParamError, match="got a LlamaMLP that computes something else"):
        sm.fuse_(model)


def test_an_mlp_that_treats_some_tokens_otherwise_is_not_fused():
    """Found by its layer, for what the layer reads; the trial of the MLP alone has four tokens."""
    model = quantized(tiny("llama"))
    mlp = model.model.layers[1].mlp

    class CountsTheFirst(type(mlp)):
        def forward(self, x):
            out = super().forward(x)
            return torch.cat([30 * out[:, :3], out[:, 3:]], 1) if x.shape[1] > 4 else out

    mlp.__class__ = CountsTheFirst
    with pytest.raises(sm.BadParamError, match=r"got outputs of model.layers.1 that differ by .* \(median\) to"):
        sm.fuse_(model)


def test_an_mlp_without_finite_results_is_not_fused():
    model = quantized(tiny("llama"))
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x, of=mlp.forward: of(x) * float("nan")
    with pytest.raises(sm.BadParamError, match="got a LlamaMLP that computes something else"):
        sm.fuse_(model)


@pytest.mark.parametrize("returns", [lambda out: [out], lambda out: {"hidden": out}])
def test_layers_with_other_keywords_and_results_are_fused(returns):
    model = quantized(tiny("llama"))
    for layer in model.model.layers:

        def forward(*arguments, x=None, of=layer.forward, **options):
            return returns(of(x if x is not None else arguments[0], **options))

        layer.forward = forward

    def run(input_ids, **options):
        hidden = model.model.embed_tokens(input_ids)
        position = model.model.rotary_emb(hidden, torch.arange(input_ids.shape[1])[None])
        for layer in model.model.layers:
            out = layer(x=hidden, position_embeddings=position)
            hidden = out["hidden"] if isinstance(out, dict) else out[0]
        return transformers.modeling_outputs.BaseModelOutputWithPast(last_hidden_state=model.model.norm(hidden))

    model.model.forward = run
    assert len(sm.fuse_(model).norms) == 4


def test_fused_modules_have_the_training_flag_of_the_model():
    model = quantized(tiny("llama")).train()
    sm.fuse_(model)
    assert all(module.training for module in model.modules())


def test_other_threads_make_modules_as_usual_while_a_model_is_saved(tmp_path):
    model, made = quantized(tiny("llama", torch.bfloat16)), []
    saving = threading.Thread(target=lambda: [sm.save_pretrained(model, tmp_path) for _ in range(3)])
    saving.start()
    while saving.is_alive():
        made.append(torch.nn.Linear(2, 2).weight)
    saving.join()
    assert made and all(weight.device.type == "cpu" and weight.dtype is torch.float32 and bool(weight.any()) for weight in made)


def test_saving_in_two_threads_leaves_torch_as_it_was(tmp_path):
    models = [quantized(tiny(name)) for name in ("llama", "qwen3")]
    threads = [threading.Thread(target=sm.save_pretrained, args=(model, tmp_path / str(i))) for i, model in enumerate(models)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu" and torch.get_default_dtype() is torch.float32
    assert all(torch.equal(logits(sm.from_pretrained(tmp_path / str(i)), IDS), logits(model, IDS)) for i, model in enumerate(models))


@pytest.mark.parametrize("error", [KeyError, ValueError, AssertionError, torch.OutOfMemoryError])
def test_fusing_is_undone_whatever_fails(error, monkeypatch):
    model = quantized(tiny("llama"))
    before, wanted, calls = classes(model), logits(model, IDS), []

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) == 2:  # in the second layer
            raise error("simulated")
        return joined(*arguments)

    joined = sm.models.fuse._joined
    monkeypatch.setattr("scaled_mm.models.fuse._joined", fail)
    with pytest.raises(error):
        sm.fuse_(model)
    assert classes(model) == before and torch.equal(logits(model, IDS), wanted)


def test_a_reader_of_a_norm_that_fails_is_named():
    """It expects a tensor, and gets what the norm has quantized."""
    model = quantized(tiny("llama"))

    def read(module, arguments, options):
        options["hidden_states"].mul(2)

    model.model.layers[1].self_attn.register_forward_pre_hook(read, with_kwargs=True)
    before = classes(model)
    with pytest.raises(sm.BadParamError, match="do only what those of Llama do, got AttributeError in model.layers.1: "):
        sm.fuse_(model)
    assert classes(model) == before


@pytest.mark.parametrize("kind, fields", [("Llama", {}), ("Mixtral", dict(num_local_experts=4))])
def test_deep_models_in_bfloat16_are_fused_though_their_outputs_differ(kind, fields):
    """A difference of one rounding grows from layer to layer; each layer by itself computes nearly the same."""
    model = quantized(made(kind, torch.bfloat16, **{**fields, "num_hidden_layers": 12, "initializer_range": 0.2}))
    assert len(sm.fuse_(model).norms) >= 12


def test_a_router_of_another_dtype_than_its_input_is_not_fused():
    fields = dict(MODELS["deepseek"][1] | MLA | EXPERTS)
    model = quantized(made("DeepseekV2", torch.bfloat16, **fields))
    assert model.model.layers[1].mlp.gate.weight.dtype is torch.float32
    done = sm.fuse_(model)
    assert done.norms and not done.routers


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn, torch.complex64], ids=str)
@pytest.mark.parametrize("calibrated", [False, True])
def test_weights_of_other_dtypes_are_refused_by_name(dtype, calibrated):
    model = tiny("llama")
    up = model.model.layers[1].mlp.up_proj
    up.weight = torch.nn.Parameter(up.weight.data.to(dtype), requires_grad=False)
    with pytest.raises(sm.BadParamError, match=r"float16, bfloat16 or float32, got model.layers.1.mlp.up_proj.weight in torch"):
        sm.quantize_(model, None, tokens() if calibrated else None, progress=False)
    assert not any(isinstance(module, INT8) for module in model.modules())


def test_a_bias_that_is_not_finite_is_refused():
    model = tiny("llama with biases")
    model.model.layers[1].self_attn.q_proj.bias.data[0] = float("nan")
    for calibration in None, tokens():
        with pytest.raises(sm.BadParamError, match="NaN or infinity in model.layers.1.self_attn.q_proj.bias"):
            sm.quantize_(model, None, calibration, progress=False)


class ReadsAWeight(torch.nn.Module):
    """Multiplies by a linear layer's weight without calling it. calls: calls it too."""

    def __init__(self, mlp: torch.nn.Module, calls: bool):
        super().__init__()
        self.inner, self.calls, self.read = mlp, calls, torch.nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return self.inner(x) + x @ self.read.weight.T + (self.read(x) if self.calls else 0)


def test_a_weight_that_is_read_without_a_call_stays():
    model = tiny("llama")
    model.model.layers[1].mlp = ReadsAWeight(model.model.layers[1].mlp, calls=False)
    before = logits(model, IDS)
    report = sm.quantize_(model, progress=False)
    assert {layer.name for layer in report.layers if layer.scheme == "float"} == {"model.layers.1.mlp.read"}
    assert distance(logits(model, IDS), before) < 0.05


@pytest.mark.parametrize("calibration", [None, tokens()])
def test_a_weight_that_is_read_beside_a_call_is_refused_by_name_unless_it_is_ignored(calibration):
    model = tiny("llama")
    model.model.layers[1].mlp = ReadsAWeight(model.model.layers[1].mlp, calls=True)
    before = classes(model), logits(model, IDS)
    message = "linear layers whose weights are read by a call only, got RuntimeError with int8 weights of model.layers.1.mlp.read: "
    with pytest.raises(sm.BadParamError, match=message):
        sm.quantize_(model, None, calibration, progress=False)
    assert classes(model) == before[0] and torch.equal(logits(model, IDS), before[1])
    report = sm.quantize_(model, sm.Int8Config(ignore=("re:.*mlp.read",)), calibration, progress=False)
    assert report.counts()["float"] == 1 and distance(logits(model, IDS), before[1]) < 0.05


@pytest.mark.parametrize("result", [lambda found: found.logits, lambda found: (found.logits, None), lambda found: [found.logits]])
def test_weights_are_checked_whatever_the_model_returns(result):
    class Wrapper(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, ids):
            return result(self.inner(ids))

    model = Wrapper(tiny("llama"))
    model.inner.model.layers[1].mlp = ReadsAWeight(model.inner.model.layers[1].mlp, calls=True)
    with pytest.raises(sm.BadParamError, match="int8 weights of inner.model.layers.1.mlp.read"):
        sm.quantize_(model, progress=False)


def test_layers_that_few_tokens_do_not_reach_are_quantized_without_data():
    """As cross-attention, and experts without tokens."""
    model = tiny("llama")
    model.model.layers[1].extra = torch.nn.Linear(64, 64)
    assert "float" not in sm.quantize_(model, progress=False).counts()
    assert type(model.model.layers[1].extra) is nn.Int8Linear


def test_what_a_model_changes_for_few_tokens_is_set_back():
    """BigBird takes another attention for them, and keeps it."""
    model, forward = tiny("llama"), transformers.LlamaForCausalLM.forward

    class Switches(transformers.LlamaForCausalLM):
        def forward(self, input_ids, **options):
            if input_ids.shape[1] < 16 and self.kind == "sparse":
                self.kind, self.model.norm = "full", torch.nn.Identity()
            return forward(self, input_ids, **options)

    model.__class__, model.kind = Switches, "sparse"
    quantized(model)
    sm.fuse_(model)
    assert model.kind == "sparse" and not isinstance(model.model.norm, torch.nn.Identity)


@pytest.mark.parametrize("style", ["prune", "weight_norm"])
@pytest.mark.parametrize("calibration", [None, tokens()])
def test_pruned_and_normalized_weights_are_quantized_as_they_are(style, calibration):
    model = tiny("llama")
    up = model.model.layers[1].mlp.up_proj
    if style == "prune":
        torch.nn.utils.prune.l1_unstructured(up, "weight", 0.3)
    else:
        torch.nn.utils.weight_norm(up)
    before = logits(model, IDS)
    sm.quantize_(model, None, calibration, progress=False)
    assert type(model.model.layers[1].mlp.up_proj) is nn.Int8Linear and distance(logits(model, IDS), before) < 0.05


def test_torch_s_own_transformer_layers_are_refused():
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(64, 4, 96, batch_first=True), 2)
    with pytest.raises(sm.BadParamError, match="got TransformerEncoderLayer, which reads their weights itself"):
        sm.quantize_(model, progress=False)


def test_a_model_without_attention_is_calibrated_with_tokens():
    model = made("Mamba", state_size=8, use_mambapy=False)
    before = logits(model, IDS)
    report = sm.quantize_(model, None, tokens(), progress=False)
    assert {layer.scheme for layer in report.layers} > {"float"} and distance(logits(model, IDS), before) < 0.05


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.complex64, torch.float32], ids=str)
def test_token_ids_of_other_dtypes_are_refused(dtype):
    with pytest.raises(sm.BadTensorDtypeError, match=r"calibration\[0\]: expected token ids as integers, got torch"):
        sm.quantize_(tiny("llama"), None, [IDS.to(dtype)], progress=False)


@pytest.mark.parametrize("ids", [IDS.to("meta"), IDS.to_sparse()])
def test_token_ids_that_are_not_in_memory_are_refused(ids):
    with pytest.raises(sm.BadParamError, match=r"calibration\[0\]: expected token ids in memory, got a tensor on "):
        sm.quantize_(tiny("llama"), None, [ids], progress=False)


def test_other_models_are_refused_by_fuse_and_convert():
    for change in sm.fuse_, sm.convert_:
        with pytest.raises(sm.BadParamError, match="model: expected a torch.nn.Module, got a NoneType"):
            change(None)
    with pytest.raises(sm.BadParamError, match="model: expected weights, got model.embed_tokens.weight on the meta device"):
        sm.fuse_(quantized(tiny("llama")).to("meta"))
    vision = quantized(bert())
    vision.forward = lambda *_: (_ for _ in ()).throw(ValueError("expected pixels"))
    with pytest.raises(sm.BadParamError, match="model: expected one that runs on token ids, got ValueError: expected pixels"):
        sm.fuse_(vision)


def test_arguments_of_layers_are_named():
    linear = nn.Int8Linear.from_tensors(torch.zeros(4, 8, dtype=torch.int8), torch.ones(4))
    with pytest.raises(sm.BadParamError, match="x: expected a tensor or a QuantizedActivation, got a NoneType"):
        linear(None)
    with pytest.raises(sm.BadParamError, match="gate_up: expected an Int8Linear, got a NoneType"):
        nn.GatedMLP(None, linear)
    with pytest.raises(sm.BadTensorShapeError, match=r"bias: expected \[4\], got \[3\]"):
        nn.Int8Linear.from_tensors(torch.zeros(4, 8, dtype=torch.int8), torch.ones(4), torch.zeros(3))
