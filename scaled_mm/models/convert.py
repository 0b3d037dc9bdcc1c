"""`convert_`: int8 layers in a model that transformers loaded from a compressed-tensors checkpoint."""

from __future__ import annotations

import torch

from scaled_mm.errors import BadParamError, BadTensorShapeError
from scaled_mm.models.blocks import replace
from scaled_mm.models.saving import refuse_own_saving
from scaled_mm.models.scheme import scheme_of
from scaled_mm.nn.linear import Int8Linear

HOOK = "ct_decompress_hook"  # of transformers: it decompresses all weights before the first forward


@torch.no_grad()
def convert_(model: torch.nn.Module) -> torch.nn.Module:
    """Replaces the compressed int8 layers of a model by `nn.Int8Linear`, in place, and removes the hook that would decompress them.

    model: what `AutoModelForCausalLM.from_pretrained` returns for a compressed-tensors checkpoint, before its first forward. Returns the model.

    Raises BadParamError if the model has no such layers, has layers with another scheme than `from_pretrained` takes, has scales that are not finite
    and positive (those that the checkpoint lacks may be), or was decompressed already; BadTensorShapeError for a scale of another shape.
    """
    if not isinstance(model, torch.nn.Module):
        raise BadParamError(f"model: expected a torch.nn.Module, got a {type(model).__name__}")
    found = {}
    for name, module in model.named_modules():
        weight, scale = getattr(module, "weight", None), getattr(module, "weight_scale", None)
        if isinstance(module, torch.nn.Linear) and isinstance(scale, torch.Tensor):
            if weight is None or weight.dtype is not torch.int8:
                dtype = None if weight is None else weight.dtype
                raise BadParamError(f"model: expected int8 weights, as before the first forward, got {name}.weight of {dtype}")
            found[name] = module
    if not found:
        raise BadParamError("model: expected linear layers with int8 weights and weight_scale, got none")
    made = {name: _int8(module, name) for name, module in found.items()}
    for name, layer in made.items():
        replace(model, name, layer)
    handle = getattr(model, HOOK, None)
    if handle is not None:
        handle.remove()
        delattr(model, HOOK)
    refuse_own_saving(model)
    return model


def _int8(module: torch.nn.Linear, name: str) -> Int8Linear:
    found = getattr(module, "quantization_scheme", None)
    if getattr(found, "input_activations", None) is None:
        raise BadParamError(f"model: expected int8 inputs of {name} in its quantization_scheme, got none: only weights are quantized")
    group = {key: _described(getattr(found, key, None)) for key in ("weights", "input_activations", "output_activations")}
    scheme = scheme_of(group, f"model: quantization_scheme of {name}")
    symmetric, static = scheme.symmetric, scheme.static
    scale = getattr(module, "input_scale", None)
    if static and scale is None:
        raise BadParamError(f"model: expected {name}.input_scale of a static layer, got none")
    for of, one in ("weight_scale", module.weight_scale), ("input_scale", scale if static else None):
        if one is not None and not bool((torch.isfinite(one) & (one > 0)).all()):
            raise BadParamError(f"model: expected finite positive scales {name}.{of}, got {float(one.min())} to {float(one.max())}")
    for of in ("weight_zero_point", *(("input_zero_point",) if symmetric else ())):
        if (one := getattr(module, of, None)) is not None and bool(one.any()):
            raise BadParamError(f"model: expected only 0 in {name}.{of} of a symmetric scheme, got {one.min().item()} to {one.max().item()}")
    n = module.weight.shape[0]
    if module.weight_scale.numel() not in (1, n):
        raise BadTensorShapeError(f"model: {name}.weight_scale: expected [{n}, 1], got {list(module.weight_scale.shape)}")
    weight_scale = module.weight_scale.expand(n, 1) if module.weight_scale.numel() == 1 else module.weight_scale
    zero = None if symmetric or not static else module.input_zero_point
    return Int8Linear.from_tensors(module.weight, weight_scale, module.bias, scale if static else None, zero, symmetric=symmetric)


def _described(arguments: object) -> dict[str, object] | None:
    """compressed-tensors' QuantizationArgs as config.json has them."""
    keys = ("num_bits", "type", "strategy", "symmetric", "dynamic", "group_size")
    values = {key: getattr(arguments, key, None) for key in keys}
    return None if arguments is None else {key: getattr(value, "value", value) for key, value in values.items() if value is not None}
