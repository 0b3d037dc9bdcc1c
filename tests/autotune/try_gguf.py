"""Correctness and times of the GGUF kernels of wgmma whose weights round, by kernel config and GGUF_SPLIT, on an H200:
`SCALED_MM_JIT=wait python tests/autotune/try_gguf.py FILE.json [FORMAT ...]`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from time_gguf import product
from time_sections import microseconds

import scaled_mm as sm

ROWS = [name for name in os.environ.get("TRY_ROWS", "16_k16_x3 32_k16_x2 64_k16_x2 96_k16_x3 128_k16_x3 192_k16_x2 256_k16_x2").split()]
WEIGHTS = ((4096, 4096), (4096, 14336), (28672, 8192), (6144, 4096))
TOKENS = (9, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048)
SPLITS = (0, 2, 3, 4, 6, 8)


def rows_for(tokens: int) -> list[str]:
    sizes = {name: int(name.split("_")[0]) for name in ROWS}
    return [name for name, size in sizes.items() if (size <= 64 or size <= 2 * tokens) and (tokens <= 4 * size or size == 256)]


def splits_for(row: str, N: int, M: int) -> list[int]:
    size = int(row.split("_")[0])
    tiles = -(-N // 128) * -(-M // size)
    return [split for split in SPLITS if split == 0 or tiles * split <= (264 if size <= 64 else 132)]


def check(handle) -> int:
    """Results against float64, with every kernel config and split; a guard behind the output."""
    bad = 0
    for fmt in FORMATS:
        for N, K, M in ((256, 2048, 40), (384, 4096, 16), (130, 2304, 129), (1000, 8192, 70), (4096, 4096, 260), (129, 512, 9), (8448, 1024, 300)):
            q = sm.quantize_block(torch.randn(N, K, device="cuda"), fmt, rule="ggml")
            packed, bias = sm.pack_block_weight(q, fmt), torch.randn(N, device="cuda")
            for dtype in (torch.float16, torch.bfloat16, torch.float32):
                x = torch.randn(M, K, device="cuda").to(dtype)
                want = x.double() @ sm.dequantize_block(q, fmt).double().t() + bias.double()
                for name in ROWS:
                    for split in (0, 2, 3, 8):
                        os.environ["GGUF_SPLIT"] = str(split)
                        storage = torch.full((M * N + 64,), 7.0, dtype=dtype, device="cuda")
                        out = storage[: M * N].view(M, N)
                        kernel = f"gguf_wgmma_128x{name}"
                        with sm.create_block_descriptor(
                            handle, out=out.t(), weight=packed, activation=x, bias=bias, mode="w16a16", kernel=kernel
                        ) as plan:
                            workspace = torch.full((plan.workspace_size + 64,), 255, dtype=torch.uint8, device="cuda")
                            for _ in range(2):
                                plan.calculate(out.t(), packed, x, bias, workspace=workspace)
                        error = float((out.double() - want).norm() / want.norm())
                        untouched = bool((storage[M * N :] == 7).all()) and bool((workspace[plan.workspace_size :] == 255).all())
                        if not (error < (6e-3 if dtype is torch.bfloat16 else 8e-4) and untouched):
                            bad += 1
                            print("BAD", fmt, N, K, M, dtype, name, split, error, untouched, flush=True)
    return bad


def main(path: Path) -> None:
    handle = sm.Handle("cuda:0")
    bad = check(handle) if not os.environ.get("TRY_NO_CHECK") else -1
    print("bad", bad, flush=True)
    cases = []
    generator = torch.Generator("cuda").manual_seed(5)
    for N, K in WEIGHTS:
        values = torch.randn(N, K, device="cuda", generator=generator)
        sets = max(2, min(12, int(2e8 // (0.6 * N * K))))
        dense = [values.bfloat16() for _ in range(max(2, min(8, sets)))]
        for fmt in FORMATS:
            packed = [sm.pack_block_weight(sm.quantize_block(values, fmt, rule="ggml"), fmt) for _ in range(sets)]
            for M in TOKENS:
                x = torch.randn(M, K, device="cuda", generator=generator)
                half, bf16, out = x.half(), x.bfloat16(), torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
                mm = microseconds([lambda weight=weight: torch.mm(bf16, weight.t(), out=out) for weight in dense] * 2)  # noqa: B023
                case = dict(M=M, N=N, K=K, fmt=fmt, bf16=mm)
                for name in rows_for(M):
                    for split in splits_for(name, N, M):
                        os.environ["GGUF_SPLIT"] = str(split)
                        case[f"{name}/{split}"] = product(handle, packed, half, torch.float16, f"gguf_wgmma_128x{name}")[0]
                ours = {k: v for k, v in case.items() if "/" in k}
                best = min(ours, key=ours.get)
                print(f"{N}x{K} {M} {fmt}: bf16 {mm:.1f}, {best} {ours[best]:.1f} = {mm / ours[best]:.2f}x", flush=True)
                cases.append(case)
    path.write_text(json.dumps(cases))


if __name__ == "__main__":
    FORMATS = sys.argv[2:] or ["q4_0"]
    main(Path(sys.argv[1]))
