"""How many thread blocks share tiles of an output: those that remain after whole waves, or each of them, in a cluster. csrc/core/sharing.h computes
the same."""

from __future__ import annotations

_INT_MAX = 2**31 - 1
# SMs of 132 that clusters of this many thread blocks can use: a cluster lies within one group of SMs, whose number is not always a multiple of the
# cluster's. Counted on H100s and H200s; GPUs of one name differ.
_USABLE = {3: 117, 4: 116, 6: 102, 8: 112}
_OF_SMS = 132
SHARING_CLUSTERS = (2, 3, 4, 6, 8)  # sizes of clusters that share the K of tiles
# In tenths of a step, set by hand: adding the sums; having parts of two tiles, by whether a tile has more than 128 tokens.
_ADD, _TWO_TILES = 20, {True: 100, False: 1}


def sharing_blocks(rest: int, steps: int, at_once: int, most: int, tile_m: int) -> int:
    """The thread blocks that share `rest` tiles. 0: do not share them: it is not faster than one more wave of whole tiles, or not possible.

    steps: of K, for each tile. at_once: thread blocks that the GPU holds at once; more than rest. most: the largest average number of thread blocks
    for a shared tile. tile_m: tokens per tile.
    """
    if rest <= 0 or rest > _INT_MAX // max(steps, 1):
        return 0
    best, least = 0, 10 * steps
    for blocks in (*(rest * parts for parts in range(2, min(most, at_once // rest) + 1)), at_once):
        if not rest < blocks <= rest * min(most, steps):
            continue
        cost = -(-10 * rest * steps // blocks) + (_TWO_TILES[tile_m > 128] if blocks % rest else 0) + _ADD
        if cost < least:
            best, least = blocks, cost
    return best


def usable_multiprocessors(cluster: int, multiprocessors: int) -> int:
    """The SMs that clusters of so many thread blocks can use."""
    return multiprocessors * _USABLE[cluster] // _OF_SMS if cluster in _USABLE else multiprocessors


def cluster_blocks(tiles: int, steps: int, multiprocessors: int, resident: int, most: int) -> tuple[int, int]:
    """(thread blocks of a cluster, which share the K of every tile; waves of clusters).

    steps: of K, for each tile. resident: thread blocks on an SM at a time. most: of a cluster, at least 2. The fewest among those with the least
    time, if the end of a tile takes as long as a step.
    """

    def waves(blocks: int) -> int:
        return -(-tiles // max(1, usable_multiprocessors(blocks, multiprocessors) * resident // blocks))

    blocks = min((blocks for blocks in SHARING_CLUSTERS if blocks <= most), key=lambda blocks: waves(blocks) * (-(-steps // blocks) + 1))
    return blocks, waves(blocks)
