"""The former name of the room `scaled_mm.gguf`, kept for code that imports it."""

from scaled_mm.gguf import *  # noqa: F403  (its __all__)
from scaled_mm.gguf import __all__ as _names
from scaled_mm.products.gguf import BlockDescriptor, create_block_descriptor

__all__ = ["BlockDescriptor", "create_block_descriptor", *_names]
