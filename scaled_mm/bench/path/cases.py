"""What is timed: layers of language models, random layers, and row-wise operators by rows and columns."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from scaled_mm.bench.path.operators import OPERATORS
from scaled_mm.measure import shapes
from scaled_mm.measure.shapes import Case

LAYER, RANDOM = "layer", "random"  # the parts that are linear layers; the others are names of operators
LINEARS = (LAYER, RANDOM)

SIZE_M: tuple[int, ...] = (1, 16, 64, 256, 1024, 4096)
SIZE_K: tuple[int, ...] = (4096, 8192, 14336)


@dataclass(frozen=True)
class Defaults:
    """What is timed if the command line names nothing. bands: a random layer gets an M of each. largest, smallest: N and K of random layers."""

    shapes: str
    ms: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]
    count: int
    smallest: int
    largest: int
    bands: tuple[tuple[int, int], ...]


GPU = Defaults("llm", shapes.LLM_M, tuple((m, k) for k in SIZE_K for m in SIZE_M), 10, 512, 16384, ((1, 64), (65, 511), (513, 4096)))
CPU = Defaults("1x256x256,17x256x256", shapes.CPU_M, ((1, 512), (33, 512)), 2, 64, 512, ((1, 16), (17, 64)))


def defaults(device: torch.device) -> Defaults:
    return CPU if device.type == "cpu" else GPU


@dataclass(frozen=True)
class PathCase(Case):
    """part: `LAYER`, `RANDOM`, or an operator, which has M rows of K columns of output, N = K."""

    part: str = LAYER


def layers(text: str, ms: tuple[int, ...]) -> list[PathCase]:
    """Cases of `shapes.parse_cases`; none for "none"."""
    return [] if text == "none" else [PathCase(one.shape, one.M, one.N, one.K) for one in shapes.parse_cases(text, ms)]


def random_layers(count: int, seed: int, given: Defaults) -> list[PathCase]:
    """`count` layers off the grid with an M of each band. N and K are multiples of 16, log-uniform; the M of every other layer are odd."""
    draw = random.Random(seed)
    known = set(shapes.LLM_SHAPES.values())
    found: dict[tuple[int, int], list[int]] = {}
    while len(found) < count:
        n, k = (16 * shapes.log_uniform(draw, given.smallest // 16, given.largest // 16) for _ in range(2))
        ms = [shapes.log_uniform(draw, *band) for band in given.bands]
        if (n, k) not in known and (n, k) not in found:
            found[n, k] = [m - 1 + m % 2 for m in ms] if len(found) % 2 == 0 else ms
    return [PathCase(f"{n}x{k}", m, n, k, RANDOM) for (n, k), ms in found.items() for m in ms]


def parse_operators(text: str) -> tuple[str, ...]:
    """`all`, `none`, or names, comma-separated. ValueError for an unknown name."""
    if text in ("all", "none"):
        return tuple(OPERATORS) if text == "all" else ()
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in OPERATORS:
            raise ValueError(f"expected all, none, or some of {', '.join(OPERATORS)}, got {name!r}")
    return tuple(dict.fromkeys(names))


def parse_sizes(text: str) -> tuple[tuple[int, int], ...]:
    """`"1x4096,16x4096"` -> ((1, 4096), (16, 4096)). ValueError for anything else."""
    found = []
    for token in filter(None, (part.strip() for part in text.split(","))):
        sizes = token.lower().split("x")
        if len(sizes) != 2 or not all(size.isdigit() and int(size) > 0 for size in sizes):
            raise ValueError(f"expected MxK with positive integers, got {token!r}")
        found.append((int(sizes[0]), int(sizes[1])))
    if not found:
        raise ValueError("expected at least one MxK, got an empty list")
    return tuple(dict.fromkeys(found))


def rows(operators: Iterable[str], sizes: Iterable[tuple[int, int]]) -> list[PathCase]:
    """Every operator on every size, those of one K together."""
    ordered = sorted(sizes, key=lambda size: size[1])
    return [PathCase(f"{name} K={k}", m, k, k, name) for name in operators for m, k in ordered]


def parts(cases: Iterable[PathCase]) -> dict[str, list[PathCase]]:
    """Part -> its cases, in order of appearance."""
    found: dict[str, list[PathCase]] = {}
    for case in cases:
        found.setdefault(case.part, []).append(case)
    return found
