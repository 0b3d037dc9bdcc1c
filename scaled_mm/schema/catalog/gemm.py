"""Products: FP32, INT8 with scales, weights in GGUF formats, and a bfloat16 layer."""

from __future__ import annotations

from collections.abc import Iterator

from scaled_mm.gguf_formats import FORMATS, WEIGHT_FORMATS
from scaled_mm.schema.catalog import texts
from scaled_mm.schema.catalog.entry import SHAPES, TOKENS, Entry

BLOCK_SHAPES = tuple(shape for shape in SHAPES if shape not in ((8192, 8192), (8192, 28672)))
ANY = {"M": 5, "N": 48, "K": 256}  # for definitions with open N and K

FLOAT_NORM = "norm=1e-05"
"""Bound for float32 sums against float64 sums. This package's products stay within 2e-6; those of cuBLAS and oneDNN do not for every K."""
HALF_NORM = "norm=0.004"
"""Bound for one or two roundings to bfloat16, each at most 2^-8 of a value."""


def entries() -> Iterator[Entry]:
    yield from _fp32()
    for bias, zero_points in ((False, False), (True, False), (True, True)):
        yield from _int8(bias, zero_points)
    for fmt in WEIGHT_FORMATS:
        yield from _block(fmt)
        yield from _block_q8_1(fmt)
        yield _whole_path(fmt)
    yield from _linear()


def _shapes() -> Iterator[tuple[str, dict[str, int | None], list[dict[str, int]]]]:
    """(suffix of the name, axes, workloads): first with open N and K, then for each shape."""
    yield "", {"M": None, "N": None, "K": None}, [ANY]
    for n, k in SHAPES:
        yield f"_n{n}_k{k}", {"M": None, "N": n, "K": k}, [{"M": m} for m in TOKENS]


# ---- FP32 ---------------------------------------------------------------------------------------------------------------

_FP32 = '''import torch


def run(a, b):
    """a [M, K] times the transpose of b [N, K], summed in float64 and rounded once."""
    return (a.double() @ b.double().t()).to(torch.float32)
'''


def _fp32() -> Iterator[Entry]:
    for suffix, axes, workloads in _shapes():
        yield Entry(
            name=f"gemm_fp32{suffix or '_baseline'}",
            op_type="gemm_fp32",
            description="out = a b^T in FP32: the baseline for quantized products.",
            axes=axes,
            inputs={"a": ("float32", ["M", "K"]), "b": ("float32", ["N", "K"])},
            outputs={"out": ("float32", ["M", "N"])},
            reference=_FP32,
            ours="import torch\n\n\ndef run(a, b):\n    return torch.nn.functional.linear(a, b)\n",
            plain="import torch\n\n\ndef run(a, b):\n    return torch.einsum('mk,nk->mn', a, b)\n",
            note="cuBLAS and oneDNN through torch; this package has no FP32 product",
            compare=FLOAT_NORM,
            workloads=workloads,
        )


# ---- INT8 ---------------------------------------------------------------------------------------------------------------

_INT_MM = '''import torch


def product(a, b):
    """int32 [M, N] by torch._int_mm, which needs more than 16 rows on a GPU."""
    rows = torch.zeros((max(32, -(-a.shape[0] // 8) * 8), a.shape[1]), dtype=torch.int8, device=a.device)
    rows[: a.shape[0]] = a
    return torch._int_mm(rows, b.t())[: a.shape[0]]
'''


def _int8(bias: bool, zero_points: bool) -> Iterator[Entry]:
    arguments = ["a", "b", "a_scale", "b_scale", *(["bias"] if bias else []), *(["a_zero_point", "b_zero_point"] if zero_points else [])]
    head = f"def run({', '.join(arguments)}):\n"
    a, b = "a.double()", "b.double()"
    given, acc = ["a", "b.t()", "a_scale", "b_scale"], "product(a, b)"
    if bias:
        given.append("bias")
    if zero_points:
        a, b = f"({a} - a_zero_point.double()[:, None])", f"({b} - b_zero_point.double()[:, None])"
        given += [f"{name}_zero_point={name}_zero_point.to(torch.int32)" for name in "ab"]
        acc += " - za * b.sum(1, dtype=torch.int32) - a.sum(1, dtype=torch.int32)[:, None] * zb + a.shape[1] * za * zb"
    rest = f"    out = acc.to(torch.float32) * b_scale * a_scale[:, None]{' + bias' if bias else ''}\n    return out.to(torch.bfloat16)\n"
    points = "    za, zb = a_zero_point.to(torch.int32)[:, None], b_zero_point.to(torch.int32)\n" if zero_points else ""
    reference = f"import torch\n\n\n{head}    acc = {a} @ {b}.t()  # exact: integers below 2^53, and below 2^31 for int32\n{rest}"
    imports = "import torch\nimport scaled_mm\n" if zero_points else "import scaled_mm\n"
    for suffix, axes, workloads in _shapes():
        yield Entry(
            name=f"gemm_int8_scaled{'_bias' if bias else ''}{'_zp' if zero_points else ''}{suffix}",
            op_type="gemm_int8_scaled",
            description="acc = (a - a_zero_point) (b - b_zero_point)^T, exact; out = bfloat16((float32(acc) * b_scale) * a_scale + "
            "bias), each operation "
            f"rounded separately. Here with{' bias' if bias else 'out bias'} and with{' zero points' if zero_points else 'out zero points'}.",
            axes=axes,
            inputs={
                "a": ("int8", ["M", "K"]),
                "b": ("int8", ["N", "K"]),
                "a_scale": ("float32", ["M"]),
                "b_scale": ("float32", ["N"]),
                **({"bias": ("float32", ["N"])} if bias else {}),
                **({"a_zero_point": ("int8", ["M"]), "b_zero_point": ("int8", ["N"])} if zero_points else {}),
            },
            outputs={"out": ("bfloat16", ["M", "N"])},
            reference=reference,
            ours=f"{imports}\n\n{head}    return scaled_mm.scaled_mm({', '.join(given)})\n",
            plain=f"{_INT_MM}\n\n{head}{points}    acc = {acc}\n{rest}",
            compare="bits",
            tags=["quantization:int8"],
            workloads=workloads,
        )


