"""All kernel families, and lookups of the family of a kernel config. A new family is a `register` line below."""

from __future__ import annotations

from scaled_mm.kernels.arch import ARCHES
from scaled_mm.kernels.block_scaled import BlockScaledC2x, BlockScaledGeneric, GroupedBlockScaledC2x, GroupedBlockScaledGeneric
from scaled_mm.kernels.block_scaled_wgmma import BlockScaledWgmma
from scaled_mm.kernels.c2x import C2x, GroupedC2x
from scaled_mm.kernels.c3x import C3x, GroupedC3x
from scaled_mm.kernels.config import KernelConfig
from scaled_mm.kernels.decode import Decode
from scaled_mm.kernels.dtypes import MAX_OUT_BYTES
from scaled_mm.kernels.experts_wgmma import GroupedBlockScaledWgmma, GroupedWgmma
from scaled_mm.kernels.family import FAMILIES, Family, KernelCost
from scaled_mm.kernels.generic import Generic, GroupedGeneric
from scaled_mm.kernels.gguf_mma import GgufMma
from scaled_mm.kernels.gguf_wgmma import GgufWgmma, GgufWgmmaCluster
from scaled_mm.kernels.sections import SECTIONS, TOP_LEVEL


def register(*kernels: Family) -> None:
    """Adds one family: its kernels for each section that it serves."""
    for of_section in kernels:
        FAMILIES.setdefault(of_section.name, {})[of_section.section] = of_section


register(C3x(), GroupedC3x())
register(C2x(), GroupedC2x(), BlockScaledC2x(), GroupedBlockScaledC2x())
register(Decode())
register(BlockScaledWgmma(), GroupedWgmma(), GroupedBlockScaledWgmma())
register(Generic(), GroupedGeneric(), BlockScaledGeneric(), GroupedBlockScaledGeneric())
register(GgufMma())
register(GgufWgmma())
register(GgufWgmmaCluster())


def family_of(config: KernelConfig) -> Family:
    """The `Family` of a legal kernel config, for its section."""
    try:
        return FAMILIES[config.family][config.section]
    except KeyError:  # a checked table contains no such config
        raise AssertionError(f"no template for family {config.family} in section {config.section}") from None


def families_of(section: str) -> list[Family]:
    """Every family with kernels for a section."""
    return [of_section[section] for of_section in FAMILIES.values() if section in of_section]


def config_findings(config: KernelConfig, arch: str) -> list[tuple[str, str]]:
    """(field, reason) for every rule of an architecture that a kernel config breaks, decided without nvcc. arch: a key of `ARCHES`."""
    of_family = FAMILIES[config.family]
    if config.section not in of_family:
        return [("family", _not_of_section(config))]
    return list(of_family[config.section].findings(config, ARCHES[arch]))


def _not_of_section(config: KernelConfig) -> str:
    only = list(FAMILIES[config.family])
    if len(only) == 1 and only != [TOP_LEVEL]:
        return f"{config.family} rows are those of {SECTIONS[only[0]].products}: they stand in the section {only[0]}"
    section = SECTIONS[config.section]
    names = [family.name for family in families_of(section.name)]
    if not names:
        return f"no family has kernels for the section {section.name}: scaled_mm/kernels/registry.py registers none"
    expected = " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return f"no {section.kernel} is a {config.family} one; expected {expected}"


def config_cost(config: KernelConfig, arch: str, out_bytes: int = MAX_OUT_BYTES) -> KernelCost:
    """The resources of a kernel on an architecture, legal there or not. arch: a key of `ARCHES`."""
    return family_of(config).cost(config, ARCHES[arch].shared_memory, out_bytes)
