"""One run of every row of a tile table, for tools that watch the kernels: `python every_row.py [ARCH [PATTERN]]`.

ARCH: "" for the GPU's own. PATTERN: a regular expression; only kernel configs whose names match run.

Small products that end inside a tile on every side, all output dtypes, scales, bias, zero points. K is long enough that the first stages of shared
memory are loaded a second time, if the kernel config states how many there are. Inputs are made on the CPU and results are compared there, so that
almost only our kernels run on the GPU. Prints the number of products; exits 1 if one differs (of GGUF formats, whose sums are floats, by more than
2e-6 in the norm).
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator

import torch

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.gguf import reference as block_reference
from scaled_mm.gguf_formats import WEIGHT_FORMATS
from scaled_mm.jit import library
from scaled_mm.tables import load_table

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int32)


def operands(M: int, N: int, K: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(M + N + K)
    return {
        "a": torch.randint(-128, 128, (M, K), dtype=torch.int8, generator=generator),
        "b": torch.randint(-128, 128, (N, K), dtype=torch.int8, generator=generator).t(),
        "a_scale": torch.rand(M, 1, generator=generator) + 0.01,
        "b_scale": torch.rand(N, generator=generator) + 0.01,
        "bias": torch.randn(N, generator=generator),
        "a_zero_point": torch.randint(-128, 128, (M,), dtype=torch.int32, generator=generator),
        "b_zero_point": torch.randint(-128, 128, (N,), dtype=torch.int8, generator=generator),
    }


def long_k(row) -> int:
    """K that loads the first stages a second time, in each part of a split K, and ends inside a stage."""
    stages = row.stages if isinstance(row.stages, int) else 2
    return (stages + 1) * row.tile.k * row.split_k + 48


def options_of(out_dtype: torch.dtype) -> list[tuple[str, ...]]:
    if out_dtype == torch.int32:
        return [(), ("a_zero_point", "b_zero_point")]
    scales = ("a_scale", "b_scale")
    return [scales, (*scales, "bias"), (*scales, "bias", "a_zero_point", "b_zero_point")]


def run(
    handle: sm.Handle, row: str, out_dtype: torch.dtype, product: dict[str, torch.Tensor], names: tuple[str, ...], prepared: bool = False
) -> bool:
    device = {name: product[name].t().cuda().t() if name == "b" else product[name].cuda() for name in ("a", "b", *names)}
    if prepared:
        device["b"] = sm.prepare_weight(device["b"], device.pop("b_zero_point", None))
    out = torch.zeros(product["a"].shape[0], product["b"].shape[1], dtype=out_dtype).cuda()
    with sm.create_descriptor(handle, out=out, kernel=row, **device) as descriptor:
        workspace = torch.zeros(descriptor.workspace_size, dtype=torch.uint8).cuda() if descriptor.workspace_size else None
        descriptor.calculate(out, **device, workspace=workspace)
    torch.cuda.synchronize()
    given = {"a_scale": None, "b_scale": None, **{name: product[name] for name in names}}
    expected = reference.scaled_mm(product["a"], product["b"], out_dtype=out_dtype, **given)
    return reference.same_bits(out.cpu(), expected)


def run_block_scaled(handle: sm.Handle, row, out_dtype: torch.dtype) -> bool:
    M, N, K = row.tile.m + 3, row.tile.n + 24, long_k(row)
    generator = torch.Generator().manual_seed(M + N + K)
    product = {
        **{name: operands(M, N, K)[name] for name in ("a", "b", "bias")},
        "a_scale": torch.rand(M, -(-K // 128), generator=generator),
        "b_scale": torch.rand(-(-K // 128), -(-N // 128), generator=generator),
    }
    device = {name: tensor.t().cuda().t() if name == "b" else tensor.cuda() for name, tensor in product.items()}
    out = torch.zeros(M, N, dtype=out_dtype).cuda()
    with sm.create_block_scaled_descriptor(handle, out=out, kernel=row.name, **device) as descriptor:
        descriptor.calculate(out, **device)
    torch.cuda.synchronize()
    return reference.same_bits(out.cpu(), reference.block_scaled_mm(**product, out_dtype=out_dtype))


def run_block(handle: sm.Handle, row, fmt: str, packed: bool, kind: str, many_rows: int = 0) -> bool:
    """A GGUF row with a weight as blocks or tiles, and q8_1 or float16 activations, the latter also quantized on the way; or, rounded, float16 or
    float32 activations in mode w16a16. many_rows: of the weight; then K is short."""
    tokens, rows, k = row.tile.m + 3, row.tile.n + 24, long_k(row) // 32 * 32
    if many_rows:
        tokens, rows, k = row.tile.m - 3, many_rows, 2 * row.tile.k + 32
    generator = torch.Generator().manual_seed(tokens + rows)
    weight_q = sm.quantize_block(torch.randn(rows, k, generator=generator), fmt)
    x = torch.randn(tokens, k, generator=generator)
    x = x if kind == "rounded float32" else x.half()
    weight = sm.pack_block_weight(weight_q.cuda(), fmt) if packed else weight_q.cuda()
    activation = (sm.quantize_q8_1(x) if kind == "q8_1" else x).cuda()
    mode = "w16a16" if kind.startswith("rounded") else "w4a16" if kind == "float16" else "w4a8"
    out = torch.zeros(rows, tokens, device="cuda")
    planned = weight if packed else sm.TensorDesc((rows, k), fmt)
    with sm.create_block_descriptor(handle, out=out, weight=planned, activation=activation, mode=mode, kernel=row.name) as descriptor:
        workspace = torch.zeros(descriptor.workspace_size, dtype=torch.uint8, device="cuda") if descriptor.workspace_size else None
        descriptor.calculate(out, weight, activation, workspace=workspace)
    torch.cuda.synchronize()
    if mode == "w4a8":
        expected = block_reference.gemm_q8_1(weight_q, sm.quantize_q8_1(x), fmt)
    else:
        expected = block_reference.gemm(weight_q, x, fmt)
    return float((out.cpu().double() - expected).norm() / expected.norm()) <= (1e-3 if mode == "w16a16" else 2e-6)


def run_grouped(handle: sm.Handle, row, out_dtype: torch.dtype) -> bool:
    """Three experts, the second without tokens, and two tokens that are nobody's."""
    wide, high = (row.tile.m, row.tile.n) if row.swap_ab else (row.tile.n, row.tile.m)
    N, K, tokens = wide * row.cluster.m * row.cluster.n + 24, long_k(row), high + 8
    generator = torch.Generator().manual_seed(tokens + N + K)
    product = {
        "a": torch.randint(-128, 128, (tokens, K), dtype=torch.int8, generator=generator),
        "b": torch.randint(-128, 128, (3, N, K), dtype=torch.int8, generator=generator).transpose(1, 2),
        "expert_offsets": torch.tensor([high + 3, high + 3, tokens - 2], dtype=torch.int32),
        "a_scale": None,
        "b_scale": None,
        "bias": None,
        "a_zero_point": torch.randint(-128, 128, (tokens,), dtype=torch.int32, generator=generator),
        "b_zero_point": torch.randint(-128, 128, (3, N), dtype=torch.int8, generator=generator),
    }
    if out_dtype != torch.int32:
        product |= {
            "a_scale": torch.rand(tokens, 1, generator=generator),
            "b_scale": torch.rand(3, N, generator=generator),
            "bias": torch.randn(3, N, generator=generator),
        }
    device = {name: t if t is None else t.mT.cuda().mT if name == "b" else t.cuda() for name, t in product.items()}
    out = torch.ones(tokens, N, dtype=out_dtype).cuda()  # the product zeroes unassigned rows
    with sm.create_grouped_descriptor(handle, out=out, kernel=row.name, **device) as descriptor:
        workspace = torch.zeros(descriptor.workspace_size, dtype=torch.uint8).cuda() if descriptor.workspace_size else None
        descriptor.calculate(out, **device, workspace=workspace)
    torch.cuda.synchronize()
    return reference.same_bits(out.cpu(), reference.grouped_scaled_mm(**product, out_dtype=out_dtype))


