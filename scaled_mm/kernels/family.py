"""`Family`: the kernels of one source for one section of the tile tables.

A family defines which kernel configs are legal, their resources, C++ code and names, the autotuner's candidates, and the terms of its
predicted time. Tables, code generation, the autotuner and the commands use this interface and never name a family.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from scaled_mm.kernels.arch import ARCHES, DEFAULT_ARCH, KIB, Arch, wgmma_arches
from scaled_mm.kernels.dtypes import MAX_OUT_BYTES, OUT_DTYPES, BuiltFor

if TYPE_CHECKING:
    from scaled_mm.kernels.config import KernelConfig
    from scaled_mm.kernels.constants import Constants

FieldFinding = tuple[str, str]  # a field of the kernel config, and why its value is illegal


@dataclasses.dataclass(frozen=True)
class KernelCost:
    """The resources of a kernel, in bytes. `accumulators`: 32-bit registers per consumer thread, for the output dtype that takes the
    most (None: not known)."""

    stage_bytes: int
    epilogue_bytes: int
    stages: int
    shared_memory: int
    accumulators: int | None


@dataclasses.dataclass(frozen=True)
class Code:
    """The C++ of a kernel: its header and its type.

    shared_memory: the bytes that the generated source asserts, exactly or, with at_most, as an upper bound; None: no assertion.
    mark: a part of the mangled names of the kernel's device functions, and of no other kernel's with another mark. `scaled_mm.jit.check` compiles
        kernels of one header with different marks as one translation unit, and tells their reports apart by it. None: the kernel is checked alone.
    """

    header: str
    type: str
    shared_memory: int | None = None
    at_most: bool = False
    mark: str | None = None


def mangled(template: str, sizes: Iterable[int], out: BuiltFor) -> str:
    """`template<sizes..., output dtype>` in a mangled name (Itanium C++ ABI): a mark of `Code`."""
    dtype = {"float": "f", "int32_t": "i"}.get(out.cxx, f"{len(out.cxx)}{out.cxx}")
    return f"{template}I{''.join(f'Li{size}E' for size in sizes)}{dtype}E"


class Family:
    """The kernels of one family for one section. A subclass overrides the defaults below.

    name, section: `family` and `section` of the kernel configs.
    fields: the fields of a kernel config that the kernel uses, besides name, family and section.
    needs_wgmma: runs only on architectures with `Arch.wgmma`.
    alignment, store_bytes, block_size: see `KernelConfig`.
    built_for: the output dtypes, or the GGUF formats of the weight; `built_for_what` names them in messages.
    splits_k: whether the kernel uses split_k.
    stream_k_schedules: the schedules of kernels that may have the scheduler stream_k.
    splits_in_clusters: whether the thread blocks that share a tile's K form a cluster.
    auto_stages: whether `stages: auto` stands for a number that `cost` computes and commands show.
    compile_order: how long a kernel config takes to compile, compared with others: a build starts with the longest.
    compiled_in_pairs: two kernel configs in one translation unit take clearly less time than in two.
    tuned: whether the autotuner tries these kernels; not the fallbacks.
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
    stream_k_schedules: tuple[str, ...] = ()
    splits_in_clusters = False
    auto_stages = False
    compile_order = 0
    compiled_in_pairs = False
    tuned = True

    # ---- legality, decided without nvcc -------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """`c2x`, `block-scaled c2x`: in messages about unused fields."""
        return self.name

    def findings(self, config: KernelConfig, arch: Arch) -> Iterator[FieldFinding]:
        """(field, reason) for every rule that a kernel config breaks on an architecture."""
        if self.needs_wgmma and not arch.wgmma:
            yield "family", f"{self.name} rows use wgmma, which {arch.name} lacks; they run on {wgmma_arches()}"
            return
        for field, info in type(config).model_fields.items():
            if field not in ("name", "family", "section", *self.fields) and getattr(config, field) != info.default:
                yield field, f"a {self.title} row has none: leave it out"
        yield from self.rules(config, arch)

    def rules(self, config: KernelConfig, arch: Arch) -> Iterator[FieldFinding]:
        """(field, reason) for every broken rule about the fields that the kernel uses."""
        raise NotImplementedError

    def cost(self, config: KernelConfig, limit: int, out_bytes: int = MAX_OUT_BYTES) -> KernelCost:
        """The resources of a kernel, legal or not.

        limit: bytes of shared memory that a thread block may opt in to. out_bytes: per element of the output.
        """
        raise NotImplementedError

    # ---- C++ ------------------------------------------------------------------------------------------------------------

    def code(self, config: KernelConfig, built_for: str, limit: int) -> Code:
        """The C++ of a legal kernel for one of `built_for`, on GPUs where a thread block may opt in to `limit` bytes of shared memory."""
        raise NotImplementedError

    # ---- the autotuner --------------------------------------------------------------------------------------------------

    def config_name(self, config: KernelConfig) -> str:
        """The canonical name of a kernel config. It contains every field in which kernel configs of a table differ."""
        raise NotImplementedError

    def candidates(self, arch: Arch) -> Iterator[KernelConfig]:
        """Kernel configs that the autotuner may try for an architecture's table. Some may be illegal."""
        return iter(())

    def loads_weights_early(self, config: KernelConfig) -> bool:
        """Whether a constant weight is read before the preceding kernel has ended."""
        return config.early_weights

    # ---- the predicted time: see `scaled_mm.kernels.time_model` ---------------------------------------------------------

    def resident(self, config: KernelConfig, cost: KernelCost, shared_memory: int) -> int:
        """Thread blocks per SM with `shared_memory` bytes. The system reserves 1 KiB per thread block."""
        return max(1, shared_memory // (cost.shared_memory + KIB))

    def accumulators(self, config: KernelConfig, out_bytes: int) -> int | None:
        """32-bit registers per consumer thread for outputs of so many bytes. None: not known."""
        return self.cost(config, ARCHES[DEFAULT_ARCH].shared_memory, out_bytes).accumulators

    def multiply_rate(self, config: KernelConfig, c: Constants) -> float:
        """The fraction of the tensor cores' peak rate that the shape of the kernel's MMAs allows."""
        return 1.0

    def block_size(self, config: KernelConfig) -> int:
        """See `KernelConfig.block_size`."""
        return 0

    def least_steps(self, config: KernelConfig) -> int:
        """The fewest steps of K in a part of a tile, where the steps of all tiles are divided evenly (stream-K); 0: they are not."""
        return 0

    def most_parts(self, config: KernelConfig) -> int:
        """The largest average number of thread blocks for a shared tile, where they share the tiles that remain after whole waves; 1: a cluster
        shares every tile; 0: neither."""
        return 0

    def epilogue_overlaps(self, config: KernelConfig) -> bool:
        """Whether a tile's epilogue runs beside the steps of another tile."""
        return False

    def step_us(self, config: KernelConfig, cost: KernelCost, multiply: float, c: Constants) -> float:
        """Microseconds per step of K of a thread block that has an SM to itself. multiply: of the arithmetic alone."""
        return multiply + c.step_us

    def start_us(self, config: KernelConfig, c: Constants) -> float:
        """Microseconds in addition to those of every launch."""
        return 0.0

    def tile_us(self, config: KernelConfig, c: Constants) -> float:
        """Additional microseconds for each tile of this kernel config."""
        return 0.0


FAMILIES: dict[str, dict[str, Family]] = {}
"""The kernels of every family, by family and section. `scaled_mm.kernels.registry` fills it."""
