"""Weights prepared once: b, its zero points, its column sums, and the promise that b does not change."""

from __future__ import annotations

import dataclasses

import torch

from scaled_mm.core.checks import check_strided
from scaled_mm.core.constant import is_written
from scaled_mm.errors import BadParamError, BadTensorDeviceError, BadTensorDtypeError, BadTensorShapeError


@dataclasses.dataclass(frozen=True, eq=False)
class PreparedWeight:
    """The result of `prepare_weight`; pass it as `b` to `scaled_mm`, `create_descriptor` and `calculate`.

    b: int8 [K, N] or [B, K, N]. zero_point: int32 or int8, or None. column_sums: int32 [1, N] or [B, 1, N], the sums of b over K,
        or the sums given to `prepare_weight`.
    constant: products may read b before the preceding kernel of their stream has ended (docs/decisions/0011). Only `prepare_weight` sets
        it. Copying, `dataclasses.replace` and unpickling reset it: prepare the weight again.
    Sums and promise refer to the time of preparation. Before writing to b, wait for its products; prepare it again afterwards.
    """

    b: torch.Tensor
    zero_point: torch.Tensor | None
    column_sums: torch.Tensor
    constant: bool = dataclasses.field(default=False, init=False)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "constant": False}

    def operands(
        self, b_zero_point: torch.Tensor | None = None, b_column_sums: torch.Tensor | None = None, needs_sums: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """(b, b_zero_point, b_column_sums) of a call. Raises BadParamError if the call also passed b_zero_point or b_column_sums."""
        if b_zero_point is not None or b_column_sums is not None:  # a loop here would cost 0.2 us per call
            name, given = ("b_column_sums", b_column_sums) if b_zero_point is None else ("b_zero_point", b_zero_point)
            raise BadParamError(f"{name}: expected none with a prepared weight, which holds its own, got a {type(given).__name__}")
        return self.b, self.zero_point, self.column_sums if needs_sums else None


@torch.no_grad()
def prepare_weight(b: torch.Tensor, b_zero_point: torch.Tensor | None = None, *, b_column_sums: torch.Tensor | None = None) -> PreparedWeight:
    """Computes b's column sums, which zero points of a need, once, and marks b as constant, so that products may load it early.

    b: int8 [K, N] or [B, K, N], any strides, any device. It is not copied.
    b_zero_point: int32 or int8: one value, [N], [1, N], or [B, 1, N] with b's B or 1; or None for a symmetric weight.
    b_column_sums: int32 [N], [1, N], or [B, 1, N] with b's B or 1: used instead of the sums of b over K. May hold zero_point * sums
        (vLLM's `azp_adj`), with `a_zero_point=torch.ones(1, dtype=torch.int32)` and without b_zero_point (docs/guide/coming-from.md).
    The sums are exact: a sum of K int8 values fits into int32 for every K that a product supports.
    Synchronizes the current stream of b's device, so that later kernels may load b early. Skipped during graph capture, compilation or
    tracing, and for a b not aligned to 16 bytes; `constant` is then False.
    Raises BadParamError, BadTensorDtypeError, BadTensorShapeError or BadTensorDeviceError, naming the argument.
    """
    for name, tensor in (("b", b), ("b_zero_point", b_zero_point), ("b_column_sums", b_column_sums)):
        if tensor is not None or name == "b":
            check_strided(name, tensor)
    if b.dtype is not torch.int8:
        raise BadTensorDtypeError(f"b: expected int8, got {str(b.dtype).removeprefix('torch.')}")
    if b.dim() not in (2, 3):
        raise BadTensorShapeError(f"b: expected 2 dimensions [K, N] or 3 [B, K, N], got {b.dim()}: {list(b.shape)}")
    if b_zero_point is not None:
        _check_zero_point(b, b_zero_point)
    sums = b.sum(dim=-2, keepdim=True, dtype=torch.int32) if b_column_sums is None else _checked_sums(b, b_column_sums)
    weight = PreparedWeight(b, b_zero_point, sums)
    object.__setattr__(weight, "constant", is_written(b))
    return weight


def _checked_sums(b: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """[1, N] or [B, 1, N]."""
    if sums.device != b.device:
        raise BadTensorDeviceError(f"b_column_sums: expected a tensor on {b.device}, got one on {sums.device}")
    if sums.dtype is not torch.int32:
        raise BadTensorDtypeError(f"b_column_sums: expected int32, got {str(sums.dtype).removeprefix('torch.')}")
    n, shape = b.shape[-1], tuple(sums.shape)
    batches = {b.shape[0], 1} if b.dim() == 3 else set()
    if shape not in [(n,), (1, n), *((batch, 1, n) for batch in batches)]:
        wanted = f"[{n}], [1, {n}] or [{b.shape[0]}, 1, {n}] with 1 for B" if batches else f"[{n}] or [1, {n}]"
        raise BadTensorShapeError(f"b_column_sums: expected {wanted} for a b {list(b.shape)}, got {list(shape)}")
    return sums.reshape(1, n) if sums.dim() == 1 else sums


def _check_zero_point(b: torch.Tensor, zero_point: torch.Tensor) -> None:
    if zero_point.device != b.device:
        raise BadTensorDeviceError(f"b_zero_point: expected a tensor on {b.device}, got one on {zero_point.device}")
    if zero_point.dtype not in (torch.int32, torch.int8):
        raise BadTensorDtypeError(f"b_zero_point: expected int32 or int8, got {str(zero_point.dtype).removeprefix('torch.')}")
    n, shape = b.shape[-1], tuple(zero_point.shape)
    expected = [(n,), (1, n)]
    if b.dim() == 3:
        expected += [(batch, 1, columns) for batch in (b.shape[0], 1) for columns in (n, 1)]
    elif len(shape) == 3:  # for a batch in which only a has several products
        expected += [(shape[0], 1, n), (shape[0], 1, 1)]
    if shape not in expected and any(size != 1 for size in shape):
        batch = b.shape[0] if b.dim() == 3 else "B"  # a 2-D b gets its batch size from a later a
        wanted = f"one value, [{n}], [1, {n}] or [{batch}, 1, {n}] with 1 in any place"
        raise BadTensorShapeError(f"b_zero_point: expected {wanted} for a b {list(b.shape)}, got {list(shape)}")
