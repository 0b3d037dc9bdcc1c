"""Quantizers and dequantizers: all GGUF formats, and static and dynamic INT8."""

from __future__ import annotations

from collections.abc import Iterator

from scaled_mm.gguf_formats import FORMATS
from scaled_mm.schema.catalog import texts
from scaled_mm.schema.catalog.entry import Entry

_SMALL, _LARGE = {"R": 16, "KB": 8}, {"R": 4096, "KB": 128}
_HIDDEN = (4096, 8192, 14336, 28672)


def entries() -> Iterator[Entry]:
    for name, fmt in FORMATS.items():
        for rule in ("absmax", "ggml") if fmt.has_rules else ("absmax",):
            yield _quantize(name, rule)
        yield _dequantize(name)
    yield from _static()
    yield from _dynamic(smooth=False)
    yield from _dynamic(smooth=True)
    yield _dequantize_int8()


def _quantize(name: str, rule: str) -> Entry:
    ggml = "_ggml" if rule == "ggml" else ""
    said = f" by the rule {rule}" if FORMATS[name].has_rules else ""
    argument = f', rule="{rule}"' if ggml else ""
    return Entry(
        name=f"quantize_{name}{ggml}",
        op_type="quantize",
        description=f"Quantizes blocks of 32 values to {name.upper()}{said}; schemas/README.md has the formulas.",
        axes={"R": None, "KB": None, "BS": 32},
        inputs={"x": ("float32", ["R", "KB", "BS"])},
        outputs={"q": (name, ["R", "KB"])},
        reference=texts.HEADER + texts.quantizer(name, rule) + "\n\ndef run(x):\n    return quantize(x)\n",
        ours=f"import torch\nimport scaled_mm\n\n\ndef run(x):\n    return scaled_mm.quantize_{name}(x.flatten(-2){argument}).view(torch.int8)\n",
        note="the package's quantizer",
        compare="bits",
        workloads=[_SMALL, _LARGE],
    )


def _dequantize(name: str) -> Entry:
    return Entry(
        name=f"dequantize_{name}",
        op_type="dequantize",
        description=f"Dequantizes {name.upper()} blocks to float32, with at most one rounding.",
        axes={"R": None, "KB": None, "BS": 32},
        inputs={"q": (name, ["R", "KB"])},
        outputs={"x": ("float32", ["R", "KB", "BS"])},
        reference=texts.reader(texts.values(name)) + f"\n\ndef run(q):\n    return {name}_values(q).to(torch.float32)\n",
        ours="import torch\nimport scaled_mm\n\n\ndef run(q):\n"
        f"    return scaled_mm.dequantize_{name}(q.view(torch.uint8)).unflatten(-1, (-1, 32))\n",
        note="the package's dequantizer, torch operations",
        compare="bits",
        workloads=[_SMALL, _LARGE],
    )


_STATIC = '''import torch


def run(x, scale, offset):
    """clamp(round half to even(x * scale + offset), -128, 127), the product is rounded before the sum."""
    return (x.to(torch.float32) * scale + offset).round().clamp(-128, 127).to(torch.int8)
'''

_STATIC_OURS = """import scaled_mm


def run(x, scale, offset):
    return scaled_mm.quantize(x, scale, offset)
"""


def _static() -> Iterator[Entry]:
    for name, axes, vector in (("", {"R": None, "H": None}, "H"), ("_tensor", {"R": None, "H": None, "ONE": 1}, "ONE")):
        yield Entry(
            name=f"quantize_int8_static{name}",
            op_type="quantize",
            description=f"y = round(x * scale + offset) to INT8, {'a scale and an offset per column' if vector == 'H' else 'one scale, one offset'}.",
            axes=axes,
            inputs={"x": ("bfloat16", ["R", "H"]), "scale": ("float32", [vector]), "offset": ("float32", [vector])},
            outputs={"y": ("int8", ["R", "H"])},
            reference=_STATIC,
            ours=_STATIC_OURS,
            note="the package's quantizer",
            compare="bits",
            tags=["quantization:int8"],
            workloads=[{"R": 16, "H": 256}, {"R": 4096, "H": 4096}],
        )


def _dynamic(smooth: bool) -> Iterator[Entry]:
    arguments = "x, smooth_scales" if smooth else "x"
    widened = "x.to(torch.float32) * smooth_scales" if smooth else "x.to(torch.float32)"
    reference = (
        f"import torch\n\n\ndef run({arguments}):\n"
        f'    """scale_out = max|row| / 127, at least 2^-126; y = round half to even(row / scale_out)."""\n    x = {widened}\n'
        "    divisor = torch.full((), 127.0, device=x.device)  # for a Python divisor, a GPU multiplies by the reciprocal\n"
        "    scale_out = (x.abs().amax(-1, keepdim=True) / divisor).clamp_min(2.0**-126)\n"
        "    y = (x / scale_out).round().clamp(-127, 127).to(torch.int8)\n    return y, scale_out.squeeze(-1)\n"
    )
    ours = f"import scaled_mm\n\n\ndef run({arguments}):\n    return scaled_mm.dynamic_quant({arguments})\n"
    for hidden in (None, *_HIDDEN):
        yield Entry(
            name=f"quantize_int8_dynamic{'_smooth' if smooth else ''}{f'_h{hidden}' if hidden else ''}",
            op_type="quantize",
            description=f"Per token: scale_out = max|x| / 127, y = round(x / scale_out){', for x * smooth_scales' if smooth else ''}.",
            axes={"M": None, "H": hidden},
            inputs={"x": ("bfloat16", ["M", "H"]), **({"smooth_scales": ("float32", ["H"])} if smooth else {})},
            outputs={"y": ("int8", ["M", "H"]), "scale_out": ("float32", ["M"])},
            reference=reference,
            ours=ours,
            note="the package's quantizer",
            compare="bits",
            tags=["quantization:int8"],
            workloads=[{"M": m} for m in (1, 16, 512)] if hidden else [{"M": 16, "H": 256}],
        )


def _dequantize_int8() -> Entry:
    return Entry(
        name="dequantize_int8",
        op_type="dequantize",
        description="x = q * scale, one scale per row.",
        axes={"M": None, "H": None},
        inputs={"q": ("int8", ["M", "H"]), "scale": ("float32", ["M"])},
        outputs={"x": ("float32", ["M", "H"])},
        reference="import torch\n\n\ndef run(q, scale):\n    return q.to(torch.float32) * scale[:, None]\n",
        ours="import torch\n\n\ndef run(q, scale):\n    return torch.mul(q, scale[:, None])\n",
        note="torch's multiplication, which widens as it reads",
        compare="bits",
        tags=["quantization:int8"],
        workloads=[{"M": 16, "H": 256}, {"M": 4096, "H": 4096}],
    )
