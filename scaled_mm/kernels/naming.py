"""Names of kernel configs, and candidates with their canonical name."""

from __future__ import annotations

from typing import Any

from scaled_mm.kernels.config import KernelConfig
from scaled_mm.kernels.family import Family


def short_options(*options: tuple[str, Any, Any]) -> str:
    """`_z4_k2`: the options (letter, value, default) whose value is not the default."""
    return "".join(f"_{letter}{value}" for letter, value, default in options if value != default)


def candidate(family: Family, **fields: Any) -> KernelConfig:
    """A kernel config of a family, with its canonical name."""
    config = KernelConfig.model_validate({"name": "candidate", "family": family.name, "section": family.section, **fields})
    return config.model_copy(update={"name": family.config_name(config)})
