"""Rotation: calls go through sets of weights and outputs that together exceed the cache, so that weights come from memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from scaled_mm.measure.device import last_level_cache_bytes
from scaled_mm.measure.shapes import Case

CACHE_MULTIPLE = 3  # the rotated weights exceed the last-level cache this many times
MIN_ROTATION, MAX_ROTATION = 4, 64

# All copies of a layer's rotated weights stay below this.
DEVICE_LIMIT_BYTES = 8 << 30
CPU_LIMIT_BYTES = 2 << 30


def rotation(bytes_each: int, cache_bytes: int, limit_bytes: int) -> int:
    """How many weight sets of `bytes_each` bytes to rotate: beyond three caches, within `limit_bytes`, at least one."""
    wanted = math.ceil(CACHE_MULTIPLE * cache_bytes / bytes_each)
    wanted = min(max(wanted, MIN_ROTATION), MAX_ROTATION)
    return max(1, min(wanted, limit_bytes // bytes_each))


def is_cold(bytes_each: int, sets: int, cache_bytes: int) -> bool:
    """Whether a rotation over `sets` sets leaves nothing of a set in the cache by the time its turn comes again."""
    return bytes_each * sets >= CACHE_MULTIPLE * cache_bytes or bytes_each >= CACHE_MULTIPLE * cache_bytes


def output_slots(sets: int, bytes_each: int, cache_bytes: int) -> int:
    """How many outputs to rotate over `sets` weights: beyond three caches, at least two where there are two weights."""
    return min(sets, max(2, math.ceil(CACHE_MULTIPLE * cache_bytes / bytes_each)))


def memory_limit(device: torch.device) -> int:
    """Bytes that all copies of a layer's weights may take on `device`."""
    if device.type != "cuda":
        return CPU_LIMIT_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return min(DEVICE_LIMIT_BYTES, free // 3)


class RotatedWeights:
    """R sets of one layer's weights on `device`. sets: R; cold: whether the sets exceed the cache.

    bytes_each: what a product reads of one set. limit: bytes that R times `bytes_each` may take. sets: R, or None to let the cache decide.
    """

    def __init__(self, bytes_each: int, limit: int, device: torch.device, sets: int | None):
        cache = last_level_cache_bytes(device)
        self.device = device
        self.sets = sets or rotation(bytes_each, cache, limit)
        self.cold = is_cold(bytes_each, self.sets, cache)


class RotatedOutputs:
    """The outputs of a case, [M, N], that implementations share, and the calls that fill them.

    Outputs rotate as the weights do, but no further than the cache asks for; weight set 0 has an output of its own, so
    that after any number of rotated calls it still shows set 0's product.
    """

    def __init__(self, case: Case, weights: RotatedWeights, dtype: torch.dtype):
        self.case, self.weights, self.device = case, weights, weights.device
        cache = last_level_cache_bytes(self.device)
        self.slots = output_slots(weights.sets, case.M * case.N * dtype.itemsize, cache)
        self.outs = self.make_outputs(case.M, dtype)

    def make_outputs(self, rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """One [rows, N] tensor per output slot, for an implementation whose output differs from the shared ones."""
        return [torch.empty(rows, self.case.N, dtype=dtype, device=self.device) for _ in range(self.slots)]

    def slot(self, i: int) -> int:
        """The output slot of weight set i: slot 0 is set 0's alone."""
        return 0 if i == 0 or self.slots == 1 else 1 + (i - 1) % (self.slots - 1)

    def out(self, i: int) -> torch.Tensor:
        return self.outs[self.slot(i)]

    def poison(self) -> None:
        """NaN into every shared output: what an implementation leaves unwritten then shows."""
        for out in self.outs:
            out.fill_(math.nan)

    def calls(self, make: Callable[[int], Callable[[], torch.Tensor]]) -> list[Callable[[], torch.Tensor]]:
        """`make(i)` for every weight set i."""
        return [make(i) for i in range(self.weights.sets)]

    def keeping(self, function: Callable[[int], torch.Tensor], held: list | None = None) -> list[Callable[[], torch.Tensor]]:
        """Calls of a function that allocates its result: each result is held until its output slot comes round again.

        Without this the allocator would hand every call the same, cached, output, which the others do not get.
        held: where the results are held, one a slot.
        """
        held = [None] * self.slots if held is None else held

        def make(i: int) -> Callable[[], torch.Tensor]:
            slot = self.slot(i)

            def call() -> torch.Tensor:
                result = function(i)
                held[slot] = result
                return result

            return call

        return self.calls(make)
