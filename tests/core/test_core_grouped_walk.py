"""How a warp finds an expert's tiles from the offsets: the device's code, on 32 coroutines (warp.cpp), against plain Python."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from scaled_mm.jit import toolchain
from scaled_mm.jit.paths import csrc_dir

TILE_M = 16
HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    """walk(tokens, tiles_n, grid, offsets): (tiles by number, what each block found to be the end of the rows)."""
    cxx = toolchain.find_cxx()
    if cxx is None:
        pytest.skip("no C++ compiler here")
    program = tmp_path_factory.mktemp("warp") / "warp"
    command = [
        str(cxx),
        "-std=c++17",
        "-O1",
        "-Wall",
        "-Wno-unknown-pragmas",
        "-Werror",
        f"-I{csrc_dir()}",
        str(HERE / "warp.cpp"),
        "-o",
        str(program),
    ]
    subprocess.run(command, check=True, timeout=120)

    def walk(tokens: int, tiles_n: int, grid: int, offsets: list[int]):
        done = subprocess.run([program, *map(str, (tokens, tiles_n, grid, *offsets))], capture_output=True, text=True, timeout=120, check=True)
        lines = [line.split() for line in done.stdout.splitlines()]
        ends = [int(line[1]) for line in lines if line[0] == "end"]
        tiles = [tuple(map(int, line)) for line in lines if line[0] != "end"]
        assert len({tile[0] for tile in tiles}) == len(tiles) and len(ends) == grid
        return {number: rest for number, *rest in tiles}, ends

    return walk


def expected(tokens: int, tiles_n: int, offsets: list[int]):
    tiles, begin = [], 0
    for expert, offset in enumerate(offsets):
        end = max(begin, min(offset, tokens))
        count = -(-(end - begin) // TILE_M) * tiles_n
        tiles += [[expert, begin, end - begin, i] for i in range(count)]
        begin = end
    return dict(enumerate(tiles)), begin


CASES = [
    (0, 1, 2, [0, 0, 0]),
    (5, 2, 3, []),
    (40, 3, 4, [40]),
    (40, 3, 4, [0] * 200 + [40]),
    (40, 1, 1, [40] * 300),
    (100, 2, 5, [10, 5, -7, 50, 200, 60]),  # decreasing, negative, past the end
    (100, 2, 5, [2**31 - 1, -(2**31), 3]),
    (64, 1, 3, [16, 32, 48, 64]),
    (1000, 3, 132, [i // 2 for i in range(2000)]),
    (129, 1, 2, [1] * 127 + [2] + [129]),  # the edge of a window of 128 experts
]


@pytest.mark.parametrize("tokens, tiles_n, grid, offsets", CASES, ids=range(len(CASES)))
def test_every_tile_of_every_expert_is_found_by_one_block(walk, tokens, tiles_n, grid, offsets):
    tiles, end = expected(tokens, tiles_n, offsets)
    assert walk(tokens, tiles_n, grid, offsets) == (tiles, [end] * grid)


def test_random_offsets_in_and_out_of_order_are_walked_as_they_are_clamped(walk):
    pick = random.Random(0)
    for _ in range(25):
        tokens, experts = pick.choice([0, 1, 17, 300, 5000]), pick.choice([1, 2, 31, 32, 33, 127, 128, 129, 257, 700])
        offsets = [pick.randint(-5, tokens + 5) for _ in range(experts)]
        if pick.random() < 0.7:
            offsets.sort()
        tiles_n, grid = pick.choice([1, 2, 7]), pick.choice([1, 3, 40])
        tiles, end = expected(tokens, tiles_n, offsets)
        assert walk(tokens, tiles_n, grid, offsets) == (tiles, [end] * grid), (tokens, tiles_n, grid, offsets)
