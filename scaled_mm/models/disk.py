"""Names and layouts of a model's tensors on disk: each expert is a separate tensor there, and some models use other names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import accumulate

import torch

from scaled_mm.errors import BadParamError
from scaled_mm.models.blocks import experts_of
from scaled_mm.nn.experts import Int8Experts
from scaled_mm.nn.linear import Int8Linear


def on_disk(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by their names on disk, through transformers' conversion, which also splits the tensors of experts. tensors: by their names in the
    model. Raises BadParamError without transformers 5."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError as error:
        raise BadParamError('model: expected transformers 5 or newer (pip install ".[models]")') from error
    loaded = model.__dict__.pop("_weight_conversions", None)  # names of the file that the model came from; a reader knows those of the class
    try:
        return revert_weight_conversion(model, dict(tensors))
    finally:
        if loaded is not None:
            model._weight_conversions = loaded


class Names:
    """The names on disk of a model, whose modules may be quantized."""

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.linears = {name: module for name, module in model.named_modules() if isinstance(module, Int8Linear)}
        self.experts = {name: module for name, module in model.named_modules() if isinstance(module, Int8Experts)}
        self.float_experts = experts_of(model)
        self._rows = {name: _rows(model, name, tensor.shape) for name, tensor in model.state_dict().items()}
        self._uses = Counter(disk for rows in self._rows.values() for disk in rows or ())

    def of_tensor(self, name: str) -> dict[str, slice]:
        """{name on disk: its rows} of a tensor. One that transformers would merge with others keeps its name in the model: int8 layers with scales of
        their own cannot be merged, and transformers reads merged tensors and others. Raises BadParamError for one whose elements are in another order
        on disk, and for one that would be merged under its own name."""
        rows = self._rows[name]
        apart = rows is not None and all(self._uses[disk] == 1 for disk in rows)
        if rows is None or (not apart and self._uses[name]):
            raise BadParamError(
                f"model: expected tensors that transformers stores as they are or divided by rows, got {name}, which it merges or reorders"
            )
        return rows if apart else {name: slice(0, sum(part.stop - part.start for part in rows.values()))}

    def of_module(self, name: str) -> str:
        """The name on disk of a linear layer."""
        found = list(self.of_tensor(f"{name}.weight"))
        return found[0].removesuffix(".weight") if len(found) == 1 else name

    def tensors_on_disk(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors, by their names in the model, with their names on disk."""
        dense = [name for name in tensors if name.rpartition(".")[0] not in self.float_experts]
        own = {name: tensors[name] for name in dense if list(self.of_tensor(name)) == [name]}
        return own | on_disk(self.model, {name: tensor for name, tensor in tensors.items() if name not in own})

    def of_experts(self, name: str) -> dict[str, tuple[str, int, int]]:
        """{name on disk: (parameter, index of the expert, half)} of the linear layers of the experts `name`. half: 0 for gate and down, 1 for up.

        Int8 experts that transformers would store in one tensor are stored one by one all the same, each with scales of its own.
        """
        one_by_one = self.each_expert(name)
        if one_by_one is not None:
            return one_by_one
        layers = (("gate_proj", "gate_up_proj", 0), ("up_proj", "gate_up_proj", 1), ("down_proj", "down_proj", 0))
        return {f"{name}.{expert}.{layer}": (which, expert, half) for expert in range(self._count(name)) for layer, which, half in layers}

    def _count(self, name: str) -> int:
        module = self.model.get_submodule(name)
        return module.num_experts if isinstance(module, Int8Experts) else module.down_proj.shape[0]

    def each_expert(self, name: str) -> dict[str, tuple[str, int, int]] | None:
        """`of_experts`, as transformers stores them; None if it stores all experts in one tensor."""
        count = self._count(name)
        # The conversion is applied to indices: the index that arrives under a name on disk identifies the expert and the half.
        marks = {
            f"{name}.gate_up_proj": torch.arange(2 * count, dtype=torch.float64).view(count, 2, 1),
            f"{name}.down_proj": torch.arange(2 * count, 4 * count, 2, dtype=torch.float64).view(count, 1, 1),
        }
        pieces = {}
        for disk, mark in (_converted(self.model, marks) or {"": torch.empty(0)}).items():
            if mark.numel() != 1 or not disk.endswith(".weight"):
                return None
            value = int(mark)
            pieces[disk.removesuffix(".weight")] = (
                ("down_proj", value // 2 - count, 0) if value >= 2 * count else ("gate_up_proj", value // 2, value % 2)
            )
        return pieces


def _converted(model: torch.nn.Module, marks: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """`on_disk` for tensors that are smaller than the model's; None for a conversion that needs them whole."""
    try:
        return on_disk(model, marks)
    except BadParamError:
        raise
    except Exception:  # noqa: BLE001 - conversions raise errors of many classes
        return None


def _rows(model: torch.nn.Module, name: str, shape: torch.Size) -> dict[str, slice] | None:
    """{name on disk: rows} of a tensor; None if it is not stored by rows, as they are. The conversion is applied to indices of rows."""
    marks = torch.arange(shape[0] if shape else 1, dtype=torch.float64).view([-1, *(1 for _ in shape[1:])] if shape else [])
    found = _converted(model, {name: marks})
    if found is None:
        return None
    pieces = [torch.atleast_1d(mark) for mark in found.values()]
    if any(mark.shape[1:] != marks.shape[1:] for mark in pieces if shape) or not torch.equal(torch.cat(pieces), torch.atleast_1d(marks)):
        return None
    ends = list(accumulate(mark.numel() for mark in found.values()))
    return {disk: slice(end - mark.numel(), end) for (disk, mark), end in zip(found.items(), ends)}
