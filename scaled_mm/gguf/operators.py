"""`torch.ops.scaled_mm.gguf_*`: the operators of products with a GGUF format, in addition to `scaled_mm.core.operators`.

The bytes of a weight do not identify its format. So operators take the format and the mode as numbers of the C interface (csrc/torch/gguf.cpp).
`gguf_gemm` takes an unpacked weight or tiles, `gguf_gemm_fields` the fields of a weight packed on a CPU.
"""

from __future__ import annotations

import torch

from scaled_mm.core import binding
from scaled_mm.core.checks import check_size
from scaled_mm.core.dispatcher import TAGS, common_device, define, runs_on_cuda, trace_device
from scaled_mm.errors import (
    BadParamError,
    BadTensorDtypeError,
    BadTensorShapeError,
    BadTensorStridesError,
    DeviceNotSupportedError,
    InternalError,
)
from scaled_mm.gguf import cpu, layout, tiles
from scaled_mm.gguf_formats import BLOCK, BlockFormat, lookup, lookup_weight

OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ACTIVATIONS = (*OUT_DTYPES, torch.uint8)


def format_code(fmt: str) -> int:
    """scaledMMDtype_t of a GGUF format."""
    return binding.DTYPES[fmt]


def mode_code(mode: str) -> int:
    """scaledMMGgufMode_t."""
    return binding.GGUF_MODES.index(mode)


# ---- what every device checks -------------------------------------------------------------------------------------------


_NAMES = {code: name for name, code in binding.DTYPES.items()}


def _weight_format(code: int) -> BlockFormat:
    return lookup_weight(_NAMES.get(code, code))


def _check_blocks(name: str, q: torch.Tensor, description: BlockFormat) -> None:
    layout.check_shape(name, q, description)  # a compiler that traces may still choose strides
    if q.dim() != 3:
        raise BadTensorShapeError(f"{name}: expected 3 dimensions [rows, K/32, {description.block_bytes}], got {list(q.shape)}")


