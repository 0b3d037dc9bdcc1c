"""Fits times of sm90's GGUF kernel configs to products that were timed on an H200: `python tests/autotune/fit_gguf.py`.

Rounded weights (mode w16a16), float16 activations and outputs. Prints losses, the time of the chosen kernel config over the least measured one: of
times fitted to the other weights, for each weight of q4_0; of times fitted to all of q4_0, and of the table's buckets, on the same products of
q4_0 and q8_0. Then the loss of the buckets on random products that were not timed, by these times; then the `times` for the table. Not run by pytest;
test_autotune_fit.py checks the measured figures.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from scaled_mm.autotune.fit import Choice, fit, judge
from scaled_mm.autotune.model import Product
from scaled_mm.kernels.gpu import facts
from scaled_mm.measure.stats import geometric_mean
from scaled_mm.tables import TileTable, load_table

DATA = Path(__file__).parents[1] / "tables" / "data"
FILES = ("h200_gguf.json", "h200_gguf_tiles.json")  # time_gguf.py says what they have
H200 = facts("NVIDIA H200", "sm90", 132)
TABLE = load_table("sm90").gguf
FEWEST = 17  # tokens; below, mma.sync multiplies and weights do not round
Measured = dict[Product, dict[str, float]]


def read(fmt: str = "q4_0") -> Measured:
    """Microseconds by product (M tokens, N rows of the weight, K) and kernel config. Of a product in both files, those of the second."""
    found: Measured = {}
    for file in FILES:
        for case in json.loads((DATA / file).read_text())["cases"]:
            if case["M"] >= FEWEST and fmt in case:
                rounding = {name: us for name, us in case[fmt].items() if TABLE.row(name).tile.m >= 32}
                found[case["M"], case["N"], case["K"]] = rounding
    return found


def weights(measured: Measured) -> list[tuple[int, int]]:
    """(N, K)."""
    return sorted({product[1:3] for product in measured})


def with_times(measured: Measured) -> TileTable:
    return TABLE.model_copy(update={"times": fit(TABLE, measured, H200)})


def held_out(measured: Measured, weight: tuple[int, int]) -> Choice:
    """The choice on the products of one weight by times that were fitted to all others."""
    apart = {own: {product: us for product, us in measured.items() if (product[1:3] == weight) == own} for own in (True, False)}
    found = judge(with_times(apart[False]), apart[True], H200)
    assert found is not None
    return found


def chosen_by_buckets(measured: Measured) -> Measured:
    """The products of which several kernel configs were timed, the one of the table's bucket among them. Earlier tables had fewer tiles."""
    return {product: us for product, us in measured.items() if len(us) > 1 and TABLE.select(*product, mode="w16a16").row.name in us}


def of_buckets(measured: Measured) -> list[float]:
    """The losses of the table's buckets, on products as `chosen_by_buckets` gives them."""
    return [us[TABLE.select(*product, mode="w16a16").row.name] / min(us.values()) for product, us in measured.items()]


def predicted_losses(table: TileTable, tokens: tuple[int, int], sizes: tuple[int, int]) -> list[float]:
    """The predicted time of the buckets' choice over the least predicted one, of 1000 random products that were not timed."""
    dice, losses = random.Random(61), []
    for _ in range(1000):
        product = (dice.randint(*tokens), dice.randrange(*sizes, 8), dice.randrange(*sizes, 32))
        us = {row.name: us for us, row in table.fastest(*product)}
        losses.append(us[table.select(*product, mode="w16a16").row.name] / min(us.values()))
    return losses


def main() -> None:
    measured = read()
    for weight in weights(measured):
        print(f"fitted to the others, on {weight}:", held_out(measured, weight))
    table = with_times(measured)
    for fmt in ("q4_0", "q8_0"):
        same = chosen_by_buckets(read(fmt))
        losses = of_buckets(same)
        print(f"fitted to all of q4_0, on {fmt}:", judge(table, same, H200))
        print(f"buckets, on the same {len(losses)} products: {geometric_mean(losses):.4f} in the mean, {max(losses):.3f} at worst")
    for sizes in ((1024, 16384), (256, 3000)):
        for tokens in ((17, 64), (65, 256), (257, 1024), (1025, 4096)):
            losses = predicted_losses(table, tokens, sizes)
            print(f"by these times, the buckets, N and K in {sizes}, tokens in {tokens}: {geometric_mean(losses):.3f}, {max(losses):.2f} at worst")
    for name, times in table.times.items():
        print(f"  {name}: {{{', '.join(f'{key}: {value}' for key, value in times.model_dump(exclude_defaults=True).items())}}}")


if __name__ == "__main__":
    main()
