"""Inputs of suites whose calls return several tensors: results that are kept, and poisoned before a check."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from scaled_mm.measure.rotation import RotatedOutputs, RotatedWeights
from scaled_mm.measure.shapes import Case

Tensors = tuple[torch.Tensor, ...]
_POISON = 85  # of integers, which have no NaN


class KeptOutputs(RotatedOutputs):
    """Outputs that exist before the calls (`out`, `share`), and results of calls that allocate (`keep`)."""

    def __init__(self, case: Case, weights: RotatedWeights, dtype: torch.dtype):
        super().__init__(case, weights, dtype)
        self._shared: list[torch.Tensor] = []
        self._kept: dict[str, list] = {}

    def share(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Further outputs, which `poison` fills too."""
        self._shared += tensors
        return tensors

    def keep(self, name: str, function: Callable[[int], Tensors]) -> list[Callable[[], Tensors]]:
        """`keeping`, of calls whose results `poison` fills, and `kept` returns after a graph has written them again."""
        self._kept[name] = held = [None] * self.slots
        return self.keeping(function, held)

    def kept(self, name: str) -> Tensors:
        """The results of set 0."""
        return self._kept[name][0]

    def poison(self) -> None:
        _fill(self.outs)
        _fill(self._shared)
        for held in self._kept.values():
            for results in held:
                _fill(results or ())


def _fill(tensors: Sequence[torch.Tensor]) -> None:
    for one in tensors:
        one.fill_(math.nan if one.is_floating_point() else _POISON)
