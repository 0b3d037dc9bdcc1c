"""Names and forms of a model's tensors on disk, where transformers has each expert by itself, and some models have other names."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from scaled_mm.errors import BadParamError
from scaled_mm.nn.experts import Int8Experts
from scaled_mm.nn.linear import Int8Linear


def on_disk(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by their names on disk. tensors: float tensors or int8 weights by their names in the model. Transformers knows the other names of each
    kind of model, and splits the tensors of experts."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError as error:
        raise BadParamError('model: expected transformers 5 or newer (pip install ".[models]")') from error
    return revert_weight_conversion(model, dict(tensors))


class Names:
    """The names on disk of a model whose modules are quantized."""

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.linears = {name: module for name, module in model.named_modules() if isinstance(module, Int8Linear)}
        self.experts = {name: module for name, module in model.named_modules() if isinstance(module, Int8Experts)}

    def of_module(self, name: str) -> str:
        """The name on disk of a linear layer."""
        renamed = on_disk(self.model, {f"{name}.weight": torch.empty(0)})
        return next(iter(renamed)).removesuffix(".weight")

    def of_experts(self, name: str) -> dict[str, tuple[str, int, int]]:
        """The name on disk of each linear layer of the experts `name`: (gate_up_proj or down_proj, the expert, the half: 0 for the gate and
        down_proj, 1)."""
        count = self.experts[name].num_experts
        # Marks in place of weights: where each ends says which piece a name stands for.
        marks = {
            f"{name}.gate_up_proj": torch.arange(2 * count, dtype=torch.float64).view(count, 2, 1),
            f"{name}.down_proj": torch.arange(2 * count, 4 * count, 2, dtype=torch.float64).view(count, 1, 1),
        }
        pieces = {}
        for disk, mark in on_disk(self.model, marks).items():
            if mark.numel() != 1 or not disk.endswith(".weight"):
                raise BadParamError(f"model: expected transformers to store each expert of {name} by itself, got {disk} {list(mark.shape)}")
            value = int(mark)
            pieces[disk.removesuffix(".weight")] = (
                ("down_proj", value // 2 - count, 0) if value >= 2 * count else ("gate_up_proj", value // 2, value % 2)
            )
        return pieces
