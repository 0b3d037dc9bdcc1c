"""The words of the schema files: op types and their groups, stored dtypes, logical dtypes. A new op type is a line here.

Stored dtypes are those that flashinfer-bench 0.1.2 accepts. It has neither uint8 nor GGUF formats, so tensors in GGUF formats are stored as
int8, and a tag gives their format: `logical:<tensor>=<format>`. docs/decisions/0014-schemas.md has the reasons.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from scaled_mm.gguf_formats import FORMATS, WEIGHT_FORMATS

if TYPE_CHECKING:
    import torch

GROUPS = ("gemm", "quantization", "activation", "normalization", "attention", "moe")


@dataclasses.dataclass(frozen=True)
class OpType:
    """A kind of operator. group: its heading in lists; summary: one line for lists."""

    name: str
    group: str
    summary: str


_WEIGHTS = {name: name.upper() for name in WEIGHT_FORMATS}

OP_TYPES: dict[str, OpType] = {
    one.name: one
    for one in (
        OpType("gemm_fp32", "gemm", "FP32 matrix product, the baseline"),
        OpType("gemm_int8_scaled", "gemm", "INT8 product with per-row and per-column scales, bias, zero points"),
        *(OpType(f"gemm_{name}", "gemm", f"{title} weight x float16 activation") for name, title in _WEIGHTS.items()),
        *(OpType(f"gemm_{name}_q8_1", "gemm", f"{title} weight x Q8_1 activation") for name, title in _WEIGHTS.items()),
        OpType("linear", "gemm", "matrix product with a bias, in 16 bits"),
        OpType("quantize", "quantization", "float to INT8 or to blocks"),
        OpType("dequantize", "quantization", "INT8 or blocks to float"),
        OpType("silu", "activation", "x * sigmoid(x)"),
        OpType("gelu", "activation", "x * Phi(x)"),
        OpType("silu_and_mul", "activation", "silu of the first half times the second half"),
        OpType("rmsnorm", "normalization", "x / rms(x) * weight"),
        OpType("add_rms_norm", "normalization", "the sum with a residual, and its rmsnorm"),
        OpType("softmax", "attention", "exp(x) / sum(exp(x)) over the last dimension"),
        OpType("rope", "attention", "rotary embedding of query and key"),
        OpType("paged_decode_attention", "attention", "one new token a sequence over a paged KV cache"),
        OpType("moe", "moe", "the experts of a mixture, with INT8 weights"),
    )
}

STORED_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1", "int64", "int32", "int16", "int8", "bool")
"""The dtypes of tensors: the enumeration of flashinfer-bench 0.1.2, in its order."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a stored dtype; a byte stores two float4_e2m1 values."""
    import torch

    return torch.float4_e2m1fn_x2 if name == "float4_e2m1" else getattr(torch, name)


LOGICAL_DTYPES = FORMATS
"""GGUF formats by name. Such a tensor is stored as int8; its last axis is the bytes of a block."""

STATUSES = ("PASSED", "INCORRECT_SHAPE", "INCORRECT_NUMERICAL", "INCORRECT_DTYPE", "RUNTIME_ERROR", "COMPILE_ERROR", "TIMEOUT")
