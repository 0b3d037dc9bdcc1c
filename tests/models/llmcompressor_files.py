"""Makes tests/models/data/llmcompressor: checkpoints that the real llm-compressor writes, and the logits of its own model. Not run by pytest.

    pip install llmcompressor && python tests/models/llmcompressor_files.py

llm-compressor wants an older transformers than the package's tests, so it has an environment of its own. Made with llmcompressor 0.14.0.1,
compressed-tensors 0.19.0, transformers 5.17.0, torch 2.13.0.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3MoeConfig

DATA = Path(__file__).parent / "data" / "llmcompressor"
VOCABULARY = 64
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    tie_word_embeddings=True,
)
DENSE = LlamaConfig(**SIZES)
MIXTURE = Qwen3MoeConfig(**SIZES, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[])
IGNORED = ["lm_head", r"re:.*mlp\.gate$"]


def of_scheme(kind: type = QuantizationModifier):
    return kind(targets="Linear", scheme="W8A8", ignore=IGNORED)


def of_inputs(**inputs):
    numbers = dict(num_bits=8, type="int")
    group = dict(targets=["Linear"], weights=dict(**numbers, strategy="channel", symmetric=True), input_activations=dict(**numbers, **inputs))
    return QuantizationModifier(config_groups={"group_0": group}, ignore=IGNORED)


# name -> (the model, what llm-compressor does, whether it needs data)
CASES = {
    "dynamic": (DENSE, of_scheme(), False),
    "gptq": (DENSE, of_scheme(GPTQModifier), True),
    "static": (DENSE, of_inputs(strategy="tensor", symmetric=True, dynamic=False), True),
    "static_asymmetric": (DENSE, of_inputs(strategy="tensor", symmetric=False, dynamic=False), True),
    "dynamic_asymmetric": (DENSE, of_inputs(strategy="token", symmetric=False, dynamic=True), False),
    "experts": (MIXTURE, of_scheme(), False),
}


def main() -> None:
    torch.manual_seed(0)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), unk_token="w0", pad_token="w0")
    rows = [{"input_ids": torch.randint(0, VOCABULARY, (32,)).tolist(), "attention_mask": [1] * 32} for _ in range(8)]
    data = dict(dataset=Dataset.from_list(rows), max_seq_length=32, num_calibration_samples=8)
    ids = torch.randint(0, VOCABULARY, (2, 24))
    for name, (config, recipe, needs_data) in CASES.items():
        folder = DATA / name
        shutil.rmtree(folder, ignore_errors=True)
        with tempfile.TemporaryDirectory() as base:  # llm-compressor reads the folder that the model names
            made = AutoModelForCausalLM.from_config(config)
            for parameter in made.parameters():  # a new model's are so small that attention is even
                if parameter.dim() > 1:
                    parameter.data.normal_(std=0.15)
            made.save_pretrained(base)
            model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
            oneshot(model=model, recipe=recipe, processor=tokenizer, **(data if needs_data else {}))
            with torch.no_grad():
                logits = model(ids).logits
            model.save_pretrained(folder, save_compressed=True)
        for other in ("generation_config.json", "recipe.yaml"):
            (folder / other).unlink(missing_ok=True)
        save_file({"ids": ids, "logits": logits}, folder / "logits.safetensors")


if __name__ == "__main__":
    main()
