"""Which products are timed: linear layers of Llama 3 8B and 70B and of DeepSeek-V3, and the M of decode and prefill batches."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

#: (N, K) of each layer's weight [N, K]. `_tp4`: one of four tensor-parallel ranks.
LLM_SHAPES: dict[str, tuple[int, int]] = {
    "8B_qkv": (6144, 4096),
    "8B_o": (4096, 4096),
    "8B_gate_up": (28672, 4096),
    "8B_down": (4096, 14336),
    "70B_qkv": (10240, 8192),
    "70B_o": (8192, 8192),
    "70B_gu_tp4": (14336, 8192),
    "70B_dn_tp4": (8192, 7168),
    "70B_gu": (57344, 8192),
}

#: The same of layers whose weights have block scales: DeepSeek-V3. gate_up, down: of its shared expert; dense_: of its first three layers.
DEEPSEEK_SHAPES: dict[str, tuple[int, int]] = {
    "dsv3_q_b": (24576, 1536),
    "dsv3_kv_b": (32768, 512),
    "dsv3_o": (7168, 16384),
    "dsv3_gate_up": (4096, 7168),
    "dsv3_down": (7168, 2048),
    "dsv3_dense_gate_up": (36864, 7168),
    "dsv3_dense_down": (7168, 18432),
}

LAYERS = LLM_SHAPES | DEEPSEEK_SHAPES

#: Names for several layers at once.
GROUPS: dict[str, tuple[str, ...]] = {
    "llm": tuple(LLM_SHAPES),
    "llama-8b": tuple(name for name in LLM_SHAPES if name.startswith("8B_")),
    "llama-70b": tuple(name for name in LLM_SHAPES if name.startswith("70B_")),
    "deepseek": tuple(DEEPSEEK_SHAPES),
}

#: Tokens in a batch, from one decoded token to a prefill chunk.
LLM_M: tuple[int, ...] = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

#: Numbers in a range of M: each is a product to be timed.
LONGEST_RANGE = 4096

#: What a CPU is asked for when the command line names nothing: the whole grid would take it hours.
CPU_SHAPES = "8B_o"
CPU_M: tuple[int, ...] = (1, 16, 64)


@dataclass(frozen=True)
class Case:
    """One product: out [M, N] = a [M, K] x b [K, N]. `shape` names the layer, or is "NxK" for a free one."""

    shape: str
    M: int
    N: int
    K: int

    def __str__(self) -> str:
        return f"{self.shape} M={self.M} N={self.N} K={self.K}"


def parse_ms(text: str) -> tuple[int, ...]:
    """`"1,16-18,4096"` -> (1, 16, 17, 18, 4096); `"1-600:7"` takes every seventh. Raises ValueError for what is neither a positive integer nor a
    range of such."""
    values: list[int] = []
    for token in filter(None, (part.strip() for part in text.split(","))):
        ends, _, step = token.partition(":")
        sizes = [*ends.split("-"), *([step] if ":" in token else [])]
        if len(sizes) > 2 + (":" in token) or not all(size.isdigit() and int(size) > 0 for size in sizes) or (":" in token and "-" not in ends):
            raise ValueError(f"M must be a positive integer or a range like 1-64, got {token!r}")
        first, last, by = int(sizes[0]), int(sizes[1] if "-" in ends else sizes[0]), int(step or 1)
        if not first <= last < first + LONGEST_RANGE * by:
            raise ValueError(f"M: expected a range from a number to one not below it, of at most {LONGEST_RANGE}, got {token!r}")
        values += range(first, last + 1, by)
    if not values:
        raise ValueError("expected at least one M, got an empty list")
    return tuple(dict.fromkeys(values))


def parse_cases(text: str, ms: tuple[int, ...]) -> list[Case]:
    """Cases of a comma list whose entries are a group (`llm`: all Llama layers, llama-8b, llama-70b, deepseek), a layer's name, or `MxNxK`.

    A named layer is crossed with `ms`; `MxNxK` brings its own M. Repeats are dropped, order is kept, and cases that
    share (N, K) stay together so that their weights can be shared. Raises ValueError that names the entry.
    """
    cases: list[Case] = []
    for token in filter(None, (part.strip() for part in text.split(","))):
        if token in GROUPS:
            cases += [Case(name, m, *LAYERS[name]) for name in GROUPS[token] for m in ms]
        elif token in LAYERS:
            n, k = LAYERS[token]
            cases += [Case(token, m, n, k) for m in ms]
        else:
            cases.append(_free_case(token))
    if not cases:
        raise ValueError("expected at least one shape, got an empty list")
    return [case for group in group_by_weight(list(dict.fromkeys(cases))) for case in group]


#: Of random products: M; N and K; bytes of the weight. Every so many products N or K is a multiple of 8 only.
RANDOM_M, RANDOM_NK, RANDOM_BYTES, RANDOM_UNALIGNED = (1, 8192), (512, 65536), 10**9, 5


def random_cases(count: int, seed: int) -> list[Case]:
    """`count` products, log-uniform in M, N and K, which follow from the seed. N and K are multiples of 64, but for every fifth product, where one
    of them is an odd multiple of 8. The weight has less than 10^9 bytes."""
    draw = random.Random(seed)
    found: dict[Case, None] = {}
    while len(found) < count:
        m = log_uniform(draw, *RANDOM_M)
        n, k = (64 * log_uniform(draw, RANDOM_NK[0] // 64, RANDOM_NK[1] // 64) for _ in range(2))
        shift = 8 * draw.choice((-3, -1, 1, 3)) if len(found) % RANDOM_UNALIGNED == RANDOM_UNALIGNED - 1 else 0
        n, k = (n + shift, k) if draw.random() < 0.5 else (n, k + shift)
        if n * k < RANDOM_BYTES:
            found[Case(f"{n}x{k}", m, n, k)] = None
    return list(found)


def log_uniform(draw: random.Random, least: int, most: int) -> int:
    """An integer, uniform in its logarithm."""
    return min(most, max(least, round(math.exp(draw.uniform(math.log(least), math.log(most))))))


def group_by_weight(cases: list[Case]) -> list[list[Case]]:
    """Cases grouped by (shape, N, K), groups and members in order of first appearance."""
    groups: dict[tuple[str, int, int], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.shape, case.N, case.K), []).append(case)
    return list(groups.values())


def _free_case(token: str) -> Case:
    sizes = token.lower().split("x")
    if len(sizes) != 3 or not all(size.isdigit() and int(size) > 0 for size in sizes):
        known = ", ".join([*GROUPS, *LAYERS])
        raise ValueError(f"unknown shape {token!r}: expected MxNxK with positive integers, or one of {known}")
    m, n, k = map(int, sizes)
    return Case(f"{n}x{k}", m, n, k)
