"""The device code around the products of a mixture of experts, run by coroutines (emulated/gpu.h), against the torch operations on the CPU: no
GPU needed."""

from __future__ import annotations

import ctypes
import subprocess

import pytest
import torch
from core.test_core_block_scaled_emulated import cuda_include
from core.test_core_rowwise_blocks_emulated import HERE, code, difficult, ints, same, strides

from scaled_mm.jit import toolchain
from scaled_mm.jit.paths import csrc_dir, include_dir
from scaled_mm.rowwise import moe, router

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
KERNELS = {0: 1024, 1: 4096, 2: 8192, 3: 16384, 4: None, 5: 1024, 6: 8192, 7: None, 8: 2048}  # of moe_emulated.cpp: the longest row
WHOLE = {0, 1, 2, 3, 4, 8}  # need whole chunks


def pointers(*tensors: torch.Tensor | None):
    return (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    cxx, include = toolchain.find_cxx(), cuda_include()
    if cxx is None or include is None:
        pytest.skip("needs a C++ compiler and the headers of a CUDA toolkit")
    target = tmp_path_factory.mktemp("emulated") / "moe.so"
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-Wall", "-Wno-unknown-pragmas"]
    includes = [f"-I{HERE / 'emulated'}", f"-I{HERE}", f"-I{csrc_dir()}", f"-I{include_dir()}", f"-isystem{include}"]
    subprocess.run([str(cxx), *flags, *includes, str(HERE / "moe_emulated.cpp"), "-o", str(target)], check=True, timeout=600)
    return ctypes.CDLL(str(target))


def routing(tokens: int, choices: int, experts: int, seed: int, absent: float = 0.2, dtype=torch.int32) -> torch.Tensor:
    """Random ids, some of them -1, a few far out of range, and more of expert 0 than of any other."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, experts, (tokens, choices), generator=generator) * (torch.rand(tokens, choices, generator=generator) < 0.7)
    ids[torch.rand(tokens, choices, generator=generator) < absent] = -1
    if absent and ids.numel() > 9:
        ids.view(-1)[3], ids.view(-1)[7] = experts, -2147483648
    return ids.to(dtype)


def emulated_sort(library, ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None, multiprocessors: int):
    """(the results of the kernel, its thread blocks)"""
    order = torch.full((ids.numel(),), -7, dtype=torch.int32)
    ends, inverse = torch.full((experts,), -7, dtype=torch.int32), torch.full(ids.shape, -7, dtype=torch.int32)
    of_ids = [0 if size == 1 else stride for size, stride in zip(ids.shape, ids.stride())]
    of_map = 1 if expert_map is None else expert_map.stride(0)
    sizes = ints(*ids.shape, experts, -1 if expert_map is None else expert_map.shape[0], multiprocessors)
    wide = int(ids.dtype is torch.int64)
    blocks = library.emulate_sort(wide, sizes, pointers(ids, expert_map, order, ends, inverse), ints(*of_ids, of_map))
    return (order, ends, inverse), blocks


def expected_sort(ids, experts, expert_map):
    """As on a GPU: ids out of range are not here."""
    least, size = 0, experts if expert_map is None else expert_map.shape[0]
    here = torch.where((ids >= least) & (ids < size), ids, -1)
    kept = None if expert_map is None else torch.where((expert_map >= 0) & (expert_map < experts), expert_map, -1)
    return moe._sort(here, experts, kept)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("tokens, choices", [(0, 2), (1, 1), (1, 8), (5, 2), (33, 6), (256, 4), (1025, 2), (700, 8)])
@pytest.mark.parametrize("experts", [1, 8, 128, 1000])
def test_the_order_is_that_of_a_stable_sort(library, tokens, choices, experts, dtype):
    for seed, absent in enumerate((0.0, 0.2, 1.0)):
        ids = routing(tokens, choices, experts, seed, absent, dtype)
        got, blocks = emulated_sort(library, ids, experts, None, 1 if seed else 132)
        assert blocks == max(1, -(-ids.numel() // 256) if not seed else 1)
        assert all(map(same, got, expected_sort(ids, experts, None))), (seed, blocks)


def test_ids_in_any_layout_and_ids_beyond_32_bits(library):
    ids = routing(40, 6, 9, 5, dtype=torch.int64)
    ids[0, 0], ids[1, 1] = 2**32, -(2**33) + 3
    for view in (ids, ids.t().contiguous().t(), torch.stack((ids, ids), -1)[..., 0], ids[:1].expand(40, 6), ids[::3, 1:4]):
        got, _ = emulated_sort(library, view, 9, None, 132)
        assert all(map(same, got, expected_sort(view, 9, None)))


def test_a_map_renames_experts_and_leaves_out_those_elsewhere(library):
    generator = torch.Generator().manual_seed(0)
    expert_map = torch.full((64,), -1, dtype=torch.int32)
    expert_map[torch.randperm(64, generator=generator)[:16]] = torch.arange(16, dtype=torch.int32)
    expert_map[3], expert_map[5] = 16, -9  # out of range: not here
    spread = torch.stack((expert_map, expert_map + 1), -1).flatten()[::2]
    for tokens in (3, 300):
        ids = routing(tokens, 8, 64, 1)
        for each in (expert_map, spread):
            got, _ = emulated_sort(library, ids, 16, each, 4)
            assert all(map(same, got, expected_sort(ids, 16, each)))
    got, _ = emulated_sort(library, routing(9, 2, 4, 0), 4, expert_map[:0], 4)
    assert (got[0] == -1).all() and (got[1] == 0).all() and (got[2] == -1).all()


def named_rows(tokens: int, choices: int, seed: int) -> torch.Tensor:
    return moe._sort(torch.where((ids := routing(tokens, choices, 5, seed)) < 5, ids.clamp_min(-1), -1), 5, None)[2]


def emulated_quantize(library, x, rows, kernel: int, padding: int = 0):
    count, k = rows.numel(), x.shape[1]
    scales = -(-k // 128) if kernel < 0 else 1
    q = torch.full((count, k + padding), 77, dtype=torch.int8)
    scale = torch.full((count, scales), -7.0)
    view = q[:, :k]
    sizes = ints(x.shape[0], rows.shape[1], k, count)
    whole = library.emulate_quantize(code(x.dtype), kernel, sizes, pointers(x, rows, view, scale), strides(x, view, scale))
    assert (q[:, k:] == 77).all(), "wrote beside its rows"
    return whole, view, scale


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kernel", [-1, *KERNELS])
def test_every_quantizer_writes_the_rows_of_its_tokens(library, kernel, dtype):
    longest = 300 if kernel < 0 else KERNELS[kernel] or 20000
    cases = [(1, 1, longest), (3, 2, longest - 8), (2, 3, longest - 3), (5, 8, 64), (3, 0, 32), (2, 2, 1), (2, 41, 24)]
    for seed, (tokens, choices, k) in enumerate(cases):
        x = torch.randn(tokens, k, generator=torch.Generator().manual_seed(seed)).to(dtype)
        if k > 1 and seed == 1:
            x[0, 1], x[1, 0], x[2] = float("nan"), float("inf"), 0
        rows = named_rows(tokens, choices, seed)
        for padding in (0, 8, 3):
            whole, q, scale = emulated_quantize(library, x, rows, kernel, padding)
            is_whole = k % 8 == 0 and (padding != 3 or rows.numel() <= 1)
            assert (whole == -1) is (kernel in WHOLE and not is_whole)
            if whole == -1:
                continue
            named = rows[rows >= 0].long()
            for got, expected in zip((q, scale), moe._quantize(x, rows, kernel < 0)):
                assert same(got[named], expected[named]), (tokens, choices, k, padding)
                others = torch.ones(len(got), dtype=torch.bool).index_fill_(0, named, False)
                assert (got[others] == (77 if got.dtype is torch.int8 else -7)).all(), "wrote a row that is not named"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_weighted_sum_is_in_the_order_of_the_choices(library, dtype):
    cases = [(1, 1, 8), (7, 2, 64), (3, 8, 1024), (2, 6, 1031), (5, 5, 2056), (3, 0, 16), (4, 3, 1), (2, 70, 40)]
    for seed, (tokens, choices, n) in enumerate(cases):
        generator = torch.Generator().manual_seed(seed)
        rows = named_rows(tokens, choices, seed)
        y = torch.randn(rows.numel(), n, generator=generator).to(dtype)
        weights = torch.rand(tokens, choices, generator=generator).to(FLOATS[seed % 3])
        for padding in (0, 8, 3):
            padded = torch.full((tokens, n + padding), 77.0, dtype=dtype)
            out, wide = padded[:, :n], torch.cat((weights, weights), 1)[:, :choices]
            sizes = ints(tokens, choices, n, rows.numel())
            library.emulate_combine(code(dtype), code(weights.dtype), sizes, pointers(y, wide, rows, out), strides(y, wide, out))
            assert same(out, moe._combine(y, weights, rows)), (tokens, choices, n, padding)
            assert (padded[:, n:] == 77).all(), "wrote beside its rows"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_router_selects_and_weighs_as_defined(library, dtype):
    """Every kernel, whole and partial lanes, strides, ties, NaN and infinities."""
    for rows, experts, choices, held in (
        *[(5, 1, 1, 2), (9, 8, 2, 2), (3, 33, 4, 2), (2, 64, 32, 2), (5, 65, 6, 4), (4, 128, 8, 4), (3, 129, 1, 8), (2, 256, 8, 8)],
        *[(3, 300, 32, 16), (2, 512, 10, 16), (2, 513, 8, 32), (2, 1000, 3, 32), (1, 1024, 32, 32), (0, 8, 2, 2)],
    ):
        plain = torch.randn(rows, experts, generator=torch.Generator().manual_seed(experts)).to(dtype)
        for x in (plain, (plain * 2).round() / 2, difficult((rows, experts), dtype, experts)):
            spread = torch.stack((x, torch.full_like(x, 99)), -1).flatten(-2)[:, ::2]
            for view, renormalize, padding in (
                (x, 0, 0),
                (x, 1, 3),
                (x.t().contiguous().t(), 1, 0),
                (spread, 0, 1),
                (x[:1].expand(rows, experts), 1, 0),
            ):
                memory = torch.full((rows, choices + padding), 77.0), torch.full((rows, choices + padding), 77, dtype=torch.int32)
                got = tuple(t[:, :choices] for t in memory)
                sizes = ints(rows, experts, choices)
                assert library.emulate_router(code(dtype), renormalize, sizes, pointers(view, *got), strides(view, *got)) == held
                assert all(map(same, got, router._topk_softmax(view, choices, bool(renormalize)))), (rows, experts, choices)
                assert all((t[:, choices:] == 77).all() for t in memory), "wrote beside its rows"
