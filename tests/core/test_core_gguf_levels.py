"""The device code that writes a weight's tiles and reads levels from them, run by a host (emulated/gpu.h): no GPU needed."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from test_core_block_scaled_emulated import cuda_include

from scaled_mm.gguf import layout, reference, tiles
from scaled_mm.gguf_formats import FORMATS, WEIGHT_FORMATS
from scaled_mm.jit import toolchain
from scaled_mm.jit.paths import csrc_dir, include_dir

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    cxx, include = toolchain.find_cxx(), cuda_include()
    if cxx is None or include is None:
        pytest.skip("needs a C++ compiler and the headers of a CUDA toolkit")
    library = tmp_path_factory.mktemp("emulated") / "levels.so"
    includes = [f"-I{HERE / 'emulated'}", f"-I{HERE}", f"-I{csrc_dir()}", f"-I{include_dir()}", f"-isystem{include}"]
    command = [
        str(cxx),
        "-std=c++17",
        "-O1",
        "-ffp-contract=off",
        "-fPIC",
        "-shared",
        "-Wall",
        "-Wno-unknown-pragmas",
        "-D__CUDA_ARCH_LIST__=900",
        *includes,
        str(HERE / "gguf_levels_emulated.cpp"),
        "-o",
        str(library),
    ]
    subprocess.run(command, check=True, timeout=600)
    return ctypes.CDLL(str(library))


def every_level(fmt: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks, and their levels less that of 0, int32 [M, 256]: a tile for each level, so that each element has every one, beside any others."""
    description = FORMATS[fmt]
    count = 1 << description.bits
    first = torch.randint(0, count, (1, 64, 8, 32), generator=torch.Generator().manual_seed(description.bits))
    levels = ((first + torch.arange(count).view(-1, 1, 1, 1)) % count).to(torch.uint8).flatten(0, 1)
    levels = levels.view(torch.int8) if description.signed else levels
    d = torch.arange(levels.shape[0] * 8, dtype=torch.int16).view(torch.float16).view(-1, 8)
    second = d.flip(0) if description.second else None
    q = torch.empty((*d.shape, description.block_bytes), dtype=torch.uint8)
    layout.put_together(layout.Parts(d, second, *layout.pack_levels(levels, description)), description, q)
    return q, levels.flatten(1).int() - description.zero


@pytest.mark.parametrize("number", ["half", "bfloat16"])
@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
def test_every_level_at_every_place_of_a_tile_becomes_its_number_exactly(emulated, fmt, number):
    q, numbers = every_level(fmt)
    made = tiles.from_blocks(q, FORMATS[fmt])
    found = torch.full((64, 256), torch.nan)
    for i in range(made.shape[0]):
        getattr(emulated, f"{fmt.upper()}_{number}")(ctypes.c_void_p(made[i].data_ptr()), ctypes.c_void_p(found.data_ptr()))
        assert torch.equal(found, numbers[64 * i : 64 * i + 64].float())
        found.fill_(torch.nan)


