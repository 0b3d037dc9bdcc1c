"""The CPU backend of INT8 products: the exact product of `integer_product`, and the epilogue of docs/design/numerics.md.

`gemm` gives the same bits as every GPU kernel: the accumulator is an exact integer, and the epilogue rounds once per
float32 operation, in the documented order. It takes any shape and any strides, including M = 1 and K = 0.
"""

from __future__ import annotations

import torch

from scaled_mm.cpu import integer_product

# Elements of a chunk of accumulators: 32 MiB, so that M = 8192 needs no int32 copy of the whole output.
# A chunk has at least _CHUNK_MIN_ROWS rows, because each product packs b again.
_CHUNK_ELEMENTS = 8 << 20
_CHUNK_MIN_ROWS = 1024

# Elements per thread that the epilogue processes at a time: 2 MiB of int32. Smaller chunks would stay in L2, but waking the threads for
# each operation of a chunk costs more than that saves (2 cores, 256 x 28672: 32 Ki 3.8 ms, 512 Ki 2.3 ms, all at once 3.6 ms).
_EPILOGUE_ELEMENTS_PER_THREAD = 512 << 10


def kernel_name() -> str:
    """The value of `desc.kernel.row` on a CPU: "cpu_onednn_int8" or "cpu_float32", the implementation of the integer product."""
    return f"cpu_{integer_product.choice().implementation}"


def kernel() -> tuple[str, str]:
    """(name, reason) of the integer product, which every INT8 kind of product uses: what a descriptor says of its kernel on a CPU."""
    return kernel_name(), f"the device is a CPU: {integer_product.choice().reason}"


def gemm(out, a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums=None, b_column_sums=None) -> None:
    """Writes out[m,n] = cast((f32(acc[m,n]) * b_scale[n]) * a_scale[m] + bias[n]), or acc itself for an int32 out.

    out: [M, N] float16, bfloat16, float32 or int32, any strides. a: int8 [M, K]. b: int8 [K, N]. a_scale: float32, one
    value, [M] or [M, 1]; b_scale: float32, one value, [N], [1, N] or [N, 1]; both None for an int32 out. bias: [N] or [1, N],
    float32 or out's dtype, or None. Zero points: int32 or int8, one value, [M] or [M, 1], [N] or [1, N]. a_row_sums: int32 [M]
    or [M, 1], b_column_sums: int32 [N] or [1, N], or None.
    In a batch out is [B, M, N], and each of the others may have a first dimension of B or 1.

    The core has validated all arguments: K is within the exact bound, and out does not overlap an input.
    """
    tensors = (out, a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums)
    if not torch.is_grad_enabled():
        return _gemm(*tensors)
    with torch.no_grad():
        return _gemm(*tensors)


