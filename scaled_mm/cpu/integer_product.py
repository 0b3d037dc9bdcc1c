"""Exact int8 x int8 -> int32 products on a CPU, by the fastest library call that is exact on this CPU.

Two implementations give the same integers:

* "onednn_int8": `torch._int_mm`. Fast where the CPU has 8-bit dot products (VNNI, AMX, Arm's i8mm).
* "float32": float32 matrix products over parts of K, summed in int32. |a * b| <= 2^14, so every partial sum over PART = 1024 values of K
  is at most 2^24 in absolute value. float32 represents it exactly, in any order of summation. Reduced precision for float32 products
  (`torch.set_float32_matmul_precision`) changes nothing: bfloat16 and TF32 represent every int8 value exactly, and accumulate in float32.

`choice` selects one per process. Without 8-bit dot products, `_int_mm` either saturates 16-bit sums of pairs (wrong for large values) or runs
torch's scalar loop (exact, 13 to 19 times slower than a float32 product).

Limits of `torch._int_mm` (torch 2.13, oneDNN 3.12; the same since its CPU version appeared):

* It truncates strides to 32 bits, passes them to oneDNN as leading dimensions and ignores the status. oneDNN rejects a broadcast view, or a
  `[1, N]` with strides (1, 1): out stays unwritten, without an error.
* If neither stride is 1, oneDNN runs its scalar reference implementation, about 4000 times slower.
* `out=` has to be contiguous.

`blas_operand` therefore copies any layout that BLAS cannot express.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time

import torch

from scaled_mm.errors import BadParamError

VARIABLE = "SCALED_MM_CPU_KERNEL"
"""Environment variable that forces an implementation; read by `choice`."""

IMPLEMENTATIONS = ("onednn_int8", "float32")

DOT_PRODUCTS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"})
"""CPU features that make `torch._int_mm` fast: x86's and then Arm's, in Linux's spelling."""

PART = 1024
"""Longest part of K that float32 sums exactly: PART * 2^14 = 2^24."""

# Elements of b that "float32" converts at a time: 4 MiB, which mostly stay in L2 and L3 until the multiplication.
_TILE_ELEMENTS = 1 << 20
_TILE_MIN_COLUMNS = 128
# Elements of the other operand that it converts at a time, and of the products of a tile: 16 MiB each.
_ROWS_ELEMENTS = 4 << 20

# From this many elements of b on, the layout affects the time of a small-M product more than call overhead does.
_LARGE_WEIGHT = 4 << 20
# Rows of b.t() whose distance is a multiple of this many bytes map to the same cache sets while oneDNN packs them.
_ALIASING_STRIDE = 2048
# Up to this many rows, the transposed accumulators cost less than the other packing order saves.
SWAP_MAX_ROWS = 64

_INT32_MAX = 2**31 - 1


# ---- which implementation --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of IMPLEMENTATIONS, and the reason for it."""

    implementation: str
    reason: str


def choice() -> Choice:
    """The implementation of this process. Selected at the first call, and again when oneDNN is enabled or disabled.

    BadParamError if SCALED_MM_CPU_KERNEL is unknown, or not exact on this CPU.
    """
    return _choose(torch.backends.mkldnn.enabled)


@functools.cache
def _choose(onednn_enabled: bool) -> Choice:
    usable = torch.backends.mkldnn.is_available() and onednn_enabled
    forced = os.environ.get(VARIABLE)
    if forced:
        if forced not in IMPLEMENTATIONS:
            raise BadParamError(f"{VARIABLE}: expected one of {', '.join(IMPLEMENTATIONS)}, got {forced!r}")
        if forced == "onednn_int8" and not int_mm_is_exact():
            raise BadParamError(f"{VARIABLE}: expected an implementation that is exact on this CPU, got {forced!r}, whose sums saturate here")
        return Choice(forced, f"{VARIABLE} forces it")
    if not usable:
        return Choice("float32", "oneDNN is switched off" if torch.backends.mkldnn.is_available() else "this torch has no oneDNN")
    if not int_mm_is_exact():
        return Choice("float32", "oneDNN's INT8 sums saturate on this CPU")
    if (features := cpu_features()) and not features & DOT_PRODUCTS:
        return Choice("float32", "this CPU has no 8-bit dot products")
    times = _measure()
    best, other = sorted(IMPLEMENTATIONS, key=times.__getitem__)
    return Choice(best, f"a 64 x 512 x 1024 product takes {times[best]:.3g} ms, {times[other]:.3g} ms by {other}")


