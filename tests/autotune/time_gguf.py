"""Times kernel configs of sm90's GGUF products beside bfloat16: `python tests/autotune/time_gguf.py FILE.json`, on an H200.

Every kernel config of wgmma on products with more than 16 tokens whose weights round (mode w16a16, float16 activations and outputs), and `torch.mm`
in bfloat16; the table's choice with bfloat16 and float32 activations, and up to 16 tokens. Graph replays; weights rotate, so that they come from
memory. The buckets of sm90.yaml are from two runs of earlier forms of it, in tests/tables/data: h200_gguf.json, before there were tiles of 144, 160
and 224 tokens, and h200_gguf_tiles.json, q4_0 only, with other weights and numbers of tokens. Takes about two minutes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from time_sections import Calls, microseconds

import scaled_mm as sm
from scaled_mm.measure.environment import read_environment
from scaled_mm.tables import KernelRow, load_table

ROWS = [row for row in load_table("sm90").gguf.rows if row.family == "gguf_wgmma"]
FORMATS = ("q4_0", "q8_0")
WEIGHTS = ((4096, 14336), (14336, 4096), (4096, 4096), (28672, 8192), (6144, 4096), (2560, 9728), (11008, 4096), (5120, 5120))  # N, K
FEW = (1, 8, 9, 16)
MANY = (20, 32, 40, 57, 64, 72, 90, 96, 112, 128, 134, 144, 150, 160, 176, 192, 208, 224, 240, 256, 272, 288, 300, 320, 352, 384, 393, 416, 448, 480)
MOST = (512, 576, 640, 660, 704, 768, 850, 896, 960, 1024, 1100, 1300, 1500, 2048, 4096)
ROTATED_BYTES, LEAST_CALLS = 2e8, 12


def worth_timing(row: KernelRow, tokens: int) -> bool:
    """False for tiles that the tokens fill to less than half, but for small ones, and for more than five tiles."""
    return (row.tile.m <= 64 or row.tile.m <= 2 * tokens) and (tokens <= 5 * row.tile.m or row.tile.m == 256)


def repeated(calls: Calls) -> Calls:
    return calls * -(-LEAST_CALLS // len(calls))


def product(handle, packed: list, x: torch.Tensor, out_dtype: torch.dtype, kernel: str | None = None) -> tuple[float, str]:
    """Microseconds of a product, and the kernel config that served it."""
    out = torch.empty(x.shape[0], packed[0].rows, dtype=out_dtype, device="cuda").t()
    mode = "auto" if kernel is None else "w16a16"
    with sm.create_block_descriptor(handle, out=out, weight=packed[0], activation=x, mode=mode, kernel=kernel) as plan:
        workspace = torch.empty(max(1, plan.workspace_size), dtype=torch.uint8, device="cuda")
        calls = [lambda weight=weight: plan.calculate(out, weight, x, workspace=workspace) for weight in packed]
        return microseconds(repeated(calls)), plan.kernel.row


def of_weight(handle, N: int, K: int) -> list[dict]:
    generator, found = torch.Generator("cuda").manual_seed(5), []
    values = torch.randn(N, K, device="cuda", generator=generator)
    sets = max(2, min(16, int(ROTATED_BYTES // (0.6 * N * K))))
    dense = [values.bfloat16() for _ in range(max(2, min(8, sets)))]
    packed = {fmt: [sm.pack_block_weight(sm.quantize_block(values, fmt, rule="ggml"), fmt) for _ in range(sets)] for fmt in FORMATS}
    for M in (*FEW, *MANY, *MOST):
        x = torch.randn(M, K, device="cuda", generator=generator)
        half, bf16, out = x.half(), x.bfloat16(), torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
        products = [lambda weight=weight: torch.mm(bf16, weight.t(), out=out) for weight in dense]  # noqa: B023
        case = dict(M=M, N=N, K=K, bf16=microseconds(repeated(products)))
        for fmt, weights in packed.items():
            us, chosen = product(handle, weights, half, torch.float16)
            others = [row.name for row in ROWS if M > 16 and row.name != chosen and worth_timing(row, M)]
            case[fmt] = {chosen: us} | {name: product(handle, weights, half, torch.float16, name)[0] for name in others}
            case[f"{fmt} bf16"], _ = product(handle, weights, bf16, torch.bfloat16)
        case["q4_0 f32"], _ = product(handle, packed["q4_0"], x, torch.float32)
        found.append(case)
    return found


def main(path: Path) -> None:
    environment, handle, cases = read_environment(torch.device("cuda:0")), sm.Handle("cuda:0"), []
    for N, K in WEIGHTS:
        cases += of_weight(handle, N, K)
        print(f"{N} x {K}: {len(cases)} cases", flush=True)
    where = f"{environment.gpu}, commit {environment.git_commit}"
    about = f"Microseconds by kernel config, and of torch.mm in bfloat16, {where}, by tests/autotune/time_gguf.py."
    path.write_text(json.dumps({"about": about, "cases": cases}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
