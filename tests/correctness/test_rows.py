"""Every kernel row of the architecture at hand, forced by name, against the reference: the same bits or a failure."""

from __future__ import annotations

import pytest
import torch

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.tables import load_table

pytestmark = pytest.mark.gpu

ROWS = [row.name for row in load_table("sm90").rows]
OUT_DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int32]
# M around every tile edge, N and K that end inside a tile, and one of several waves.
SHAPES = [(1, 256, 512), (7, 128, 16), (16, 4096, 256), (17, 136, 1040), (64, 1024, 4096), (129, 392, 144), (333, 1000, 784),
          (1024, 2048, 1024), (8192, 512, 256)]  # fmt: skip


@pytest.fixture(scope="module")
def handle() -> sm.Handle:
    handle = sm.Handle("cuda:0")
    if handle.arch != "sm90":
        pytest.skip(f"the rows of sm90 need compute capability 9.0, this GPU is {handle.arch}")
    return handle


def operands(M: int, N: int, K: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    a = torch.randint(-128, 128, (M, K), dtype=torch.int8, device="cuda", generator=generator)
    weight = torch.randint(-128, 128, (N, K), dtype=torch.int8, device="cuda", generator=generator)
    return a, weight.t()


def calculate(handle, row, a, out_dtype, **inputs):
    """The product by one row into an output that is poisoned: an element that is not written cannot pass."""
    N = (inputs["b"].b if isinstance(inputs["b"], sm.PreparedWeight) else inputs["b"]).shape[1]
    out = torch.full((a.shape[0], N), -77777 if out_dtype == torch.int32 else float("nan"), dtype=out_dtype, device="cuda")
    with sm.create_descriptor(handle, out=out, a=a, kernel=row, **inputs) as desc:
        assert desc.kernel.row == row
        workspace = torch.empty(desc.workspace_size, dtype=torch.uint8, device="cuda") if desc.workspace_size else None
        desc.calculate(out, a, workspace=workspace, **inputs)
    return out


def run(handle, row, a, b, out_dtype, **options):
    """The product by one row, whose bits may not depend on whether the weight is a tensor or prepared."""
    out = calculate(handle, row, a, out_dtype, b=b, **options)
    weight = sm.prepare_weight(b, options.pop("b_zero_point", None))
    assert weight.constant
    early = calculate(handle, row, a, out_dtype, b=weight, **options)
    assert torch.equal(early, out), f"{row} {out_dtype} {tuple(a.shape)} {tuple(b.shape)}: with a prepared weight the bits differ"
    return out


def scales(M: int, N: int, kind: str) -> dict[str, torch.Tensor]:
    if kind == "scalar":
        return {"a_scale": torch.rand(1, device="cuda") + 0.01, "b_scale": torch.rand((), device="cuda") - 0.5}
    return {"a_scale": torch.rand(M, 1, device="cuda") + 0.01, "b_scale": torch.randn(N, device="cuda")}


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
@pytest.mark.parametrize("row", ROWS)
def test_every_row_is_bit_equal_to_the_reference(handle, row, out_dtype):
    for seed, (M, N, K) in enumerate(SHAPES):
        a, b = operands(M, N, K, seed)
        variants = [{}]
        if out_dtype != torch.int32:
            vector, scalar = scales(M, N, "vector"), scales(M, N, "scalar")
            bias = torch.randn(N, device="cuda")
            variants = [vector, {**vector, "bias": bias.to(out_dtype)}, {**scalar, "bias": bias}]
        for options in variants:
            expected = reference.scaled_mm(a, b, options.get("a_scale"), options.get("b_scale"), options.get("bias"), out_dtype=out_dtype)
            out = run(handle, row, a, b, out_dtype, **options)
            assert torch.equal(out, expected), f"{row} {out_dtype} M={M} N={N} K={K} {sorted(options)}"


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
@pytest.mark.parametrize("row", ROWS)
def test_every_row_takes_zero_points_out_exactly(handle, row, out_dtype):
    for seed, (M, N, K) in enumerate([(1, 256, 512), (17, 136, 1040), (333, 1000, 784)]):
        a, b = operands(M, N, K, seed)
        za = torch.randint(-128, 128, (M, 1), dtype=torch.int32, device="cuda")
        zb = torch.randint(-128, 128, (1, N), dtype=torch.int8, device="cuda")
        options = {} if out_dtype == torch.int32 else scales(M, N, "vector")
        for zero_points in ({"a_zero_point": za}, {"b_zero_point": zb}, {"a_zero_point": za[:1], "b_zero_point": zb}):
            expected = reference.scaled_mm(a, b, options.get("a_scale"), options.get("b_scale"), out_dtype=out_dtype, **zero_points)
            out = run(handle, row, a, b, out_dtype, **options, **zero_points)
            assert torch.equal(out, expected), f"{row} {out_dtype} M={M} N={N} K={K} {sorted(zero_points)}"


@pytest.mark.parametrize("row", ROWS)
def test_every_row_sums_the_most_negative_products_without_saturating(handle, row):
    K = 131056  # the largest multiple of 16 below the bound: the sum is 16384 short of 2^31
    a = torch.full((3, K), -128, dtype=torch.int8, device="cuda")
    b = torch.full((16, K), -128, dtype=torch.int8, device="cuda").t()
    assert (run(handle, row, a, b, torch.int32) == K * 16384).all()
    assert (run(handle, row, a, torch.full((16, K), 127, dtype=torch.int8, device="cuda").t(), torch.int32) == -K * 16256).all()


@pytest.mark.parametrize("row", ROWS)
def test_every_row_waits_for_what_the_preceding_kernel_writes_though_constant_weights_come_early(handle, row):
    M, N, K, rounds = 40, 2048, 2048, 12
    x = torch.randint(-128, 128, (rounds, M, K), dtype=torch.int8, device="cuda")
    scale, bias = torch.rand(rounds, M, 1, device="cuda"), torch.randn(rounds, N, device="cuda")
    weight = sm.prepare_weight(torch.randint(-128, 128, (N, K), dtype=torch.int8, device="cuda").t())
    b_scale = torch.rand(N, device="cuda")
    inputs = {"a": x[0].clone(), "b": weight, "a_scale": scale[0].clone(), "b_scale": b_scale, "bias": bias[0].clone()}
    out = torch.full((rounds, 2, M, N), float("nan"), dtype=torch.bfloat16, device="cuda")
    with sm.create_descriptor(handle, out=out[0, 0], kernel=row, **inputs) as desc:
        desc.calculate(out[0, 0], **inputs)  # loads what is loaded lazily
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(rounds):
                inputs["a"].copy_(x[i])
                inputs["a_scale"].copy_(scale[i])
                inputs["bias"].copy_(bias[i])
                for j in range(2):  # the second follows a kernel of ours, which lets it start early
                    desc.calculate(out[i, j], **inputs)
        for _ in range(5):
            out.fill_(float("nan"))
            graph.replay()
        for i in range(rounds):
            expected = reference.scaled_mm(x[i], weight.b, scale[i], b_scale, bias[i])
            assert torch.equal(out[i, 0], expected) and torch.equal(out[i, 1], expected), f"{row}, round {i}"


@pytest.mark.parametrize("weights", ["tensor", "prepared"])
@pytest.mark.parametrize("row", ROWS)
def test_every_row_honours_padded_rows_and_runs_again_in_a_graph(handle, row, weights):
    M, N, K = 100, 264, 1008
    a = torch.randint(-128, 128, (M, K + 48), dtype=torch.int8, device="cuda")[:, 16 : 16 + K]
    b = torch.randint(-128, 128, (N, K + 16), dtype=torch.int8, device="cuda")[:, :K].t()
    out = torch.full((M, N + 24), float("nan"), dtype=torch.bfloat16, device="cuda")[:, 8 : 8 + N]
    options = scales(M, N, "vector")
    weight = sm.prepare_weight(b) if weights == "prepared" else b
    with sm.create_descriptor(handle, out=out, a=a, b=weight, kernel=row, **options) as desc:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):  # back to back: programmatic dependent launch lets them overlap
                desc.calculate(out, a, weight, **options)
        for _ in range(2):
            a.copy_(torch.randint(-128, 128, (M, K), dtype=torch.int8, device="cuda"))
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, reference.scaled_mm(a, b, **options)), row
