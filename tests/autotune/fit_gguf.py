"""Fits times of sm90's GGUF kernel configs to products that were timed on an H200: `python tests/autotune/fit_gguf.py`.

Rounded weights (mode w16a16), float16 activations and outputs. Prints the time of the chosen kernel config over the least measured one: on the
products of the fit, and on random products of another seed, by format and range of tokens. Then the `times` for the table. Not run by pytest;
test_autotune_fit.py checks those over all tokens.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from time_gguf import FEW_FORMATS, FITTED, FORMATS, H200, JUDGED, ROUNDING, TABLE

from scaled_mm.autotune.fit import fit, judge
from scaled_mm.autotune.model import Product
from scaled_mm.gguf_formats import WEIGHT_FORMATS
from scaled_mm.measure.stats import geometric_mean
from scaled_mm.tables import TileTable

DATA = Path(__file__).parents[1] / "tables" / "data"
FITTED_FILES, JUDGED_FILE = ("h200_gguf_random.json", "h200_gguf_few.json"), "h200_gguf_held_out.json"  # time_gguf.py says what they have
FEW, *RANGES = ((9, 16), (17, 64), (65, 256), (257, 1024), (1025, 4096))  # tokens; FEW: only weights of formats with minima round
Measured = dict[Product, dict[str, float]]
#: With q8_0 an SM has room for one of its thread blocks instead of two: its times are fitted to the geometric mean of q4_0 and q8_0.
ONE_BLOCK_WITH_Q8_0 = "gguf_wgmma_cluster_128x64_k4_x2"


def cases(judged: bool) -> list[dict]:
    """judged: the random products that no times are fitted to, instead of all others."""
    if judged:
        return json.loads((DATA / JUDGED_FILE).read_text())["cases"]
    many, few = (json.loads((DATA / file).read_text())["cases"] for file in FITTED_FILES)
    return [case for case in few if case["M"] <= FEW[1]] + many  # the others of few were timed with tiles of 16 and 32 tokens alone


def read(fmt: str = "q4_0", judged: bool = False) -> Measured:
    """Microseconds by product (M tokens, N rows of the weight, K) and kernel config. judged: see `cases`."""
    found: Measured = {}
    for case in cases(judged):
        if fmt in case:
            found[case["M"], case["N"], case["K"]] = {name: us for name, us in case[fmt].items() if TABLE.row(name) in ROUNDING}
    return found


def fitted() -> Measured:
    """What the table's times are fitted to: q4_0, but for one kernel config."""
    found, other = read("q4_0"), read("q8_0")
    for product, us in found.items():
        if ONE_BLOCK_WITH_Q8_0 in us:
            if ONE_BLOCK_WITH_Q8_0 in other.get(product, {}):
                us[ONE_BLOCK_WITH_Q8_0] = math.sqrt(us[ONE_BLOCK_WITH_Q8_0] * other[product][ONE_BLOCK_WITH_Q8_0])
            else:
                del us[ONE_BLOCK_WITH_Q8_0]
    return found


def within(measured: Measured, tokens: tuple[int, int]) -> Measured:
    return {product: us for product, us in measured.items() if tokens[0] <= product[0] <= tokens[1]}


def with_times(measured: Measured) -> TileTable:
    return TABLE.model_copy(update={"times": fit(TABLE, measured, H200)})


def chosen(table: TileTable, fmt: str, case: dict) -> str:
    """The kernel config of the table's buckets in mode w16a16."""
    minima = WEIGHT_FORMATS[fmt].second == "m"
    return table.select(case["M"], case["N"], case["K"], mode="w16a16", gpu=H200, minima=minima).row.name


def over_bf16(table: TileTable, fmt: str, tokens: tuple[int, int]) -> list[float]:
    """Of the random products that no times are fitted to: bfloat16's time over that of the table's choice."""
    inside = [case for case in cases(judged=True) if tokens[0] <= case["M"] <= tokens[1] and fmt in case]
    return [case["bf16"] / case[fmt][chosen(table, fmt, case)] for case in inside]


def losses_of_few(table: TileTable, fmt: str, judged: bool) -> list[float]:
    """The time of the table's choice over the least measured one, of weights that round or not, with FEW tokens."""
    few = [case for case in cases(judged) if case["M"] <= FEW[1] and fmt in case]
    return [case[fmt][chosen(table, fmt, case)] / min(case[fmt].values()) for case in few]


def main() -> None:
    table = with_times(fitted())
    for judged, seed in ((False, FITTED), (True, JUDGED)):
        for fmt in FEW_FORMATS[seed]:
            losses = losses_of_few(table, fmt, judged)
            what = f"{'random' if judged else 'fitted'} products, {fmt}, tokens {FEW}"
            print(f"{what}: {len(losses)}, mean {geometric_mean(losses):.4f}, worst {max(losses):.3f}")
            if judged:
                print(f"  over bfloat16: {geometric_mean(over_bf16(table, fmt, FEW)):.3f}, least {min(over_bf16(table, fmt, FEW)):.2f}")
    for tokens in (*RANGES, (RANGES[0][0], RANGES[-1][1])):
        for fmt in FORMATS[FITTED]:
            print(f"the products of the fit, {fmt}, tokens {tokens}:", judge(table, within(read(fmt), tokens), H200))
    for fmt in FORMATS[JUDGED]:
        for tokens in (*RANGES, (RANGES[0][0], RANGES[-1][1])):
            print(f"random products, {fmt}, tokens {tokens}:", judge(table, within(read(fmt, judged=True), tokens), H200))
            ratios = over_bf16(table, fmt, tokens)
            print(f"  over bfloat16: {geometric_mean(ratios):.3f}, least {min(ratios):.2f}")
    for name, times in table.times.items():
        print(f"  {name}: {{{', '.join(f'{key}: {value}' for key, value in times.model_dump(exclude_defaults=True).items())}}}")


if __name__ == "__main__":
    main()
