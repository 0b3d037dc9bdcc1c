"""What the C interface accepts of rope, groupwise INT8 quantization and GGUF quantizers, and how it names what is wrong. On a CPU handle: no GPU
needed."""

from __future__ import annotations

import ctypes

import pytest
import torch

import scaled_mm as sm
from scaled_mm.core import binding
from scaled_mm.errors import BadParamError, BadTensorDtypeError, BadTensorShapeError, BadTensorStridesError, NullPointerError
from scaled_mm.gguf_formats import FORMATS
from scaled_mm.rowwise.kernels import Kind

HALF, FLOAT, INT8, INT32 = torch.float16, torch.float32, torch.int8, torch.int32
GGUF_NAMES = " or ".join(", ".join(FORMATS).rsplit(", ", 1))


def desc(dtype, *shape, strides=None):
    if strides is None:
        strides = tuple(torch.empty(shape, device="meta").stride())
    return binding.tensor_desc(dtype, shape, strides, 16, 0)


def create(kind: Kind, option: int, *descs) -> None:
    if kind is Kind.INT8_BLOCK and len(descs) == 3:
        descs = (*descs, None)  # without expert_offsets
    handle, descriptor = sm.Handle("cpu"), ctypes.c_void_p()
    create = binding.library().scaledMMCreateRowwiseDescriptor
    create.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int32] * 3, ctypes.c_double, ctypes.c_void_p, ctypes.c_int32]
    if status := create(handle._pointer, ctypes.byref(descriptor), int(kind), option, 0, 0.0, *binding.operands(descs)):
        raise binding.failure(status)
    binding.call("scaledMMDestroyDescriptor", descriptor)


Q, K, ANGLE = desc(HALF, 5, 4, 64), desc(HALF, 5, 2, 64), desc(FLOAT, 5, 64)
X, INT8_X, SCALE = desc(HALF, 5, 300), desc(INT8, 5, 300), desc(FLOAT, 5, 3)
Q4 = desc("q4_0", 5, 64, strides=(36, 1))


def test_each_kind_takes_its_operands():
    create(Kind.ROPE, 0, Q, Q, K, ANGLE, ANGLE, K)
    create(Kind.ROPE, 1, Q, desc(HALF, 5, 4, 64, strides=(512, 64, 1)), K, desc(HALF, 5, 32), desc(FLOAT, 5, 32), K)
    create(Kind.ROPE, 0, Q, Q, desc(HALF, 5, 0, 64), ANGLE, ANGLE, desc(HALF, 5, 0, 64))
    create(Kind.INT8_BLOCK, 0, INT8_X, X, SCALE)
    create(Kind.INT8_BLOCK, 0, INT8_X, X, desc(FLOAT, 5, 3, strides=(1, 5)))
    create(Kind.INT8_BLOCK, 1, INT8_X, X, desc(FLOAT, 1, 3))
    create(Kind.INT8_BLOCK, 4, INT8_X, X, desc(FLOAT, 5, 5))
    create(Kind.INT8_BLOCK, 2, INT8_X, X, SCALE, desc(INT32, 7))
    create(Kind.INT8_BLOCK, 7, desc(INT8, 2, 200, 300), desc(FLOAT, 2, 200, 300), desc(FLOAT, 2, 4, 5))
    create(Kind.INT8_BLOCK, 1, desc(INT8, 2, 200, 300), desc(FLOAT, 2, 200, 300), desc(FLOAT, 2, 2, 3))
    for fmt, size in (("q4_0", 18), ("q4_1", 20), ("q5_0", 22), ("q5_1", 24), ("q8_0", 34), ("q8_1", 36)):
        for rule in (0, 1):
            create(Kind.GGUF_QUANTIZE, rule, desc(fmt, 5, 64, strides=(2 * size, 1)), desc(HALF, 5, 64, strides=(1, 5)))


