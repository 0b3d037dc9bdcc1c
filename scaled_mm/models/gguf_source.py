"""A GGUF file that transformers loads: what is checked before, and which of its tensors the model does not use."""

from __future__ import annotations

import os
import types
from collections.abc import Sequence

import torch

from scaled_mm.errors import BadParamError
from scaled_mm.gguf.gguf_file import read_header, shown


class GgufSource:
    """path: of the file. argument: the name of path in messages.

    tensors: the names of the file's tensors. names: {name in the file: name in the model}, after `check`; None for an architecture whose names
    transformers does not tell.
    Raises as `load_gguf`, and BadParamError for a file that does not hold a whole model.
    """

    def __init__(self, path: str | os.PathLike, argument: str):
        try:
            self.tensors, values = read_header(path)
        except BadParamError as error:
            raise BadParamError(f"{argument}: {str(error).removeprefix('path: ')}") from error
        self.path, self.argument = shown(os.fsdecode(path)), argument
        self.names: dict[str, str] | None = {}
        self.arch = self._check_whole(values)

    def _check_whole(self, values: dict[str, int | str]) -> str:
        """The architecture. Refuses a file without the sizes of its model, for which transformers would take those of a large one, and one without
        its last layer."""
        parts = values.get("split.count", 1)
        if parts not in (0, 1):
            got = f"{self.path}, one of {parts} files; llama.cpp's gguf-split --merge joins them"
            raise BadParamError(f"{self.argument}: expected a whole model, got {got}")
        arch = values.get("general.architecture")
        if not isinstance(arch, str):
            raise BadParamError(f"{self.argument}: expected a model, got {self.path} without general.architecture as text")
        for key in (f"{arch}.block_count", f"{arch}.embedding_length"):
            if not isinstance(size := values.get(key), int) or size < 0:
                raise BadParamError(f"{self.argument}: expected a model, got {self.path} without {shown(key)} as a number")
        layers = values[f"{arch}.block_count"]
        if layers and not any(f"blk.{layers - 1}." in name for name in self.tensors):
            raise BadParamError(f"{self.argument}: expected the tensors of {layers} layers, {self.path} has none of blk.{layers - 1}")
        return arch

    def check(self, model: torch.nn.Module) -> None:
        """BadParamError if the file lacks a tensor of the model, because transformers gives such parameters random values, or zeros."""
        self.names = _names_of_transformers(model, self.arch)
        ours = {name for name, _ in model.named_parameters()}  # of tied parameters the first name
        wanted = [name for name, of_model in (self.names or {}).items() if of_model in ours]
        there = {*self.tensors, *map(_stem, self.tensors)}
        if lacking := [name for name in wanted if name not in there]:
            raise BadParamError(f"{self.argument}: expected the tensors of a {type(model).__name__}, {self.path} has no {first_of(lacking)}")

    @property
    def unused(self) -> list[str]:
        """The tensors of the file that the model has no place for; none if the names are unknown."""
        return [] if self.names is None else [name for name in self.tensors if name not in self.names and _stem(name) not in self.names]

    def unused_in_words(self, model: torch.nn.Module) -> str:
        """A sentence about `unused`; "" if there is nothing to say."""
        if self.names is None:
            return f"{self.path}: it is not known which of its tensors a {type(model).__name__} of transformers uses"
        if not self.unused:
            return ""
        return f"{self.path}: a {type(model).__name__} of transformers does not use {first_of(list(map(shown, self.unused)))}"


def _stem(name: str) -> str:
    """The name of experts in transformers' map, which has no suffix."""
    return name.removesuffix(".weight")


def first_of(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def _names_of_transformers(model: torch.nn.Module, arch: str) -> dict[str, str] | None:
    """{name in the file: name in the model} of tensors, by the map that transformers loads with; None if it has none."""
    try:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

        return get_gguf_hf_weights_map(_outline(model, 1), TENSOR_PROCESSORS.get(arch, TensorProcessor)(config={}))
    except (ImportError, NotImplementedError):  # another version; an architecture that it loads in another way
        return None


def _outline(module: torch.nn.Module, depth: int) -> types.SimpleNamespace:
    """A stand-in for the model: the names of its tensors and of its children's, which give all names of the map. The map takes a second per hundred
    modules, so children of children are left out."""
    children = [(name, _outline(child, depth - 1)) for name, child in module.named_children()] if depth else []
    names = dict.fromkeys(module.state_dict())
    return types.SimpleNamespace(config=getattr(module, "config", None), state_dict=lambda: names, named_children=lambda: children)