def _check_weight(weight: torch.Tensor, description: BlockFormat, rows: int, k: int, packed: bool) -> None:
    message = "weight: expected rows and k of 0 or more, k a multiple of 32, got {} and {}"
    check_size(rows >= 0, lambda: message.format(rows, k))
    check_size(k >= 0, lambda: message.format(rows, k))
    check_size(k % BLOCK == 0, lambda: message.format(rows, k))
    if packed:
        expected = tiles.shape(rows, k // BLOCK, description)
        if weight.dtype is not torch.uint8:
            raise BadTensorDtypeError(f"weight: expected uint8, got {str(weight.dtype).removeprefix('torch.')}")
        if weight.dim() != 3:
            raise BadTensorShapeError(f"weight: expected tiles {list(expected)}, got {list(weight.shape)}")
    else:
        _check_blocks("weight", weight, description)
        expected = (rows, k // BLOCK, description.block_bytes)
    for got, wanted in zip(weight.shape, expected):
        check_size(got == wanted, lambda: f"weight: expected {list(expected)} of rows = {rows}, k = {k}, got {list(weight.shape)}")


def _check_fields(fields: layout.Parts, description: BlockFormat) -> None:
    """A typed error unless the fields are those that a CPU's packed weight of the format has."""
    if fields.d.dim() != 2:
        raise BadTensorShapeError(f"d: expected 2 dimensions [N, K/32], got {list(fields.d.shape)}")
    blocks = tuple(fields.d.shape)
    levels = torch.int8 if description.signed else torch.uint8
    for name, field, wanted, dtype, expected in (
        ("d", fields.d, True, torch.float16, blocks),
        ("m", fields.second, description.second == "m", torch.float16, blocks),
        ("high", fields.high, description.high_bytes > 0, torch.uint8, (*blocks, description.high_bytes)),
        ("levels", fields.levels, True, levels, (*blocks, description.level_bytes)),
    ):
        if (field is not None) != wanted:
            kinds = ("a tensor", "None") if wanted else ("None", "a tensor")
            raise BadParamError(f"{name}: expected {kinds[0]} for {description.name}, got {kinds[1]}")
        if not wanted:
            continue
        if field.dtype is not dtype:
            raise BadTensorDtypeError(f"{name}: expected {dtype} for {description.name}, got {field.dtype}")
        message = f"{name}: expected {list(expected)} for {description.name}, got {list(field.shape)}"
        if field.dim() != len(expected):
            raise BadTensorShapeError(message)
        for got, size in zip(field.shape, expected):
            check_size(got == size, lambda message=message: message)


def _check_rest(activation: torch.Tensor, bias: torch.Tensor | None, rows: int, k: int, out_dtype: torch.dtype, mode: int) -> None:
    if activation.dtype is torch.uint8:
        _check_blocks("activation", activation, lookup("q8_1"))
    elif activation.dtype not in ACTIVATIONS:
        got = str(activation.dtype).removeprefix("torch.")
        raise BadTensorDtypeError(f"activation: expected float16, bfloat16, float32, or uint8 for q8_1, got {got}")
    elif activation.dim() != 2:
        raise BadTensorShapeError(f"activation: expected 2 dimensions [M, K], got {activation.dim()}: {list(activation.shape)}")
    width = activation.shape[1] * BLOCK if activation.dtype is torch.uint8 else activation.shape[1]
    check_size(width == k, lambda: f"activation: expected [M, K] with K = {k} as in weight [N, K], got {list(activation.shape)}")
    if out_dtype not in OUT_DTYPES:
        raise BadTensorDtypeError(f"out_dtype: expected float16, bfloat16 or float32, got {str(out_dtype).removeprefix('torch.')}")
    if bias is not None:
        if bias.dtype not in (out_dtype, torch.float32):
            raise BadTensorDtypeError(f"bias: expected out's dtype {out_dtype} or torch.float32, got {bias.dtype}")
        if bias.dim() != 1:
            raise BadTensorShapeError(f"bias: expected 1 dimension [N], got {bias.dim()}: {list(bias.shape)}")
        check_size(bias.shape[0] == rows, lambda: f"bias: expected [N] with N = {rows} as in weight [N, K], got {list(bias.shape)}")
    if not 0 <= mode < len(binding.GGUF_MODES):
        raise BadParamError(f"mode: expected a scaledMMGgufMode_t, got {mode}")
    name = binding.GGUF_MODES[mode]
    if activation.dtype is torch.uint8 and name not in ("auto", "w4a8"):
        raise BadParamError(f"mode: expected auto or w4a8 with q8_1 activations, got {name}")
    if activation.dtype is torch.float32 and name == "w4a16":
        raise BadParamError("mode: expected auto, w4a8 or w16a16 with float32 activations, got w4a16")


def out_shape(rows: int, activation: torch.Tensor, transposed_out: bool) -> tuple[int, int]:
    return (activation.shape[0], rows) if transposed_out else (rows, activation.shape[0])


# ---- the CPU, and CUDA until its implementation is loaded ------------------------------------------------------------------


def _check_strides(name: str, q: torch.Tensor, description: BlockFormat) -> None:
    if q.dtype is torch.uint8:
        layout.check_blocks(name, q, description)


def _gemm_any(weight, activation, bias, fmt, rows, k, packed, constant_weight, out_dtype, mode, transposed_out):
    if runs_on_cuda(dict(weight=weight, activation=activation), dict(bias=bias)):
        return gguf_gemm(weight, activation, bias, fmt, rows, k, packed, constant_weight, out_dtype, mode, transposed_out)
    description = _weight_format(fmt)
    _check_weight(weight, description, rows, k, packed)
    _check_rest(activation, bias, rows, k, out_dtype, mode)
    _check_strides("activation", activation, lookup("q8_1"))
    if packed:
        if not weight.is_contiguous():
            raise BadTensorStridesError(f"weight: expected contiguous tiles, got strides {list(weight.stride())}")
        weight = tiles.to_blocks(weight, rows, k // BLOCK, description)
    else:
        _check_strides("weight", weight, description)
    fields = layout.take_apart(weight, description)
    return cpu.gemm(fields, description, activation, bias, out_dtype, binding.GGUF_MODES[mode], transposed_out)


def _check_fields_device(device: torch.device) -> None:
    if device.type not in ("cpu", "meta"):
        raise DeviceNotSupportedError(f"levels: expected a tensor on the CPU, for a GPU takes blocks or tiles, got one on {device}")


def _gemm_fields_any(levels, high, d, m, activation, bias, fmt, out_dtype, mode, transposed_out):
    _check_fields_device(common_device(dict(levels=levels, d=d, activation=activation), dict(high=high, m=m, bias=bias)))
    description, fields = _weight_format(fmt), layout.Parts(d, m, high, levels)
    _check_fields(fields, description)
    _check_rest(activation, bias, d.shape[0], d.shape[1] * BLOCK, out_dtype, mode)
    _check_strides("activation", activation, lookup("q8_1"))
    return cpu.gemm(fields, description, activation, bias, out_dtype, binding.GGUF_MODES[mode], transposed_out)


def _calculate_any(descriptor, out, weight, activation, bias, workspace, fmt, rows, k, packed, stream):
    common_device(dict(weight=weight, activation=activation), dict(bias=bias, out=out, workspace=workspace))
    raise InternalError("gguf_calculate: it takes CUDA tensors; use BlockDescriptor.calculate")


# ---- fake implementations: shapes without data, for torch.compile -----------------------------------------------------------


def _gemm_fake(weight, activation, bias, fmt, rows, k, packed, constant_weight, out_dtype, mode, transposed_out):
    trace_device(dict(weight=weight, activation=activation), dict(bias=bias))
    _check_weight(weight, _weight_format(fmt), rows, k, packed)
    _check_rest(activation, bias, rows, k, out_dtype, mode)
    return weight.new_empty(out_shape(rows, activation, transposed_out), dtype=out_dtype)


def _gemm_fields_fake(levels, high, d, m, activation, bias, fmt, out_dtype, mode, transposed_out):
    _check_fields_device(common_device(dict(levels=levels, d=d, activation=activation), dict(high=high, m=m, bias=bias)))
    _check_fields(layout.Parts(d, m, high, levels), _weight_format(fmt))
    _check_rest(activation, bias, d.shape[0], d.shape[1] * BLOCK, out_dtype, mode)
    return levels.new_empty(out_shape(d.shape[0], activation, transposed_out), dtype=out_dtype)


def _calculate_fake(descriptor, out, weight, activation, bias, workspace, fmt, rows, k, packed, stream):
    common_device(dict(weight=weight, activation=activation), dict(bias=bias, out=out, workspace=workspace))
    _check_weight(weight, _weight_format(fmt), rows, k, packed)


_WEIGHT = "int fmt, SymInt rows, SymInt k, bool packed"
_RESULT = "ScalarType out_dtype, int mode, bool transposed_out"
_FIELDS = "Tensor levels, Tensor? high, Tensor d, Tensor? m"
gguf_gemm = define(
    f"gguf_gemm(Tensor weight, Tensor activation, Tensor? bias, {_WEIGHT}, bool constant_weight, {_RESULT}) -> Tensor", _gemm_any, _gemm_fake, TAGS
)
gguf_gemm_fields = define(
    f"gguf_gemm_fields({_FIELDS}, Tensor activation, Tensor? bias, int fmt, {_RESULT}) -> Tensor", _gemm_fields_any, _gemm_fields_fake, TAGS
)
gguf_calculate = define(
    f"gguf_calculate(int descriptor, Tensor(a!) out, Tensor weight, Tensor activation, Tensor? bias, Tensor? workspace, {_WEIGHT}, int stream) -> ()",
    _calculate_any,
    _calculate_fake,
)
