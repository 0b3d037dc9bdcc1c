"""Runs a model's layers one at a time on calibration data, and observes what each linear layer reads."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch

from scaled_mm.errors import BadParamError
from scaled_mm.models.blocks import linears_of


@dataclasses.dataclass
class Call:
    """The arguments of one call of a layer. hidden: the first argument, [batch, tokens, H], recorded for the first decoder layer only; None for the
    others."""

    hidden: torch.Tensor | None
    rest: tuple
    options: dict


@dataclasses.dataclass
class Group:
    """Linear layers that read the same tensor. names: in the layer. x: that tensor, float32 [all tokens, K]. norm: the name of the norm that wrote
    it."""

    names: tuple[str, ...]
    x: torch.Tensor
    norm: str | None


@torch.no_grad()
def record_calls(model: torch.nn.Module, blocks: Sequence[torch.nn.Module], run: Callable[[], None], skips: bool) -> list[list[Call]]:
    """The calls of each layer while `run` runs the model. skips: layers return their input unchanged, so recording costs only the embedding and one
    call of the first layer, or one for each batch if its output has further parts, which T5's other layers read. False: all layers run, because the
    caller's function may use the result."""
    calls: list[list[Call]] = [[] for _ in blocks]
    further: list[tuple | None] = []  # parts of the first layer's output after the first; None if it is a tensor

    def recorder(index: int, forward: Callable) -> Callable:
        def recorded(*arguments, **options):
            if not arguments and "hidden_states" not in options:
                raise BadParamError(f"model: expected layers that read hidden_states, got {type(blocks[index]).__name__} with {', '.join(options)}")
            hidden, rest = (arguments[0], arguments[1:]) if arguments else (options["hidden_states"], ())
            kept = {name: without_cache(name, value) for name, value in options.items() if name != "hidden_states"}
            if index == 0 and any(_is_filled(value) for value in options.values()):
                raise BadParamError("calibration: expected runs without earlier tokens in a KV cache, as generate() makes them, got a filled cache")
            calls[index].append(Call(hidden.detach() if index == 0 else None, rest, kept))
            if not skips:
                return forward(*arguments, **options)
            if index == 0 and (not further or further[0]):
                out = forward(*arguments, **{**options, **kept})
                further[:] = [out[1:] if isinstance(out, tuple) else None]
            return hidden if further[0] is None else (hidden, *further[0])

        return recorded

    own = [vars(block).get("forward") for block in blocks]  # as accelerate gives to modules
    for index, block in enumerate(blocks):
        block.forward = recorder(index, block.forward)
    try:
        run()
    finally:
        for block, forward in zip(blocks, own):
            del block.forward
            if forward is not None:
                block.forward = forward
    if not calls[0] or any(len(of_block) != len(calls[0]) for of_block in calls):
        counts = sorted({len(of_block) for of_block in calls})
        raise BadParamError(f"calibration: expected every layer to run equally often, and at least once, got {counts[0]} to {counts[-1]} times")
    return calls


def without_cache(name: str, value: object) -> object:
    """The argument, with KV caches disabled: a cache would grow at every rerun."""
    return False if name == "use_cache" else None if hasattr(value, "get_seq_length") else value


def _is_filled(value: object) -> bool:
    length = getattr(value, "get_seq_length", None)
    try:
        return callable(length) and int(length()) > 0
    except ValueError:  # of a model without attention
        return False


def tensors_of(value: object) -> list[torch.Tensor]:
    """All tensors inside of tuples, lists and dictionaries."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_of(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def on_device(value: object, device: torch.device) -> object:
    """Tensors inside of tuples, lists and dictionaries, on a device; floating-point tensors in float32."""
    if isinstance(value, torch.Tensor):
        return value.to(device, torch.float32) if value.is_floating_point() else value.to(device)
    if isinstance(value, (tuple, list)):
        return type(value)(on_device(item, device) for item in value)
    if isinstance(value, dict):
        return {name: on_device(item, device) for name, item in value.items()}
    return value


class FloatBlock:
    """A float32 copy of one layer, on a device."""

    def __init__(self, block: torch.nn.Module, device: torch.device):
        self.block = copy.deepcopy(block).to(device, torch.float32).eval()
        self.device = device

    @torch.no_grad()
    def __call__(self, call: Call, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's output for one call, float32."""
        out = self.block(hidden.to(self.device, torch.float32), *on_device(call.rest, self.device), **on_device(call.options, self.device))
        return out[0] if isinstance(out, tuple) else out

    def observe(self, calls: Sequence[Call], hidden: Sequence[torch.Tensor]) -> tuple[list[Group], list[torch.Tensor]]:
        """(groups of linear layers with their inputs, the outputs of all calls)."""
        inputs: dict[str, list[torch.Tensor]] = {}
        groups, outputs = [], []
        for call, tensor in zip(calls, hidden):
            with _Observer(self.block) as observer:
                outputs.append(self(call, tensor))
            for name, x in observer.inputs.items():
                inputs.setdefault(name, []).append(x.reshape(-1, x.shape[-1]))
            groups = groups or list(observer.groups())
        return [Group(names, torch.cat(inputs[names[0]]), norm) for names, norm in groups], outputs


class _Observer:
    """Keeps the input of each linear layer and the output of each norm during one call of a layer. Keeping a tensor also keeps its address from
    being used again, so equal addresses mean the same tensor."""

    def __init__(self, block: torch.nn.Module):
        self.inputs: dict[str, torch.Tensor] = {}
        self.norms: dict[str, torch.Tensor] = {}
        self.handles = [module.register_forward_pre_hook(self._reads(name)) for name, module in linears_of(block).items()]
        norms = ((name, module) for name, module in block.named_modules() if "norm" in type(module).__name__.lower() and hasattr(module, "weight"))
        self.handles += [module.register_forward_hook(self._writes(name)) for name, module in norms]

    def _reads(self, name: str) -> Callable:
        def hook(module, arguments):
            self.inputs[name] = arguments[0].detach()

        return hook

    def _writes(self, name: str) -> Callable:
        def hook(module, arguments, output):
            self.norms[name] = output.detach()

        return hook

    def __enter__(self) -> _Observer:
        return self

    def __exit__(self, *_) -> None:
        for handle in self.handles:
            handle.remove()

    def groups(self) -> Iterator[tuple[tuple[str, ...], str | None]]:
        """(the names of layers that read the same tensor, the norm that wrote it)."""
        readers: dict[tuple[int, int], list[str]] = {}
        for name, x in self.inputs.items():
            readers.setdefault((x.data_ptr(), x.numel()), []).append(name)
        writers = {(y.data_ptr(), y.numel()): name for name, y in self.norms.items()}
        for place, names in readers.items():
            yield tuple(names), writers.get(place)
