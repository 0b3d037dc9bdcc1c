"""`scaled-mm quantize`, `eval` and `generate`, on a small random model, and on a real one if SCALED_MM_SMOLLM2 names its GGUF file."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal

import pytest
import torch
from operands.tiny_models import SIZES, bert, tiny, transformers

import scaled_mm as sm
from scaled_mm.cli import main
from scaled_mm.log_lines import LogLines
from scaled_mm.measure import plots
from scaled_mm.models.progress import progress_bar

TEXT = "The quick brown fox jumps over the lazy dog. " * 200


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A model with a tokenizer of single bytes, as files."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    letters = sorted(set(TEXT.replace(" ", "Ġ")) | {"<unk>"})
    tokenizer = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate(letters)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), pre_tokenizers.Split("", "isolated")]
    )
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    tiny("llama", torch.bfloat16).save_pretrained(folder)
    return folder


def answer(capsys, *words):
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, message, *words):
    """The command ends with exit status 2 and the message in one line, without a traceback, and prints no result."""
    assert main([*map(str, words)]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert message in captured.err and all(line.startswith(("scaled-mm ", "loading ")) for line in captured.err.splitlines()), captured.err


def changed(model_folder, folder, **contents):
    """A copy of the model with other files: name without .json to content."""
    shutil.copytree(model_folder, folder)
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(content)
    return folder


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "contents, message",
    [
        (dict(config=DEEP), "config.json: "),
        (dict(config="[]"), "config.json, got a list"),
        (dict(tokenizer_config="[]"), "MODEL: expected a tokenizer in "),
        (dict(tokenizer_config=DEEP), "MODEL: expected a tokenizer in "),
        (dict(tokenizer="{}"), "MODEL: expected a tokenizer in "),
    ],
)
def test_a_malformed_file_of_a_model_is_refused_in_one_line(model_folder, tmp_path, capsys, contents, message):
    model = changed(model_folder, tmp_path / "model", **contents)
    refused(capsys, message, "eval", model, "--device", "cpu")
    refused(capsys, message, "generate", model, "The quick", "--device", "cpu")


@pytest.mark.parametrize("content", ["[" * 5000, "a: 2026-99-99", "[", "activation: never", "smooth: 1" + "0" * 400, "overrides: {'re:(': null}"])
def test_a_malformed_policy_is_refused_by_name(model_folder, tmp_path, capsys, content):
    (tmp_path / "policy.yaml").write_text(content)
    refused(capsys, "policy.yaml: ", "quantize", model_folder, "--out", tmp_path / "out", "--policy", tmp_path / "policy.yaml")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def other_folders(model_folder, tmp_path_factory):
    """Models beside the same tokenizer that cannot be compared with `model_folder`, by what differs."""
    root = tmp_path_factory.mktemp("others")
    few, t5 = tiny("llama"), transformers.T5Config(**{**SIZES, "num_layers": 2}, d_model=64, d_ff=96, d_kv=16, num_heads=4)
    few.resize_token_embeddings(8)
    deep = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 3})
    wide = transformers.LlamaConfig(**{**SIZES, "hidden_size": 32})
    llama = transformers.LlamaForCausalLM._from_config
    models = {"vocabulary": few, "layers": llama(deep), "hidden": llama(wide), "encoder": bert(), "t5": transformers.T5ForConditionalGeneration(t5)}
    for name, model in models.items():
        shutil.copytree(model_folder, root / name, ignore=shutil.ignore_patterns("*.safetensors", "config.json", "generation_config.json"))
        model.save_pretrained(root / name)
    return {"decoder": model_folder, **{name: root / name for name in models}}


@pytest.mark.parametrize(
    "model, against, message",
    [
        ("decoder", "vocabulary", "against: expected token ids from 0 to 7 in batches[0], got "),
        ("vocabulary", None, "model: expected token ids from 0 to 7 in batches[0], got "),
        ("decoder", "layers", "against: expected 2 layers, as model has, got 3"),
        ("decoder", "hidden", "against: expected hidden states [1, 32, 64], as model has, got [1, 32, 32]"),
        ("decoder", "encoder", "against: expected a model that returns logits, as model does, got last_hidden_state"),
        ("encoder", "decoder", "against: expected a model that returns last_hidden_state, as model does, got logits"),
        ("t5", None, "model: expected a causal language model, or an encoder without a head, got a T5ForConditionalGeneration"),
        ("decoder", "t5", "against: expected a causal language model, or an encoder without a head, got a T5ForConditionalGeneration"),
        ("decoder", "nowhere", "--against: expected a folder, a GGUF file or a name on the hub"),
    ],
)
def test_models_that_cannot_be_compared_are_refused(other_folders, tmp_path, capsys, model, against, message):
    (tmp_path / "text.txt").write_text(TEXT)
    other = [] if against is None else ["--against", other_folders.get(against, tmp_path / "nowhere")]
    refused(capsys, message, "eval", other_folders[model], *other, "--text", tmp_path / "text.txt", "--tokens", 32, "--windows", 1, "--device", "cpu")


def test_logits_of_another_vocabulary_are_not_compared():
    few = tiny("llama")
    few.resize_token_embeddings(8)
    with pytest.raises(sm.BadParamError, match=r"against: expected logits \[1, 8, 64\], as model has, got \[1, 8, 8\]"):
        sm.evaluate(tiny("llama"), [torch.arange(8)[None]], few)


def test_a_plot_that_cannot_be_drawn_is_refused_before_the_evaluation(model_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("scaled_mm.models.evaluate.evaluate", None)  # not called
    (tmp_path / "folder.png").mkdir()
    for path, message in (
        (tmp_path / "none" / "x.png", "--plot: expected a file in a folder that is there, got "),
        (tmp_path / "folder.png", "--plot: expected a file in a folder that is there, got "),
        (tmp_path / "x.foo", "--plot: expected a file that ends in one of "),
        (tmp_path / "x", "--plot: expected a file that ends in one of "),
    ):
        refused(capsys, message, "eval", model_folder, "--against", model_folder, "--plot", path)
    refused(capsys, "--plot: expected --against MODEL too", "eval", model_folder, "--plot", tmp_path / "x.png")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


def test_a_plot_that_fails_after_all_loses_no_result(model_folder, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("scaled_mm.cli.eval._draw", full)
    words = [
        "eval",
        model_folder,
        "--against",
        model_folder,
        "--tokens",
        32,
        "--windows",
        1,
        "--device",
        "cpu",
        "--plot",
        tmp_path / "x.png",
        "--json",
    ]
    assert main([*map(str, words)]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["tokens"] == 31 and "x.png cannot be drawn, OSError" in captured.err and "Traceback" not in captured.err


@pytest.mark.parametrize("template", ["{{ raise_exception('roles must alternate') }}", "{{ messages[0]['x']['y'] }}", "{% if %}"])
def test_a_chat_template_that_raises_is_refused_in_one_line(model_folder, tmp_path, capsys, template):
    shutil.copytree(model_folder, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    refused(capsys, "MODEL: expected a chat template that takes one user message, ", "generate", tmp_path / "model", "The quick", "--device", "cpu")


def test_models_that_cannot_continue_the_prompt_are_refused(other_folders, capsys):
    for name, message in (
        ("vocabulary", "MODEL: expected token ids from 0 to 7 in the tokens of PROMPT, got "),
        ("t5", "MODEL: expected a causal language model, got a T5ForConditionalGeneration"),
    ):
        refused(capsys, message, "generate", other_folders[name], "The quick", "--device", "cpu")


@pytest.mark.parametrize(
    "policy, format, message",
    [
        (
            "ignore: ['re:.*']",
            "compressed-tensors",
            "--policy: expected layers to quantize, got ignore and overrides that exclude all 14 linear layers and experts of model.layers",
        ),
        ("activation: static", "w8a8_int8", "--policy: expected dynamic for model.layers.0.self_attn.q_proj, as the format w8a8_int8 holds nothing"),
        ("symmetric: false", "w8a8_int8", "holds nothing else, got dynamic asymmetric"),
        ("overrides: {'re:.*up_proj': {activation: static}}", "w8a8_int8", "--policy: expected dynamic for model.layers.0.mlp.up_proj"),
        ("overrides: {'re:.*q_proj': null}", "compressed-tensors", "got q_proj not quantized, k_proj auto, v_proj auto"),
        ("{activation: static, overrides: {'re:.*up_proj': {activation: dynamic}}}", "compressed-tensors", "got gate_proj static, up_proj dynamic"),
        ("overrides: {'re:.*k_proj': {symmetric: false}}", "compressed-tensors", "got q_proj auto, k_proj auto asymmetric, v_proj auto"),
    ],
)
def test_schemes_that_no_checkpoint_holds_are_refused_before_calibration(model_folder, tmp_path, capsys, monkeypatch, policy, format, message):
    monkeypatch.setattr("scaled_mm.models.quantize.quantize_", None)  # not called
    (tmp_path / "policy.yaml").write_text(policy)
    refused(capsys, message, "quantize", model_folder, "--out", tmp_path / "out", "--format", format, "--policy", tmp_path / "policy.yaml")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_decisions_of_another_policy_stays_and_the_message_says_what_to_do(model_folder, tmp_path, capsys):
    out, policy = tmp_path / "out", tmp_path / "policy.yaml"
    words = ["quantize", model_folder, "--out", out, "--prompts", 2, "--device", "cpu", "--policy", policy]
    policy.write_text("activation: dynamic")
    answer(capsys, *words)
    before = (out / "quantization.json").read_bytes()
    for contents, changes in ("smooth: null", {}), ("activation: dynamic", {"exponents": 3}), ("activation: dynamic", {"scheme": "static"}):
        policy.write_text(contents)
        document = json.loads(before)
        document["layers"][0].update({key: value for key, value in changes.items() if key in document["layers"][0]})
        (out / "quantization.json").write_text(json.dumps({**document, **{key: changes[key] for key in changes if key in document}}, indent=1))
        changed = (out / "quantization.json").read_bytes()
        message = f"{out}/quantization.json"
        refused(capsys, message, *words)
        refused(capsys, "; delete that file to start anew, or choose another folder", *words)
        assert (out / "quantization.json").read_bytes() == changed
    (out / "quantization.json").unlink()
    answer(capsys, *words)


def test_patterns_that_match_no_layer_are_named(model_folder, tmp_path, capsys):
    (tmp_path / "policy.yaml").write_text("{ignore: [lm_head, model.norm], overrides: {'re:.*qproj': null, 're:.*o_proj': {smooth: null}}}")
    words = ["quantize", model_folder, "--out", tmp_path / "out", "--calibration", "none", "--device", "cpu", "--policy", tmp_path / "policy.yaml"]
    assert main([*map(str, words)]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert said == [f"warning: --policy: {pattern!r} matches no linear layer or experts in model.layers" for pattern in ("model.norm", "re:.*qproj")]


def test_a_model_is_quantized_evaluated_and_speaks(model_folder, tmp_path, capsys):
    out, text = tmp_path / "int8", tmp_path / "text.txt"
    text.write_text(TEXT)
    options = ["--out", out, "--calibration", text, "--prompts", 4, "--device", "cpu"]
    report = answer(capsys, "quantize", model_folder, *options)
    assert len(report["layers"]) == 14 and report == json.loads((out / "quantization.json").read_text())
    assert (out / "quantization.png").stat().st_size > 10_000
    result = answer(capsys, "eval", out, "--against", model_folder, "--text", text, "--tokens", 32, "--plot", tmp_path / "e.png", "--device", "cpu")
    assert result["tokens"] == 12 * 31 and 0 < result["kl"] < 0.01 and len(result["layers"]) == 2 and (tmp_path / "e.png").exists()
    fused = answer(capsys, "eval", out, "--against", model_folder, "--text", text, "--tokens", 32, "--fused", "--device", "cpu")
    assert fused["kl"] == pytest.approx(result["kl"], rel=0.5)
    said = answer(capsys, "generate", out, "The quick", "--tokens", 5, "--device", "cpu")
    assert said["tokens"] == 5 and said["tokens_per_second"] > 0 and said["fused"] is True
    model, tokenizer = sm.from_pretrained(out), transformers.AutoTokenizer.from_pretrained(out)
    sm.fuse_(model)
    ids = tokenizer("The quick", return_tensors="pt")["input_ids"]
    assert said["text"] == tokenizer.decode(model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :], skip_special_tokens=True)
    assert main(["quantize", str(model_folder), *map(str, options)]) == 0  # again: nothing is searched
    shown = capsys.readouterr().out
    assert "best static" in shown and "Wrote" in shown


def test_without_calibration_all_inputs_are_dynamic(model_folder, tmp_path, capsys):
    report = answer(capsys, "quantize", model_folder, "--out", tmp_path, "--calibration", "none", "--device", "cpu")
    assert len(report["layers"]) == 14 and {layer["scheme"] for layer in report["layers"]} == {"dynamic"}


def test_a_model_that_is_not_there_leaves_no_folder(tmp_path, capsys):
    assert main(["quantize", str(tmp_path / "none"), "--out", str(tmp_path / "int8")]) == 2
    assert "MODEL: expected a folder, a GGUF file or a name on the hub" in capsys.readouterr().err and not (tmp_path / "int8").exists()


def test_a_folder_with_the_weights_of_another_model_is_refused_before_a_model_is_loaded(model_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("scaled_mm.models.source.load_model", None)  # not called
    (tmp_path / "pytorch_model.bin").write_text("old")
    refused(capsys, "--out: expected a folder without the weights of another model", "quantize", model_folder, "--out", tmp_path, "--device", "cpu")
    assert [file.name for file in tmp_path.iterdir()] == ["pytorch_model.bin"]


def test_without_matplotlib_a_model_is_quantized_and_a_plot_of_eval_is_refused(model_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plots, "unavailable", lambda: "matplotlib is not installed")
    assert main(["quantize", str(model_folder), "--out", str(tmp_path / "int8"), "--prompts", "2", "--device", "cpu"]) == 0
    assert "; no plot: matplotlib is not installed." in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "int8" / "quantization.json").exists() and not (tmp_path / "int8" / "quantization.png").exists()
    assert main(["eval", str(tmp_path / "int8"), "--plot", str(tmp_path / "e.png")]) == 2
    assert "--plot: matplotlib is not installed" in capsys.readouterr().err


def test_a_policy_decides_and_sglangs_format_is_dynamic(model_folder, tmp_path, capsys):
    policy = tmp_path / "policy.yaml"
    policy.write_text("activation: static\nclip: percentile\npercentile: 99\nsmooth: null\noverrides: {'re:.*o_proj': {activation: dynamic}}\n")
    report = answer(capsys, "quantize", model_folder, "--out", tmp_path / "static", "--policy", policy, "--prompts", 2, "--device", "cpu")
    assert {layer["scheme"] for layer in report["layers"] if "o_proj" not in layer["name"]} == {"static"}
    report = answer(capsys, "quantize", model_folder, "--out", tmp_path / "w8a8", "--format", "w8a8_int8", "--prompts", 2, "--device", "cpu")
    assert {layer["scheme"] for layer in report["layers"]} == {"dynamic"}
    sm.from_pretrained(tmp_path / "w8a8")
    assert main(["quantize", str(model_folder), "--out", str(model_folder)]) == 2
    assert "--out: expected another folder than that of the model" in capsys.readouterr().err
    policy.write_text("bits: 4\n")
    assert main(["quantize", str(model_folder), "--out", str(tmp_path / "no"), "--policy", str(policy)]) == 2
    assert "--policy: " in capsys.readouterr().err
    assert main(["generate", str(model_folder), ""]) == 2
    assert "PROMPT: expected some text, got none" in capsys.readouterr().err
    config = json.loads((model_folder / "config.json").read_text())
    for name, fields, message in (
        ("unknown", {"model_type": "nobody", "architectures": None}, "MODEL: transformers cannot load"),
        ("encoder", {"architectures": ["LlamaModel"]}, "MODEL: expected one that generates text, got a LlamaModel"),
    ):
        other = shutil.copytree(model_folder, tmp_path / name)
        (other / "config.json").write_text(json.dumps({**config, **fields}))
        assert main(["generate", str(other), "The quick"]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert main(["eval", str(tmp_path / "nothing")]) == 2
    assert "MODEL: expected a folder, a GGUF file or a name on the hub" in capsys.readouterr().err


@pytest.mark.skipif(not os.environ.get("SCALED_MM_SMOLLM2"), reason="SCALED_MM_SMOLLM2 names no GGUF file of SmolLM2-135M (docs/guide/models.md)")
def test_massive_activations_of_a_real_model_stay_dynamic_and_the_literal_clamp_damages_it():
    """The layers 10 and 11 of SmolLM2. The input of the last down_proj reaches 3000, where 99.9 % of it are below 2."""
    from scaled_mm.models.data import default_text, windows
    from scaled_mm.models.source import load_model, load_tokenizer

    path = os.environ["SCALED_MM_SMOLLM2"]
    reference, tokenizer = load_model(path), load_tokenizer(path)
    reference.model.layers = reference.model.layers[:12]
    calibration, batches = windows(default_text(), tokenizer, 6, 64), windows(default_text(evaluation=True), tokenizer, 2, 64)
    first = {r"re:model\.layers\.\d\.": None}
    auto, clamped = copy.deepcopy(reference), copy.deepcopy(reference)
    report = sm.quantize_(auto, sm.Int8Config(overrides=first), calibration, progress=False)
    down = report.layers[-1]
    assert down.name == "model.layers.11.mlp.down_proj" and down.scheme == "dynamic"
    assert down.absmax > 300 * down.threshold and down.errors["99.9 %"] > 3 * down.error
    literal = sm.Int8Config(activation="static", clip="percentile", smooth=None, overrides=first)
    with pytest.warns(UserWarning, match="static scales: "):
        sm.quantize_(clamped, literal, calibration, progress=False)
    errors = [sm.evaluate(model, batches, reference).layers["model.layers.11"] for model in (auto, clamped)]
    assert errors[0] < 0.03 and errors[1] > 3 * errors[0], errors


def test_a_line_of_the_text_stays_one_line_in_a_pipe(model_folder, capsys):
    assert main(["generate", str(model_folder), "The quick", "--tokens", "200", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    said = answer(capsys, "generate", model_folder, "The quick", "--tokens", 200, "--device", "cpu")["text"]
    assert len(said) == 200 and text.rstrip("\n") == said.rstrip("\n")


def test_progress_without_a_terminal_is_lines(monkeypatch, capsys):
    monkeypatch.setattr("scaled_mm.models.progress.LogLines", lambda terminal: LogLines(terminal, seconds=0.0))
    for shown, expected in (True, ["packing: 1 of 2, the last one a, 0 s", "packing: 2 of 2, the last one b, 0 s"]), (False, []):
        with progress_bar(shown, 2, "packing") as advance:
            advance("a"), advance("b")
        assert capsys.readouterr().err.splitlines() == expected


def test_a_missing_gguf_file_is_not_looked_for_on_the_hub(capsys):
    assert main(["generate", "nofolder/x.gguf", "Hello"]) == 2
    assert "there is no nofolder/x.gguf" in capsys.readouterr().err


def test_an_empty_folder_and_a_prompt_that_is_no_text_are_refused(model_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["quantize", str(model_folder), "--out", ""])
    assert "--out: expected a folder, got an empty text" in capsys.readouterr().err and not list(tmp_path.iterdir())
    refused(capsys, "PROMPT: expected UTF-8, got 'caf\\udce9'", "generate", model_folder, "caf\udce9")
    refused(capsys, "--out: expected another folder than that of the model, and none in it", "quantize", model_folder, "--out", model_folder / "q")


def test_sigterm_leaves_no_temporary_folder(model_folder, tmp_path, monkeypatch):
    from scaled_mm.models import quantize

    def ends(*_, **__):
        assert any(path.name.startswith(".int8") for path in (tmp_path / "out").iterdir())
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(quantize, "quantize_", ends)
    with pytest.raises(SystemExit) as ended:
        main(["quantize", str(model_folder), "--out", str(tmp_path / "out"), "--offload"])
    assert ended.value.code == 143 and not (tmp_path / "out").exists() and signal.getsignal(signal.SIGTERM) == before


def test_the_mark_at_the_start_of_a_text_file_is_not_text(tmp_path):
    from scaled_mm.cli import common

    (tmp_path / "text").write_bytes(b"\xef\xbb\xbfwords")
    assert common.text_of("--text", tmp_path / "text") == "words"
