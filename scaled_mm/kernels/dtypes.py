"""Output dtypes and GGUF formats: a kernel is built for one output dtype, or for one GGUF format of the weight."""

from __future__ import annotations

import dataclasses

from scaled_mm.gguf_formats import FORMATS
from scaled_mm.gguf_formats import WEIGHT_FORMATS as _WEIGHTS

C_DTYPES: dict[str, int] = {
    **{"int8": 0, "int32": 1, "float16": 2, "bfloat16": 3, "float32": 4},
    **{name: description.code for name, description in FORMATS.items()},
    "int64": 64,
}
"""The scaledMMDtype_t of each dtype and GGUF format."""

GGUF_MODES = ("auto", "w4a8", "w4a16", "w16a16")
"""The index of a name is its scaledMMGgufMode_t."""


@dataclasses.dataclass(frozen=True)
class BuiltFor:
    """One output dtype, or one GGUF format. cxx: the C++ type. dtype: its name in `C_DTYPES`. bytes: per element of the output; 0 for a format."""

    cxx: str
    dtype: str
    bytes: int = 0

    @property
    def code(self) -> int:
        """The scaledMMDtype_t."""
        return C_DTYPES[self.dtype]


OUT_DTYPES: dict[str, BuiltFor] = {
    "bf16": BuiltFor("__nv_bfloat16", "bfloat16", 2),
    "fp16": BuiltFor("__half", "float16", 2),
    "fp32": BuiltFor("float", "float32", 4),
    "int32": BuiltFor("int32_t", "int32", 4),
}
"""Output dtypes by the suffix of the kernel's symbol."""

WEIGHT_FORMATS: dict[str, BuiltFor] = {name: BuiltFor(f"scaled_mm::gguf::{name.upper()}", name) for name in _WEIGHTS}
"""GGUF formats of a weight: each kernel config of the section gguf is built for each format. The kernel writes every output dtype."""

BUILT_FOR: dict[str, BuiltFor] = OUT_DTYPES | WEIGHT_FORMATS

MAX_OUT_BYTES = max(dtype.bytes for dtype in OUT_DTYPES.values())
"""The largest size of an output element: a kernel config must fit for every output dtype."""
