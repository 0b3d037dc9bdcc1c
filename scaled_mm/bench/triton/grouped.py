"""A plain grouped INT8 product in Triton, as serving engines have it: the rows of each expert are padded to whole tiles, a table says which expert a
tile is of, and rows are gathered by index. With scales of channels, or of blocks of 128. Imported only where Triton is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
import triton
import triton.language as tl
import triton.testing

from scaled_mm.bench.triton.tiles import Aligned, Config


@triton.jit(do_not_specialize=["copies", "gather"])  # one compilation for all routings
def _kernel(
    a_ptr, b_ptr, c_ptr, a_scale_ptr, b_scale_ptr, rows_ptr, experts_ptr, tiles_ptr,
    copies, N, K, stride_a, stride_be, stride_bn, stride_c, stride_as, stride_bse, stride_bsn, gather,
    BLOCK_SCALES: tl.constexpr, PROGRAMS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """c[rows[i]] = a[rows[i] // gather] b[expert of i's tile]^T. Persistent: program p has tiles p, p + PROGRAMS, ..."""
    tiles_n = tl.cdiv(N, BN)
    tiles_m = tl.load(tiles_ptr)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS):
        group = tile // (GROUP * tiles_n)
        first = group * GROUP
        height = tl.minimum(tiles_m - first, GROUP)
        m = first + (tile % (GROUP * tiles_n)) % height
        n = (tile % (GROUP * tiles_n)) // height
        expert = tl.load(experts_ptr + m).to(tl.int64)
        rows = tl.load(rows_ptr + m * BM + tl.arange(0, BM))
        inside = rows < copies
        of_a = (rows // gather).to(tl.int64)
        columns = n * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        a_at = a_ptr + of_a[:, None] * stride_a + k[None, :]
        b_at = b_ptr + expert * stride_be + (columns % N).to(tl.int64)[None, :] * stride_bn + k[:, None]
        if BLOCK_SCALES:
            total = tl.zeros((BM, BN), dtype=tl.float32)
            for step in range(0, tl.cdiv(K, BK)):
                a = tl.load(a_at, mask=inside[:, None] & (k[None, :] < K - step * BK), other=0)
                b = tl.load(b_at, mask=k[:, None] < K - step * BK, other=0)
                of_block = step * BK // 128
                sa = tl.load(a_scale_ptr + of_a * stride_as + of_block, mask=inside, other=0.0)
                sb = tl.load(b_scale_ptr + expert * stride_bse + ((columns % N) // 128) * stride_bsn + of_block)
                total += tl.dot(a, b).to(tl.float32) * sa[:, None] * sb[None, :]
                a_at += BK
                b_at += BK
            out = total
        else:
            acc = tl.zeros((BM, BN), dtype=tl.int32)
            for step in range(0, tl.cdiv(K, BK)):
                a = tl.load(a_at, mask=inside[:, None] & (k[None, :] < K - step * BK), other=0)
                b = tl.load(b_at, mask=k[:, None] < K - step * BK, other=0)
                acc = tl.dot(a, b, acc, out_dtype=tl.int32)
                a_at += BK
                b_at += BK
            sa = tl.load(a_scale_ptr + of_a, mask=inside, other=0.0)
            sb = tl.load(b_scale_ptr + expert * stride_bse + columns % N)
            out = acc.to(tl.float32) * sb[None, :] * sa[:, None]
        c_at = c_ptr + rows.to(tl.int64)[:, None] * stride_c + columns[None, :]
        tl.store(c_at, out.to(tl.bfloat16), mask=inside[:, None] & (columns[None, :] < N))


def product(
    config: Config, a, a_scale, weight, weight_scale, aligned: Aligned, out, gather: int, multiprocessors: int, compile_only: bool = False
) -> torch.Tensor:
    """out [copies, N] of a [rows, K] and weight [E, N, K]. gather: copies that share a row of a. compile_only: nothing is launched."""
    block = weight_scale.dim() == 3
    programs = multiprocessors * config.programs
    n, k = weight.shape[1:]
    strides = (a.stride(0), weight.stride(0), weight.stride(1), out.stride(0), a_scale.stride(0), weight_scale.stride(0))
    _kernel.run(
        a, weight, out, a_scale, weight_scale, aligned.rows, aligned.experts, aligned.tiles, out.shape[0], n, k,
        *strides, weight_scale.stride(1) if block else 0, gather, block, programs, config.bm, config.bn, config.bk, config.group,
        grid=(programs,), warmup=compile_only, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out


def fastest(configs: Iterable[Config], call_of: Callable[[Config], Callable[..., torch.Tensor]]) -> Config:
    """The configuration whose call takes the least time. RuntimeError if none runs on this GPU.

    call_of: a call for a configuration, with the option compile_only of `product`. All are compiled at the same time first.
    """
    calls, best = {config: call_of(config) for config in configs}, None
    with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for call in calls.values():
            call(compile_only=True)
    for config, call in calls.items():
        try:
            call()
            ms = triton.testing.do_bench(call, warmup=2, rep=6, return_mode="median")
        except triton.runtime.errors.OutOfResources:
            continue
        if best is None or ms < best[0]:
            best = ms, config
    if best is None:
        raise RuntimeError("no configuration of the Triton kernel runs on this GPU")
    return best[1]
