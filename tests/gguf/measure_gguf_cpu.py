"""Prints what docs/design/gguf-formats.md says of error and speed on a CPU: `python tests/gguf/measure_gguf_cpu.py [M K] [format ...]`.

Times are the least of several runs, in milliseconds: a product, the same with the packed weight (`block_linear`, which quantizes x too),
and what it has to beat, the weight dequantized once and a float32 product.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from test_gguf_products import NMSE, whole_path

import scaled_mm as sm
from scaled_mm.gguf_formats import WEIGHT_FORMATS

TOKENS = (1, 2, 8, 32, 128, 512)


def milliseconds(functions: list[Callable[[], object]], least: float = 2.0) -> list[float]:
    """The least time of each. They take turns, so that what else the machine does falls on all of them."""
    best, start, rounds = [float("inf")] * len(functions), time.perf_counter(), 0
    while rounds < 3 or time.perf_counter() - start < least:
        for i, function in enumerate(functions):
            before = time.perf_counter()
            function()
            best[i] = min(best[i], time.perf_counter() - before)
        rounds += 1
    return [seconds * 1e3 for seconds in best]


def times(fmt: str, weight_q: torch.Tensor, n: int) -> list[float]:
    packed, dequantized = sm.pack_block_weight(weight_q, fmt), sm.dequantize_block(weight_q, fmt)
    x = torch.randn(n, packed.shape[1])
    x_q, x_16 = sm.quantize_q8_1(x), x.bfloat16()
    with_q8_1, with_floats = getattr(sm, f"gemm_{fmt}_q8_1"), getattr(sm, f"gemm_{fmt}")
    return milliseconds(
        [
            lambda: with_q8_1(weight_q, x_q),
            lambda: sm.block_linear(x, packed, mode="w4a8"),
            lambda: with_floats(weight_q, x_16),
            lambda: sm.dequantize_block(weight_q, fmt) @ sm.dequantize_q8_1(x_q).t(),
            lambda: dequantized @ x.t(),
        ]
    )


def main(m: int, k: int, formats: list[str]) -> None:
    print("NMSE            q8_1 activations   bfloat16 activations")
    for fmt, rule in NMSE:
        quantized, floats = whole_path(fmt, rule)
        print(f"{fmt} {rule:8s}   {quantized:.3e}          {floats:.3e}")
    print(f"\n{m} x {k}, {torch.get_num_threads()} threads, torch {torch.__version__}, milliseconds")
    print("format tokens     q8_1   packed    w4a16  dequantize+mm  mm alone")
    for fmt in formats:
        weight_q = sm.quantize_block(torch.randn(m, k), fmt)
        for n in TOKENS:
            q8_1, packed, w4a16, dequantize, alone = times(fmt, weight_q, n)
            print(f"{fmt}   {n:6d} {q8_1:8.2f} {packed:8.2f} {w4a16:8.2f} {dequantize:14.2f} {alone:9.2f}", flush=True)


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:] if argument.isdigit()]
    named = [argument for argument in sys.argv[1:] if not argument.isdigit()]
    main(*(numbers or (4096, 4096)), named or list(WEIGHT_FORMATS))
