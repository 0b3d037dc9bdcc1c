"""Which scheme the linear layers with a common input get: every candidate is measured by the error of the layers' outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch

from scaled_mm.layers.linear import int8_linear
from scaled_mm.models.config import Int8Config
from scaled_mm.models.smoothing import Fold
from scaled_mm.models.weights import quantize_weight
from scaled_mm.products.gemm import scaled_mm
from scaled_mm.rowwise.int8 import quantize_int8

STATIC_MAY_LOSE = 1.5  # "auto" takes a static scale if its error is at most this many times that of a dynamic one
PERCENTILES = (99.99, 99.999)  # candidates beside the one of the config
SAMPLED_TOKENS = 512  # that errors are measured on; maxima and percentiles are of all tokens
_MSE_STEPS = 28  # of the search for the scale of least squared error: each is 2^(1/4) smaller


@dataclasses.dataclass(frozen=True)
class Static:
    """A static scale of inputs. rule: how it was found. zero_point: None for symmetric inputs."""

    rule: str
    scale: float
    zero_point: int | None = None


@dataclasses.dataclass
class Choice:
    """The scheme of a group of layers, and the errors of all candidates.

    static: None for dynamic scales. exponents: of the factors that are folded, int32 [K], or None. errors: candidate to error; a candidate is
    "dynamic" or a rule of static scales, with "smooth " before it if factors were folded.
    """

    name: str
    static: Static | None
    exponents: torch.Tensor | None
    errors: dict[str, float]


def sample(tokens: int, count: int = SAMPLED_TOKENS) -> torch.Tensor:
    """Indices of at most `count` of the tokens, evenly spread."""
    return torch.arange(min(tokens, count)) * tokens // min(tokens, count)


@torch.no_grad()
def choose(config: Int8Config, x: torch.Tensor, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, fold: Fold | None) -> Choice:
    """The scheme for layers that read x.

    x: float32 [tokens, K], what the layers read on the calibration data. weights: float32 [N, K] of each layer. dtype: the model's.
    """
    rows = sample(x.shape[0]).to(x.device)
    wanted = [x[rows] @ weight.t() for weight in weights.values()]

    def error(inputs: torch.Tensor, quantized: list, static: Static | None) -> float:
        return relative_error([product(inputs[rows], *weight, static, config.symmetric) for weight in quantized], wanted)

    def prepared(e: torch.Tensor | None) -> tuple[torch.Tensor, list]:
        """The inputs and the int8 weights with factors 2^e folded."""
        scaled = weights.values() if e is None else [torch.ldexp(weight, e) for weight in weights.values()]
        return x if e is None else torch.ldexp(x, -e), [quantize_weight(weight, dtype) for weight in scaled]

    smoothed = None
    if fold is not None and config.smooth is not None:
        tried = ((e, *prepared(e)) for e in fold.candidates(x, list(weights.values()), config.smooth))
        smoothed = min(((error(inputs, quantized, None), e, inputs, quantized) for e, inputs, quantized in tried), key=lambda one: one[0])[1:]
    choices: list[tuple[str, float, Static | None, torch.Tensor | None]] = []
    for prefix, variant in (("", (None, *prepared(None))), ("smooth ", smoothed)):
        if variant is not None:
            e, inputs, quantized = variant
            for name, static in _candidates(config, inputs, rows, dtype):
                choices.append((prefix + name, error(inputs, quantized, static), static, e))
    name, _, static, e = _best(config, choices)
    return Choice(name, static, e, {name: error for name, error, _, _ in choices})


def product(x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, static: Static | None, symmetric: bool) -> torch.Tensor:
    """x W^T with the operators that the quantized model will run. float32 [tokens, N]."""
    if static is not None:
        scale = torch.tensor([static.scale], dtype=torch.float32, device=x.device)
        zero = None if static.zero_point is None else torch.tensor([static.zero_point], dtype=torch.int8, device=x.device)
        return int8_linear(x, weight, weight_scale, input_scale=scale, input_zero_point=zero)
    if symmetric:
        return int8_linear(x, weight, weight_scale)
    q = quantize_int8(x, symmetric=False)
    return scaled_mm(q.q, weight.t(), q.scale, weight_scale.reshape(1, -1), out_dtype=torch.float32, a_zero_point=q.zero_point)


def relative_error(outputs: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The root mean square, over layers and tokens, of |y - wanted| / |wanted|, of vectors of a token.

    Relative to each token, because the few tokens with massive activations would outweigh all others in a plain squared error.
    """
    return float(torch.cat([relative_squares(y, w) for y, w in zip(outputs, wanted)]).double().mean().sqrt())


