"""What the C interface accepts of the operators around the products of experts, and how it names what is wrong. On a CPU handle: no GPU needed."""

from __future__ import annotations

import pytest
import torch
from core.test_core_rowwise_blocks import FLOAT, HALF, INT8, create, desc

from scaled_mm.errors import BadParamError, BadTensorDtypeError, BadTensorShapeError, BadTensorStridesError, NullPointerError
from scaled_mm.rowwise.kernels import Kind

INT, LONG = torch.int32, torch.int64
IDS, ORDER, ENDS, INVERSE = desc(LONG, 5, 2), desc(INT, 10), desc(INT, 8), desc(INT, 5, 2)
X, Q, SCALE, BLOCK_SCALE = desc(HALF, 5, 300), desc(INT8, 10, 300), desc(FLOAT, 10, 1), desc(FLOAT, 10, 3)
LOGITS, CHOSEN = desc(HALF, 5, 300), desc(INT, 5, 8)
Y, WEIGHTS, OUT = desc(HALF, 10, 64), desc(FLOAT, 5, 2), desc(HALF, 5, 64)


def test_each_kind_takes_its_operands():
    create(Kind.MOE_SORT, 0, ORDER, IDS, None, ENDS, INVERSE)
    create(Kind.MOE_SORT, 0, ORDER, desc(INT, 5, 2, strides=(1, 5)), desc(INT, 16, strides=(3,)), ENDS, INVERSE)
    create(Kind.MOE_SORT, 0, desc(INT, 0), desc(LONG, 0, 2), None, desc(INT, 1024), desc(INT, 0, 2))
    create(Kind.MOE_QUANTIZE, 0, Q, X, INVERSE, SCALE)
    create(Kind.MOE_QUANTIZE, 1, Q, desc(FLOAT, 5, 300, strides=(1, 5)), INVERSE, BLOCK_SCALE)
    create(Kind.MOE_QUANTIZE, 1, Q, X, INVERSE, desc(FLOAT, 10, 3, strides=(1, 10)))
    create(Kind.MOE_COMBINE, 0, OUT, Y, WEIGHTS, INVERSE)
    create(Kind.MOE_COMBINE, 0, desc(HALF, 5, 64, strides=(1, 5)), Y, desc(HALF, 5, 2, strides=(1, 5)), INVERSE)
    create(Kind.TOPK_SOFTMAX, 0, WEIGHTS, LOGITS, INVERSE)
    create(Kind.TOPK_SOFTMAX, 1, desc(FLOAT, 5, 32, strides=(1, 5)), desc(FLOAT, 5, 32, strides=(1, 5)), desc(INT, 5, 32, strides=(1, 5)))
    create(Kind.TOPK_SOFTMAX, 1, desc(FLOAT, 0, 1), desc(FLOAT, 0, 1), desc(INT, 0, 1))
    create(Kind.TOPK_SOFTMAX, 1, desc(FLOAT, 5, 1), desc(FLOAT, 5, 1024, strides=(0, 0)), desc(INT, 5, 1))


