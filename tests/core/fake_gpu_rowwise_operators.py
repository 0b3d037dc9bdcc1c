"""Runs in a process with the fake driver: the Python functions of row-wise operators through csrc/python to the kernels, against torch operations.

fake_gpu_rowwise_operators.py FUNCTION KERNELS ROWWISE EXTENSION     prints one JSON document
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from collections.abc import Callable

import torch
from fake_gpu_rowwise import FLOATS, RowwiseCore, whole
from short_path_script import load

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.core import fast
from scaled_mm.errors import ArchitectureNotSupportedError, ScaledMMError
from scaled_mm.layers import linear as layer
from scaled_mm.rowwise import kernels

on_gpu = [False]
served: list[bool] = []


def pretend_to_be_cuda(core: RowwiseCore, extension: str) -> None:
    torch.Tensor.is_cuda = property(lambda self: on_gpu[0])
    fast.module = load(extension)
    fast.empty = lambda shape, dtype, device: torch.empty(shape, dtype=dtype)
    fast.handle_address = lambda device: core.handle.value
    torch.Tensor.get_device = lambda self: 0
    launch = kernels.launch
    kernels.launch = lambda *args: served.append(launch(*args)) or served[-1]


def by_kernel(on: bool) -> None:
    """Whether tensors pretend to be on a GPU, where kernels serve."""
    on_gpu[0] = on


def answer_of(call: Callable[[], object]) -> object:
    try:
        return call()
    except ScaledMMError as error:
        return type(error), str(error)


def same(got: object, expected: object) -> bool:
    if isinstance(expected, torch.Tensor):
        if not isinstance(got, torch.Tensor) or any(property_of(got) != property_of(expected) for property_of in PROPERTIES):
            return False
        return reference.same_bits(got, expected) if expected.is_floating_point() else torch.equal(got, expected)
    if isinstance(expected, tuple):
        return type(got) is type(expected) and len(got) == len(expected) and all(map(same, got, expected))
    return got == expected


PROPERTIES = (lambda t: t.shape, lambda t: t.dtype, lambda t: t.requires_grad, lambda t: t.is_contiguous())


def told(result: object) -> str:
    """A result, short."""
    if isinstance(result, torch.Tensor):
        return f"{result.dtype} {list(result.shape)} {list(result.stride())} {result.flatten()[:4].tolist()}"
    return f"({', '.join(map(told, result))})" if isinstance(result, tuple) else str(result)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # of [2, 6, 5, 32]
    "contiguous": lambda t: t,
    "a row": lambda t: t[0, 0, 0],
    "one element rows": lambda t: t[..., :2],
    "columns apart": lambda t: t[..., ::2],
    "unaligned": lambda t: t[..., 2:],
    "half a row further": lambda t: t[..., 3:29],
    "a slice of heads": lambda t: t[:, 2:4],
    "a slice of rows": lambda t: t[:, :, 1:4],
    "every second row": lambda t: t[0, :, ::2],
    "transposed": lambda t: t.transpose(1, 2),
    "transposed rows": lambda t: t.transpose(-1, -2)[..., :4],
    "rows along the first dimension": lambda t: t.permute(3, 1, 2, 0),
    "expanded": lambda t: t[:1].expand(3, 6, 5, 32),
    "all rows one": lambda t: t[:1, :1, :1].expand(2, 3, 4, 32),
    "inner rows one": lambda t: t[:, :, :1].expand(2, 6, 3, 32),
    "one element of a row": lambda t: t[..., :1].expand(2, 6, 5, 32),
    "size 1 with a stride of its own": lambda t: t[0, ::6].unsqueeze(0).as_strided((1, 1, 5, 32), (3, 7, 32, 1)),
    "size 1 in between": lambda t: t[:, None, :, None, 0],
    "no rows": lambda t: t[:0],
    "no rows in between": lambda t: t[:, :, :0],
    "no rows, expanded": lambda t: t[:0, :1].expand(0, 7, 5, 32),
    "no columns": lambda t: t[..., :0],
    "eight dimensions": lambda t: t[:, :, None, :, None, None, None],
    "negated": torch._neg_view,
    "negated with gaps": lambda t: torch._neg_view(t[..., ::2]),
    "wants a gradient": lambda t: t.clone().requires_grad_(),
    "a parameter": torch.nn.Parameter,
    "of a parameter": lambda t: torch.nn.Parameter(t)[1:],
}
ONES = {"0-d": (), "[1]": (1,), "[1, 1]": (1, 1), "[1, 1, 1, 1, 1]": (1, 1, 1, 1, 1)}
POINTS = (0, -128, 127, 2**31 - 1, -(2**31))


def one(value: float, shape: tuple[int, ...], dtype=torch.float32) -> torch.Tensor:
    return torch.full(shape, value, dtype=dtype)


def calls_of(x: torch.Tensor, residual: torch.Tensor, seed: int) -> dict[str, Callable[[], object]]:
    """Operators on x. residual: of its shape and dtype. What is written is made anew by every call."""
    generator = torch.Generator().manual_seed(seed)
    k, rows = x.shape[-1], (*x.shape[:-1], 1)
    of = FLOATS[seed % 3]
    weight, shift = (torch.randn(k, generator=generator).to(of) for _ in range(2))
    gaps = torch.randn(2 * k + 1, generator=generator)[1::2]
    scales = torch.rand(rows, generator=generator) / 10 + 0.001
    points = torch.randint(-128, 128, rows, generator=generator, dtype=(torch.int8, torch.int32)[seed % 2])
    shape = list(ONES.values())[seed % 4]
    scale, point = one(0.02, shape), one(POINTS[seed % 5], list(ONES.values())[seed // 4 % 4], torch.int32)
    strided = torch.stack((scales, scales), -1)[..., 1]
    calls = {
        "token": lambda: sm.quantize_int8(x),
        "smooth": lambda: sm.quantize_int8(x, smooth_scale=weight),
        "asymmetric": lambda: sm.quantize_int8(x, symmetric=False, smooth_scale=gaps),
        "static": lambda: sm.quantize_int8(x, scale=scale),
        "static point": lambda: sm.quantize_int8(x, scale=scale, zero_point=point),
        "static rows": lambda: sm.quantize_int8(x, scale=scales, zero_point=points),
        "static strided rows": lambda: sm.quantize_int8(x, scale=strided, zero_point=point),
        "static rows of the channels": lambda: sm.quantize_int8(x, "channel", scale=scales.transpose(-1, -2)) if x.dim() > 1 else None,
        "static tensor": lambda: sm.quantize_int8(x, "tensor", scale=scale, zero_point=point),
        "tensor": lambda: sm.quantize_int8(x, "tensor"),
        "channel": lambda: sm.quantize_int8(x, "channel"),
        "channel asymmetric": lambda: sm.quantize_int8(x, "channel", symmetric=False),
        "dynamic_quant": lambda: sm.dynamic_quant(x, weight),
        "quantize": lambda: sm.quantize(x, weight, shift),
        "quantize one": lambda: sm.quantize(x, one(3.0, shape[:1]), shift.float()),
        "quantize ones": lambda: sm.quantize(x, one(3.0, ()), one(0.5, (1,))),
        "norm": lambda: sm.rms_norm(x, weight),
        "norm token": lambda: sm.rms_norm(x, gaps, 0.1, quantize="token"),
        "norm static": lambda: sm.rms_norm(x, weight[:1].expand(k), quantize=scale, zero_point=point),
        "add": lambda: sm.add_rms_norm(x, residual, weight, 0),
        "add token": lambda: sm.add_rms_norm(x, residual, weight, quantize="token"),
        "silu": lambda: sm.silu_and_mul(x),
        "gelu token": lambda: sm.gelu_and_mul(x, quantize="token"),
        "gelu tanh static": lambda: sm.gelu_and_mul(x, approximate="tanh", quantize=scale, zero_point=point),
    }
    return calls


def layouts(*paths: str) -> dict:
    """Every operator on every view: bits, shapes, strides and gradients as without kernels. The share that a kernel served."""
    core = RowwiseCore(*paths[:2])
    pretend_to_be_cuda(core, paths[2])
    base = torch.randn(2, 6, 5, 32, generator=torch.Generator().manual_seed(1)) * 3
    wrong, unserved, count = [], {}, 0
    for seed, (dtype, (name, view)) in enumerate(itertools.product(FLOATS, VIEWS.items())):
        x, residual = view(base.to(dtype)), view(base.flip(0).to(dtype))
        for what, call in calls_of(x, residual, seed).items():
            by_kernel(False)
            expected = answer_of(call)
            by_kernel(True)
            served.clear()
            if not same(answer_of(call), expected):
                wrong.append(f"{what} of {name} in {dtype}: {told(answer_of(call))}, not {told(expected)}")
            count += 1
            if not any(served) and not (isinstance(expected, tuple) and isinstance(expected[0], type)):
                unserved.setdefault(what if what == "tensor" else name, set()).add(what)
    return {"wrong": wrong[:10], "count": count, "unserved": {name: sorted(what) for name, what in unserved.items()}}


def written(*paths: str) -> dict:
    """out= and total= at places that overlap other operands: memory afterwards as without kernels, and the version counter moved."""
    core = RowwiseCore(*paths[:2])
    pretend_to_be_cuda(core, paths[2])
    wrong = []

    def compare(what: str, make: Callable[[], dict], call: Callable[[dict], object], target: str) -> None:
        results = []
        for on in (False, True):
            by_kernel(on)
            torch.manual_seed(5)
            tensors = make()
            before = tensors[target]._version
            result = answer_of(lambda: call(tensors))  # noqa: B023
            moved = tensors[target]._version > before
            results.append(
                (result, *(whole(t) for t in tensors.values()), moved, isinstance(result, tuple) and tensors[target] in identities(result))
            )
        if not same(tuple(results[1]), tuple(results[0])):
            wrong.append(f"{what}: {told(results[1])}, not {told(results[0])}")

    def norm(places: Callable[[torch.Tensor], dict]) -> Callable[[], dict]:
        def make() -> dict:
            memory = torch.randn(20, 32).to(torch.bfloat16)
            return {"x": memory[:4], "residual": memory[5:9], "weight": torch.randn(32), "total": memory[10:14], **places(memory)}

        return make

    def add(t: dict):
        return sm.add_rms_norm(t["x"], t["residual"], t["weight"], quantize="token", total=t["total"])

    for what, places in {
        "apart": lambda m: {},
        "x": lambda m: {"total": m[:4]},
        "residual": lambda m: {"total": m[5:9]},
        "x and residual": lambda m: {"total": m[:4], "residual": m[:4]},
        "a row after x": lambda m: {"total": m[1:5]},
        "a row before residual": lambda m: {"total": m[4:8]},
        "x, next to residual": lambda m: {"total": m[:4], "residual": m[2:6]},
        "between the rows of x": lambda m: {"x": m[:8:2], "total": m[1:9:2]},
        "x in columns": lambda m: {"x": m[:4].reshape(32, 4).t(), "total": m[:4]},
        "columns": lambda m: {"total": m[10:14].view(32, 4).t()},
        "x in three dimensions": lambda m: {name: m[:8:2].view(2, 2, 32) for name in ("x", "total")} | {"residual": m[9:13].view(2, 2, 32)},
        "x of no single stride": lambda m: {name: m[:12].view(2, 6, 32)[:, 1:3] for name in ("x", "total")} | {"residual": m[12:16].view(2, 2, 32)},
        "over weight": lambda m: {"total": m[:4], "weight": m[3]},
        "itself": lambda m: {"total": m[10:11].expand(4, 32)},
        "no rows": lambda m: {"x": m[:0], "total": m[3:3], "residual": m[2:2]},
        "negated": lambda m: {"total": torch._neg_view(m[:4])},
        "wants a gradient": lambda m: {"total": m[:4].clone().requires_grad_()},
    }.items():
        compare(f"total: {what}", norm(places), add, "total")

    def quantizer(places: Callable[[torch.Tensor], dict]) -> Callable[[], dict]:
        def make() -> dict:
            memory = torch.randint(-100, 100, (20, 32), dtype=torch.int8)
            return {"x": torch.randn(4, 32), "scale": torch.rand(4, 1), "out": memory[:4], **places(memory)}

        return make

    for what, places in {
        "apart": lambda m: {},
        "every second row": lambda m: {"out": m[:8:2]},
        "columns": lambda m: {"out": m[:4].view(32, 4).t()},
        "x": lambda m: {"x": m[:16].view(-1).view(torch.float32).view(4, 32), "out": m[:4]},
        "the end of x": lambda m: {"x": m[:16].view(-1).view(torch.float32).view(4, 32), "out": m[14:18]},
        "scale": lambda m: {"scale": m[2, :16].view(torch.float32).view(4, 1)},
        "itself": lambda m: {"out": m[:1].expand(4, 32)},
        "three dimensions, no single stride": lambda m: {
            "x": torch.randn(2, 2, 32),
            "scale": torch.rand(2, 2, 1),
            "out": m[:12].view(2, 6, 32)[:, :2],
        },
        "of another dtype": lambda m: {"out": torch.zeros(4, 32)},
        "of another shape": lambda m: {"out": m[:5]},
    }.items():
        compare(f"out: {what}", quantizer(places), lambda t: sm.quantize_int8(t["x"], out=t["out"]), "out")
        compare(f"static out: {what}", quantizer(places), lambda t: sm.quantize_int8(t["x"], scale=t["scale"], out=t["out"]), "out")
        compare(f"asymmetric out: {what}", quantizer(places), lambda t: sm.quantize_int8(t["x"], symmetric=False, out=t["out"]), "out")
    return {"wrong": wrong}


def identities(result: tuple) -> set:
    return {t for part in result for t in (part if isinstance(part, tuple) else (part,)) if isinstance(t, torch.Tensor)}


def transforms(*paths: str) -> dict:
    """Under torch.func, inference mode and without a kernel: the values are those without kernels."""
    core = RowwiseCore(*paths[:2])
    pretend_to_be_cuda(core, paths[2])
    x, weight = torch.randn(3, 4, 32), torch.randn(32)
    cases = {
        "vmap": lambda: torch.vmap(lambda t: tuple(sm.quantize_int8(t)))(x),
        "vmap norm": lambda: torch.vmap(lambda t: sm.rms_norm(t, weight))(x),
        "vmap of a weight": lambda: torch.vmap(lambda w: sm.rms_norm(x, w))(torch.stack((weight, weight))),
        "vmap in place": lambda: torch.vmap(lambda t, r, total: sm.add_rms_norm(t, r, weight, total=total))(x, x, torch.zeros_like(x)),
        "vmap out": lambda: torch.vmap(lambda t, out: tuple(sm.quantize_int8(t, out=out)))(x, torch.zeros(3, 4, 32, dtype=torch.int8)),
        "vmap of out alone": lambda: torch.vmap(lambda out: tuple(sm.quantize_int8(x, out=out)))(torch.zeros(2, 3, 4, 32, dtype=torch.int8)),
        "inference mode": lambda: inference(x, weight),
        "int epsilon": lambda: sm.rms_norm(x, weight, 1),
        "bad epsilon": lambda: sm.rms_norm(x, weight, -1),
        "empty norm": lambda: sm.rms_norm(x[..., :0], weight[:0]),
        "a scale of two": lambda: sm.rms_norm(x, weight, quantize=torch.ones(2)),
        "a scale in float16": lambda: sm.silu_and_mul(x, quantize=torch.ones(1).half()),
        "a zero point without a scale": lambda: sm.silu_and_mul(x, quantize="token", zero_point=torch.zeros(1, dtype=torch.int8)),
        "nine dimensions": lambda: sm.silu_and_mul(x[None, None, None, None, None, None]),
        "odd": lambda: sm.silu_and_mul(x[..., :31]),
        "residual of another dtype": lambda: sm.add_rms_norm(x, x.half(), weight),
        "residual of another shape": lambda: sm.add_rms_norm(x, x[:1], weight),
    }
    wrong = []
    for what, call in cases.items():
        by_kernel(False)
        expected = catching(call)
        by_kernel(True)
        if not same(got := catching(call), expected):
            wrong.append(f"{what}: {told(got)}, not {told(expected)}")
    return {"wrong": wrong}


def inference(x: torch.Tensor, weight: torch.Tensor):
    with torch.inference_mode():
        total = torch.zeros_like(x)
        return sm.add_rms_norm(x, total, weight, total=total)[0]


def catching(call: Callable[[], object]) -> object:
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


def unbuilt(kernels_path: str, extension: str) -> dict:
    """Without row-wise kernels, and on a GPU that none are for, torch operations serve, and a warning says so once."""
    core, x = RowwiseCore(kernels_path), torch.randn(2, 8)
    expected = sm.quantize_int8(x)
    pretend_to_be_cuda(core, extension)
    by_kernel(True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = [sm.quantize_int8(x) for _ in range(2)]
        kernels._not_built.clear()  # of which a warning has told
        fast.handle_address = old_gpu
        got += [sm.quantize_int8(x) for _ in range(2)]
    by_kernel(False)
    return {"right": [same(one, expected) for one in got], "warnings": [str(w.message) for w in caught], "served": served}


def old_gpu(device: int) -> int:
    raise ArchitectureNotSupportedError("handle: an old GPU")


def too_long(*paths: str) -> list[bool]:
    """Whether the extension leaves rows to torch operations that are more, or longer, than the core takes."""
    core = RowwiseCore(*paths[:2])
    pretend_to_be_cuda(core, paths[2])
    mode = (kernels.Kind.QUANTIZE, kernels.Function.QUANTIZE_INT8, kernels.Output.ROUND, 0.0, 0)
    rows = [torch.zeros(1).expand(*shape) for shape in ((2**31, 1), (2**16, 2**15, 1), (1, 2**31 - 1))]
    out = torch.zeros(1, 1, dtype=torch.int8)
    return [fast.module.rowwise(core.handle.value, *mode, (out, x, *[None] * 7)) is NotImplemented for x in rows]


def linear_cases() -> dict[str, tuple[tuple, dict]]:
    """Name -> what `int8_linear` is called with."""
    n, k = 24, 40
    generator = torch.Generator().manual_seed(9)
    weight, scale = torch.randint(-127, 128, (n, k), generator=generator, dtype=torch.int8), torch.rand(n, generator=generator) + 0.1
    options = {
        "plain": {},
        "bias": dict(bias=torch.randn(n, generator=generator)),
        "smooth": dict(smooth_scale=torch.rand(k, generator=generator)),
        "static": dict(input_scale=torch.tensor([0.05])),
        "zero point": dict(input_scale=torch.tensor([[0.05]]), input_zero_point=torch.tensor(3, dtype=torch.int8)),
        "float32": dict(out_dtype=torch.float32),
    }
    found = {}
    for (name, option), shape, dtype in itertools.product(options.items(), ((7, k), (k,), (2, 3, k), (1, k)), FLOATS):
        if dtype is torch.float16 and name != "float32":
            continue  # the fake GPU's products have no float16 outputs
        x = torch.randn(*shape, generator=generator).to(dtype)
        found[f"{name} {list(shape)} {dtype}"] = (x, weight, scale), option
        found[f"{name} {list(shape)} {dtype} prepared"] = (x, sm.prepare_weight(weight.t()), scale[:, None]), option
    found["columns apart"] = (torch.randn(5, 2 * k)[:, ::2], weight, scale), {}
    return found


def linear(*paths: str) -> dict:
    """`int8_linear` in one call of the extension: the bits of the two functions. What the call leaves to them."""
    core = RowwiseCore(*paths[:2])
    cases = linear_cases()
    expected = {name: sm.int8_linear(*operands, **option) for name, (operands, option) in cases.items()}
    pretend_to_be_cuda(core, paths[2])
    fast.is_current = lambda device: True

    def short(x, weight, scale, bias=None, input_scale=None, input_zero_point=None, smooth_scale=None, out_dtype=None):
        return layer._short(x, weight, scale, bias, input_scale, input_zero_point, smooth_scale, out_dtype)

    got = {name: short(*operands, **option) for name, (operands, option) in cases.items()}
    x, weight, scale = cases["plain [7, 40] torch.float32"][0]
    refused = {
        "nine dimensions": short(x[(None,) * 7], weight, scale),
        "no rows": short(x[:0], weight, scale),
        "another K": short(x[:, 1:], weight, scale),
        "a scale of each row": short(x, weight, scale, input_scale=torch.ones(7)),
        "a zero point alone": short(x, weight, scale, input_zero_point=torch.ones(1, dtype=torch.int8)),
        "a weight with zero points": short(x, sm.prepare_weight(weight.t(), torch.ones(1, dtype=torch.int8)), scale),
        "an int8 output": short(x, weight, scale, out_dtype=torch.int8),
        "no tensor": short(x, None, scale),
    }
    return {
        "wrong": [name for name, result in expected.items() if not same(got[name], result)],
        "count": len(cases),
        "computed": [name for name, result in refused.items() if result is not None],
    }


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