@pytest.mark.parametrize(
    "error, message, kind, option, descs",
    [
        (BadParamError, "pairs: expected a scaledMMRopePairs_t, got 2", Kind.ROPE, 2, (Q, Q, K, ANGLE, ANGLE, K)),
        (BadTensorDtypeError, "query: expected float16, bfloat16 or float32, got int8", Kind.ROPE, 0, (Q, desc(INT8, 5, 4, 64), K, ANGLE, ANGLE, K)),
        (BadTensorShapeError, r"query: expected 3 dimensions \[M, HQ, D\]", Kind.ROPE, 0, (Q, ANGLE, K, ANGLE, ANGLE, K)),
        (
            BadTensorShapeError,
            r"query: expected \[M, HQ, D\] with an even D, got \[5, 4, 3\]",
            Kind.ROPE,
            0,
            (Q, desc(HALF, 5, 4, 3), K, ANGLE, ANGLE, K),
        ),
        (NullPointerError, r"key: expected a tensor \[M, HK, D\], got none", Kind.ROPE, 0, (Q, Q, None, ANGLE, ANGLE, K)),
        (BadTensorDtypeError, "key: expected float16, got float32", Kind.ROPE, 0, (Q, Q, desc(FLOAT, 5, 2, 64), ANGLE, ANGLE, K)),
        (BadTensorShapeError, r"key: expected \[5, 2, 64\], got \[5, 2, 62\]", Kind.ROPE, 0, (Q, Q, desc(HALF, 5, 2, 62), ANGLE, ANGLE, K)),
        (BadTensorShapeError, r"out: expected \[5, 4, 64\], got \[5, 2, 64\]", Kind.ROPE, 0, (K, Q, K, ANGLE, ANGLE, K)),
        (BadTensorStridesError, "out_key: expected strides", Kind.ROPE, 0, (Q, Q, K, ANGLE, ANGLE, desc(HALF, 5, 2, 64, strides=(0, 64, 1)))),
        (BadTensorShapeError, r"cos: expected \[5, 64\] or \[5, 32\], got \[5, 16\]", Kind.ROPE, 0, (Q, Q, K, desc(FLOAT, 5, 16), ANGLE, K)),
        (BadTensorShapeError, r"sin: expected \[5, 64\] as cos, got \[5, 32\]", Kind.ROPE, 0, (Q, Q, K, ANGLE, desc(FLOAT, 5, 32), K)),
        (BadParamError, "dim: expected a scaledMMInt8BlockDim_t, got -1", Kind.INT8_BLOCK, -1, (INT8_X, X, SCALE)),
        (BadParamError, "dim: expected a scaledMMInt8BlockDim_t, got 8", Kind.INT8_BLOCK, 8, (INT8_X, X, SCALE)),
        (BadTensorShapeError, r"out_scale: expected \[5, 5\], got \[5, 3\]", Kind.INT8_BLOCK, 4, (INT8_X, X, SCALE)),
        (BadTensorShapeError, r"x: expected 2 dimensions \[M, K\]", Kind.INT8_BLOCK, 0, (INT8_X, Q, SCALE)),
        (BadTensorShapeError, r"x: expected 2 or 3 dimensions", Kind.INT8_BLOCK, 1, (INT8_X, desc(HALF, 5), SCALE)),
        (BadTensorDtypeError, "out: expected int8, got float16", Kind.INT8_BLOCK, 0, (X, X, SCALE)),
        (BadTensorShapeError, r"out_scale: expected \[5, 3\], got \[5, 2\]", Kind.INT8_BLOCK, 0, (INT8_X, X, desc(FLOAT, 5, 2))),
        (BadTensorShapeError, r"out_scale: expected \[1, 3\], got \[5, 3\]", Kind.INT8_BLOCK, 1, (INT8_X, X, SCALE)),
        (NullPointerError, r"out_scale: expected a tensor \[5, 3\], got none", Kind.INT8_BLOCK, 0, (INT8_X, X, None)),
        (BadTensorDtypeError, "expert_offsets: expected int32, got float32", Kind.INT8_BLOCK, 0, (INT8_X, X, SCALE, desc(FLOAT, 7))),
        (BadTensorShapeError, r"expert_offsets: expected 1 dimension \[E\]", Kind.INT8_BLOCK, 0, (INT8_X, X, SCALE, desc(INT32, 7, 1))),
        (BadTensorShapeError, "expert_offsets: .* at least 1", Kind.INT8_BLOCK, 0, (INT8_X, X, SCALE, desc(INT32, 0))),
        (BadTensorStridesError, "expert_offsets: expected a contiguous", Kind.INT8_BLOCK, 0, (INT8_X, X, SCALE, desc(INT32, 7, strides=(2,)))),
        (BadParamError, "expert_offsets: expected none for a weight", Kind.INT8_BLOCK, 1, (INT8_X, X, desc(FLOAT, 1, 3), desc(INT32, 7))),
        (BadParamError, "rule: expected a scaledMMGgufRule_t, got 7", Kind.GGUF_QUANTIZE, 7, (Q4, desc(HALF, 5, 64))),
        (BadTensorShapeError, r"x: expected \[M, K\] with K a multiple of 32, got \[5, 300\]", Kind.GGUF_QUANTIZE, 0, (Q4, X)),
        (BadTensorDtypeError, f"out: expected {GGUF_NAMES}, got int8", Kind.GGUF_QUANTIZE, 0, (INT8_X, desc(HALF, 5, 64))),
        (BadTensorShapeError, r"out: expected \[M, K\] = \[5, 32\], got \[5, 64\]", Kind.GGUF_QUANTIZE, 0, (Q4, desc(HALF, 5, 32))),
        (
            BadTensorStridesError,
            "out: expected one block after the other, strides 36 and 1, got 40 and 1",
            Kind.GGUF_QUANTIZE,
            0,
            (desc("q4_0", 5, 64, strides=(40, 1)), desc(HALF, 5, 64)),
        ),
    ],
)
def test_what_is_wrong_is_refused_and_named(error, message, kind, option, descs):
    with pytest.raises(error, match="^" + message):
        create(kind, option, *descs)


def test_kinds_with_an_option_have_no_other_number():
    handle, descriptor = sm.Handle("cpu"), ctypes.c_void_p()
    function = binding.library().scaledMMCreateRowwiseDescriptor
    create_arguments = (int(Kind.INT8_BLOCK), 0, 1, ctypes.c_double(0.0))
    status = function(handle._pointer, ctypes.byref(descriptor), *create_arguments, *binding.operands((INT8_X, X, SCALE, None)))
    with pytest.raises(BadParamError, match="^output, epsilon: expected 0"):
        raise binding.failure(status)
