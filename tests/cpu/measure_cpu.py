"""Prints how a product of the CPU backend compares with float32 `mm` of the same matrices: `python tests/cpu/measure_cpu.py`.

scaled_mm with scales and a bfloat16 result, a weight [N, K] as `w.t()`; median of 8 calls, taken in turn with `mm`.
"""

from __future__ import annotations

import statistics
import time

import torch

import scaled_mm as sm
from scaled_mm.cpu import integer_product

SHAPES = (
    (1, 4096, 4096),
    (1, 11008, 4096),
    (4, 4096, 4096),
    (17, 4096, 4096),
    (33, 1000, 1031),
    (64, 4096, 14336),
    (128, 2048, 4096),
    (512, 3072, 2048),
)
CALLS = 8


def main() -> None:
    print(f"{torch.get_num_threads()} threads, {integer_product.choice()}")
    print(f"{'M':>5} {'N':>6} {'K':>6} {'mm ms':>9} {'ours ms':>9} {'mm / ours':>10}")
    for m, n, k in SHAPES:
        a, w = (torch.randint(-128, 128, (rows, k), dtype=torch.int8) for rows in (m, n))
        a_scale, b_scale = torch.rand(m, 1), torch.rand(1, n)
        left, right = a.float(), w.float()
        calls = {"mm": lambda left=left, right=right: left @ right.t(), "ours": lambda a=a, w=w, s=a_scale, t=b_scale: sm.scaled_mm(a, w.t(), s, t)}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for round in range(CALLS + 1):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                if round:
                    times[name].append(1e3 * (time.perf_counter() - start))
        mm, ours = (statistics.median(times[name]) for name in ("mm", "ours"))
        print(f"{m:5} {n:6} {k:6} {mm:9.2f} {ours:9.2f} {mm / ours:10.2f}")


if __name__ == "__main__":
    main()
