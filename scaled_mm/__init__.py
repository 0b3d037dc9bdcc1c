"""Quantized matrix multiplication for inference: INT8 with fused scales, bias and zero points, the same bits everywhere."""

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

__version__ = "0.1.0"

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
    "GroupedBlockScaledDescriptor",
    "GroupedDescriptor",
    "Handle",
    "InsufficientWorkspaceError",
    "InternalError",
    "KernelChoice",
    "KernelNotBuiltError",
    "KernelNotFoundError",
    "NullPointerError",
    "PreparedWeight",
    "ScaledMMError",
    "Status",
    "TensorDesc",
    "block_scaled_mm",
    "create_block_descriptor",
    "create_block_scaled_descriptor",
    "create_descriptor",
    "create_grouped_block_scaled_descriptor",
    "create_grouped_descriptor",
    "grouped_block_scaled_mm",
    "grouped_scaled_mm",
    "prepare_weight",
    "scaled_mm",
    *gguf.__all__,
    *layers.__all__,
    *rowwise.__all__,
]