@pytest.mark.parametrize("m, blocks", [(64, 8), (1, 1), (63, 9), (130, 15)])
@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
def test_a_kernel_writes_the_tiles_that_packing_does(emulated, fmt, m, blocks):
    q = torch.randint(0, 256, (m, blocks, FORMATS[fmt].block_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(m))
    made = torch.full(tiles.shape(m, blocks, FORMATS[fmt]), 0xA5, dtype=torch.uint8)
    write = getattr(emulated, f"{fmt.upper()}_tiles")
    write(ctypes.c_void_p(q.data_ptr()), ctypes.c_int64(m), ctypes.c_int64(blocks), ctypes.c_void_p(made.data_ptr()))
    packed = tiles.from_blocks(q, FORMATS[fmt])
    assert torch.equal(made[..., :-128], packed[..., :-128])
    assert (made[..., -128:].view(torch.float16) == 1).all()  # only packed weights are rounded


def with_scales(q: torch.Tensor, d: torch.Tensor, m: torch.Tensor, fmt: str) -> torch.Tensor:
    """Blocks of the same levels with these float16 scales and, if the format has them, minima."""
    q = q.clone()
    q[..., :2] = d.unsqueeze(-1).view(torch.uint8)
    if FORMATS[fmt].second == "m":
        q[..., 2:4] = m.unsqueeze(-1).view(torch.uint8)
    return q


def scales_of(rows: str) -> tuple[torch.Tensor, torch.Tensor]:
    """float16 d, m [64, 8]. One block in eight is far below the others of its row."""
    generator = torch.Generator().manual_seed(7)
    of_rows = torch.logspace(-24, 16.5, 64, 2)[:, None]
    d, m = (torch.randn(64, 8, generator=generator).clamp(-1, 1) * of_rows * 2.0 ** -(12 * (torch.arange(8) == 5)) for _ in range(2))
    d, m = {
        "like": (d, m),
        "minima": (d, m * 2**15),
        "scales": (d, m / 2**15),
        "small": (d / 2**25, m / 2**20),
        "no_d": (d * 0, m),
        "zeros": (d * 0, m * 0),
    }[rows]
    return d.clamp(-65504, 65504).half(), m.clamp(-65504, 65504).half()


@pytest.mark.parametrize("number, dtype", [("half", torch.float16), ("bfloat16", torch.bfloat16)])
@pytest.mark.parametrize("rows", ["like", "minima", "scales", "small", "no_d", "zeros"])
@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
def test_rounded_values_are_those_of_the_formula_and_as_close_as_the_documentation_says(emulated, fmt, rows, number, dtype):
    """Rows from the smallest scales to the largest."""
    d, m = scales_of(rows)
    q = with_scales(every_level(fmt)[0][:64], d, m, fmt)
    wanted, exact = reference.rounded(q, fmt, dtype), reference.dequantize(q, fmt)
    tile, found = tiles.from_blocks(q, FORMATS[fmt]), torch.full((64, 256), torch.nan)
    getattr(emulated, f"{fmt.upper()}_rounded_{number}")(ctypes.c_void_p(tile.data_ptr()), ctypes.c_void_p(found.data_ptr()))
    assert wanted.isfinite().all() and torch.equal(found, wanted.float())
    minima = FORMATS[fmt].second == "m"
    largest_d, largest_m = (one.double().abs().amax(1, keepdim=True) for one in (d, m * minima))
    lost = torch.maximum(2.0**-14 * largest_d, 2.0**-30 * largest_m)
    lost[(largest_d < 2**-8) & (largest_m < 2**7)] = 0
    if dtype is torch.float16 or minima:
        bound = exact.abs() * (2.0**-11 if dtype is torch.float16 else 2.0**-8 + 2.0**-11) + lost
        assert (lost > 0).any() == (rows in ("like", "minima", "scales") or (rows == "no_d" and minima))
    else:  # d rounds, then the value; no value is too small
        bound = exact.abs() * 2.0**-7
    assert ((wanted - exact).abs() <= bound).all()


@pytest.mark.parametrize("number, dtype", [("half", torch.float16), ("bfloat16", torch.bfloat16)])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("fmt, field", [(fmt, field) for fmt, of in WEIGHT_FORMATS.items() for field in ("dm" if of.second == "m" else "d")])
def test_a_block_that_is_not_finite_does_not_change_the_rounding_of_others(emulated, fmt, field, bad, number, dtype):
    d, m = scales_of("like")
    {"d": d, "m": m}[field][:, 3] = bad
    q = with_scales(every_level(fmt)[0][:64], d, m, fmt)
    tile, found = tiles.from_blocks(q, FORMATS[fmt]), torch.full((64, 256), torch.nan)
    getattr(emulated, f"{fmt.upper()}_rounded_{number}")(ctypes.c_void_p(tile.data_ptr()), ctypes.c_void_p(found.data_ptr()))
    {"d": d, "m": m}[field][:, 3] = 0
    wanted = reference.rounded(with_scales(q, d, m, fmt), fmt, dtype).float()
    others = torch.arange(256) // 32 != 3
    assert torch.equal(found[:, others], wanted[:, others]) and not found[:, ~others].isfinite().any()


@pytest.mark.parametrize("fmt", [name for name, description in WEIGHT_FORMATS.items() if description.second == "m"])
def test_minima_and_levels_of_a_tile_are_those_of_the_middle_level(emulated, fmt):
    q, numbers = every_level(fmt)
    middle = 1 << (FORMATS[fmt].bits - 1)
    halves = torch.randn(64, 8, 2, generator=torch.Generator().manual_seed(5)).half()
    q[:64, :, :4] = halves.view(torch.uint8).view(64, 8, 4)  # d, m
    tile = tiles.from_blocks(q[:64], FORMATS[fmt])
    high, low = torch.full((64, 8), torch.nan), torch.full((64, 8), torch.nan)
    getattr(emulated, f"{fmt.upper()}_middles")(*(ctypes.c_void_p(x.data_ptr()) for x in (tile, high, low)))
    want = middle * halves[..., 0].double() + halves[..., 1].double()
    assert ((high.double() + low.double() - want).abs() <= want.abs() * 2.0**-21).all()
    assert not (high.view(torch.int32) & 0x1FFF).any() and not (low.view(torch.int32) & 0x1FFF).any()
    for name in ("centred", "centred_bfloat16"):
        found = torch.full((64, 256), torch.nan)
        getattr(emulated, f"{fmt.upper()}_{name}")(ctypes.c_void_p(tile.data_ptr()), ctypes.c_void_p(found.data_ptr()))
        assert torch.equal(found, numbers[:64].float() - middle)


def test_a_sum_becomes_two_numbers_of_tf32_that_keep_22_bits_of_it(emulated):
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(3)) * torch.logspace(-30, 30, 100_000)
    sums = torch.cat([values, torch.tensor([0.0, -0.0, 65504.0 * 32, 3.4028235e38, -3.4028235e38, torch.inf, -torch.inf, torch.nan])])
    parts = torch.empty(sums.shape[0], 2)
    emulated.two_tf32_of(ctypes.c_void_p(sums.data_ptr()), ctypes.c_int64(sums.shape[0]), ctypes.c_void_p(parts.data_ptr()))
    finite = parts[:-3]
    assert not (finite.view(torch.int32) & 0x1FFF).any() and finite.isfinite().all()
    assert (finite.prod(1) < 0).any() and (finite.prod(1) > 0).any()  # rounded, not cut: low parts have either sign
    lost = (finite.double().sum(1) - sums[:-3].double()).abs()
    assert (lost <= sums[:-3].double().abs() * 2.0**-22).all()
    assert parts[-3:-1].tolist() == [[torch.inf, 0.0], [-torch.inf, 0.0]] and parts[-1, 0].isnan() and parts[-1, 1] == 0