@pytest.mark.parametrize(
    "error, message, kind, option, descs",
    [
        (BadParamError, "function: expected 0", Kind.MOE_SORT, 1, (ORDER, IDS, None, ENDS, INVERSE)),
        (BadTensorDtypeError, "topk_ids: expected int32 or int64, got float32", Kind.MOE_SORT, 0, (ORDER, WEIGHTS, None, ENDS, INVERSE)),
        (BadTensorShapeError, r"topk_ids: expected 2 dimensions \[M, choices\]", Kind.MOE_SORT, 0, (ORDER, desc(LONG, 10), None, ENDS, INVERSE)),
        (BadTensorShapeError, "topk_ids: expected at most 2147483647 elements", Kind.MOE_SORT, 0, (ORDER, desc(INT, 2**30, 2), None, ENDS, INVERSE)),
        (BadTensorDtypeError, "expert_map: expected int32, got int64", Kind.MOE_SORT, 0, (ORDER, IDS, desc(LONG, 4), ENDS, INVERSE)),
        (BadTensorShapeError, r"out: expected \[M choices\] = \[10\], got \[9\]", Kind.MOE_SORT, 0, (desc(INT, 9), IDS, None, ENDS, INVERSE)),
        (BadTensorStridesError, "out: expected a contiguous", Kind.MOE_SORT, 0, (desc(INT, 10, strides=(2,)), IDS, None, ENDS, INVERSE)),
        (BadTensorShapeError, "ends: expected .* from 1 to 1024, got", Kind.MOE_SORT, 0, (ORDER, IDS, None, desc(INT, 1025), INVERSE)),
        (BadTensorShapeError, "ends: expected .* from 1 to 1024, got", Kind.MOE_SORT, 0, (ORDER, IDS, None, desc(INT, 0), INVERSE)),
        (NullPointerError, r"inverse: expected a tensor \[M, choices\]", Kind.MOE_SORT, 0, (ORDER, IDS, None, ENDS, None)),
        (BadTensorShapeError, r"inverse: expected \[M, choices\] = \[5, 2\]", Kind.MOE_SORT, 0, (ORDER, IDS, None, ENDS, desc(INT, 5, 3))),
        (BadTensorStridesError, "inverse: expected a contiguous", Kind.MOE_SORT, 0, (ORDER, IDS, None, ENDS, desc(INT, 5, 2, strides=(1, 5)))),
        (BadParamError, "function: expected a scaledMMMoeScales_t, got 2", Kind.MOE_QUANTIZE, 2, (Q, X, INVERSE, SCALE)),
        (BadTensorDtypeError, "x: expected float16, bfloat16 or float32, got int8", Kind.MOE_QUANTIZE, 0, (Q, Q, INVERSE, SCALE)),
        (BadTensorShapeError, r"rows: expected \[M, choices\] = \[5, choices\]", Kind.MOE_QUANTIZE, 0, (Q, X, desc(INT, 4, 2), SCALE)),
        (BadTensorDtypeError, "rows: expected int32, got int64", Kind.MOE_QUANTIZE, 0, (Q, X, IDS, SCALE)),
        (BadTensorShapeError, r"out: expected \[rows, K\] with K = 300", Kind.MOE_QUANTIZE, 0, (desc(INT8, 10, 299), X, INVERSE, SCALE)),
        (BadTensorStridesError, "out: expected strides", Kind.MOE_QUANTIZE, 0, (desc(INT8, 10, 300, strides=(0, 1)), X, INVERSE, SCALE)),
        (BadTensorShapeError, r"out_scale: expected \[10, 1\], got \[10, 3\]", Kind.MOE_QUANTIZE, 0, (Q, X, INVERSE, BLOCK_SCALE)),
        (BadTensorShapeError, r"out_scale: expected \[10, 3\], got \[10, 1\]", Kind.MOE_QUANTIZE, 1, (Q, X, INVERSE, SCALE)),
        (BadTensorDtypeError, "out: expected float16, got float32", Kind.MOE_COMBINE, 0, (desc(FLOAT, 5, 64), Y, WEIGHTS, INVERSE)),
        (BadTensorShapeError, r"out: expected \[M, N\] with N = 64", Kind.MOE_COMBINE, 0, (desc(HALF, 5, 63), Y, WEIGHTS, INVERSE)),
        (BadTensorShapeError, r"topk_weights: expected .* with M = 5", Kind.MOE_COMBINE, 0, (OUT, Y, desc(FLOAT, 4, 2), INVERSE)),
        (BadTensorShapeError, r"rows: expected \[M, choices\] = \[5, 2\]", Kind.MOE_COMBINE, 0, (OUT, Y, WEIGHTS, desc(INT, 5, 3))),
        (BadParamError, "function: expected a scaledMMTopkWeights_t, got 2", Kind.TOPK_SOFTMAX, 2, (WEIGHTS, LOGITS, INVERSE)),
        (BadTensorDtypeError, "logits: expected float16, bfloat16 or float32, got int32", Kind.TOPK_SOFTMAX, 0, (WEIGHTS, CHOSEN, INVERSE)),
        (BadTensorShapeError, r"logits: expected 2 dimensions \[M, E\]", Kind.TOPK_SOFTMAX, 0, (WEIGHTS, desc(HALF, 5), INVERSE)),
        (BadTensorShapeError, r"logits: expected .* E from 1 to 1024", Kind.TOPK_SOFTMAX, 0, (WEIGHTS, desc(HALF, 5, 1025), INVERSE)),
        (BadTensorShapeError, r"logits: expected .* E from 1 to 1024", Kind.TOPK_SOFTMAX, 0, (WEIGHTS, desc(HALF, 5, 0), INVERSE)),
        (BadTensorDtypeError, "out: expected float32, got float16", Kind.TOPK_SOFTMAX, 0, (desc(HALF, 5, 2), LOGITS, INVERSE)),
        (BadTensorShapeError, r"out: expected .* M = 5 and k from 1 to 32", Kind.TOPK_SOFTMAX, 0, (desc(FLOAT, 4, 2), LOGITS, INVERSE)),
        (BadTensorShapeError, r"out: expected .* M = 5 and k from 1 to 32", Kind.TOPK_SOFTMAX, 0, (desc(FLOAT, 5, 33), LOGITS, INVERSE)),
        (BadTensorShapeError, r"out: expected .* M = 5 and k from 1 to 2", Kind.TOPK_SOFTMAX, 0, (desc(FLOAT, 5, 3), desc(HALF, 5, 2), INVERSE)),
        (BadTensorShapeError, r"out: expected .* M = 5 and k from 1 to 32", Kind.TOPK_SOFTMAX, 0, (desc(FLOAT, 5, 0), LOGITS, INVERSE)),
        (BadTensorStridesError, "out: expected strides", Kind.TOPK_SOFTMAX, 0, (desc(FLOAT, 5, 2, strides=(0, 1)), LOGITS, INVERSE)),
        (NullPointerError, r"ids: expected a tensor \[M, k\]", Kind.TOPK_SOFTMAX, 0, (WEIGHTS, LOGITS, None)),
        (BadTensorDtypeError, "ids: expected int32, got int64", Kind.TOPK_SOFTMAX, 0, (WEIGHTS, LOGITS, IDS)),
        (BadTensorShapeError, r"ids: expected \[5, 2\] as out, got \[5, 8\]", Kind.TOPK_SOFTMAX, 0, (WEIGHTS, LOGITS, CHOSEN)),
        (BadTensorStridesError, "ids: expected strides", Kind.TOPK_SOFTMAX, 0, (WEIGHTS, LOGITS, desc(INT, 5, 2, strides=(0, 1)))),
    ],
)
def test_what_is_wrong_is_refused_and_named(error, message, kind, option, descs):
    with pytest.raises(error, match="^" + message):
        create(kind, option, *descs)