def _gemm(out, a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums) -> None:
    if out.dim() == 3:
        return _batch(out, a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums)
    m, k = a.shape
    n = b.shape[1]
    if m == 0 or n == 0:
        return
    zero_points = None
    if a_zero_point is not None or b_zero_point is not None:
        zero_points = _ZeroPoints(a, b, a_zero_point, b_zero_point, a_row_sums, b_column_sums)
    a_scale, b_scale, bias = _column(a_scale), _row(b_scale), _row(bias)

    if out.dtype is torch.int32:
        accumulate_into = out if out.is_contiguous() else None
        acc = integer_product.accumulate(a, b, accumulate_into)
        if zero_points is not None:
            zero_points.subtract_from(acc, 0)
        if acc.data_ptr() != out.data_ptr():
            out.copy_(acc)
        return

    chunk = max(_CHUNK_MIN_ROWS, _CHUNK_ELEMENTS // n)
    buffer = torch.empty((min(chunk, m), n), dtype=torch.int32, device="cpu") if m > integer_product.SWAP_MAX_ROWS else None
    for start in range(0, m, chunk):
        stop = min(start + chunk, m)
        acc = integer_product.accumulate(_rows_of(a, start, stop), b, None if buffer is None else _rows_of(buffer, 0, stop - start))
        _epilogue(_rows_of(out, start, stop), acc, _rows_of(a_scale, start, stop), b_scale, bias, zero_points, start)


# ---- batches ---------------------------------------------------------------------------------------------------------


def _batch(out, a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums) -> None:
    if out.numel() == 0:
        return
    of_rows, of_columns = (a_scale, a_zero_point, a_row_sums), (b_scale, bias, b_zero_point, b_column_sums)
    if out.shape[0] > 1 and all(map(_is_shared, (b, *of_columns))) and (rows := _as_rows(out)) is not None:
        # One product of all rows, so that oneDNN packs b only once.
        batch, m = out.shape[:2]
        a = a.expand(batch, m, a.shape[-1]).reshape(batch * m, -1 if a.numel() else a.shape[-1])
        a_scale, a_zero_point, a_row_sums = (_every_row(t, batch, m) for t in of_rows)
        b, b_scale, bias, b_zero_point, b_column_sums = (_product_of(t, 0) for t in (b, *of_columns))
        return gemm(rows, a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums)
    inputs = (a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums)
    for i in range(out.shape[0]):
        gemm(out[i], *(_product_of(t, i) for t in inputs))


def _is_shared(t: torch.Tensor | None) -> bool:
    return t is None or t.dim() < 3 or t.shape[0] == 1


def _product_of(t: torch.Tensor | None, i: int) -> torch.Tensor | None:
    """The part of an operand for product i of a batch. A shared operand has fewer dimensions, or a first dimension of 1."""
    return t if t is None or t.dim() < 3 else t[i if t.shape[0] > 1 else 0]


def _as_rows(out: torch.Tensor) -> torch.Tensor | None:
    """A view of out [B, M, N] as [B * M, N], or None if its strides do not allow one."""
    batch, m, n = out.shape
    try:
        return out.view(batch * m, n)
    except RuntimeError:
        return None


def _every_row(t: torch.Tensor | None, batch: int, m: int) -> torch.Tensor | None:
    """Expands [M], [M, 1] or [B, M, 1] (B or M may be 1) to [B * M, 1]; returns one value unchanged."""
    if t is None or t.numel() == 1:
        return t
    return (t if t.dim() == 3 else t.reshape(1, -1, 1)).expand(batch, m, 1).reshape(-1, 1)


# ---- zero points -----------------------------------------------------------------------------------------------------


class _ZeroPoints:
    """acc - za * colsum(b) - zb * rowsum(a) + K * za * zb, as acc - za * (colsum(b) - K * zb) - rowsum(a) * zb.

    Each step is int32 arithmetic modulo 2^32. The true result fits into 32 bits, because the core bounds K, so the wrapped result
    is exact. The sums are products with a vector of ones: 200 times faster than `Tensor.sum` on int8.
    """

    def __init__(self, a, b, a_zero_point, b_zero_point, a_row_sums, b_column_sums):
        k = a.shape[1]
        self.a_zero_point = self.b_zero_point = self.row_sum = self.column_term = None
        if b_zero_point is not None:
            self.b_zero_point = _row(b_zero_point).to(torch.int32)
            known = None if a_row_sums is None or k == 0 else _column(a_row_sums)
            self.row_sum = integer_product.accumulate(a, torch.ones((k, 1), dtype=torch.int8, device="cpu"), None) if known is None else known
        if a_zero_point is not None:
            self.a_zero_point = _column(a_zero_point).to(torch.int32)
            known = None if b_column_sums is None or k == 0 else _row(b_column_sums)
            self.column_term = integer_product.accumulate(torch.ones((1, k), dtype=torch.int8, device="cpu"), b, None) if known is None else known
            if b_zero_point is not None:
                self.column_term = self.column_term - self.b_zero_point * k

    def subtract_from(self, acc: torch.Tensor, start: int) -> None:
        """Corrects `acc` in place; its first row is row `start` of the output."""
        stop = start + acc.shape[0]
        if self.a_zero_point is not None:
            acc.addcmul_(_rows_of(self.a_zero_point, start, stop), self.column_term, value=-1)
        if self.b_zero_point is not None:
            acc.addcmul_(_rows_of(self.row_sum, start, stop), self.b_zero_point, value=-1)


# ---- the epilogue ----------------------------------------------------------------------------------------------------


def _epilogue(out, acc, a_scale, b_scale, bias, zero_points: _ZeroPoints | None, start: int) -> None:
    """Processes the rows in chunks. Each float32 operation is a separate call, so that none can be contracted."""
    m, n = acc.shape
    rows = max(1, _EPILOGUE_ELEMENTS_PER_THREAD * torch.get_num_threads() // n)
    if m <= rows and zero_points is None and out.dtype is not torch.float32:  # one chunk
        value = acc.float().mul_(b_scale).mul_(a_scale)
        out.copy_(value if bias is None else value.add_(bias))
        return
    # A float32 out also serves as the temporary.
    temporary = None if out.dtype is torch.float32 else torch.empty((min(rows, m), n), dtype=torch.float32, device="cpu")
    for top in range(0, m, rows):
        bottom = min(top + rows, m)
        block, target = _rows_of(acc, top, bottom), _rows_of(out, top, bottom)
        if zero_points is not None:
            zero_points.subtract_from(block, start + top)
        value = target if temporary is None else _rows_of(temporary, 0, bottom - top)
        value.copy_(block)
        value.mul_(b_scale)
        value.mul_(_rows_of(a_scale, top, bottom))
        if bias is not None:
            value.add_(bias)
        if temporary is not None:
            target.copy_(value)


# Fast path: most scales already have the wanted shape, and the check is cheaper than a reshape. After a large weight was streamed through
# the caches, a few microseconds matter.


def _column(t: torch.Tensor | None) -> torch.Tensor | None:
    """Reshapes one value, [M] or [M, 1] to [1, 1] or [M, 1]."""
    return t if t is None or (t.dim() == 2 and t.shape[1] == 1) else t.reshape(-1, 1)


def _row(t: torch.Tensor | None) -> torch.Tensor | None:
    """Reshapes one value, [N] or [1, N] to [1, 1] or [1, N], and converts floating point to float32, which is exact."""
    if t is None:
        return None
    if t.dim() != 2 or t.shape[0] != 1:
        t = t.reshape(1, -1)
    return t if t.dtype is torch.float32 or not t.is_floating_point() else t.float()


def _rows_of(t: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """t[start:stop], or t itself if the slice covers t or t is a single row shared by all rows."""
    return t if t.shape[0] == 1 or (start == 0 and stop == t.shape[0]) else t[start:stop]
