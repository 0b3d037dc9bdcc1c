"""How many thread blocks share the tiles of an output that remain after whole waves. csrc/core/sharing.h computes the same."""

from __future__ import annotations

_INT_MAX = 2**31 - 1
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
