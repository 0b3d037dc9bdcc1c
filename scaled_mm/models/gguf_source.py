"""A GGUF file that transformers loads: what is checked before, and which of its tensors the model does not use."""

from __future__ import annotations

import os
import types
from collections.abc import Mapping, Sequence

import torch

from scaled_mm.errors import BadParamError
from scaled_mm.gguf.gguf_file import open_gguf


class GgufSource:
    """path: of the file. argument: the name of path in messages.

    tensors: the gguf package's tensors by name. names: {name in the file: name in the model}, after `check`.
    Raises as `load_gguf`, and BadParamError for a file that does not hold a whole model.
    """

    def __init__(self, path: str | os.PathLike, argument: str):
        try:
            self.tensors, fields, self.shown = open_gguf(path)
        except BadParamError as error:
            raise BadParamError(f"{argument}: {str(error).removeprefix('path: ')}") from error
        self.argument = argument
        self.names: dict[str, str] = {}
        self._check_whole(fields)

    def _check_whole(self, fields: Mapping[str, object]) -> None:
        """Refuses a file without the sizes of its model, for which transformers would take those of a large one, or without its last layer."""
        arch = fields["general.architecture"].contents() if "general.architecture" in fields else ""
        for key in ("general.architecture", f"{arch}.block_count", f"{arch}.embedding_length"):
            if key not in fields:
                raise BadParamError(f"{self.argument}: expected a model, got {self.shown} without {key}")
        parts = fields["split.count"].contents() if "split.count" in fields else 1
        if parts > 1:
            got = f"{self.shown}, one of {parts} files; llama.cpp's gguf-split --merge joins them"
            raise BadParamError(f"{self.argument}: expected a whole model, got {got}")
        layers = fields[f"{arch}.block_count"].contents()
        if layers and not any(f"blk.{layers - 1}." in name for name in self.tensors):
            raise BadParamError(f"{self.argument}: expected the tensors of {layers} layers, {self.shown} has none of blk.{layers - 1}")

    def check(self, model: torch.nn.Module) -> None:
        """BadParamError if the file lacks a tensor of the model, because transformers gives such parameters random values."""
        self.names = _names_of_transformers(model)
        ours = {name for name, _ in model.named_parameters()}  # of tied parameters the first name
        wanted = [name for name, of_model in self.names.items() if of_model in ours]
        # Of experts transformers' names lack the suffix.
        lacking = [name for name in wanted if name not in self.tensors and f"{name}.weight" not in self.tensors]
        if lacking:
            raise BadParamError(f"{self.argument}: expected the tensors of a {type(model).__name__}, {self.shown} has no {first_of(lacking)}")

    @property
    def unused(self) -> list[str]:
        """The tensors of the file that the model has no place for. transformers has names of its own for experts, which it merges."""
        return [name for name in self.tensors if name not in self.names and "_exps." not in name]

    def unused_in_words(self, model: torch.nn.Module) -> str:
        """A sentence about `unused`."""
        return f"{self.shown}: a {type(model).__name__} of transformers does not use {first_of(self.unused)}"


def first_of(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def _names_of_transformers(model: torch.nn.Module) -> dict[str, str]:
    """{name in the file: name in the model} of tensors."""
    try:
        from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map
    except ImportError as error:
        import transformers

        raise ImportError(f"GGUF: expected the names of its tensors in transformers, which {transformers.__version__} does not have") from error
    return get_gguf_hf_weights_map(_outline(model, 1), TensorProcessor())


def _outline(module: torch.nn.Module, depth: int) -> types.SimpleNamespace:
    """A stand-in for the model: the names of its tensors and of its children's. The map takes a second per hundred modules; deeper ones add
    no name."""
    children = [(name, _outline(child, depth - 1)) for name, child in module.named_children()] if depth else []
    names = dict.fromkeys(module.state_dict())
    return types.SimpleNamespace(config=getattr(module, "config", None), state_dict=lambda: names, named_children=lambda: children)
