"""A kernel family: the kernels of one source for one section of the tile tables, and everything the rest of the package asks of them.

Legality, what a kernel occupies, its C++, its name, the autotuner's candidates, and what sets its predicted time apart. The table's
rules, code generation, the tuner and the commands ask here; none of them knows a family by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from scaled_mm.kernels.arch import KIB, Arch, wgmma_arches
from scaled_mm.kernels.dtypes import MAX_OUT_BYTES, OUT_DTYPES

if TYPE_CHECKING:
    from scaled_mm.kernels.config import KernelConfig
    from scaled_mm.kernels.constants import Constants

FieldFinding = tuple[str, str]  # a field of the configuration, and the reason


@dataclasses.dataclass(frozen=True)
class KernelCost:
    """What a kernel occupies. Bytes; `accumulators` are 32-bit registers per consumer thread (None: not known)."""

    stage_bytes: int
    epilogue_bytes: int
    stages: int
    shared_memory: int
    accumulators: int | None


@dataclasses.dataclass(frozen=True)
class Code:
    """The C++ of a kernel: the header that has it, and its type.

    shared_memory: bytes that the generated source asserts, exactly or (at_most) as a bound; None: nothing.
    """

    header: str
    type: str
    shared_memory: int | None = None
    at_most: bool = False


class Family:
    """The kernels of one family for one section. A subclass states what differs from the defaults below.

    name, section: `family` and `section` of the configurations.
    fields: of a configuration, those that the kernel has, beside its name, family and section.
    needs_wgmma: runs only where `Arch.wgmma` is.
    alignment, store_bytes: see `KernelConfig`.
    built_for: the output dtypes, or the formats of the weight; `built_for_what` names them in messages.
    splits_k: whether split_k has a meaning.
    auto_stages: whether `stages: auto` is a number that the rules compute, and worth showing.
    tuned: whether the autotuner tries them; a fallback is no rival.
    model_out_bytes: of an element of the output, with which the predicted time counts shared memory.
    """

    name: str
    section: str = "gemm"
    fields: tuple[str, ...] = ()
    needs_wgmma = False
    alignment: tuple[int, int, int] = (16, 16, 16)
    store_bytes = 1
    built_for: tuple[str, ...] = tuple(OUT_DTYPES)
    built_for_what = "an out dtype"
    splits_k = False
    auto_stages = False
    tuned = True
    model_out_bytes = MAX_OUT_BYTES

    # ---- legality, decided without nvcc -------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """`c2x`, `block-scaled c2x`: in messages about unused fields."""
        return self.name

    def findings(self, config: KernelConfig, arch: Arch) -> Iterator[FieldFinding]:
        """(field, reason) for every rule that a configuration breaks on an architecture."""
        if self.needs_wgmma and not arch.wgmma:
            yield "family", f"{self.name} rows use wgmma, which {arch.name} lacks; they run on {wgmma_arches()}"
            return
        for field, info in type(config).model_fields.items():
            if field not in ("name", "family", "section", *self.fields) and getattr(config, field) != info.default:
                yield field, f"a {self.title} row has none: leave it out"
        yield from self.rules(config, arch)

    def rules(self, config: KernelConfig, arch: Arch) -> Iterator[FieldFinding]:
        """What is wrong with the fields that the kernel has."""
        raise NotImplementedError

    def cost(self, config: KernelConfig, limit: int, out_bytes: int = MAX_OUT_BYTES) -> KernelCost:
        """What a kernel occupies, legal or not.

        limit: bytes of shared memory that a thread block may have. out_bytes: of an element of the output.
        """
        raise NotImplementedError

    # ---- C++ ------------------------------------------------------------------------------------------------------------

    def code(self, config: KernelConfig, built_for: str, limit: int) -> Code:
        """The C++ of a legal kernel for one of `built_for`, on GPUs where a thread block may have `limit` bytes of shared memory."""
        raise NotImplementedError

    # ---- the autotuner --------------------------------------------------------------------------------------------------

    def config_name(self, config: KernelConfig) -> str:
        """The canonical name of a configuration: what makes two kernels of a table different is in it."""
        raise NotImplementedError

    def candidates(self, arch: Arch) -> Iterator[KernelConfig]:
        """Configurations that the autotuner may try for the table of an architecture, illegal ones among them."""
        return iter(())

    def loads_weights_early(self, config: KernelConfig) -> bool:
        """Whether a constant weight is read before the preceding kernel has ended."""
        return config.early_weights

    # ---- the predicted time: see `scaled_mm.autotune.model` -------------------------------------------------------------

    def resident(self, config: KernelConfig, cost: KernelCost, shared_memory: int) -> int:
        """Thread blocks that share an SM with `shared_memory` bytes; each block takes 1 KiB for the system."""
        return max(1, shared_memory // (cost.shared_memory + KIB))

    def multiply_rate(self, config: KernelConfig, c: Constants) -> float:
        """The part of the tensor cores' rate that the shape of the kernel's MMAs allows."""
        return 1.0

    def step_us(self, config: KernelConfig, cost: KernelCost, step: float, multiply: float, c: Constants) -> float:
        """Microseconds of a step of K: `step`, of multiplying and loading, or more. multiply: microseconds of the arithmetic."""
        return step

    def start_us(self, config: KernelConfig, c: Constants) -> float:
        """Microseconds beside those of every launch."""
        return 0.0


FAMILIES: dict[str, dict[str, Family]] = {}
"""The kernels of every family by section. `scaled_mm.kernels.registry` fills it."""
