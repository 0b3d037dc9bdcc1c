"""Fits the `times` of sm90.yaml to random products that were timed on an H100: `python tests/autotune/fit_times.py`.

For each random seed, prints how well a fit to all other seeds chooses on it; then the block for the table, fitted to all.
Not run by pytest; test_autotune_fit.py does the first part.
"""

from __future__ import annotations

import json
from pathlib import Path

from scaled_mm.autotune.fit import Choice, fit, judge
from scaled_mm.autotune.model import Product
from scaled_mm.kernels.gpu import facts
from scaled_mm.tables import TileTable, load_table

RANDOM = (31, 32, 35, 37)  # seeds of random products
SEEDS = (*RANDOM, 36, 40, 41)  # the file says what the others are
DATA = Path(__file__).parents[1] / "tables" / "data" / "h100_random.json"
H100 = facts("NVIDIA H100 80GB HBM3", "sm90", 132)
Measured = dict[Product, dict[str, float]]


def read(*seeds: int) -> Measured:
    """Microseconds by product and kernel config."""
    cases = json.loads(DATA.read_text())["cases"]
    return {(case["M"], case["N"], case["K"]): case["us"] for case in cases if case["seed"] in seeds}


def held_out(table: TileTable, seed: int) -> Choice:
    """The choice on the products of one seed by times that were fitted to all others."""
    others = read(*(one for one in SEEDS if one != seed))
    found = judge(table.model_copy(update={"times": fit(table, others, H100)}), read(seed), H100)
    assert found is not None
    return found


def main() -> None:
    table = load_table("sm90")
    print("from the architecture's numbers:", judge(table.model_copy(update={"times": {}}), read(*SEEDS), H100))
    for seed in RANDOM:
        print(f"fitted to the others, on seed {seed}:", held_out(table, seed))
    for name, times in fit(table, read(*SEEDS), H100).items():
        print(f"  {name}: {{{', '.join(f'{key}: {value}' for key, value in times.model_dump(exclude_defaults=True).items())}}}")


if __name__ == "__main__":
    main()
