"""How many thread blocks share the tiles of an output that remain after whole rounds. csrc/core/sharing.h computes the same; a test compares them."""

from __future__ import annotations

_INT_MAX = 2**31 - 1
# In tenths of a step, set by hand from measured times: adding the sums; having parts of two tiles, by whether a tile has more than 128 tokens.
_ADD, _SECOND = 20, {True: 100, False: 1}


def sharing_blocks(rest: int, steps: int, slots: int, most: int, tile_m: int) -> int:
    """The thread blocks that share `rest` tiles; 0: one more round of whole tiles takes less time.

    steps: of K, for each tile. slots: thread blocks that the GPU holds at once; more than rest. most: the largest average number of thread blocks per
    shared tile. tile_m: tokens per tile.
    """
    if rest <= 0 or rest > _INT_MAX // max(steps, 1):
        return 0
    best, least = 0, 10 * steps
    for blocks in (*(rest * parts for parts in range(2, min(most, slots // rest) + 1)), slots):
        if not rest < blocks <= rest * min(most, steps):
            continue
        cost = -(-10 * rest * steps // blocks) + (_SECOND[tile_m > 128] if blocks % rest else 0) + _ADD
        if cost < least:
            best, least = blocks, cost
    return best
