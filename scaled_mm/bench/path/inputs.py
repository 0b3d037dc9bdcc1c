"""What the inputs of linear layers and of row-wise operators have in common: activations, and the calls of every implementation."""

from __future__ import annotations

from collections.abc import Callable

import torch

from scaled_mm.bench.kept import KeptOutputs
from scaled_mm.bench.path.cases import PathCase
from scaled_mm.bench.path.operators import Tensors
from scaled_mm.measure.run import Options

#: A language model's activations have a few channels that are this much larger in every row.
OUTLIER_EVERY, OUTLIER_FACTOR = 512, 30.0


def activations(rows: int, columns: int, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """bfloat16 [rows, columns]: normal values, and one channel of `OUTLIER_EVERY` that is `OUTLIER_FACTOR` times as large; at least one."""
    x = torch.randn(rows, columns, device=device, generator=generator)
    outliers = torch.randperm(columns, device=device, generator=generator)[: max(1, columns // OUTLIER_EVERY)]
    x[:, outliers] *= OUTLIER_FACTOR
    return x.to(torch.bfloat16)


class PathInputs(KeptOutputs):
    """A case, and the calls of every implementation on it."""

    case: PathCase

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
