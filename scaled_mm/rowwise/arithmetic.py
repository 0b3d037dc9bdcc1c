"""The arithmetic of row-wise operators, in torch operations that each round once: the same bits on a CPU and on every GPU.

docs/design/numerics.md has the formulas. `W` is float32 for 16-bit operands and float64 for float32 operands.
"""

from __future__ import annotations

import math

import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32)

VECTOR, LANES = 8, 1024
"""A lane of a sum takes VECTOR consecutive elements out of each VECTOR * LANES."""

# Chebyshev interpolants, the highest power first: of (2^f - 1) / f for |f| <= 1 / 2, and of exp(z^2) erfc(z) / t for 0 < t <= 1,
# t = 1 / (1 + z / 2). Those of float32 are float32 numbers.
_EXP = {
    torch.float32: (0.009656710550189018, 0.05583828315138817, 0.24022530019283295, 0.6931367516517639),
    torch.float64: (
        1.5297323675330583e-05,
        0.00015461444703785432,
        0.0013333502386492506,
        0.009618056678507231,
        0.055504108839093375,
        0.2402265092228889,
        0.6931471805599453,
    ),
}
_ERFC = {
    torch.float32: (
        -0.05235712602734566,
        0.25402361154556274,
        -0.42926156520843506,
        0.21884174644947052,
        0.008622662164270878,
        0.19038935005664825,
        0.24550308287143707,
        0.2821437418460846,
        0.28209447860717773,
    ),
    torch.float64: (
        0.01894443785873818,
        -0.11143371394984673,
        0.24191166901429034,
        -0.1604094898201885,
        -0.23574146030525628,
        0.5147553742204203,
        -0.33215151680603827,
        0.08678227962349602,
        -0.09560490888131576,
        0.0026206827902637165,
        0.0829424441565841,
        0.17636354017793732,
        0.24683105283031012,
        0.2820948174259401,
        0.28209479171672364,
    ),
}
_LOW = {torch.float32: -110.0, torch.float64: -760.0}  # below, exp is 0
_EXPONENT = {torch.float32: (torch.int32, 127, 23), torch.float64: (torch.int64, 1023, 52)}  # integer type, bias, bits of the fraction


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in the type W that operators on it compute in."""
    return x.to(torch.float64 if x.dtype is torch.float32 else torch.float32)


def sum_of_squares(w: torch.Tensor) -> torch.Tensor:
    """[..., 1]: the sum of w * w over the last dimension, in the documented order. w: in W."""
    k = int(w.shape[-1])  # also of a trace, where sizes are tensors or symbols
    used = min(LANES, 1 << (-(-k // VECTOR) - 1).bit_length())  # of a short row: the others would be 0, and adding 0 changes no sum of squares
    squares = torch.nn.functional.pad(w * w, (0, -k % (VECTOR * used))).unflatten(-1, (-1, used, VECTOR))
    lanes = w.new_zeros((*w.shape[:-1], used))
    for step in range(squares.shape[-3]):
        for element in range(VECTOR):
            lanes = lanes + squares[..., step, :, element]
    half = used // 2
    while half:
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
        half //= 2
    return lanes


def inverse_root(v: torch.Tensor) -> torch.Tensor:
    """1 / sqrt(v): an IEEE square root, then an IEEE division.

    torch's CPU sqrt is Intel MKL's where torch has MKL, and off by one unit for 18 % of float32 numbers (torch 2.13, AVX2). Its CPU rsqrt is the
    two IEEE instructions. CUDA is the other way round: sqrt is IEEE, and rsqrt is approximate.
    """
    return v.rsqrt() if v.device.type == "cpu" else 1 / v.sqrt()


def exp(v: torch.Tensor) -> torch.Tensor:
    """exp(v) for v <= 0 in W; 0 below W's range, NaN for NaN."""
    x = v.clamp_min(_LOW[v.dtype]) * _number(math.log2(math.e), v)
    n = x.round()
    f = x - n
    half = (n * 0.5).floor()
    return ((_polynomial(_EXP[v.dtype], f) * f + 1) * _power_of_two(half)) * _power_of_two(n - half)


def erfc(z: torch.Tensor) -> torch.Tensor:
    """The complementary error function of z in W."""
    a = z.abs()
    t = 1 / (1 + 0.5 * a)
    e = exp(-(a * a)) * (_polynomial(_ERFC[z.dtype], t) * t)
    return torch.where(z < 0, 2 - e, e)


def sigmoid_times(g: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """g * sigmoid(v), in W, from t = exp(-|v|): exp(-v) would overflow where the result is not yet 0."""
    t = exp(-v.abs())
    return torch.where(v < 0, g * t, g) * (1 / (1 + t))


def _number(value: float, like: torch.Tensor) -> torch.Tensor:
    """A constant in W, on the device: an operation with it is the same on every device."""
    return torch.full((), value, dtype=like.dtype, device=like.device)


def _polynomial(coefficients: tuple[float, ...], x: torch.Tensor) -> torch.Tensor:
    result = _number(coefficients[0], x).expand_as(x)
    for coefficient in coefficients[1:]:
        result = result * x + _number(coefficient, x)
    return result


def _power_of_two(n: torch.Tensor) -> torch.Tensor:
    """2^n for an integral n within the exponents of normal numbers, by its bits. NaN: any power."""
    integer, bias, fraction = _EXPONENT[n.dtype]
    return ((n.nan_to_num(nan=0.0).to(integer) + bias) << fraction).view(n.dtype)
