"""The parts of a transformer model that quantization works on: its layers one after the other, and the linear layers and experts inside."""

from __future__ import annotations

import copy
from collections.abc import Callable

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
    if len({id(layer) for layer in found[0][1]}) < len(found[0][1]):
        raise BadParamError(f"model: expected layers of {found[0][0]} that are modules of their own, got the same one several times")
    return found[0]


def linears_of(block: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """The linear layers of a decoder layer by name, without those of experts and routers.

    Raises BadParamError for one that has several names: it would be replaced under the first only.
    """
    named = [(name, module) for name, module in block.named_modules(remove_duplicate=False) if type(module) is torch.nn.Linear]
    found = {name: module for name, module in named if "experts" not in name.split(".")[:-1] and ROUTERS.isdisjoint(name.split("."))}
    for module in found.values():
        names = [name for name, same in named if same is module]
        if len(names) > 1:
            raise BadParamError(f"model: expected linear layers that are modules of their own, got one under the names {' and '.join(names)}")
    return found


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
    """The name that `fused_experts` gives to the activation of transformers' experts.

    Raises BadParamError for experts that compute anything else than down(activation(gate) * up), summed by the router's weights: clamps, norms, other
    activations.
    """
    name = name_of_activation(getattr(experts, "act_fn", None))
    try:
        computed, expected = _trial_of_experts(experts, name)
        reason = "" if torch.allclose(computed, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())) else "other values"
    except Exception as error:  # noqa: BLE001 - whatever it raises, these are no experts of that form
        reason = f"{type(error).__name__}: {error}"
    if reason:
        raise BadParamError(f"model: expected experts that compute down({name}(gate) * up), got {type(experts).__name__}, which computes {reason}")
    return name


def _trial_of_experts(experts: torch.nn.Module, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What experts of this class compute for random tokens, and what `fused_experts` would, in float32. Weights are small random ones, because those
    of the model may be large or on the meta device. gate and up reach 100, which shows clamps."""
    count, hidden, inner, tokens = experts.down_proj.shape[0], 32, 16, 8
    if [name for name, _ in experts.named_parameters()] != ["gate_up_proj", "down_proj"]:
        raise ValueError("further parameters")
    generator = torch.Generator().manual_seed(0)
    gate_up, down = (torch.randn(count, n, k, generator=generator) for n, k in ((2 * inner, hidden), (hidden, inner)))
    x, weights = 5 * torch.randn(tokens, hidden, generator=generator), torch.rand(tokens, 2, generator=generator)
    ids = torch.randint(0, count, (tokens, 2), generator=generator)
    small = copy.copy(experts)
    small.__dict__ = {**experts.__dict__, "_parameters": {"gate_up_proj": torch.nn.Parameter(gate_up), "down_proj": torch.nn.Parameter(down)}}
    if hasattr(getattr(experts, "config", None), "_experts_implementation"):
        small.config = copy.deepcopy(experts.config)
        small.config._experts_implementation = "eager"  # transformers' others need a GPU, or more columns
    gate, up = torch.einsum("tk,tcnk->tcn", x, gate_up[ids]).chunk(2, -1)
    each = torch.einsum("tcn,tchn->tch", _ACTIVATIONS[activation](gate) * up, down[ids])
    with torch.no_grad():
        return small(x, ids, weights), (each * weights[..., None]).sum(1)


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def name_of_activation(function: object) -> str:
    """The name that this package gives to an activation. Raises BadParamError for one that it lacks."""
    probe = torch.linspace(-40, 40, 321)
    for name, expected in _ACTIVATIONS.items():
        if callable(function) and torch.allclose(function(probe), expected(probe), rtol=1e-6, atol=1e-6):
            return name
    raise BadParamError(f"model: expected one of the activations {', '.join(_ACTIVATIONS)}, got {function!r}")


def check_in_memory(model: torch.nn.Module) -> None:
    """BadParamError for a parameter on the meta device."""
    if meta := next((name for name, tensor in model.named_parameters() if tensor.is_meta), None):
        raise BadParamError(f"model: expected weights, got {meta} on the meta device")


def replace(root: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    """Puts a module in the place of root's module `name`, with its forward and backward hooks and its training flag. Hooks that compute the weight
    before each call, as those of torch.nn.utils.prune and weight_norm, are dropped."""
    parent, _, child = name.rpartition(".")
    former = getattr(root.get_submodule(parent), child)
    computed = "weight" in vars(former)  # no parameter
    for field in vars(former):
        hooks = field.startswith(("_forward_", "_backward_")) or field == "_is_full_backward_hook"
        if hooks and not (computed and field.startswith("_forward_pre_")):  # the same dictionaries, so handles still remove what they added
            vars(module)[field] = vars(former)[field]
    module.training = former.training
    setattr(root.get_submodule(parent), child, module)


def is_patched(module: torch.nn.Module) -> bool:
    """Whether calling the module does more than its class does: forward hooks, or a forward of its own, as accelerate gives to modules."""
    return "forward" in vars(module) or any(value for field, value in vars(module).items() if field.startswith("_forward_"))