def run_grouped_block_scaled(handle: sm.Handle, row, out_dtype: torch.dtype) -> bool:
    """Three experts, the second without tokens, and two tokens that are nobody's."""
    N, K, tokens = row.tile.n + 24, long_k(row), row.tile.m + 11
    blocks_k, generator = -(-K // 128), torch.Generator().manual_seed(tokens + N + K)
    product = {
        "a": torch.randint(-128, 128, (tokens, K), dtype=torch.int8, generator=generator),
        "b": torch.randint(-128, 128, (3, N, K), dtype=torch.int8, generator=generator).transpose(1, 2),
        "a_scale": torch.rand(tokens, blocks_k, generator=generator),
        "b_scale": torch.rand(3, blocks_k, -(-N // 128), generator=generator),
        "expert_offsets": torch.tensor([row.tile.m + 3, row.tile.m + 3, tokens - 2], dtype=torch.int32),
        "bias": torch.randn(3, N, generator=generator),
    }
    device = {name: t.mT.cuda().mT if name == "b" else t.cuda() for name, t in product.items()}
    out = torch.ones(tokens, N, dtype=out_dtype).cuda()  # the product zeroes unassigned rows
    with sm.create_grouped_block_scaled_descriptor(handle, out=out, kernel=row.name, **device) as descriptor:
        descriptor.calculate(out, **device)
    torch.cuda.synchronize()
    return reference.same_bits(out.cpu(), reference.grouped_block_scaled_mm(**product, out_dtype=out_dtype))


def run_batched(handle: sm.Handle, row: str, M: int, N: int, K: int, prepared: bool = False) -> bool:
    """Two products with zero points and biases of their own."""
    each = [operands(M + i, N, K) for i in range(2)]
    product = {name: torch.stack([one[name][:M] if name in ("a", "a_scale", "a_zero_point") else one[name] for one in each]) for name in each[0]}
    product["b"] = torch.stack([one["b"].t() for one in each]).mT
    for name in ("b_scale", "bias", "b_zero_point"):
        product[name] = product[name].unsqueeze(1)
    product["a_zero_point"] = product["a_zero_point"].unsqueeze(2)
    device = {name: t.mT.cuda().mT if name == "b" else t.cuda() for name, t in product.items()}
    if prepared:
        device["b"] = sm.prepare_weight(device["b"], device.pop("b_zero_point"))
    out = torch.zeros(2, M, N, dtype=torch.bfloat16).cuda()
    with sm.create_descriptor(handle, out=out, kernel=row, **device) as descriptor:
        workspace = torch.zeros(descriptor.workspace_size, dtype=torch.uint8).cuda()
        descriptor.calculate(out, **device, workspace=workspace)
    torch.cuda.synchronize()
    return reference.same_bits(out.cpu(), reference.scaled_mm(**product, out_dtype=torch.bfloat16))


def checks(handle: sm.Handle, table, wanted: re.Pattern[str]) -> Iterator[tuple[str, bool]]:
    """(what was run, whether it came out right)."""

    def named(rows):
        return [row for row in rows if wanted.search(row.name)]

    for row in named(table.rows):
        M = (row.tile.n if row.swap_ab else row.tile.m) + 3
        N, K = (row.tile.m if row.swap_ab else row.tile.n) * row.cluster.m * row.cluster.n + 24, long_k(row)
        product = operands(M, N, K)
        for out_dtype in DTYPES:
            for names in options_of(out_dtype):
                yield f"{row.name} {out_dtype} {names}", run(handle, row.name, out_dtype, product, names)
            if row.early_weights or row.family == "decode":
                yield f"{row.name} {out_dtype} prepared", run(handle, row.name, out_dtype, product, options_of(out_dtype)[-1], prepared=True)
        if row.family == "generic":  # it has a kernel for each of these M, and two of them for operands that are not aligned
            for M, K in itertools.product((5, 15, 31, 60), (row.tile.k * 9 + 48, row.tile.k * 9 + 41)):
                for out_dtype in DTYPES:
                    names = options_of(out_dtype)[-1]
                    yield f"{row.name} {out_dtype} M={M} K={K}", run(handle, row.name, out_dtype, operands(M, N, K), names)
                yield f"{row.name} batched M={M} K={K}", run_batched(handle, row.name, M, N, K)
        yield f"{row.name} batched", run_batched(handle, row.name, M, N, K)
        yield f"{row.name} batched, prepared", run_batched(handle, row.name, M, N, K, prepared=True)
    for row in named(table.grouped.rows):
        for out_dtype in DTYPES:
            yield f"{row.name} {out_dtype}", run_grouped(handle, row, out_dtype)
    for row in named(table.block_scaled.rows):
        for out_dtype in DTYPES[:3]:
            yield f"{row.name} {out_dtype}", run_block_scaled(handle, row, out_dtype)
    for row in named(table.grouped_block_scaled.rows):
        for out_dtype in DTYPES[:3]:
            yield f"{row.name} {out_dtype}", run_grouped_block_scaled(handle, row, out_dtype)
    for row in named(table.gguf.rows):
        kinds = ("q8_1", "float16", "quantized float16", "rounded float16", "rounded float32")
        for fmt, packed, kind in itertools.product(WEIGHT_FORMATS, (False, True), kinds):
            yield f"{row.name} {fmt} {'packed ' if packed else ''}{kind}", run_block(handle, row, fmt, packed, kind)
        if row.family == "gguf_wgmma_cluster":  # more tiles than clusters at a time: a cluster has several
            tiles = torch.cuda.get_device_properties(0).multi_processor_count + 8
            for fmt in WEIGHT_FORMATS:
                yield f"{row.name} {fmt} many rows", run_block(handle, row, fmt, True, "rounded float16", tiles * row.tile.n)


def main(arch: str | None = None, pattern: str = "") -> int:
    wanted = re.compile(pattern)
    handle = sm.Handle("cuda:0", arch=arch or None)
    table = load_table(handle.arch)
    if library.arch_library(table) is None:
        library.build_kernels(table, [name for name in library.kernel_names(table) if wanted.search(name[0])])
    products = wrong = 0
    for what, right in checks(handle, table, wanted):
        products += 1
        if not right:
            wrong += 1
            print(f"{what}: differs from the reference", file=sys.stderr)
    rows = sum(bool(wanted.search(row.name)) for row in table.all_rows)
    print(f"{products} products of {rows} rows of {handle.arch}, {wrong} wrong")
    return 1 if wrong or not products else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