def cpu_features(cpuinfo: str = "/proc/cpuinfo") -> frozenset[str]:
    """The CPU's features from /proc/cpuinfo; empty if unknown."""
    try:
        with open(cpuinfo) as file:
            return next((frozenset(line.partition(":")[2].split()) for line in file if line.lower().startswith(("flags", "features"))), frozenset())
    except OSError:
        return frozenset()


def int_mm_is_exact() -> bool:
    """Whether `torch._int_mm` gives the exact product on this CPU, whatever the values.

    Tries random and extreme values with every form of call that `accumulate` uses. The extreme values are -128 and 127 in every pairing,
    which saturate 16-bit pairs in either operand position.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    k, n = 259, 64  # K is not a multiple of 4, so that the tail of the 4-way dot product is tested too
    for rows in (1, 2, 16, 48):
        a = torch.randint(-128, 128, (rows, k), dtype=torch.int8, generator=generator, device="cpu")
        weight = torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=generator, device="cpu")
        operands = [(a, weight)]
        operands += [(torch.full_like(a, x), torch.full_like(weight, y)) for x in (-128, 127) for y in (-128, 127)]
        for left, right in operands:
            want = (left.double() @ right.double().t()).to(torch.int32)
            products = [
                _product(left, right.t()),
                _product(left, right.t().contiguous()),
                _product_swapped(left, right.t()),
                _product_by_rows(left, right.t()),
            ]
            if not all(torch.equal(product, want) for product in products):
                return False
    return True


def _measure() -> dict[str, float]:
    """Milliseconds of one product by each implementation: the minimum of several interleaved runs.

    Takes at most 0.2 s, even with torch's scalar loop.
    """
    a, b = torch.ones((64, 1024), dtype=torch.int8, device="cpu"), torch.ones((512, 1024), dtype=torch.int8, device="cpu").t()
    best = dict.fromkeys(IMPLEMENTATIONS, math.inf)
    # float32 uses several threads and suffers most from a busy CPU, hence more runs.
    for name, product in [("float32", _product_float32), ("onednn_int8", _product), ("float32", _product_float32)] * 4:
        start = time.perf_counter()
        product(a, b)
        best[name] = min(best[name], (time.perf_counter() - start) * 1e3)
    return best


# ---- the product -----------------------------------------------------------------------------------------------------


def accumulate(a: torch.Tensor, b: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """int32 [M, N] = a @ b, exact. a: int8 [M, K]. b: int8 [K, N]. Any strides; K within the exact bound.

    `into`: a contiguous int32 [M, N] tensor that may receive the result. The returned tensor may be another one.
    """
    if a.shape[1] == 0:
        return torch.zeros((a.shape[0], b.shape[1]), dtype=torch.int32, device="cpu") if into is None else into.zero_()
    if choice().implementation == "float32":
        return _product_float32(a, b, into)
    m, (k, n) = a.shape[0], b.shape
    # oneDNN has a matrix-vector kernel for K-contiguous weights that neither packs nor copies. Two calls of it are
    # faster than one general product (4096 x 4096, 2 cores: 0.21 ms against 1.15 ms).
    b_is_k_contiguous = b.stride(0) == 1 and b.stride(1) >= k
    if m <= 2 and b_is_k_contiguous:
        return _product_by_rows(a, b, into)
    if m <= SWAP_MAX_ROWS and b_is_k_contiguous and b.stride(1) % _ALIASING_STRIDE == 0 and n * k >= _LARGE_WEIGHT:
        return _product_swapped(a, b)
    return _product(a, b, into)


def _product(a: torch.Tensor, b: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    a, b = blas_operand(a), blas_operand(b)
    return torch._int_mm(a, b) if into is None else torch._int_mm(a, b, out=into)


def _product_swapped(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b as (b.t() @ a.t()).t(). oneDNN then packs the weight in the other order, which avoids cache-set conflicts.

    M is padded with zero rows to 4, 8 or a multiple of 16: oneDNN's kernels for the remaining columns are slow.
    """
    m, k = a.shape
    padded = next((size for size in (4, 8) if m <= size), -(-m // 16) * 16)
    rows = a.new_zeros((padded, k))
    rows[:m].copy_(a)
    return torch._int_mm(blas_operand(b.t()), blas_operand(rows.t()))[:, :m].t()


def _product_by_rows(a: torch.Tensor, b: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b, one matrix-vector product per row of a."""
    if a.shape[0] == 1:
        return _product(a, b, into)
    acc = torch.empty((a.shape[0], b.shape[1]), dtype=torch.int32, device="cpu") if into is None else into
    for row in range(a.shape[0]):
        _product(a[row : row + 1], b, acc[row : row + 1])
    return acc


def _product_float32(a: torch.Tensor, b: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b by float32 products over parts of K, none longer than PART.

    The wider operand is converted one tile at a time (several parts of K x some columns) and multiplied by one batched product. The other
    operand is converted some rows at a time. Zeros fill the last part.
    """
    m, (k, n) = a.shape[0], b.shape
    acc = torch.empty((m, n), dtype=torch.int32, device="cpu") if into is None else into
    if m > n:  # the same product, transposed
        _product_float32(b.t(), a.t(), acc.t())
        return acc
    parts = -(-k // PART)
    part = -(-k // parts)
    part = min(PART, -(-part // 16) * 16)  # whole vectors
    padded = parts * part
    # A tile has the layout of its source, so that the conversion reads and writes in order.
    k_is_contiguous = b.stride(0) == 1
    columns = min(n, max(_TILE_MIN_COLUMNS, _TILE_ELEMENTS // (padded if k_is_contiguous else part)))
    together = min(parts, max(1, _TILE_ELEMENTS // (columns * part)))
    rows = min(m, max(1, _ROWS_ELEMENTS // max(padded, columns * together)))
    sizes = (rows * padded, columns * together * part, rows * columns * together)
    left, tile, sums = (torch.empty(size, dtype=torch.float32, device="cpu") for size in sizes)
    for top in range(0, m, rows):
        height = min(rows, m - top)
        _convert(a[top : top + height], left[: height * padded].view(height, padded))
        by_part = left[: height * padded].view(height, parts, part).transpose(0, 1)
        for start in range(0, n, columns):
            width = min(columns, n - start)
            target = acc[top : top + height, start : start + width]
            for first in range(0, parts, together):
                count = min(together, parts - first)
                source = b[first * part : (first + count) * part, start : start + width]
                right = tile[: width * count * part]
                if k_is_contiguous:
                    _convert(source.t(), right.view(width, count * part))
                    right = right.view(width, count, part).permute(1, 2, 0)
                else:
                    _convert(source.t(), right.view(count * part, width).t())
                    right = right.view(count, part, width)
                products = torch.bmm(by_part[first : first + count], right, out=sums[: count * height * width].view(count, height, width))
                integers = products.to(torch.int32).sum(0, dtype=torch.int32) if count > 1 else products[0].to(torch.int32)
                target.copy_(integers) if first == 0 else target.add_(integers)
    return acc


def _convert(source: torch.Tensor, tile: torch.Tensor) -> None:
    """Writes source, int8 [rows, K], into float32 [rows, K or more] with zeros past K."""
    k = source.shape[1]
    tile[:, :k].copy_(source)
    if k < tile.shape[1]:
        tile[:, k:].zero_()


def blas_operand(t: torch.Tensor) -> torch.Tensor:
    """`t`, or a copy of it, with strides that BLAS can express: one stride is 1, the other a leading dimension.

    A leading dimension is at least the extent of the contiguous dimension and fits into 32 bits, because torch truncates it to 32 bits. BLAS
    reads the stride of a dimension of size 1 although it is meaningless, so it is replaced.
    """
    rows, columns = t.shape
    row_stride, column_stride = t.stride()
    if column_stride == 1 or columns == 1:
        leading = row_stride if rows > 1 else columns
        if columns <= leading <= _INT32_MAX:
            return t if t.stride() == (leading, 1) else t.as_strided(t.shape, (leading, 1))
    if row_stride == 1 or rows == 1:
        leading = column_stride if columns > 1 else rows
        if rows <= leading <= _INT32_MAX:
            return t if t.stride() == (1, leading) else t.as_strided(t.shape, (1, leading))
    return t.contiguous()
