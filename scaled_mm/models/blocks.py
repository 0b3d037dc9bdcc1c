"""The parts of a transformer model that quantization works on: its layers one after the other, and the linear layers and experts inside."""

from __future__ import annotations

import torch

from scaled_mm.errors import BadParamError
from scaled_mm.nn.block_linear import BlockLinear
from scaled_mm.nn.experts import Int8Experts
from scaled_mm.nn.linear import Int8Linear


def blocks_of(model: torch.nn.Module) -> tuple[str, list[torch.nn.Module]]:
    """(name of the list, the decoder or encoder layers of the model, in order), of a float or a quantized model.

    Raises BadParamError if the model has none, or several lists of them, as encoder-decoder models have.
    """
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.ModuleList) or any(name.startswith(f"{outer}.") for outer, _ in found):
            continue
        if len(module) and all(any(isinstance(inner, (torch.nn.Linear, Int8Linear, BlockLinear)) for inner in layer.modules()) for layer in module):
            found.append((name, list(module)))
    if len(found) != 1:
        names = ", ".join(name for name, _ in found) or "none"
        raise BadParamError(f"model: expected one torch.nn.ModuleList of layers with torch.nn.Linear modules, got {names}")
    return found[0]


def linears_of(block: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """The linear layers of a decoder layer by name, without those of experts and routers."""
    return {
        name: module
        for name, module in block.named_modules()
        if type(module) is torch.nn.Linear and "experts" not in name.split(".")[:-1] and ROUTERS.isdisjoint(name.split("."))
    }


ROUTERS = {"gate", "router", "shared_expert_gate"}  # linear layers there stay as they are: engines do not quantize them


def experts_of(block: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules of a layer that hold all its experts, by name: with gate_up_proj [E, 2 I, H] and down_proj [E, H, I], as transformers 5 has them.

    Raises BadParamError for experts of another form.
    """
    found = {}
    for name, module in block.named_modules():
        if name.split(".")[-1] != "experts" or isinstance(module, Int8Experts) or not any(True for _ in module.parameters()):
            continue
        gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
        shapes = [list(weight.shape) if isinstance(weight, torch.nn.Parameter) else None for weight in (gate_up, down)]
        if None in shapes or any(len(shape) != 3 for shape in shapes) or shapes[0][1:] != [2 * shapes[1][2], shapes[1][1]]:
            raise BadParamError(
                f"model: expected experts {name} with gate_up_proj [E, 2 I, H] and down_proj [E, H, I], got {shapes[0]} and {shapes[1]}"
            )
        if getattr(module, "gate_up_proj_bias", None) is not None or getattr(module, "down_proj_bias", None) is not None:
            raise BadParamError(f"model: expected experts {name} without biases, which fused_experts does not add")
        found[name] = module
    return found


def activation_of(experts: torch.nn.Module) -> str:
    """The name that `fused_experts` gives to the activation of transformers' experts. Raises BadParamError for one that it lacks."""
    function = getattr(experts, "act_fn", None)
    probe = torch.linspace(-4, 4, 33)
    known = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    }
    for name, expected in known.items():
        if callable(function) and torch.allclose(function(probe), expected(probe), rtol=0, atol=1e-6):
            return name
    raise BadParamError(f"model: expected experts with one of the activations {', '.join(known)}, got {function!r}")


def replace(root: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    """Puts a module in the place of root's module `name`."""
    parent, _, child = name.rpartition(".")
    setattr(root.get_submodule(parent), child, module)
