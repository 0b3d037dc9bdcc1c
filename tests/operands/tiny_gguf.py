"""A small GGUF file of a Llama model, as llama.cpp's converter writes it. Importing this module skips the test file without transformers and gguf."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import scaled_mm as sm
from operands.tiny_models import transformers

gguf = pytest.importorskip("gguf")

HEADS, KEY_HEADS, LAYERS, VOCABULARY, HIDDEN, INNER = 4, 2, 2, 96, 64, 256
# The format of each linear layer of a decoder layer, by its name in the file.
FORMATS = {"attn_q": "q4_0", "attn_k": "q4_1", "attn_v": "q5_0", "attn_output": "q5_1", "ffn_gate": "q8_0", "ffn_up": "q4_1", "ffn_down": "q4_0"}
SHAPES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // 2, HIDDEN),
    "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}
MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write(
    path: Path,
    formats: Mapping[str, str] = FORMATS,
    embedding: str = "q8_0",
    head: str | None = None,
    architecture: str = "llama",
    without: str = "",
    more: Mapping[str, tuple[int, ...]] | None = None,
    layers: int = LAYERS,
    parts: int = 1,
) -> Path:
    """Writes random weights. formats: of `quantize_block`, or "f16", "f32", "q4_k", "q5_k", "q6_k", by name.
    head: the format of an output head; None: it is tied to the embedding. without: the name of a tensor that is left out. more: the shapes of
    other tensors by name. layers: the number that the header gives. parts: the number of files that the header gives."""
    generator = torch.Generator().manual_seed(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    if parts > 1:
        writer.add_uint16("split.count", parts)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)

    def add(name: str, shape: tuple[int, ...], fmt: str, scale: float) -> None:
        values = torch.randn(shape, generator=generator) * scale
        if name == without:
            return
        if fmt in ("f16", "f32"):
            writer.add_tensor(name, values.to(torch.float16 if fmt == "f16" else torch.float32).numpy())
        elif fmt in ("q4_k", "q5_k"):
            size = {"q4_k": 144, "q5_k": 176}[fmt]
            data = torch.randint(0, 256, (shape[0], shape[1] // 256, size), dtype=torch.uint8, generator=generator)
            data[..., :4] = torch.tensor([2.0**-12, 2.0**-12]).half().view(torch.uint8)  # d and dmin
            writer.add_tensor(name, data.flatten(-2).numpy(), raw_dtype=gguf.GGMLQuantizationType[fmt.upper()])
        elif fmt == "q6_k":
            data = torch.randint(0, 256, (shape[0], shape[1] // 256, 210), dtype=torch.uint8, generator=generator)
            data[..., 192:208] = data[..., 192:208] % 96 + 32  # scales of 16 values
            data[..., 208:] = torch.tensor([2.0**-14]).half().view(torch.uint8)  # d
            writer.add_tensor(name, data.flatten(-2).numpy(), raw_dtype=gguf.GGMLQuantizationType.Q6_K)
        else:
            data = sm.quantize_block(values, fmt, rule="ggml").flatten(-2).numpy()
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[fmt.upper()])

    add("token_embd.weight", (VOCABULARY, HIDDEN), embedding, 1.0)
    for layer in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{norm}.weight", (HIDDEN,), "f32", 1.0)
        for name, shape in SHAPES.items():
            add(f"blk.{layer}.{name}.weight", shape, formats[name], shape[1] ** -0.5)
    add("output_norm.weight", (HIDDEN,), "f32", 1.0)
    if head is not None:
        add("output.weight", (VOCABULARY, HIDDEN), head, HIDDEN**-0.5)
    for name, shape in (more or {}).items():
        add(name, shape, "f32", 1.0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokens(length: int = 24) -> torch.Tensor:
    """Token ids [2, length]."""
    return torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))


def write_experts(path: Path) -> Path:
    """A Qwen3 mixture with random weights; of the experts transformers expects 768 inner values."""
    experts, inner, generator = 4, 768, torch.Generator().manual_seed(0)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    for add, value in (
        (writer.add_context_length, 128),
        (writer.add_embedding_length, HIDDEN),
        (writer.add_block_count, LAYERS),
        (writer.add_feed_forward_length, INNER),
        (writer.add_expert_feed_forward_length, inner),
        (writer.add_head_count, HEADS),
        (writer.add_head_count_kv, KEY_HEADS),
        (writer.add_key_length, HIDDEN // HEADS),
        (writer.add_value_length, HIDDEN // HEADS),
        (writer.add_layer_norm_rms_eps, 1e-6),
        (writer.add_rope_freq_base, 10000.0),
        (writer.add_expert_count, experts),
        (writer.add_expert_used_count, 2),
        (writer.add_vocab_size, VOCABULARY),
    ):
        add(value)
    attention = {name: shape for name, shape in SHAPES.items() if name.startswith("attn")}
    layer = {
        **{name: (HIDDEN,) for name in ("attn_norm", "ffn_norm")},
        **{name: (HIDDEN // HEADS,) for name in ("attn_q_norm", "attn_k_norm")},
        **attention,
        "ffn_gate_inp": (experts, HIDDEN),
        **{name: (experts, inner, HIDDEN) for name in ("ffn_gate_exps", "ffn_up_exps")},
        "ffn_down_exps": (experts, HIDDEN, inner),
    }
    shapes = {f"blk.{index}.{name}.weight": shape for index in range(LAYERS) for name, shape in layer.items()}
    shapes |= {"token_embd.weight": (VOCABULARY, HIDDEN), "output_norm.weight": (HIDDEN,), "output.weight": (VOCABULARY, HIDDEN)}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator) * 0.1
        fmt = FORMATS.get(name.split(".")[-2])
        if fmt is None:
            writer.add_tensor(name, values.numpy())
        else:
            data = sm.quantize_block(values, fmt, rule="ggml").flatten(-2).numpy()
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[fmt.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


__all__ = ["FORMATS", "MODULES", "transformers", "tokens", "write", "write_experts"]
