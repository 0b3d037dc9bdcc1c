"""Quantized matrix multiplication for inference: INT8 with fused scales, bias and zero points, the same bits everywhere."""

import importlib
from typing import TYPE_CHECKING

from scaled_mm import gguf, layers, rowwise
from scaled_mm.core.handle import Handle
from scaled_mm.core.plan import KernelChoice
from scaled_mm.core.tensor_desc import TensorDesc
from scaled_mm.errors import (
    AccumulatorOverflowError,
    ArchitectureNotSupportedError,
    BadParamError,
    BadTensorAlignmentError,
    BadTensorDeviceError,
    BadTensorDtypeError,
    BadTensorShapeError,
    BadTensorStridesError,
    CudaError,
    DeviceNotSupportedError,
    InsufficientWorkspaceError,
    InternalError,
    KernelNotBuiltError,
    KernelNotFoundError,
    NullPointerError,
    ScaledMMError,
    Status,
)
from scaled_mm.gguf import *  # noqa: F403  (its __all__, which is part of ours)
from scaled_mm.layers import *  # noqa: F403  (its __all__, which is part of ours)
from scaled_mm.products.block_scaled import BlockScaledDescriptor, block_scaled_mm, create_block_scaled_descriptor
from scaled_mm.products.gemm import Descriptor, create_descriptor, scaled_mm
from scaled_mm.products.gguf import BlockDescriptor, create_block_descriptor
from scaled_mm.products.grouped import GroupedDescriptor, create_grouped_descriptor, grouped_scaled_mm
from scaled_mm.products.grouped_block_scaled import (
    GroupedBlockScaledDescriptor,
    create_grouped_block_scaled_descriptor,
    grouped_block_scaled_mm,
)
from scaled_mm.products.prepared_weight import PreparedWeight, prepare_weight
from scaled_mm.rowwise import *  # noqa: F403  (its __all__, which is part of ours)

if TYPE_CHECKING:  # for readers of the source; `__getattr__` imports them
    from scaled_mm import nn, parallel
    from scaled_mm.models.config import Int8Config
    from scaled_mm.models.convert import convert_
    from scaled_mm.models.evaluate import evaluate
    from scaled_mm.models.fuse import fuse_
    from scaled_mm.models.gguf import GgufReport, from_gguf
    from scaled_mm.models.load import from_pretrained
    from scaled_mm.models.quantize import quantize_
    from scaled_mm.models.report import QuantizationReport
    from scaled_mm.models.reproducible import reproducible_
    from scaled_mm.models.save import save_pretrained

__version__ = "0.1.0"

# Whole models are loaded at their first use: most programs need none of them.
_LATER = {
    "nn": "scaled_mm.nn",
    "parallel": "scaled_mm.parallel",
    "Int8Config": "scaled_mm.models.config",
    "quantize_": "scaled_mm.models.quantize",
    "QuantizationReport": "scaled_mm.models.report",
    "save_pretrained": "scaled_mm.models.save",
    "from_gguf": "scaled_mm.models.gguf",
    "GgufReport": "scaled_mm.models.gguf",
    "from_pretrained": "scaled_mm.models.load",
    "convert_": "scaled_mm.models.convert",
    "fuse_": "scaled_mm.models.fuse",
    "reproducible_": "scaled_mm.models.reproducible",
    "evaluate": "scaled_mm.models.evaluate",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_LATER[name])
    value = module if _LATER[name] == f"scaled_mm.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


__all__ = [
    "AccumulatorOverflowError",
    "ArchitectureNotSupportedError",
    "BadParamError",
    "BadTensorAlignmentError",
    "BadTensorDeviceError",
    "BadTensorDtypeError",
    "BadTensorShapeError",
    "BadTensorStridesError",
    "BlockDescriptor",
    "BlockScaledDescriptor",
    "CudaError",
    "Descriptor",
    "DeviceNotSupportedError",
    "GgufReport",
    "GroupedBlockScaledDescriptor",
    "GroupedDescriptor",
    "Handle",
    "InsufficientWorkspaceError",
    "Int8Config",
    "InternalError",
    "KernelChoice",
    "KernelNotBuiltError",
    "KernelNotFoundError",
    "NullPointerError",
    "PreparedWeight",
    "QuantizationReport",
    "ScaledMMError",
    "Status",
    "TensorDesc",
    "block_scaled_mm",
    "convert_",
    "create_block_descriptor",
    "create_block_scaled_descriptor",
    "create_descriptor",
    "create_grouped_block_scaled_descriptor",
    "create_grouped_descriptor",
    "evaluate",
    "from_gguf",
    "from_pretrained",
    "fuse_",
    "grouped_block_scaled_mm",
    "grouped_scaled_mm",
    "nn",
    "parallel",
    "prepare_weight",
    "quantize_",
    "reproducible_",
    "save_pretrained",
    "scaled_mm",
    *gguf.__all__,
    *layers.__all__,
    *rowwise.__all__,
]
