"""Which GGUF products are timed: formats x weights x tokens."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from scaled_mm.errors import BadParamError
from scaled_mm.gguf_formats import BLOCK, WEIGHT_FORMATS, name_hint
from scaled_mm.measure.shapes import GROUPS, LAYERS, Case, group_by_weight, log_uniform

SHAPES = "28672x8192,4096x14336,4096x4096"
TOKENS: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048, 4096)
SWEEP: tuple[int, ...] = tuple(range(1, 65))

#: Tokens of a random weight, one number of each band; and the bands of the report.
BANDS = ((1, 1), (2, 8), (9, 16), (17, 32), (33, 64), (65, 128), (129, 256), (257, 511), (512, 4096))
#: Rows and K of a random weight.
RANDOM_NK = (1024, 16384)

#: What a CPU is asked for when the command line names nothing: the whole grid would take it hours.
CPU_SHAPES = "4096x4096"
CPU_TOKENS: tuple[int, ...] = (1, 32, 512)


@dataclass(frozen=True)
class GgufCase(Case):
    """out [M, N] = activations [M, K] x W^T, W [N, K] in the format `fmt`: M tokens, N rows of the weight.

    `shape` is the layer's name or "NxK".
    """

    fmt: str = ""

    def __str__(self) -> str:
        return f"{self.fmt} {super().__str__()}"


def parse_formats(text: str) -> tuple[str, ...]:
    """`"q4_0,q8_0"`, or `all` -> names of formats that a weight may have. BadParamError for others."""
    if text == "all":
        return tuple(WEIGHT_FORMATS)
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in WEIGHT_FORMATS:
            raise BadParamError(f"--formats: expected all, or some of {', '.join(WEIGHT_FORMATS)}, got {name!r}{name_hint(name)}")
    if not names:
        raise BadParamError("--formats: expected at least one format, got an empty list")
    return tuple(dict.fromkeys(names))


def parse_cases(formats: Iterable[str], text: str, tokens: tuple[int, ...]) -> list[GgufCase]:
    """Cases of a comma list of layers' names and groups as INT8's benchmark has them, `NxK`, or `MxNxK`, which brings its tokens. "none" gives none.

    Cases of one weight stand together. BadParamError for a shape that is none, or whose K is no multiple of 32.
    """
    if text == "none":
        return []
    found: list[GgufCase] = []
    for token in filter(None, (part.strip() for part in text.split(","))):
        for name in GROUPS.get(token, (token,)):
            found += _layer(name, tokens, tuple(formats))
    if not found:
        raise BadParamError("--shapes: expected at least one shape, got an empty list")
    ordered = [case for fmt in formats for case in dict.fromkeys(found) if case.fmt == fmt]
    return [case for group in group_by_format(ordered) for case in group]


def random_cases(formats: Iterable[str], count: int, seed: int) -> list[GgufCase]:
    """`count` weights with a number of tokens of each band, which follow from the seed and are the same in every format.

    All are log-uniform. N is a multiple of 8 and K of 32; every other weight has odd numbers of tokens.
    """
    draw = random.Random(seed)
    found: dict[tuple[int, int], list[int]] = {}
    while len(found) < count:
        n, k = (step * log_uniform(draw, RANDOM_NK[0] // step, RANDOM_NK[1] // step) for step in (8, BLOCK))
        tokens = [log_uniform(draw, *band) for band in BANDS]
        if len(found) % 2 == 0:
            tokens = [m if m % 2 else m - 1 if m > least else m + 1 for m, (least, _) in zip(tokens, BANDS, strict=True)]
        found.setdefault((n, k), tokens)
    return [GgufCase(f"{n}x{k}", m, n, k, fmt) for fmt in formats for (n, k), tokens in found.items() for m in tokens]


def _layer(name: str, tokens: tuple[int, ...], formats: tuple[str, ...]) -> list[GgufCase]:
    if name in LAYERS:
        sizes = LAYERS[name]
    else:
        sizes = _sizes(name)
        if len(sizes) == 3:
            tokens, sizes = sizes[:1], sizes[1:]
        name = f"{sizes[0]}x{sizes[1]}"
    if sizes[1] % BLOCK:
        raise BadParamError(f"--shapes: expected K to be a multiple of {BLOCK}, got {sizes[1]} in {name!r}")
    return [GgufCase(name, m, *sizes, fmt) for fmt in formats for m in tokens]


def _sizes(text: str) -> tuple[int, ...]:
    sizes = text.lower().split("x")
    if len(sizes) not in (2, 3) or not all(size.isdigit() and int(size) > 0 for size in sizes):
        known = ", ".join([*GROUPS, *LAYERS])
        raise BadParamError(f"--shapes: expected NxK (rows of the weight x K), MxNxK (M tokens), or one of {known}, got {text!r}")
    return tuple(map(int, sizes))


def group_by_format(cases: list[GgufCase]) -> list[list[GgufCase]]:
    """Cases that share a weight: format by format, then as `group_by_weight`."""
    formats = dict.fromkeys(case.fmt for case in cases)
    return [group for fmt in formats for group in group_by_weight([case for case in cases if case.fmt == fmt])]
