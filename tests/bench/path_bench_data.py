"""A synthetic path document, and vLLM's operators as torch operations on a CPU."""

from __future__ import annotations

import torch
from bench_data import GPU, environment, measured
from torch.nn import functional

from scaled_mm.bench.overhead import OverheadRecord
from scaled_mm.bench.path.cases import LAYER, LINEARS
from scaled_mm.bench.path.operators import OPERATORS
from scaled_mm.bench.path.peers import Vllm
from scaled_mm.bench.path.record import Lacking, PathCaseRecord, PathDocument, PathSettings
from scaled_mm.measure.record import Implementation, Result
from scaled_mm.measure.roofline import linear_bytes, linear_us, memory_us

NAMESPACE = "fake_vllm"
SCHEMAS = (
    "dynamic_scaled_int8_quant(Tensor! result, Tensor input, Tensor! scale, Tensor!? azp) -> ()",
    "static_scaled_int8_quant(Tensor! result, Tensor input, Tensor scale, Tensor? azp) -> ()",
    "rms_norm_dynamic_per_token_quant(Tensor! result, Tensor input, Tensor weight, Tensor! scale, float epsilon, Tensor? scale_ub, Tensor!? residual)"
    " -> ()",
    "fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor weight, float epsilon) -> ()",
    "silu_and_mul(Tensor! result, Tensor input) -> ()",
    "cutlass_scaled_mm(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()",
)


def _quantize(out, x, scale, azp) -> None:
    scale.copy_(x.float().abs().amax(-1, keepdim=True) / 127)
    out.copy_((x.float() / scale).round().clamp(-127, 127))


def _static(out, x, scale, azp) -> None:
    out.copy_((x.float() / scale).round().clamp(-128, 127))


def _norm_quantize(out, x, weight, scale, epsilon, upper, residual) -> None:
    if residual is not None:
        residual.add_(x)
    _quantize(out, functional.rms_norm((x if residual is None else residual).float(), x.shape[-1:], weight.float(), epsilon), scale, None)


def _add_norm(x, residual, weight, epsilon) -> None:
    residual.add_(x)
    x.copy_(functional.rms_norm(residual, x.shape[-1:], weight, epsilon))


def _silu(out, x) -> None:
    g, u = x.chunk(2, dim=-1)
    out.copy_(functional.silu(g) * u)


def _product(out, a, b, a_scale, b_scale, bias) -> None:
    out.copy_((a.float() @ b.float()) * a_scale * b_scale)


def register(lacking: str = "") -> torch.library.Library:
    """The operators in a namespace of their own, without one; they live as long as what is returned."""
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    functions = (_quantize, _static, _norm_quantize, _add_norm, _silu, _product)
    for schema, function in zip(SCHEMAS, functions, strict=True):
        name = schema.partition("(")[0]
        if name != lacking:
            library.define(schema)
            library.impl(name, function, "CPU")
    return library


class FakeVllm(Vllm):
    """The peer itself, over these operators."""

    devices, namespace = ("cpu",), NAMESPACE

    def _load_package(self) -> str | None:
        return None


def path_record(part: str, M: int, N: int, K: int, shape: str | None = None, gpu: str = GPU, **results: Result) -> PathCaseRecord:
    linear = part in LINEARS
    moved = linear_bytes(M, N, K) if linear else OPERATORS[part].traffic_bytes(M, K)
    return PathCaseRecord(
        part=part,
        shape=shape or (f"{N}x{K}" if linear else f"{part} K={K}"),
        **{"M": M, "N": N, "K": K},
        traffic_bytes=moved,
        roof_us=linear_us(M, N, K, gpu) if linear else memory_us(moved, gpu),
        rotation=12,
        outputs=12,
        cold=True,
        check="checked",
        results=results,
    )


def cases() -> list[PathCaseRecord]:
    """Two layers at two M, a random layer, an operator at two sizes."""
    good = {"bit_equal": True, "error": 0.0}

    def linear(part: str, m: int, n: int, k: int, ours: float, vllm: float, bf16: float, shape: str | None = None) -> PathCaseRecord:
        of_ours = measured(ours, kernel="decode_1", **good)
        return path_record(part, m, n, k, shape, ours=of_ours, apart=measured(ours + 1, **good), torch=measured(bf16), vllm=measured(vllm))

    return [
        linear(LAYER, 16, 4096, 4096, 8.0, 16.0, 16.0, "8B_o"),
        linear(LAYER, 512, 4096, 4096, 20.0, 22.0, 40.0, "8B_o"),
        linear(LAYER, 16, 6144, 4096, 10.0, 14.0, 18.0, "8B_qkv"),
        linear(LAYER, 512, 6144, 4096, 30.0, 27.0, 60.0, "8B_qkv"),
        linear("random", 33, 1168, 3376, 5.0, 9.0, 10.0),
        path_record("silu_and_mul", 1, 4096, 4096, ours=measured(2.0, **good), torch=measured(5.0), vllm=Result(failed="RuntimeError: no kernel")),
        path_record("silu_and_mul", 4096, 4096, 4096, ours=measured(25.0, **good), torch=measured(70.0), vllm=measured(30.0)),
    ]


def document(records: list[PathCaseRecord] | None = None, arch: str = "sm90") -> PathDocument:
    def implementation(name: str) -> Implementation:
        rest = dict(int8=True, rival=False, version="1", library=None, unavailable=None)
        return Implementation(name=name, label=f"label of {name}", **rest)

    return PathDocument(
        created="2026-01-01T00:00:00+00:00",
        command="scaled-mm bench path --seed 7",
        settings=PathSettings(budget_ms=60, rounds=4, check=True, check_limit_gmac=8192, seed=7, kernel=None),
        environment=environment().model_copy(update={"arch": arch}),
        implementations=[implementation(name) for name in ("ours", "apart", "torch", "vllm")],
        lacking=[Lacking(implementation="vllm", part="quantize_int8_static", why="torch.ops._C has no static_scaled_int8_quant")],
        cases=cases() if records is None else records,
        overhead=[OverheadRecord(name="linear: ours", us=2.5, samples=[2.5], calls=200)],
    )
