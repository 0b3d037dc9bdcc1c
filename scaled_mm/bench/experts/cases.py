"""What is timed: the products and the whole layer of mixtures of experts, by tokens, routing and kind of scale."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from scaled_mm.measure.shapes import Case

W13, W2, LAYER = "w13", "w2", "layer"
PARTS = (W13, W2, LAYER)
BALANCED, SKEWED = "balanced", "skewed"
ROUTINGS = (BALANCED, SKEWED)
CHANNEL, BLOCK = "channel", "block"
SCALES = (CHANNEL, BLOCK)


@dataclass(frozen=True)
class Model:
    """experts: all of the router's. here: the local ones. choices: experts per token. hidden, inner: H and I of a layer."""

    experts: int
    here: int
    choices: int
    hidden: int
    inner: int


MODELS: dict[str, Model] = {
    "mixtral": Model(8, 8, 2, 4096, 14336),  # Mixtral 8x7B
    "qwen3": Model(128, 128, 8, 2048, 768),  # Qwen3-30B-A3B
    "deepseek": Model(256, 256, 8, 7168, 2048),  # DeepSeek-V3
    "deepseek_ep8": Model(256, 32, 8, 7168, 2048),  # one of eight expert-parallel ranks of DeepSeek-V3
    "tiny": Model(8, 8, 2, 256, 128),  # for CPUs
}

GPU_MODELS, CPU_MODELS = "mixtral,qwen3,deepseek,deepseek_ep8", "tiny"
GPU_TOKENS: tuple[int, ...] = (1, 8, 64, 256, 1024, 4096, 8192)
CPU_TOKENS: tuple[int, ...] = (1, 17)


@dataclass(frozen=True)
class ExpertsCase(Case):
    """shape: a name of MODELS. M: tokens. N, K: of the part's product; of the layer, hidden and inner."""

    part: str = LAYER
    routing: str = BALANCED
    scales: str = CHANNEL

    @property
    def model(self) -> Model:
        return MODELS[self.shape]

    @property
    def copies(self) -> int:
        """Rows of the products, unassigned ones among them."""
        return self.M * self.model.choices

    def __str__(self) -> str:
        return f"{self.shape} {self.part} T={self.M} {self.routing} {self.scales}"


def defaults(device: torch.device) -> tuple[str, tuple[int, ...]]:
    """(models, tokens) if the command line names none."""
    return (CPU_MODELS, CPU_TOKENS) if device.type == "cpu" else (GPU_MODELS, GPU_TOKENS)


def some_of(text: str, known: Iterable[str]) -> tuple[str, ...]:
    """The names of a comma list; "all" of them. ValueError for an unknown one, or none."""
    known = tuple(known)
    names = known if text == "all" else tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in known:
            raise ValueError(f"expected all, or some of {', '.join(known)}, got {name!r}")
    if not names:
        raise ValueError(f"expected all, or some of {', '.join(known)}, got an empty list")
    return names


def cases(models: Iterable[str], tokens: Iterable[int], parts: Iterable[str], routings: Iterable[str], scales: Iterable[str]) -> list[ExpertsCase]:
    """All combinations; those that share weights stay together."""
    tokens, parts, routings = tuple(tokens), tuple(parts), tuple(routings)
    found = []
    for name in models:
        model = MODELS[name]
        sizes = {W13: (2 * model.inner, model.hidden), W2: (model.hidden, model.inner), LAYER: (model.hidden, model.inner)}
        for kind in scales:
            found += [ExpertsCase(name, m, *sizes[part], part, routing, kind) for part in parts for routing in routings for m in tokens]
    return found
