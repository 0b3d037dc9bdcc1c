"""What is timed: decoder layers of language models, by the number of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from scaled_mm.measure.shapes import Case


@dataclass(frozen=True)
class Model:
    """hidden: H. heads, kv_heads of `head` elements. inner: I of the feed-forward network, or of an expert.

    experts: experts of a mixture; 0: one dense network. choices: experts per token. Layers with experts also normalize each head of query and key.
    """

    hidden: int
    heads: int
    kv_heads: int
    head: int
    inner: int
    experts: int = 0
    choices: int = 0

    @property
    def of_query(self) -> int:
        """Columns of all query heads."""
        return self.heads * self.head

    @property
    def of_qkv(self) -> int:
        """Columns of all heads."""
        return (self.heads + 2 * self.kv_heads) * self.head

    @property
    def stored(self) -> int:
        """Elements of a layer's weights."""
        return self.hidden * (self.of_qkv + self.of_query + 3 * self.inner * max(self.experts, 1))

    @property
    def read(self) -> int:
        """Elements of the weights that one token reads, without the router's."""
        return self.hidden * (self.of_qkv + self.of_query + 3 * self.inner * max(self.choices, 1))


MODELS: dict[str, Model] = {
    "llama-8b": Model(4096, 32, 8, 128, 14336),  # Llama 3 8B
    "llama-70b": Model(8192, 64, 8, 128, 28672),  # Llama 3 70B
    "qwen3-30b-a3b": Model(2048, 32, 4, 128, 768, 128, 8),
    "tiny": Model(256, 4, 2, 64, 512),  # for CPUs
    "tiny-experts": Model(256, 4, 2, 64, 128, 8, 2),
}

GPU_MODELS, CPU_MODELS = "llama-8b,llama-70b,qwen3-30b-a3b", "tiny,tiny-experts"
GPU_TOKENS: tuple[int, ...] = (1, 16, 64, 256, 2048)
CPU_TOKENS: tuple[int, ...] = (1, 17)


@dataclass(frozen=True)
class DecoderCase(Case):
    """shape: a name of MODELS. M: tokens. N, K: hidden."""

    @property
    def model(self) -> Model:
        return MODELS[self.shape]

    def __str__(self) -> str:
        return f"{self.shape} T={self.M}"


def defaults(device: torch.device) -> tuple[str, tuple[int, ...]]:
    """(models, tokens) if the command line names none."""
    return (CPU_MODELS, CPU_TOKENS) if device.type == "cpu" else (GPU_MODELS, GPU_TOKENS)


def cases(models: Iterable[str], tokens: Iterable[int]) -> list[DecoderCase]:
    """All combinations, those of a model together."""
    tokens = tuple(tokens)
    return [DecoderCase(name, m, MODELS[name].hidden, MODELS[name].hidden) for name in models for m in tokens]
