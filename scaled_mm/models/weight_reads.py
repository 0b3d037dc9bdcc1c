"""Linear layers whose weights a model reads itself, without calling the layer: an int8 layer cannot take their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from scaled_mm.errors import BadParamError, lacks_memory
from scaled_mm.models.fuse import trial


class _Placeholder(torch.nn.Module):
    """A linear layer whose weight looks like that of the int8 layer that will take its place."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        self.linear = [linear]  # no submodule
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.weight = torch.zeros(1, dtype=torch.int8, device=linear.weight.device).expand(linear.weight.shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear[0](x)


Place = tuple[torch.nn.Module, str]  # a layer of the model, and the name of a linear layer in it


def read_by(run: Callable[[], object], places: Sequence[Place]) -> Exception | None:
    """What `run` raises if the linear layers have int8 weights; None for nothing."""
    linears = [block.get_submodule(name) for block, name in places]

    def put(modules) -> None:
        for (block, name), module in zip(places, modules):
            parent, _, child = name.rpartition(".")
            setattr(block.get_submodule(parent), child, module)

    put(map(_Placeholder, linears))
    try:
        run()
        return None
    except Exception as error:
        if lacks_memory(error):
            raise
        return error
    finally:
        put(linears)


def not_only_called(run: Callable[[], object], names: dict[Place, str], error: Exception) -> BadParamError:
    """The error for weights that are read beside a call."""
    found = [name for place, name in names.items() if read_by(run, [place])] or list(names.values())
    got = f"{type(error).__name__} with int8 weights of {', '.join(found[:3])}: {error}"
    return BadParamError(f"model: expected linear layers whose weights are read by a call only, got {got}")


def stay_float(model: torch.nn.Module, names: dict[Place, str]) -> set[torch.nn.Module]:
    """The linear layers whose weights the model reads without a call, found by running it on a few tokens. Empty if it does not run on token ids.

    names: of the layers that are to be quantized. BadParamError if the model reads the weight of one that it calls, too.
    """

    def run() -> None:
        trial(model)

    if read_by(run, list(names)) is None:
        return set()
    called: set[torch.nn.Module] = set()
    linears = {place: place[0].get_submodule(place[1]) for place in names}
    handles = [linear.register_forward_pre_hook(lambda linear, _: called.add(linear)) for linear in linears.values()]
    try:
        run()
    except Exception as error:  # whatever it raises, it needs other arguments
        if lacks_memory(error):
            raise
        return set()
    finally:
        for handle in handles:
            handle.remove()
    read = {place for place, linear in linears.items() if linear not in called and read_by(run, [place])}
    rest = {place: name for place, name in names.items() if place not in read}
    if error := read_by(run, list(rest)):
        raise not_only_called(run, rest, error) from error
    return {linears[place] for place in read}
