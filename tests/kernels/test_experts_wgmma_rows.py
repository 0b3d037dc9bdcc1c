"""wgmma kernels for products of experts (csrc/int8/grouped/wgmma.cuh), also of sizes that no table has: the bits of the reference."""

from __future__ import annotations

import dataclasses

import pytest
import test_grouped_block_scaled_rows as block_rows
import test_grouped_rows as rows
import torch
from forced import SUFFIXES
from operands.grouped_block_scaled_cases import OUT_DTYPES, ExpertsCase
from operands.grouped_cases import grouped, random_offsets

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.core import binding
from scaled_mm.jit import library
from scaled_mm.kernels.registry import family_of
from scaled_mm.tables import KernelRow, load_table

TABLE = load_table("sm90")
# (tile of the MMA and K of a stage, stages, swap_ab): rings that wrap around and rings that do not, stages of several blocks of K, one and two
# warpgroups, with and without swap_ab.
SIZES = [
    ((64, 8, 128), 8, True),
    ((64, 16, 128), 2, True),
    ((64, 32, 256), 4, True),
    ((64, 64, 128), 6, True),
    ((128, 16, 512), 2, True),
    ((64, 64, 128), 4, False),
    ((64, 64, 256), 3, False),
    ((128, 64, 256), 4, False),
    ((128, 128, 128), 6, False),
]


def made_rows(section: str) -> dict[str, KernelRow]:
    found = {}
    for tile, stages, swap in SIZES:
        row = KernelRow.model_validate(dict(name="r", family="wgmma", section=section, tile=list(tile), stages=stages, swap_ab=swap))
        name = family_of(row).config_name(row)
        found[name] = row.model_copy(update={"name": name})
    return found


GROUPED, BLOCK_SCALED = made_rows("grouped"), made_rows("grouped_block_scaled")


@pytest.fixture(scope="module")
def handle():
    handle = sm.Handle("cuda:0")
    if handle.arch != "sm90":
        pytest.skip(f"these kernels need compute capability 9.0, this GPU is {handle.arch}")
    merged, names = TABLE, []
    for section, made in (("grouped", GROUPED), ("grouped_block_scaled", BLOCK_SCALED)):
        own = getattr(TABLE, section)
        known = {row.name for row in own.rows}
        extra = tuple(row for row in made.values() if row.name not in known)
        merged = merged.model_copy(update={section: own.model_copy(update={"rows": (*own.rows, *extra)})})
        names += [(row.name, suffix) for row in extra for suffix in SUFFIXES.values() if suffix in family_of(row).built_for]
    binding.register_table(merged)
    for path in library.build_kernels(merged, names).values():
        binding.call("scaledMMLoadKernels", str(path).encode())
    yield handle
    binding.register_table(TABLE)


@pytest.mark.gpu
@pytest.mark.parametrize("row", GROUPED)
def test_every_kernel_config_has_the_bits_of_the_reference(handle, row):
    for out_dtype in SUFFIXES:
        for index, what in enumerate(rows.ALIGNED):
            case, expected, padding = rows.made(True, index, out_dtype)
            out = rows.run(handle, row, case, padding)
            assert reference.same_bits(out, expected), f"{row} {out_dtype} {what}: {reference.describe_difference(out, expected)}"


@pytest.mark.gpu
@pytest.mark.parametrize("row", BLOCK_SCALED)
def test_every_kernel_config_with_scales_of_blocks_has_the_bits_of_the_reference(handle, row):
    for case in block_rows.ALIGNED:
        for out_dtype in OUT_DTYPES:
            case = dataclasses.replace(case, out_dtype=out_dtype)
            out, expected = block_rows.run(handle, row, case), block_rows.made(case)[1]
            assert reference.same_bits(out, expected), f"{row} {case}: {reference.describe_difference(out, expected)}"


@pytest.mark.gpu
@pytest.mark.parametrize("row", [*GROUPED, *BLOCK_SCALED])
def test_every_kernel_config_sums_the_largest_values_exactly(handle, row):
    if row in GROUPED:
        K = 131056  # the largest multiple of 16 below the bound
        a, weight = torch.full((3, K), -128, dtype=torch.int8, device="cuda"), torch.full((2, 16, K), -128, dtype=torch.int8, device="cuda")
        offsets = torch.tensor([2, 3], dtype=torch.int32, device="cuda")
        case = rows.Grouped(a, weight.transpose(1, 2), None, None, offsets, None, torch.int32)
        assert (rows.run(handle, row, case, 0) == K * 16384).all()
        return
    for values in ("minimum", "extremes"):
        case = ExpertsCase(130, 3, 1024, 136, torch.float32, pad=16, values=values)
        assert reference.same_bits(block_rows.run(handle, row, case), block_rows.made(case)[1])


@pytest.mark.gpu
@pytest.mark.parametrize("row", [*GROUPED, *BLOCK_SCALED])
def test_every_kernel_config_follows_offsets_that_change_between_replays_of_a_graph(handle, row):
    generator = torch.Generator().manual_seed(0)
    if row in GROUPED:
        case = grouped(500, 20, 128, 136, bias="float32", device="cuda:0")
        inputs, out, create, expected = case.defined_by, case.poisoned(), sm.create_grouped_descriptor, reference.grouped_scaled_mm
    else:
        case = ExpertsCase(500, 20, 256, 136, bias="float32")
        inputs, out = case.make("cuda:0"), case.poisoned("cuda:0")
        create, expected = sm.create_grouped_block_scaled_descriptor, reference.grouped_block_scaled_mm
    with create(handle, out=out, **inputs, kernel=row) as desc:
        desc.calculate(out, **inputs)  # loads what is loaded lazily
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):  # back to back: a kernel starts before the one before it has ended
                desc.calculate(out, **inputs)
        for kind in ("random", "one", "short", "wild", "random"):
            inputs["expert_offsets"].copy_(random_offsets(500, 20, generator, kind))
            inputs["a"].copy_(torch.randint(-128, 128, inputs["a"].shape, dtype=torch.int8, device="cuda"))
            out.fill_(float("nan"))
            graph.replay()
            on_cpu = {name: None if t is None else t.cpu() for name, t in inputs.items()}
            assert reference.same_bits(out.cpu(), expected(**on_cpu)), f"{row} {kind}"


@pytest.mark.parametrize("section", ["grouped", "grouped_block_scaled"])
def test_rules_of_the_family(section):
    from scaled_mm.kernels.registry import config_findings

    def findings(**changed) -> set[str]:
        fields = dict(name="r", family="wgmma", section=section, tile=[64, 16, 128], stages=4, swap_ab=True)
        return {field for field, _ in config_findings(KernelRow.model_validate({**fields, **changed}), "sm90")}

    assert findings() == set()
    assert findings(tile=[32, 16, 128]) == findings(tile=[64, 256, 128]) == findings(tile=[64, 16, 64]) == {"tile"}
    assert findings(stages=1) == findings(tile=[128, 128, 128], stages=8, swap_ab=False) == {"stages"}
    assert findings(split_k=2) == {"split_k"} and findings(swizzle=4) == {"swizzle"}
    row = KernelRow.model_validate(dict(name="r", family="wgmma", section=section, tile=[64, 16, 128], stages=4, swap_ab=True))
    assert [field for field, _ in config_findings(row, "sm80")] == ["family"]
    assert family_of(row).config_name(row) == f"{section}_wgmma_64x16x128_s4_swap"
