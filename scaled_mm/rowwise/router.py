"""`topk_softmax`: the router of a mixture of experts in one kernel."""

from __future__ import annotations

from operator import index

import torch

from scaled_mm.errors import BadParamError, BadTensorShapeError
from scaled_mm.rowwise import kernels
from scaled_mm.rowwise.arithmetic import exp
from scaled_mm.rowwise.moe import MOST_EXPERTS
from scaled_mm.rowwise.operands import check_rows
from scaled_mm.rowwise.operators import operator

MOST_CHOICES = 32  # of the kernel: kMostChoices in csrc/core/kernel_abi.h
_LANES = 32


@torch.no_grad()
def topk_softmax(logits: torch.Tensor, k: int, *, renormalize: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, ids): the softmax over the experts of each token, and the k experts with the largest logits, the largest first.

        p = exp(logits - max) / sum(exp(logits - max)),  weights = p[ids],  with renormalize: weights / sum(weights)

    logits: [..., E], float16, bfloat16 or float32, 1 to 8 dimensions, E from 1 to 1024, any strides, CPU or CUDA.
    k: the experts of a token, from 1 to 32, at most E.
    Returns float32 [..., k] and int32 [..., k], contiguous: `topk_weights` and `topk_ids` of `fused_experts`. No gradient.

    Experts with equal logits are selected in ascending order; NaN counts as the largest logit. All weights of a row are NaN if it has a NaN, if its
    largest logit is infinity, or if all are -infinity; its ids follow the same rule. Computed in float32, in an order that docs/design/numerics.md
    defines: a CPU and every GPU give the same bits, for any number of rows.
    Raises a ScaledMMError subclass that names the argument, what was expected and what was given.
    """
    if not isinstance(renormalize, bool):
        raise BadParamError(f"renormalize: expected True or False, got {renormalize!r}")
    k = _check(logits, k)
    if torch.compiler.is_compiling():
        return _operator(logits, k, renormalize)
    served = _by_kernel(logits, k, renormalize) if kernels.serve(logits) else None
    return _topk_softmax(logits, k, renormalize) if served is None else served


def _check(logits, k, renormalize=True) -> int:
    """k, as an int."""
    check_rows("logits", logits)
    experts = logits.shape[-1]
    if not 1 <= experts <= MOST_EXPERTS:
        raise BadTensorShapeError(f"logits: expected [..., E] with E from 1 to {MOST_EXPERTS}, got {list(logits.shape)}")
    most = min(experts, MOST_CHOICES)
    try:
        choices = None if isinstance(k, (bool, torch.Tensor)) else index(k)
    except TypeError:
        choices = None
    if choices is None or not 1 <= choices <= most:
        raise BadParamError(f"k: expected an integer from 1 to {most} for {experts} experts, got {k!r}")
    return choices


def _by_kernel(logits, k, renormalize) -> tuple[torch.Tensor, torch.Tensor] | None:
    shape = (*logits.shape[:-1], k)
    weights, ids = (kernels.empty(logits, shape, dtype) for dtype in (torch.float32, torch.int32))
    return (weights, ids) if kernels.launch(kernels.Kind.TOPK_SOFTMAX, int(renormalize), 0, 0.0, weights, logits, ids) else None


def _topk_softmax(logits, k, renormalize) -> tuple[torch.Tensor, torch.Tensor]:
    w = logits.to(torch.float32).contiguous()
    keys = _keys(w).topk(k).values  # of integers that differ, so that every device selects the same
    ids = w.shape[-1] - 1 - keys % MOST_EXPERTS
    e = exp(w - w.amax(-1, keepdim=True))
    weights = e.gather(-1, ids) / _sum(e)
    if renormalize:
        total = torch.zeros_like(weights[..., :1])
        for j in range(k):
            total = total + weights[..., j : j + 1]
        weights = weights / total
    return weights, ids.to(torch.int32)


def _keys(w: torch.Tensor) -> torch.Tensor:
    """int64: larger for larger logits, then for lower experts. w: float32."""
    bits = (w + 0.0).view(torch.int32)  # -0 becomes 0
    order = torch.where(w.isnan(), torch.iinfo(torch.int32).max, torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
    return order.to(torch.int64) * MOST_EXPERTS + torch.arange(w.shape[-1] - 1, -1, -1, device=w.device)


def _sum(e: torch.Tensor) -> torch.Tensor:
    """[..., 1]: the sum over a row. Expert i belongs to lane i mod 32, which adds its own in ascending order; then a tree over the lanes."""
    parts = torch.nn.functional.pad(e, (0, -e.shape[-1] % _LANES)).unflatten(-1, (-1, _LANES))
    lanes = torch.zeros_like(parts[..., 0, :])
    for step in range(parts.shape[-2]):
        lanes = lanes + parts[..., step, :]
    half = _LANES // 2
    while half:
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
        half //= 2
    return lanes


def _fake(logits, k, renormalize) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*logits.shape[:-1], k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


_operator = operator("topk_softmax", 2, _topk_softmax, _check, "int k, bool renormalize", fake=_fake, first="logits", kernel=_by_kernel)
