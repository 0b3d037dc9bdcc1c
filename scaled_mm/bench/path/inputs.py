"""What the inputs of linear layers and of row-wise operators have in common: activations, and results that are kept and poisoned."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from scaled_mm.bench.path.cases import PathCase
from scaled_mm.bench.path.operators import Tensors
from scaled_mm.measure.rotation import RotatedOutputs, RotatedWeights
from scaled_mm.measure.run import Options

#: A language model's activations have a few channels that are this much larger in every row.
OUTLIER_EVERY, OUTLIER_FACTOR = 512, 30.0
_POISON = 85  # of integers, which have no NaN


def activations(rows: int, columns: int, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """bfloat16 [rows, columns]: normal values, and one channel of `OUTLIER_EVERY` that is `OUTLIER_FACTOR` times as large; at least one."""
    x = torch.randn(rows, columns, device=device, generator=generator)
    outliers = torch.randperm(columns, device=device, generator=generator)[: max(1, columns // OUTLIER_EVERY)]
    x[:, outliers] *= OUTLIER_FACTOR
    return x.to(torch.bfloat16)


class PathInputs(RotatedOutputs):
    """A case, and the calls of every implementation on it."""

    case: PathCase

    def __init__(self, case: PathCase, weights: RotatedWeights, dtype: torch.dtype):
        super().__init__(case, weights, dtype)
        self._shared: list[torch.Tensor] = []
        self._kept: dict[str, list] = {}

    def ours(self, name: str) -> list[Callable[[], Tensors]]:
        """What users call; results are kept as those of `name`."""
        raise NotImplementedError

    def torch(self) -> list[Callable[[], Tensors]]:
        """torch's own operators."""
        raise NotImplementedError

    def vllm(self, packet: Callable[[str], Callable]) -> list[Callable[[], Tensors]]:
        """vLLM's operators, over outputs that exist already. packet: from a name to the operator."""
        raise NotImplementedError

    def expected(self, options: Options) -> tuple[Tensors | None, torch.Tensor | None, str]:
        """(results of set 0 by the reference, on the device; which rows they are, None for all; "checked", or why there are none)."""
        raise NotImplementedError

    def kernel(self) -> dict[str, str]:
        """`kernel` and `reason` of ours, if it has a kernel config."""
        raise NotImplementedError

    @property
    def traffic_bytes(self) -> int:
        """Bytes that must move."""
        raise NotImplementedError

    def roof_us(self, gpu: str) -> float | None:
        """The floor under the time; None for an unknown GPU."""
        raise NotImplementedError

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