def relative_squares(y: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """|y - wanted|^2 / |wanted|^2 of the vectors in the last dimension, float32."""
    return (y - wanted).square().sum(-1) / wanted.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)


def _best(config: Int8Config, choices: list) -> tuple:
    dynamic = min((choice for choice in choices if choice[2] is None), key=lambda choice: choice[1])
    static = [choice for choice in choices if choice[2] is not None]
    if config.activation == "static":
        return min((choice for choice in static if choice[2].rule == rule_of(config)), key=lambda choice: choice[1])
    if config.activation == "auto" and static:
        best = min(static, key=lambda choice: choice[1])
        if best[1] <= STATIC_MAY_LOSE * dynamic[1]:
            return best
    return dynamic


def rule_of(config: Int8Config) -> str:
    """The name of the rule that `clip` selects."""
    return percentile_name(config.percentile) if config.clip == "percentile" else config.clip


def percentile_name(percentile: float) -> str:
    return f"{percentile:g} %"


def _candidates(config: Int8Config, x: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[str, Static | None]]:
    yield "dynamic", None
    if config.activation == "dynamic":
        return
    magnitudes = x.abs().reshape(-1)
    rules: dict[str, tuple[float, float]] = {"absmax": (float(x.min()), float(x.max()))}
    for percentile in sorted({config.percentile, *PERCENTILES}):
        bound = quantile(magnitudes, percentile)
        rules[percentile_name(percentile)] = max(-bound, rules["absmax"][0]), min(bound, rules["absmax"][1])
    rules["mse"] = _least_squares(x[rows], *rules["absmax"], config.symmetric)
    for rule, (low, high) in rules.items():
        scale, zero_point = scale_of(low, high, config.symmetric)
        rounded = float(torch.tensor(scale).to(dtype))  # checkpoints store it in the model's dtype, in which it may be 0
        yield rule, Static(rule, rounded or torch.finfo(dtype).smallest_normal, zero_point)


def quantile(magnitudes: torch.Tensor, percentile: float) -> float:
    """The smallest value that at least `percentile` percent of the values do not exceed."""
    count = magnitudes.numel()
    above = min(count - 1, int((100 - percentile) / 100 * count))  # values that may be larger
    return float(magnitudes.topk(above + 1, sorted=False).values.min())


def scale_of(low: float, high: float, symmetric: bool) -> tuple[float, int | None]:
    """(scale, zero point) of inputs from low to high, rounded to float32; the rules of `quantize_int8`."""
    tiny = torch.finfo(torch.float32).tiny
    if symmetric:
        return float(torch.tensor(max(abs(low), abs(high)) / 127).clamp_min(tiny)), None
    low, high = min(low, 0.0), max(high, 0.0)
    scale = float(torch.tensor(high / 255 - low / 255).clamp_min(tiny))
    return scale, int(max(-128, min(127, round(-128 - low / scale))))


def _least_squares(x: torch.Tensor, low: float, high: float, symmetric: bool) -> tuple[float, float]:
    """The range, a part of low to high, whose static scale has the least squared error relative to each token."""
    norms = x.square().sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    best = (float("inf"), (low, high))
    for step in range(_MSE_STEPS):
        part = 2.0 ** (-step / 4)
        scale, zero = scale_of(low * part, high * part, symmetric)
        zero = 0 if zero is None else zero
        least = -127 if symmetric else -128
        rounded = ((x / scale).round() + zero).clamp(least, 127)
        error = float((((rounded - zero) * scale - x).square() / norms).sum(-1).double().mean())
        best = min(best, (error, (low * part, high * part)))
    return best[1]
