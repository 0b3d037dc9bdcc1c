"""The sharing of tiles, which kernels and predicted times have in common: csrc/core/sharing.h against scaled_mm/kernels/sharing.py."""

from __future__ import annotations

import ctypes
import random
import subprocess

import pytest

from scaled_mm.jit import compile, toolchain
from scaled_mm.kernels.sharing import SHARING_CLUSTERS, cluster_blocks, sharing_blocks

SOURCE = """
#include "core/sharing.h"
extern "C" __attribute__((visibility("default"))) int64_t sharing_blocks(int64_t rest, int64_t steps, int64_t at_once, int64_t most, int64_t tile_m) {
  return scaled_mm::sharing_blocks(rest, steps, at_once, most, tile_m);
}
extern "C" __attribute__((visibility("default"))) int64_t cluster_blocks(int64_t tiles, int64_t steps, int64_t sms, int64_t resident, int64_t most) {
  const scaled_mm::ClusterBlocks found = scaled_mm::cluster_blocks(tiles, steps, int32_t(sms), int32_t(resident), int32_t(most));
  return found.waves * 16 + found.blocks;
}
"""


@pytest.fixture(scope="module")
def in_c(tmp_path_factory):
    if (cxx := toolchain.find_cxx()) is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("sharing")
    (folder / "sharing.cpp").write_text(SOURCE)
    subprocess.run([cxx, *compile.cxx_flags(), "-shared", str(folder / "sharing.cpp"), "-o", str(folder / "sharing.so")], check=True)
    library = ctypes.CDLL(str(folder / "sharing.so"))
    for function in (library.sharing_blocks, library.cluster_blocks):
        function.argtypes, function.restype = [ctypes.c_int64] * 5, ctypes.c_int64
    return library


def test_it_is_the_same_in_c_and_in_python(in_c):
    dice, shared = random.Random(3), 0
    for _ in range(50000):
        at_once = dice.choice((1, 66, 114, 132, 264))
        steps = dice.choice((dice.randrange(80), dice.randrange(2**24)))
        case = (dice.randrange(at_once), steps, at_once, dice.choice((1, 2, 16, 1024)), dice.choice((32, 128, 144, 256)))
        blocks = sharing_blocks(*case)
        assert in_c.sharing_blocks(*case) == blocks, case
        shared += blocks > 0
    assert shared > 10000


@pytest.mark.parametrize(
    "rest, steps, tile_m, blocks",
    [
        (0, 16, 128, 0),  # whole waves
        (66, 16, 128, 132),  # two thread blocks for each tile
        (120, 16, 128, 0),  # 12 of 132 thread blocks are idle: sharing costs more
        (60, 64, 128, 132),  # parts of two tiles cost little with tiles of up to 128 tokens
        (60, 64, 256, 120),  # and more than the twelve idle thread blocks with larger ones
        (1, 64, 128, 16),  # the most
        (1, 3, 128, 0),  # adding the sums takes longer than three steps
        (2, 2**30, 128, 0),  # more steps than a kernel counts
    ],
)
def test_tiles_are_shared_where_it_is_faster(rest, steps, tile_m, blocks):
    assert sharing_blocks(rest, steps, 132, 16, tile_m) == blocks


def test_the_clusters_are_the_same_in_c_and_in_python(in_c):
    dice, found = random.Random(4), set()
    for _ in range(20000):
        tiles, steps = dice.choice((dice.randrange(400), dice.randrange(2**31))), dice.choice((dice.randrange(60), dice.randrange(2**24)))
        case = (tiles, steps, dice.choice((1, 16, 78, 114, 132)), dice.choice((1, 2)), dice.choice(SHARING_CLUSTERS))
        blocks, waves = cluster_blocks(*case)
        assert in_c.cluster_blocks(*case) == waves * 16 + blocks, case
        found.add(blocks)
    assert found == set(SHARING_CLUSTERS)


@pytest.mark.parametrize(
    "tiles, steps, most, blocks, waves",
    [
        (64, 16, 8, 2, 1),  # 128 of 132 SMs
        (39, 24, 8, 3, 1),
        (27, 42, 8, 4, 1),
        (14, 16, 8, 8, 1),
        (8, 6, 8, 6, 1),  # eight would have as many steps
        (32, 16, 8, 3, 1),  # clusters of four use 116 SMs, which hold 29
        (32, 16, 2, 2, 1),
        (1000, 16, 8, 2, 16),
        (0, 16, 8, 2, 0),
    ],
)
def test_a_cluster_has_as_many_thread_blocks_as_take_least_time(tiles, steps, most, blocks, waves):
    assert cluster_blocks(tiles, steps, 132, 1, most) == (blocks, waves)
