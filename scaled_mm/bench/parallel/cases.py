"""What is predicted or measured: row-parallel linear layers and whole decoder layers of Llama 3, and experts."""

from __future__ import annotations

from scaled_mm.measure.shapes import LLM_SHAPES

#: (N, K) of the whole weight.
LINEAR: dict[str, tuple[int, int]] = {
    "8B_o": LLM_SHAPES["8B_o"],
    "8B_down": LLM_SHAPES["8B_down"],
    "70B_o": LLM_SHAPES["70B_o"],
    "70B_down": (8192, 28672),
}

TINY = {"tiny": (64, 192)}  # for CPUs

#: The linear layers of a decoder layer: those whose N is divided, those whose K is.
DECODERS: dict[str, tuple[tuple[tuple[int, int], ...], tuple[str, ...]]] = {
    "llama-8b": ((LLM_SHAPES["8B_qkv"], LLM_SHAPES["8B_gate_up"]), ("8B_o", "8B_down")),
    "llama-70b": ((LLM_SHAPES["70B_qkv"], LLM_SHAPES["70B_gu"]), ("70B_o", "70B_down")),
}

EXPERTS = "deepseek"  # of `scaled_mm.bench.experts.cases.MODELS`

M: tuple[int, ...] = (1, 16, 64, 256, 2048, 8192)
RANKS: tuple[int, ...] = (2, 4, 8, 16)

MEASURED_M: tuple[int, ...] = (1, 16, 64, 256, 2048)
MEASURED_EXPERTS = "qwen3,deepseek"  # every rank also has all experts, to compare with: 12 GB of DeepSeek
