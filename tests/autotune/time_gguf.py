"""Times kernel configs of sm90's GGUF products beside bfloat16, on an H200: `python tests/autotune/time_gguf.py FILE.json [few] [KERNEL...]`.

Kernel configs with rounded weights (mode w16a16, float16 activations and outputs), on random products: seed 51, q4_0, is for the fit, together with
three weights of LLM layers, which are larger (q8_0 beside it is only judged); seed 52, with one format more, is held out. `torch.mm` in bfloat16
beside them. few: products of 9 to 48 tokens alone, with q5_1 instead of q8_0 in seed 51; kernel configs with tiles of 16 and 32 tokens, among them
those of mma.sync, whose weights do not round. KERNEL: names of the only kernel configs to time. Graph replays; weights rotate, so that they come from
memory, but for those too small for MOST_SETS copies to exceed the L2 cache. Takes 280 s, with few 30 s.

In tests/tables/data, h200_gguf_random.json and h200_gguf_few.json have what it wrote of seed 51 with the kernels before decision 0029 (q8_0, tiles of
16 tokens, and kernel configs that `worth_timing` left out then, are of further runs), h200_gguf_held_out.json what it wrote of seed 52 with those
since then.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from time_sections import Calls, microseconds

import scaled_mm as sm
from scaled_mm.kernels.gpu import facts
from scaled_mm.measure.environment import read_environment
from scaled_mm.tables import KernelRow, load_table

TABLE, H200 = load_table("sm90").gguf, facts("NVIDIA H200", "sm90", 132)
ROUNDING = [row for row in TABLE.rows if row.family == "gguf_wgmma_cluster" or (row.family == "gguf_wgmma" and row.tile.m >= 32)]
OF_FEW = [row for row in TABLE.rows if row.tile.m in (16, 32) and row.name != "gguf_mma_32x32_x2"]
FITTED, JUDGED = 51, 52  # seeds
FORMATS = {FITTED: ("q4_0", "q8_0"), JUDGED: ("q4_0", "q5_1", "q8_0")}
FEW_FORMATS = {FITTED: ("q4_0", "q5_1"), JUDGED: ("q4_0", "q5_1", "q8_0")}
WEIGHTS, TOKENS = {FITTED: 30, JUDGED: 7}, 16  # numbers of weights, and of tokens for each
LAYERS = {FITTED: [(28672, 8192), (6144, 4096), (4096, 14336)], JUDGED: []}  # (N, K)
ROTATED_BYTES, MOST_SETS, LEAST_CALLS = 2e8, 256, 12
PREDICTED = 1.15


def between(dice: random.Random, least: int, most: int, step: int) -> int:
    """A multiple of step, log-uniform."""
    return max(least, round(least * (most / least) ** dice.random() / step) * step)


def products(seed: int) -> list[tuple[int, int, list[int]]]:
    """(N, K, numbers of tokens) of weights with N from 256 to 28672 and K from 256 to 14336. Half of the numbers of tokens are above 512."""
    dice = random.Random(seed)
    tokens = lambda: [between(dice, *(17, 512) if i % 2 else (513, 4096), 1) for i in range(TOKENS)]  # noqa: E731
    drawn = [(between(dice, 256, 28672, 8), between(dice, 256, 14336, 32), sorted(tokens())) for _ in range(WEIGHTS[seed])]
    return drawn + [(N, K, sorted(tokens())) for N, K in LAYERS[seed]]


def few_tokens(seed: int) -> list[tuple[int, int, list[int]]]:
    """The same weights, with two numbers of 9 to 16 tokens and one of 17 to 48."""
    dice = random.Random(-seed)
    return [(N, K, [*sorted(dice.sample(range(9, 17), 2)), dice.randint(17, 48)]) for N, K, _ in products(seed)]


def worth_timing(row: KernelRow, M: int, N: int, K: int) -> bool:
    """True if M is above 16 and the table predicts a time within PREDICTED of the least. Otherwise false for kernels that do not round a weight, if
    M is above 16; for tiles of more than 64 tokens of which less than half would be filled; for tiles of fewer than 128 tokens, if M is more than
    five of them and the output has more than two of them for each SM; and for clusters, if it has more than two tiles for each SM and M is above
    16."""
    if M > 16 and TABLE.has_predicted_time(row):
        least = min(TABLE.predicted_us(one, M, N, K, H200) for one in TABLE.predicted_rows)
        if TABLE.predicted_us(row, M, N, K, H200) <= PREDICTED * least:
            return True
    tiles = -(-M // row.tile.m) * -(-N // row.tile.n)
    if row.family == "gguf_wgmma_cluster" and M > 16 and tiles > 2 * H200.multiprocessors:
        return False
    if row.tile.m < 32 and row.family != "gguf_wgmma_cluster":
        return M <= 16
    return (row.tile.m <= 64 or row.tile.m <= 2 * M) and (row.tile.m >= 128 or M <= 5 * row.tile.m or tiles <= 2 * H200.multiprocessors)


def repeated(calls: Calls) -> Calls:
    return calls * -(-LEAST_CALLS // len(calls))


def product(handle: sm.Handle, packed: list, x: torch.Tensor, kernel: str) -> float:
    """Microseconds of a product."""
    out = torch.empty(x.shape[0], packed[0].rows, dtype=x.dtype, device="cuda").t()
    with sm.create_block_descriptor(handle, out=out, weight=packed[0], activation=x, mode="w16a16", kernel=kernel) as plan:
        workspace = torch.empty(max(1, plan.workspace_size), dtype=torch.uint8, device="cuda")
        calls = [lambda weight=weight: plan.calculate(out, weight, x, workspace=workspace) for weight in packed]
        return microseconds(repeated(calls))


def of_weight(handle: sm.Handle, seed: int, N: int, K: int, tokens: list[int], formats: tuple[str, ...], rows: list[KernelRow]) -> list[dict]:
    generator, found = torch.Generator("cuda").manual_seed(5), []
    values = torch.randn(N, K, device="cuda", generator=generator)
    sets = lambda bytes_each: int(max(2, min(MOST_SETS, ROTATED_BYTES / (bytes_each * N * K))))  # noqa: E731
    dense = [values.bfloat16() for _ in range(sets(2))]
    packed = {}
    for fmt in formats:
        blocks = sm.quantize_block(values, fmt, rule="ggml")
        packed[fmt] = [sm.pack_block_weight(blocks, fmt) for _ in range(sets(0.6))]
    for M in tokens:
        x = torch.randn(M, K, device="cuda", generator=generator)
        half, bf16, out = x.half(), x.bfloat16(), torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
        references = [lambda weight=weight: torch.mm(bf16, weight.t(), out=out) for weight in dense]  # noqa: B023
        case = dict(seed=seed, M=M, N=N, K=K, bf16=microseconds(repeated(references)))
        for fmt, weights in packed.items():
            case[fmt] = {row.name: product(handle, weights, half, row.name) for row in rows if worth_timing(row, M, N, K)}
        found.append(case)
    return found


def main(path: Path, few: bool, kernels: list[str]) -> None:
    environment, handle, cases = read_environment(torch.device("cuda:0")), sm.Handle("cuda:0"), []
    rows = [row for row in (OF_FEW if few else ROUNDING) if not kernels or row.name in kernels]
    for seed in (FITTED, JUDGED):
        for N, K, tokens in few_tokens(seed) if few else products(seed):
            cases += of_weight(handle, seed, N, K, tokens, (FEW_FORMATS if few else FORMATS)[seed], rows)
            print(f"seed {seed}, {N} x {K}: {len(cases)} cases", flush=True)
    where = f"{environment.gpu}, commit {environment.git_commit}"
    about = f"Microseconds by kernel config, and of torch.mm in bfloat16, {where}, by tests/autotune/time_gguf.py. Seed {JUDGED} is not fitted to."
    path.write_text(json.dumps({"about": about, "cases": cases}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), "few" in sys.argv[2:], [name for name in sys.argv[2:] if name != "few"])
