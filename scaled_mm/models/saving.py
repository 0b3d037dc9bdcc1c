"""Keeps transformers from saving a quantized model as a float one."""

from __future__ import annotations

import torch

from scaled_mm.errors import BadParamError

INT8 = "model: expected scaled_mm.save_pretrained(model, path) for a quantized model; transformers would not save its scheme"


class _Refusal:
    def __init__(self, message: str):
        self.message = message

    def __call__(self, *_, **__):
        raise BadParamError(self.message)


def refuse_own_saving(model: torch.nn.Module, message: str = INT8) -> None:
    """Lets the method `save_pretrained` of this model raise. transformers would write quantized weights without quantization_config."""
    if hasattr(type(model), "save_pretrained"):
        model.save_pretrained = _Refusal(message)
