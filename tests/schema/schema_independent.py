"""What definitions compute, computed in another way: numpy, the gguf package, integers; nothing of the package's and no torch kernel."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from scaled_mm import schema

gguf = pytest.importorskip("gguf")

LAYOUTS = {
    "q4_0": [("d", "<f2"), ("qs", "u1", 16)],
    "q4_1": [("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)],
    "q5_0": [("d", "<f2"), ("qh", "<u4"), ("qs", "u1", 16)],
    "q5_1": [("d", "<f2"), ("m", "<f2"), ("qh", "<u4"), ("qs", "u1", 16)],
    "q8_0": [("d", "<f2"), ("qs", "i1", 32)],
    "q8_1": [("d", "<f2"), ("s", "<f2"), ("qs", "i1", 32)],
}
ZERO = {"q4_0": 8, "q5_0": 16}  # the level for 0; formats without one have a minimum, or signed levels
PACKAGE = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")  # formats that the gguf package computes; others are computed here


def blocks(q: np.ndarray, fmt: str) -> tuple[np.ndarray, np.ndarray]:
    """(records [...], levels int64 [..., 32]) of int8 [..., bytes]."""
    records = np.ascontiguousarray(q).view(np.dtype(LAYOUTS[fmt]))[..., 0]
    levels = records["qs"].astype(np.int64)
    if levels.shape[-1] == 16:
        levels = np.concatenate([levels % 16, levels // 16], axis=-1)
    if "qh" in records.dtype.names:
        levels += 16 * (records["qh"][..., None].astype(np.int64) >> np.arange(32) & 1)
    return records, levels


def dequantized(q: np.ndarray, fmt: str) -> np.ndarray:
    """float64 [..., 32]."""
    if fmt not in PACKAGE:
        return dequantized_by_hand(q, fmt)
    kind = gguf.GGMLQuantizationType[fmt.upper()]
    values = gguf.quants.dequantize(np.ascontiguousarray(q).view(np.uint8).reshape(-1, q.shape[-1]), kind)
    return values.reshape(*q.shape[:-1], 32).astype(np.float64)


def dequantized_by_hand(q: np.ndarray, fmt: str) -> np.ndarray:
    records, levels = blocks(q, fmt)
    value = records["d"][..., None].astype(np.float64) * (levels - ZERO.get(fmt, 0))
    return value + records["m"][..., None].astype(np.float64) if "m" in records.dtype.names else value


def inverse(d: np.ndarray) -> np.ndarray:
    return np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)


def rounded_away(x: np.ndarray) -> np.ndarray:
    return np.trunc(x + np.copysign(np.float32(0.5), x))


def quantized(x: np.ndarray, fmt: str, rule: str) -> np.ndarray:
    """uint8 [..., bytes] of float32 [..., 32]."""
    if fmt in PACKAGE and (fmt not in ZERO or rule == "ggml"):
        return gguf.quants.quantize(x.reshape(-1, 32), gguf.GGMLQuantizationType[fmt.upper()]).reshape(*x.shape[:-1], -1)
    return quantized_by_hand(x, fmt, rule)


def quantized_by_hand(x: np.ndarray, fmt: str, rule: str) -> np.ndarray:
    records = np.zeros(x.shape[:-1], np.dtype(LAYOUTS[fmt]))
    signed, fifths = records["qs"].dtype == np.int8, "qh" in records.dtype.names
    top = 31 if fifths else 15
    if fmt in ZERO and rule == "absmax":
        d = np.abs(x).max(-1, keepdims=True) / np.float32(ZERO[fmt] - 1)
        levels = rounded_away(x / d) + ZERO[fmt]
    elif fmt in ZERO:
        d = np.take_along_axis(x, np.abs(x).argmax(-1, keepdims=True), -1) / np.float32(-ZERO[fmt])
        levels = np.minimum(np.trunc(x * inverse(d) + np.float32(ZERO[fmt] + 0.5)), top)
    elif signed:
        d = np.abs(x).max(-1, keepdims=True) / np.float32(127)
        levels = rounded_away(x * inverse(d))
    else:
        m = x.min(-1, keepdims=True)
        d = (x.max(-1, keepdims=True) - m) / np.float32(top)
        levels = np.minimum(np.trunc((x - m) * inverse(d) + np.float32(0.5)), top)
        records["m"] = m[..., 0]
    levels = levels.astype(np.int64)
    records["d"] = d[..., 0]
    if fifths:
        records["qh"] = ((levels >> 4) << np.arange(32)).sum(-1)
    records["qs"] = levels if signed else levels[..., :16] % 16 + levels[..., 16:] % 16 * 16
    if "s" in records.dtype.names:
        s = x
        while s.shape[-1] > 1:
            s = s[..., : s.shape[-1] // 2] + s[..., s.shape[-1] // 2 :]
        records["s"] = s[..., 0]
    return records[..., None].view(np.uint8)


def product_q8_1(weight: np.ndarray, fmt: str, activation: np.ndarray) -> np.ndarray:
    """Block by block, in integers until the scales come."""
    w, levels = blocks(weight, fmt)
    a, values = blocks(activation, "q8_1")
    dots = np.einsum("nbk,mbk->mnb", levels, values).astype(np.float64)
    d, da, s = (field.astype(np.float64) for field in (w["d"][None], a["d"][:, None], a["s"][:, None]))
    if fmt in ZERO:
        return (d * (da * dots - ZERO[fmt] * s)).sum(-1)
    return (d * da * dots + (w["m"][None].astype(np.float64) * s if "m" in w.dtype.names else 0)).sum(-1)


def int8_scaled(a, b, a_scale, b_scale, bias=None, a_zero_point=None, b_zero_point=None):
    a, b = a.astype(np.int64), b.astype(np.int64)
    if a_zero_point is not None:
        a, b = a - a_zero_point[:, None], b - b_zero_point[:, None]
    out = (a @ b.T).astype(np.float32) * b_scale * a_scale[:, None]
    return torch.from_numpy(out if bias is None else out + bias).bfloat16().double().numpy()


def dynamic(x, smooth=None):
    x = x.astype(np.float32) if smooth is None else x.astype(np.float32) * smooth
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    return np.rint(x / scale), scale[:, 0]


def rms_norm(x, weight, epsilon):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * weight


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rope(query, key, cos, sin):
    def turned(x):
        z = x[..., : x.shape[-1] // 2] + 1j * x[..., x.shape[-1] // 2 :]
        half = z.shape[-1]
        real = z.real * cos[:, None, :half] - z.imag * sin[:, None, :half]
        imaginary = z.imag * cos[:, None, half:] + z.real * sin[:, None, half:]
        return np.concatenate([real, imaginary], axis=-1)

    return turned(query), turned(key)


def decode(query, keys, values, lengths, tables, scale):
    out, size = np.empty_like(query), keys.shape[1]
    for b, h in np.ndindex(query.shape[:2]):
        kv = h // (query.shape[1] // keys.shape[2])
        places = [(tables[b, i // size], i % size) for i in range(lengths[b])]
        weights = softmax(np.array([keys[page, at, kv] @ query[b, h] for page, at in places]) * scale)
        out[b, h] = sum(weight * values[page, at, kv] for weight, (page, at) in zip(weights, places))
    return out


def experts(x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids):
    """A loop over the tokens and their choices, in float64 but for what is rounded on the way."""

    def quantized_row(v):
        scale = np.float32(np.abs(v.astype(np.float32)).max()) / np.float32(127)
        return np.rint(v.astype(np.float32) / scale).astype(np.int64), np.float64(scale)

    def bfloat16(v):
        return torch.from_numpy(v).bfloat16().double().numpy()

    out = np.zeros_like(x)
    for token, choice in np.ndindex(topk_ids.shape):
        expert = topk_ids[token, choice]
        q, scale = quantized_row(x[token])
        gate, up = np.split(bfloat16((w13[expert].astype(np.int64) @ q) * w13_scale[expert] * scale), 2)
        with np.errstate(over="ignore"):
            q, scale = quantized_row(gate * sigmoid(gate) * up)
        out[token] += topk_weights[token, choice] * bfloat16((w2[expert].astype(np.int64) @ q) * w2_scale[expert] * scale)
    return out


def independent(definition: schema.Definition, inputs: list) -> list[np.ndarray]:
    """The outputs, in float64 or as integers."""
    values = [one if not isinstance(one, torch.Tensor) else one.double().numpy() if one.is_floating_point() else one.numpy() for one in inputs]
    named, op, name = dict(zip(definition.inputs, values)), definition.op_type, definition.name
    if op == "gemm_fp32":
        return [named["a"] @ named["b"].T]
    if op == "gemm_int8_scaled":
        floats = {key: value.astype(np.float32) for key, value in named.items() if value.dtype == np.float64}
        return [int8_scaled(**(named | floats))]
    if op.startswith("gemm_"):
        fmt = op.removeprefix("gemm_").removesuffix("_q8_1") if op.endswith("_q8_1") else op.removeprefix("gemm_")
        if "activation_q" in named:
            return [product_q8_1(named["weight_q"], fmt, named["activation_q"])]
        if op.endswith("_q8_1"):
            activation = quantized(named["activation"].astype(np.float32), "q8_1", "ggml")
            return [product_q8_1(named["weight_q"], fmt, activation)]
        weight = dequantized(named["weight_q"], fmt)
        return [named["activation"] @ weight.reshape(len(weight), -1).T]
    if op == "linear":
        return [named["x1"] @ named["x2"].T + named["bias"]]
    if op == "dequantize":
        return [dequantized(named["q"], definition.logical["q"])] if "q" in definition.logical else [named["q"] * named["scale"][:, None]]
    if name.startswith("quantize_int8_static"):
        x, scale, offset = (value.astype(np.float32) for value in values)
        return [np.clip(np.rint(x * scale + offset), -128, 127)]
    if name.startswith("quantize_int8_dynamic"):
        return list(dynamic(named["x"], named["smooth_scales"].astype(np.float32) if "smooth_scales" in named else None))
    if op == "quantize":
        return [quantized(named["x"].astype(np.float32), definition.logical["q"], "ggml" if name.endswith("ggml") else "absmax").view(np.int8)]
    if op == "silu":
        return [named["x"] * sigmoid(named["x"])]
    if op == "gelu":
        return [named["x"] * np.vectorize(lambda x: 0.5 * math.erfc(-x / math.sqrt(2)))(named["x"])]
    if op == "silu_and_mul":
        gate, up = np.split(named["x"], 2, axis=-1)
        return [gate * sigmoid(gate) * up]
    if op == "rmsnorm":
        return [rms_norm(**named)]
    if op == "add_rms_norm":
        total = torch.from_numpy(named["x"] + named["residual"]).bfloat16().double().numpy()
        return [rms_norm(total, named["weight"], named["epsilon"]), total]
    if op == "softmax":
        return [softmax(named["x"])]
    if op == "rope":
        return list(rope(**named))
    if op == "paged_decode_attention":
        return [decode(*values)]
    if op == "moe":
        return [experts(**named)]
    raise AssertionError(f"no independent computation for {op}")


def check(definition: schema.Definition, run, inputs: list) -> None:
    """Bit by bit where outputs are integers or one rounding makes them, else to that rounding."""
    result = run(*inputs)
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    for out, expected in zip(outputs, independent(definition, inputs), strict=True):
        expected = torch.from_numpy(np.ascontiguousarray(expected)).to(out.dtype)
        assert out.shape == expected.shape and out.double().isfinite().all()
        if definition.compare.norm is None:
            assert torch.equal(out, expected)
        else:  # sums in another order may end on the other side of a rounding
            bound = 1e-7 if out.dtype is torch.float32 else 1e-4
            assert (out.double() - expected.double()).norm() <= bound * expected.double().norm()
