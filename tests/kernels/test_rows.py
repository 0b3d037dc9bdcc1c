"""Every kernel config of sm90, forced by name: the bits of the reference."""

from __future__ import annotations

import pytest
import torch
from operands.pairs import pairs

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.tables import load_table

pytestmark = pytest.mark.gpu

ROWS = [row.name for row in load_table("sm90").rows]
OUT_DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int32]
# M around every tile edge, N and K that end inside a tile, and one of several waves.
SHAPES = [
    (1, 256, 512),
    (7, 128, 16),
    (16, 4096, 256),
    (17, 136, 1040),
    (64, 1024, 4096),
    (129, 392, 144),
    (333, 1000, 784),
    (1024, 2048, 1024),
    (8192, 512, 256),
]


def operands(M: int, N: int, K: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    a = torch.randint(-128, 128, (M, K), dtype=torch.int8, device="cuda", generator=generator)
    weight = torch.randint(-128, 128, (N, K), dtype=torch.int8, device="cuda", generator=generator)
    return a, weight.t()


def workspace_of(desc) -> torch.Tensor | None:
    return torch.empty(desc.workspace_size, dtype=torch.uint8, device="cuda") if desc.workspace_size else None


def calculate(handle, row, a, out_dtype, **inputs):
    """The product by one row into an output that is poisoned: an element that is not written cannot pass."""
    N = (inputs["b"].b if isinstance(inputs["b"], sm.PreparedWeight) else inputs["b"]).shape[1]
    out = torch.full((a.shape[0], N), -77777 if out_dtype == torch.int32 else float("nan"), dtype=out_dtype, device="cuda")
    with sm.create_descriptor(handle, out=out, a=a, kernel=row, **inputs) as desc:
        assert desc.kernel.row == row
        desc.calculate(out, a, workspace=workspace_of(desc), **inputs)
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


def zero_points(M: int, N: int, which: str | None) -> dict[str, torch.Tensor]:
    a = {"a_zero_point": torch.randint(-128, 128, (M, 1), dtype=torch.int32, device="cuda")}
    b = {"b_zero_point": torch.randint(-128, 128, (1, N), dtype=torch.int8, device="cuda")}
    return {None: {}, "a": a, "b": b, "one of a, and b": {"a_zero_point": a["a_zero_point"][:1], **b}, "a and b": {**a, **b}}[which]


def check(handle, row: str, shape: tuple[int, int, int], out_dtype: torch.dtype, points: str | None, **options) -> None:
    M, N, K = shape
    a, b = operands(M, N, K, seed=M + N + K)
    options |= zero_points(M, N, points)
    expected = reference.scaled_mm(a, b, out_dtype=out_dtype, **{"a_scale": None, "b_scale": None, **options})
    out = run(handle, row, a, b, out_dtype, **options)
    assert torch.equal(out, expected), f"{row} {out_dtype} M={M} N={N} K={K} {sorted(options)} {points}"


@pytest.mark.parametrize("row", ROWS)
def test_every_kernel_config_is_bit_equal_to_the_reference(handle, row):
    """Every pair of shape, dtype, scales, bias and zero points: scaled products, and raw sums."""
    points = (None, "a", "b", "one of a, and b")
    for case in pairs(shape=SHAPES, out_dtype=OUT_DTYPES[:3], scaling=("vector", "vector and bias", "scalar and float32 bias"), points=points):
        kind, _, bias = case.pop("scaling").partition(" and ")
        M, N, _ = case["shape"]
        options = scales(M, N, kind)
        if bias:
            options["bias"] = torch.randn(N, device="cuda").to(torch.float32 if "float32" in bias else case["out_dtype"])
        check(handle, row, **case, **options)
    for case in pairs(shape=SHAPES, points=points):
        check(handle, row, out_dtype=torch.int32, **case)


@pytest.mark.parametrize("row", ROWS)
def test_every_kernel_config_is_right_where_its_last_tiles_have_few_or_nearly_all_rows(handle, row):
    config = load_table("sm90").row(row)
    m, n = (config.tile.n, config.tile.m) if config.swap_ab else (config.tile.m, config.tile.n)
    clusters = config.cluster.n if config.swap_ab else config.cluster.m  # so that tiles are added that hold nothing
    for M in (1, m - 1, m + 1, m + 8, m + 9, 2 * m - 1, m * clusters + 1):
        for N in (n - 8, n + 8, 2 * n - 8):
            check(handle, row, (M, N, 272), torch.bfloat16, None, **scales(M, N, "vector"))


@pytest.mark.parametrize("row", ROWS)
def test_every_kernel_config_sums_the_most_negative_products_without_saturating(handle, row):
    K = 131056  # the largest multiple of 16 below the bound: the sum is 16384 short of 2^31
    a = torch.full((3, K), -128, dtype=torch.int8, device="cuda")
    b = torch.full((16, K), -128, dtype=torch.int8, device="cuda").t()
    assert (run(handle, row, a, b, torch.int32) == K * 16384).all()
    assert (run(handle, row, a, torch.full((16, K), 127, dtype=torch.int8, device="cuda").t(), torch.int32) == -K * 16256).all()


@pytest.mark.parametrize("row", ROWS)
def test_every_kernel_config_waits_for_what_the_preceding_kernel_writes_though_constant_weights_come_early(handle, row):
    # Each product reads what the one before it writes: only our own kernels let the next one start early. The int32 sums of the first
    # are the second's a, byte by byte; the second's first row and column are the third's bias and scale; the sums of the first are
    # also the fourth's b, which is an ordinary tensor, and the fifth writes over the first's sums, which the fourth still reads.
    M, N, K, rounds = 64, 512, 4096, 6
    x = torch.randint(-128, 128, (rounds, M, K), dtype=torch.int8, device="cuda")
    weight = sm.prepare_weight(torch.randint(-128, 128, (N, K), dtype=torch.int8, device="cuda").t())
    wide = sm.prepare_weight(torch.randint(-128, 128, (1024, 4 * N), dtype=torch.int8, device="cuda").t())
    half = torch.full((1,), 2.0**-20, device="cuda")
    ones = torch.ones(1024, device="cuda")
    a = x[0].clone()
    sums = torch.empty(M, N, dtype=torch.int32, device="cuda")
    scaled = torch.empty(M, 1024, device="cuda")
    third, fourth = torch.empty(M, 1024, dtype=torch.bfloat16, device="cuda"), torch.empty(M, M, device="cuda")
    as_a, as_b = sums.view(torch.int8), sums.view(torch.int8).t()  # [M, 4N]: 4N is the K of what follows
    then = dict(a=as_a, b=wide, a_scale=scaled[:, :1], b_scale=ones, bias=scaled[0])
    products = [
        (sums, dict(a=a, b=weight)),
        (scaled, dict(a=as_a, b=wide, a_scale=half, b_scale=half)),
        (third, then),
        (fourth, dict(a=as_a, b=as_b, a_scale=half, b_scale=half)),
        (sums, dict(a=a, b=weight)),
    ]

    def expected(x):
        first = reference.scaled_mm(x, weight.b, None, None, out_dtype=torch.int32)
        bytes_of = first.view(torch.int8)
        second = reference.scaled_mm(bytes_of, wide.b, half, half, out_dtype=torch.float32)
        return (
            first,
            second,
            reference.scaled_mm(bytes_of, wide.b, second[:, :1], ones, second[0]),
            reference.scaled_mm(bytes_of, bytes_of.t(), half, half, out_dtype=torch.float32),
            first,
        )

    plans = [sm.create_descriptor(handle, out=out, kernel=row, **inputs) for out, inputs in products]
    workspaces = [workspace_of(plan) for plan in plans]
    for plan, workspace, (out, inputs) in zip(plans, workspaces, products):
        plan.calculate(out, **inputs, workspace=workspace)  # loads what is loaded lazily
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for plan, workspace, (out, inputs) in zip(plans, workspaces, products):
            plan.calculate(out, **inputs, workspace=workspace)
    for i in range(rounds):
        a.copy_(x[i])
        for out in (sums, scaled, third, fourth):
            out.fill_(-1)
        graph.replay()
        for number, ((out, _), right) in enumerate(zip(products, expected(x[i]))):
            assert reference.same_bits(out, right), f"{row}, round {i}, product {number}: {reference.describe_difference(out, right)}"
    for plan in plans:
        plan.destroy()


@pytest.mark.parametrize("weights", ["tensor", "prepared"])
@pytest.mark.parametrize("row", ROWS)
def test_every_kernel_config_honours_padded_rows_and_runs_again_in_a_graph(handle, row, weights):
    M, N, K = 100, 264, 1008
    a = torch.randint(-128, 128, (M, K + 48), dtype=torch.int8, device="cuda")[:, 16 : 16 + K]
    b = torch.randint(-128, 128, (N, K + 16), dtype=torch.int8, device="cuda")[:, :K].t()
    out = torch.full((M, N + 24), float("nan"), dtype=torch.bfloat16, device="cuda")[:, 8 : 8 + N]
    options = scales(M, N, "vector")
    weight = sm.prepare_weight(b) if weights == "prepared" else b
    with sm.create_descriptor(handle, out=out, a=a, b=weight, kernel=row, **options) as desc:
        workspace, graph = workspace_of(desc), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):  # back to back: programmatic dependent launch lets them overlap
                desc.calculate(out, a, weight, **options, workspace=workspace)
        for _ in range(2):
            a.copy_(torch.randint(-128, 128, (M, K), dtype=torch.int8, device="cuda"))
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, reference.scaled_mm(a, b, **options)), row
