"""Names and layouts of a model's tensors on disk: each expert is a separate tensor there, and some models use other names."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from scaled_mm.errors import BadParamError
from scaled_mm.nn.experts import Int8Experts
from scaled_mm.nn.linear import Int8Linear


def on_disk(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by their names on disk, through transformers' conversion, which also splits the tensors of experts. tensors: by their names in the
    model. Raises BadParamError without transformers 5."""
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
        """{name on disk: (parameter, index of the expert, half)} of the linear layers of the experts `name`. half: 0 for gate and down, 1 for up."""
        module = self.model.get_submodule(name)
        count = module.num_experts if isinstance(module, Int8Experts) else module.down_proj.shape[0]
        # The conversion is applied to indices: the index that arrives under a name on disk identifies the expert and the half.
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