# ---- weights in GGUF formats -------------------------------------------------------------------------------------------


def _block_shapes(with_k: bool) -> Iterator[tuple[str, dict[str, int | None], list[dict[str, int]], list[str]]]:
    """As `_shapes`, with KB blocks along K. with_k: K is an axis too, with a constraint between K and KB."""
    constraints = ["K == 32 * KB"] if with_k else []

    def along_k(k: int | None, blocks: int | None) -> dict[str, int | None]:
        return {**({"K": k} if with_k else {}), "KB": blocks}

    yield "", {"M": None, "N": None, **along_k(None, None)}, [{"M": ANY["M"], "N": ANY["N"], **along_k(ANY["K"], ANY["K"] // 32)}], constraints
    for n, k in BLOCK_SHAPES:
        yield f"_n{n}_k{k}", {"M": None, "N": n, **along_k(k, k // 32)}, [{"M": m} for m in TOKENS], constraints


def _block(fmt: str) -> Iterator[Entry]:
    bits = FORMATS[fmt].bits
    reference = texts.reader(texts.values(fmt)) + (
        "\n\ndef run(activation, weight_q):\n"
        '    """activation [M, K] times the transpose of the weight\'s values [N, K], in float64, rounded once."""\n'
        f"    weight = {fmt}_values(weight_q).flatten(-2)\n    return (activation.double() @ weight.t()).to(torch.float32)\n"
    )
    plain = texts.reader(texts.values(fmt)) + (
        "\n\ndef run(activation, weight_q):\n"
        f"    weight = {fmt}_values(weight_q).to(torch.float32).flatten(-2)\n    return activation.to(torch.float32) @ weight.t()\n"
    )
    for suffix, axes, workloads, constraints in _block_shapes(with_k=True):
        yield Entry(
            name=f"gemm_{fmt}_w{bits}a16{suffix}",
            op_type=f"gemm_{fmt}",
            description=f"out = activation W^T with W in {fmt.upper()} and the activation in float16. schemas/README.md describes the format.",
            axes=axes,
            inputs={"activation": ("float16", ["M", "K"]), "weight_q": (fmt, ["N", "KB"])},
            outputs={"out": ("float32", ["M", "N"])},
            reference=reference,
            ours="import torch\nimport scaled_mm\n\n\ndef run(activation, weight_q):\n"
            f"    return scaled_mm.gemm_{fmt}(weight_q.view(torch.uint8), activation).t()\n",
            plain=plain,
            compare=FLOAT_NORM,
            constraints=constraints,
            workloads=workloads,
        )


def _product(fmt: str, dtype: str) -> str:
    """The text of `product(weight_q, activation_q)` by the formula with stored sums; accumulates in `dtype`."""
    description = FORMATS[fmt]
    to = "" if dtype == "float64" else f".to(torch.{dtype})"
    minimum = ", m" if description.second == "m" else ""
    if description.zero and dtype == "float64":
        rest = f" - {description.zero} * s.squeeze(-1) @ d.squeeze(-1).t()"
    elif description.zero:  # the same sum without cancellation of large terms
        rest = f" + {description.zero} * ((da * qa.sum(-1, keepdim=True) - s).squeeze(-1){to} @ d.squeeze(-1){to}.t())"
    elif minimum:
        rest = f" + s.squeeze(-1){to} @ m.squeeze(-1){to}.t()"
    else:
        rest = ""
    q = "q" if dtype == "float64" or not description.zero else f"(q - {description.zero})"
    return (
        f'\n\ndef product(weight_q, activation_q):\n    """Sums over blocks of d d_a sum(q q_a), and of {_COMPENSATION[fmt]}."""\n'
        f"    q, d{minimum} = {fmt}_parts(weight_q)\n    qa, da, s = q8_1_parts(activation_q)\n"
        f"    return (da * qa).flatten(-2){to} @ (d * {q}).flatten(-2){to}.t(){rest}\n"
    )


_COMPENSATION = {name: f"-{one.zero} d s" if one.zero else "m s" if one.second == "m" else "nothing else" for name, one in WEIGHT_FORMATS.items()}


def _q8_1_texts(fmt: str) -> tuple[str, str]:
    """(reference, plain): the texts up to and including `product`."""
    read = texts.reader(texts.parts(fmt), texts.parts("q8_1"))
    return read + _product(fmt, "float64"), read + _product(fmt, "float32")


def _block_q8_1(fmt: str) -> Iterator[Entry]:
    run = "\n\ndef run(activation_q, weight_q):\n    return product(weight_q, activation_q).to(torch.float32)\n"
    reference, plain = _q8_1_texts(fmt)
    call = f"scaled_mm.gemm_{fmt}_q8_1(weight_q.view(torch.uint8), activation_q.view(torch.uint8)).t()"
    for suffix, axes, workloads, constraints in _block_shapes(with_k=False):
        yield Entry(
            name=f"gemm_{fmt}_q8_1_w{FORMATS[fmt].bits}a8{suffix}",
            op_type=f"gemm_{fmt}_q8_1",
            description=f"out = A W^T with W in {fmt.upper()} and A in Q8_1. It uses the stored sums s; schemas/README.md has the formula.",
            axes=axes,
            inputs={"activation_q": ("q8_1", ["M", "KB"]), "weight_q": (fmt, ["N", "KB"])},
            outputs={"out": ("float32", ["M", "N"])},
            reference=reference + run,
            ours=f"import torch\nimport scaled_mm\n\n\ndef run(activation_q, weight_q):\n    return {call}\n",
            plain=plain + run,
            compare=FLOAT_NORM,
            constraints=constraints,
            workloads=workloads,
        )


def _whole_path(fmt: str) -> Entry:
    run = "\n\ndef run(activation, weight_q):\n    return product(weight_q, quantize(activation)).to(torch.float32)\n"
    reference, plain = (text + texts.quantizer("q8_1", "ggml") for text in _q8_1_texts(fmt))
    call = f"scaled_mm.gemm_{fmt}_q8_1(weight_q.view(torch.uint8), scaled_mm.quantize_q8_1(activation.flatten(-2))).t()"
    return Entry(
        name=f"gemm_{fmt}_q8_1_bs32",
        op_type=f"gemm_{fmt}_q8_1",
        description=f"The whole path: a float16 activation is quantized to Q8_1 in blocks of 32, then multiplied by a weight in {fmt.upper()}.",
        axes={"M": None, "N": None, "KB": None, "BS": 32},
        inputs={"activation": ("float16", ["M", "KB", "BS"]), "weight_q": (fmt, ["N", "KB"])},
        outputs={"out": ("float32", ["M", "N"])},
        reference=reference + run,
        ours=f"import torch\nimport scaled_mm\n\n\ndef run(activation, weight_q):\n    return {call}\n",
        plain=plain + run,
        compare=FLOAT_NORM,
        tags=["quantization:q8_1"],
        workloads=[{"M": ANY["M"], "N": ANY["N"], "KB": 8}, *({"M": m, "N": 4096, "KB": 128} for m in TOKENS)],
    )


# ---- a bfloat16 layer -------------------------------------------------------------------------------------------------

_LINEAR = '''import torch


def run(x1, x2, bias):
    """x1 [M, K] times the transpose of x2 [N, K], and the bias, in float64, rounded once."""
    return (x1.double() @ x2.double().t() + bias.double()).to(torch.bfloat16)
'''


def _linear() -> Iterator[Entry]:
    for n, k in ((4096, 4096), (14336, 4096), (28672, 8192)):
        yield Entry(
            name=f"linear_n{n}_k{k}",
            op_type="linear",
            description="out = x1 x2^T + bias in bfloat16.",
            axes={"M": None, "N": n, "K": k},
            inputs={"x1": ("bfloat16", ["M", "K"]), "x2": ("bfloat16", ["N", "K"]), "bias": ("bfloat16", ["N"])},
            outputs={"out": ("bfloat16", ["M", "N"])},
            reference=_LINEAR,
            ours="import torch\n\n\ndef run(x1, x2, bias):\n    return torch.nn.functional.linear(x1, x2, bias)\n",
            plain="import torch\n\n\ndef run(x1, x2, bias):\n    return x1 @ x2.t() + bias\n",
            note="cuBLAS and oneDNN through torch, which do this best",
            compare=HALF_NORM,
            workloads=[{"M": m} for m in TOKENS],
        )
